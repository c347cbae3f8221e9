"""Training jobs on SLURM that finish: submitted by one command, stopped cleanly, resumed exactly.

The names below are the public interface: for own training scripts (`init`, `Checkpointer`, ...), and for notebooks and
programs that submit runs (`submit`, `open_run`, ...). They are loaded on first use, so that `import slurmtrain` and the
command line stay free of torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it; loading `typing` takes a while, in which Ctrl-C shows a traceback
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from slurmtrain.checkpoint.store.retention import Keep as Keep
    from slurmtrain.control.mapping import MapRun as MapRun
    from slurmtrain.control.mapping import map as map
    from slurmtrain.control.mapping import open_map as open_map
    from slurmtrain.control.runs import Run as Run
    from slurmtrain.control.runs import Status as Status
    from slurmtrain.control.runs import open_run as open_run
    from slurmtrain.control.runs import submit as submit
    from slurmtrain.data.exact_loader import DataLoader as DataLoader
    from slurmtrain.data.loading.workers import ignore_stop_signals as ignore_stop_signals
    from slurmtrain.parallel.ddp import warm_up_ddp_buckets as warm_up_ddp_buckets
    from slurmtrain.rank.api import exit_for_requeue as exit_for_requeue
    from slurmtrain.rank.api import init as init
    from slurmtrain.rank.api import should_stop as should_stop
    from slurmtrain.rank.api import stop_requested as stop_requested
    from slurmtrain.rank.own_checkpointer import Checkpointer as Checkpointer
    from slurmtrain.report.status.waiting import RunFailedError as RunFailedError
    from slurmtrain.report.status.waiting import RunStoppedError as RunStoppedError
    from slurmtrain.report.status.waiting import WaitTimeoutError as WaitTimeoutError

_PUBLIC = {
    "submit": "slurmtrain.control.runs",
    "open_run": "slurmtrain.control.runs",
    "map": "slurmtrain.control.mapping",
    "open_map": "slurmtrain.control.mapping",
    "MapRun": "slurmtrain.control.mapping",
    "Run": "slurmtrain.control.runs",
    "Status": "slurmtrain.control.runs",
    "RunFailedError": "slurmtrain.report.status.waiting",
    "RunStoppedError": "slurmtrain.report.status.waiting",
    "WaitTimeoutError": "slurmtrain.report.status.waiting",
    "init": "slurmtrain.rank.api",
    "should_stop": "slurmtrain.rank.api",
    "stop_requested": "slurmtrain.rank.api",
    "exit_for_requeue": "slurmtrain.rank.api",
    "Checkpointer": "slurmtrain.rank.own_checkpointer",
    "DataLoader": "slurmtrain.data.exact_loader",
    "Keep": "slurmtrain.checkpoint.store.retention",
    "warm_up_ddp_buckets": "slurmtrain.parallel.ddp",
    "ignore_stop_signals": "slurmtrain.data.loading.workers",
}
__all__ = sorted(["__version__", *_PUBLIC])


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("slurmtrain.errors")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "errors"])
