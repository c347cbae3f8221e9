"""The public names for an own training loop: `init`, `Checkpointer`, `should_stop`, `exit_for_requeue`.

    run = slurmtrain.init()
    checkpointer = slurmtrain.Checkpointer()
    restored = checkpointer.restore(model=model, optimizer=optimizer)
    for step in range(restored.step if restored else 0, steps):
        ...
        if slurmtrain.should_stop():
            checkpointer.save(step + 1, model=model, optimizer=optimizer)
            slurmtrain.exit_for_requeue()
    checkpointer.save(steps, model=model, optimizer=optimizer)

The same script runs by itself, under torchrun, and as `job=command` on a cluster.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from slurmtrain.errors import (
    EXIT_REQUEUE,
    CheckpointError,
    CheckpointMismatch,
    SlurmtrainError,
    Superseded,
    exit_code_of,
)
from slurmtrain.runs import attempts, lookup
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from slurmtrain.runtime import attempt_context
from slurmtrain.system import signals

_stop = signals.arm()  # before torch is imported, which takes seconds, where this module is what imports it

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from slurmtrain.checkpoint.checkpointer import Checkpointer as BaseCheckpointer  # noqa: E402
from slurmtrain.checkpoint.checkpointer import Restored  # noqa: E402
from slurmtrain.checkpoint.commit import Incarnation  # noqa: E402
from slurmtrain.checkpoint.retention import Keep  # noqa: E402
from slurmtrain.checkpoint.saving import DRAIN_S, SaveResult  # noqa: E402
from slurmtrain.config import secrets  # noqa: E402
from slurmtrain.config.compose import load_frozen  # noqa: E402
from slurmtrain.config.schema import ClusterConfig  # noqa: E402
from slurmtrain.runtime.agreement import StopAgreement  # noqa: E402
from slurmtrain.runtime.attempt_context import AttemptContext  # noqa: E402
from slurmtrain.runtime.distributed_context import DistributedContext, join  # noqa: E402
from slurmtrain.slurm.environment import Environment  # noqa: E402


@dataclass(frozen=True)
class Run:
    """The facts that `init` has found.

    Attributes:
        rank, world_size, local_rank: numbers of this process and of all.
        device: the device for this rank's model.
        directory: the run directory, or the working directory for a script that was not submitted.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    directory: Path


_distributed: DistributedContext | None = None
_context: AttemptContext | None = None
_agreement: StopAgreement | None = None
_checkpointers: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def init(*, device: str = "auto", rendezvous_timeout_s: int = 300) -> Run:
    """Find this rank, meet the others, make torch's default process group (if there are several), and handle stop signals.

    Call it as early as you can: signals are handled from here on, not from `import slurmtrain` on, which loads nothing.
    If a signal ends a rank sooner, the job is still requeued if it was submitted (`job=command`): the process around
    the script does that.

    Args:
        device: "auto" (as the job's train.device says: a GPU if the job has asked for some or one is visible), "cpu" or
            "cuda".
        rendezvous_timeout_s: seconds to wait for the other ranks, unless the job's config sets them.

    Raises:
        EnvironmentMismatch, RendezvousError: shown as one sentence; the process ends with the right exit code.
    """
    global _distributed, _context, _agreement
    sys.excepthook = _record_and_show
    environment = Environment.detect()
    cluster = ClusterConfig(rendezvous_timeout_s=rendezvous_timeout_s)
    directory = os.environ.get(RUN_DIR_VARIABLE)
    if directory and ATTEMPT_VARIABLE in os.environ:
        _context = AttemptContext(RunDir(Path(directory)), int(os.environ[ATTEMPT_VARIABLE]), supervised=True)
        config = load_frozen(_context.run_dir.config_file)
        secrets.take(config.secrets)
        cluster = config.cluster
        device = config.train.device if device == "auto" else device
    meeting = _context.attempt_dir.path if _context else None
    if meeting is None and environment.source == "slurm" and environment.world_size > 1:
        meeting = attempt_context.meeting_directory(environment, lookup.runs_root())
    _distributed = join(cluster, device, environment, meeting, _stop)
    _agreement = StopAgreement(_stop, _distributed.control)
    atexit.register(_let_go)
    run_path = _context.run_dir.path if _context else Path.cwd()
    return Run(environment.rank, environment.world_size, environment.local_rank, _distributed.device, run_path)


def should_stop() -> bool:
    """Return whether any rank was told to stop: the same answer on all ranks. Call it once a step, on every rank.

    It costs one small all-reduce on the CPU.
    """
    agreement = _initialised()[1]
    agreement.begin()
    return agreement.finish().stop


def exit_for_requeue() -> NoReturn:
    """Exit after a save: all ranks together, with the exit code (75) that makes the job start again.

    Raises:
        CheckpointError: the last save failed, so there is less to continue from than it would seem.
    """
    distributed = _initialised()[0]
    for checkpointer in list(_checkpointers):
        checkpointer.wait()
    distributed.leave_together()
    from slurmtrain.runtime.main import leave

    leave(EXIT_REQUEUE)


class Checkpointer(BaseCheckpointer):
    """The checkpoints of this run, in its run directory; see `slurmtrain.checkpoint.Checkpointer` for what it promises.

    Args:
        directory: another directory; default: the run's, or ./checkpoints for a script that was not submitted.
        keep: which complete checkpoints to keep, for instance slurmtrain.Keep(last=3, every=1000).
        options: verify, asynchronous, max_failures, on_replica_drift, config.
    """

    def __init__(self, directory: Path | str | None = None, *, keep: Keep = Keep(), **options: Any):  # noqa: B008
        distributed = _initialised()[0]
        incarnation, run_id = None, ""
        if _context is not None:
            incarnation = Incarnation(_context.number, _context.incarnation_label(distributed.environment))
            run_id = _context.run_dir.id
        if directory is None:
            directory = _context.run_dir.checkpoints if _context else Path("checkpoints")
        super().__init__(
            directory,
            group=distributed.saving,
            incarnation=incarnation,
            run_id=run_id,
            keep=keep,
            on_ending=_note_saved,
            **options,
        )
        _checkpointers.add(self)

    def restore(self, **arguments: Any) -> Restored | None:
        restored = super().restore(**arguments)
        _note(first_step=restored.step if restored else 0, stepping=time.time())
        return restored


def _note(**changes: Any) -> None:
    if _context is not None and _initialised()[0].environment.rank == 0:
        attempt_context.update_attempt(_context, **changes)


def _note_saved(ending: SaveResult | CheckpointError) -> None:
    if isinstance(ending, SaveResult):
        _note(last_step=ending.step)


def _initialised() -> tuple[DistributedContext, StopAgreement]:
    if _distributed is None or _agreement is None:
        raise RuntimeError("call slurmtrain.init() first")
    return _distributed, _agreement


def _let_go() -> None:
    """End our gloo groups, and with them their threads, at the end of the script, while the interpreter still works.

    A thread of gloo frees a finished collective's tensors a little after the script has gone on, and needs the
    interpreter for it. If the interpreter is gone by then, the process ends with SIGABRT: a finished job would look
    like a crash.
    """
    global _distributed, _agreement
    lost = [checkpointer.lost for checkpointer in list(_checkpointers) if checkpointer.lost is not None]
    distributed, _distributed, _agreement = _distributed, None, None
    if lost and distributed is not None:
        if _context is not None:
            attempts.record_failure(
                _context.attempt_dir,
                distributed.environment.rank,
                exit_code=lost[0].exit_code,
                sentence=lost[0].message,
                superseded=isinstance(lost[0], Superseded),
            )
        from slurmtrain.runtime.main import leave

        leave(lost[0].exit_code)
    for group in (distributed.control, distributed.saving) if distributed is not None else ():
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _record_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Record an uncaught error in the attempt, and show ours as one sentence, the user's with its traceback."""
    expected = isinstance(error, SlurmtrainError)
    if expected:
        print(f"slurmtrain: error: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(kind, error, trace)
    for checkpointer in list(_checkpointers):
        with suppress(CheckpointError):
            checkpointer.close(DRAIN_S)
    code = exit_code_of(error)
    if _context is not None:
        sentence = error.message if isinstance(error, SlurmtrainError) else f"{kind.__name__}: {error}"
        rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
        attempts.record_failure(
            _context.attempt_dir,
            rank,
            exit_code=code,
            sentence=sentence,
            superseded=isinstance(error, Superseded),
            on_any_node=isinstance(error, CheckpointMismatch),
        )
    from slurmtrain.runtime.main import leave

    leave(code)
