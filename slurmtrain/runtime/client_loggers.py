"""W&B and MLflow in a program that leaves to be started again: they write what they buffer.

`exit_for_requeue` ends the process at once, without exit handlers, in which these libraries would do it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

WITHIN_S = 5.0  # of the grace time


def close_client_loggers(within_s: float = WITHIN_S) -> None:
    """Close the runs of W&B and MLflow that this process has open, if any; give up after `within_s` seconds.

    Neither ends the run: the next attempt goes on in the one of the same id.
    """
    closing = []
    for name, find in _FIND.items():
        close = _found(name, find) if name in sys.modules else None
        if close is not None:
            closing.append(threading.Thread(target=_tried, args=(name, close), name=f"close-{name}", daemon=True))
    for thread in closing:
        thread.start()
    deadline = time.monotonic() + within_s
    for thread in closing:
        thread.join(max(0.0, deadline - time.monotonic()))


def _found(name: str, find: Callable[[Any], Callable[[], None] | None]) -> Callable[[], None] | None:
    try:
        return find(sys.modules[name])
    except Exception as error:  # a logger must not keep the program from leaving
        log.warning("%s could not be asked for its run before the program leaves: %s", name, error)
        return None


def _tried(name: str, close: Callable[[], None]) -> None:
    try:
        close()
    except Exception as error:
        log.warning("%s could not be closed before the program leaves: %s", name, error)


def _find_wandb(wandb: Any) -> Callable[[], None] | None:
    run: Any = getattr(wandb, "run", None)

    def close() -> None:
        run.mark_preempting()
        run.finish(exit_code=1)

    return close if run is not None else None


def _find_mlflow(mlflow: Any) -> Callable[[], None] | None:
    find = getattr(mlflow, "active_run", None)
    run: Any = find() if find is not None else None  # of this thread: MLflow has one for each

    def close() -> None:
        mlflow.flush_async_logging()
        mlflow.MlflowClient().set_terminated(run.info.run_id, "KILLED")

    return close if run is not None else None


# By the module of a library, what returns how to close the run that it has open; None: it has none.
_FIND: dict[str, Callable[[Any], Callable[[], None] | None]] = {"wandb": _find_wandb, "mlflow": _find_mlflow}
