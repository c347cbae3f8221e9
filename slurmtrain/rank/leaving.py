"""How a rank leaves: what it records of the error that ends it, and the exit code of the contract, whatever fails then.

A disk may be full, or a record unreadable, just when a rank has to say why it ends. That must not change its exit code,
by which whoever has started it decides what happens next.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, NoReturn

from slurmtrain.checkpoint.errors import CheckpointMismatchError, LostPeersError, NonFiniteError, SupersededError
from slurmtrain.errors import DivergedError, EnvironmentMismatchError, SlurmtrainError, exit_code_of
from slurmtrain.rank.addresses import RendezvousError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.system import signals
from slurmtrain.system.logs import show_error
from slurmtrain.system.patience import begin

if TYPE_CHECKING:
    from slurmtrain.rank.watchdog import Watchdog

log = logging.getLogger(__name__)

# What gloo and NCCL say when another rank has gone.
LOST_A_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
# What gloo says in a collective, and the store before there is a group.
TIMED_OUT = ("Timed out waiting", "wait timeout after")


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return what a rank records of an error that ends it."""
    told_all = isinstance(error, EnvironmentMismatchError) and error.told_all and rank != 0  # rank 0 records it for all
    return Failure(
        exit_code_of(error),
        error.message if isinstance(error, SlurmtrainError) else _in_a_line(error),
        because_of_peer=lost_a_peer(error) or told_all,
        superseded=isinstance(error, SupersededError),
        on_any_node=isinstance(error, CheckpointMismatchError),
        diverged=isinstance(error, DivergedError | NonFiniteError),
        bad_nodes=error.nodes if isinstance(error, EnvironmentMismatchError) else (),
    )


def lost_a_peer(error: BaseException) -> bool:
    """Return whether this is an error that a rank gets when another rank has gone: that rank's failure came first."""
    if isinstance(error, LostPeersError) or (isinstance(error, RendezvousError) and error.because_of_peer):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_A_PEER)


def timed_out(error: BaseException) -> bool:
    """Return whether this is the error for a collective, or the start of a group, to which some rank did not come in time."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in TIMED_OUT)


def _in_a_line(error: BaseException) -> str:
    """Return class and message of an error in one line.

    Of a long message that is its first line, and its last one, where a data worker's own error is.
    """
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join((name, " ... ".join(lines[:1] + lines[1:][-1:]))) if lines else name


@contextlib.contextmanager
def undeterred(what: str) -> Iterator[None]:
    """Go on after an error in the block, with a warning: this rank is leaving, and with the exit code that it has.

    Args:
        what: what the block does, as in "record the failure".
    """
    try:
        yield
    except Exception as error:
        log.warning("cannot %s: %s", what, error.message if isinstance(error, SlurmtrainError) else _in_a_line(error))


def show(error: BaseException) -> None:
    """Show an error that ends this rank on stderr: one of ours as a sentence, any other with its traceback."""
    with undeterred("show the error"):
        if isinstance(error, SlurmtrainError):
            show_error(error)
        else:
            traceback.print_exception(error)


def fail(
    error: BaseException,
    rank: int,
    attempt_dir: AttemptDir | None,
    watchdog: Watchdog | None,
    *,
    when: float | None = None,
    finish: Callable[[int], None] = lambda code: None,
) -> NoReturn:
    """Record a failure and exit. No collectives are used: the other ranks may be gone, or wait for something else.

    Args:
        when: when it failed, in unix seconds; None: now.
        finish: called with the exit code when the failure is on record.
    """
    failure = failure_of(error, rank)
    if watchdog is not None and timed_out(error):
        with undeterred("find out which ranks did not come"):
            watchdog.collective_timed_out(error)
    if attempt_dir is not None:
        with undeterred("record the failure"):
            record_failure(attempt_dir, rank, failure, when=when)
    with undeterred("complete the record of the attempt"):
        finish(failure.exit_code)
    if watchdog is not None:
        with undeterred("tell the other ranks that this one leaves"):
            watchdog.close()
    leave(failure.exit_code)


def leave(code: int) -> NoReturn:
    """End this process now: no exit handlers that could hang, no child left behind, no signal that changes the code."""
    signals.ignore_further_stop_signals()
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the disk of its log is full, or somebody has closed it
            stream.flush()
    os._exit(code)


# W&B and MLflow in a program that leaves to be started again: `leave` runs no exit handlers, in which these libraries would
# write what they buffer.

WITHIN_S = 5.0  # of the grace time


def close_client_loggers(within_s: float = WITHIN_S) -> None:
    """Close the runs of W&B and MLflow that this process has open, if any; give up after `within_s` seconds.

    Neither ends the run: the next attempt goes on in the one of the same id.
    """
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    of_wandb: Any = getattr(wandb, "run", None)
    of_mlflow: Any = None
    with undeterred("ask MLflow for its run"):
        of_mlflow = mlflow.active_run() if mlflow is not None else None  # of this thread: MLflow has one for each

    def close_wandb() -> None:
        with undeterred("close W&B's run"):
            of_wandb.mark_preempting()
            of_wandb.finish(exit_code=1)

    def close_mlflow() -> None:
        assert mlflow is not None
        with undeterred("close MLflow's run"):
            mlflow.flush_async_logging()
            mlflow.MlflowClient().set_terminated(of_mlflow.info.run_id, "KILLED")

    closing = [close for run, close in ((of_wandb, close_wandb), (of_mlflow, close_mlflow)) if run is not None]
    wait([begin(close) for close in closing], within_s)
