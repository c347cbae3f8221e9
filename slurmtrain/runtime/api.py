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

The same script runs by itself, under torchrun, and as `job=command` on a cluster. Loading this module changes nothing
in the process, and loads no torch: `init` handles the stop signals first, and only then loads it, which takes seconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from slurmtrain.config import secrets
from slurmtrain.config.compose import load_frozen
from slurmtrain.config.schema import ClusterConfig, WatchdogConfig
from slurmtrain.errors import (
    EXIT_REQUEUE,
    CheckpointError,
    CheckpointMismatchError,
    SlurmtrainError,
    SupersededError,
    exit_code_of,
)
from slurmtrain.runs import attempts, lookup
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from slurmtrain.runtime import attempt_context
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.slurm.environment import Environment, rank_or_zero
from slurmtrain.system import logs, signals
from slurmtrain.system.logs import show_error

if TYPE_CHECKING:
    import torch

    from slurmtrain.checkpoint.checkpointer import Checkpointer
    from slurmtrain.runtime.agreement import StopAgreement
    from slurmtrain.runtime.distributed_context import DistributedContext
    from slurmtrain.runtime.watchdog.watchdog import Watchdog

log = logging.getLogger(__name__)


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


@dataclass
class Session:
    """What `init` has found and made, for the functions and Checkpointers of this process.

    Attributes:
        context: the attempt that this process belongs to; None for a script that was not submitted.
        distributed: this rank and its groups; None before `init`, and when the script is at its end.
        agreement: how the ranks agree to stop; None when `distributed` is.
        checkpointers: those that the script has made and still holds.
        watchdog: watches whether the script gets on; None: nothing does.
        first_step: the step of the checkpoint that was restored.
    """

    context: AttemptContext | None = None
    distributed: DistributedContext | None = None
    agreement: StopAgreement | None = None
    checkpointers: weakref.WeakSet[Checkpointer] = field(default_factory=weakref.WeakSet)
    watchdog: Watchdog | None = None
    first_step: int = 0

    def initialised(self) -> tuple[DistributedContext, StopAgreement]:
        """Return this rank's groups and its agreement.

        Raises:
            RuntimeError: `init` has not been called.
        """
        if self.distributed is None or self.agreement is None:
            raise RuntimeError("call slurmtrain.init() first")
        return self.distributed, self.agreement


session = Session()


def init(*, device: str = "auto", rendezvous_timeout_s: int = 300, watchdog: bool | int = False) -> Run:
    """Find this rank, meet the others, make torch's default process group (if there are several), and handle stop signals.

    Call it as early as you can: signals are handled from here on, not from `import slurmtrain` on, which loads nothing.
    If a signal ends a rank sooner, the job is still requeued if it was submitted (`job=command`): the process around
    the script does that.

    Args:
        device: "auto" (as the job's train.device says: a GPU if the job has asked for some or one is visible), "cpu" or
            "cuda".
        rendezvous_timeout_s: seconds to wait for the other ranks, unless the job's config sets them.
        watchdog: end the program when a rank does not get on, and name that rank: when `should_stop`, which is called once a
            step, is not called for so many seconds, nor for watchdog.factor times the longest step. True: for
            watchdog.min_s seconds. Choose more than an evaluation of yours takes.

    Raises:
        EnvironmentMismatchError, RendezvousError: shown as one sentence; the process ends with the right exit code.
        RuntimeError: it was called before in this process.
    """
    if session.distributed is not None:
        raise RuntimeError("slurmtrain.init() was called already: call it once, and keep the Run that it returns")
    stop_flag = signals.install_signal_handlers()
    logs.set_up(leave_to_others=True)
    from slurmtrain.runtime.agreement import StopAgreement  # torch, which takes seconds
    from slurmtrain.runtime.distributed_context import init_distributed

    sys.excepthook = _record_and_show
    environment = Environment.detect()
    cluster, limits = ClusterConfig(rendezvous_timeout_s=rendezvous_timeout_s), WatchdogConfig()
    directory = os.environ.get(RUN_DIR_VARIABLE)
    if directory and ATTEMPT_VARIABLE in os.environ:
        session.context = AttemptContext(RunDir(Path(directory)), int(os.environ[ATTEMPT_VARIABLE]), supervised=True)
        config = load_frozen(session.context.run_dir.config_file)
        secrets.take(config.secrets)
        cluster, limits = config.cluster, config.watchdog
        device = config.train.device if device == "auto" else device
    meeting = session.context.attempt_dir.path if session.context else None
    if meeting is None and environment.source == "slurm" and environment.world_size > 1:
        meeting = attempt_context.meeting_directory(environment, lookup.runs_root())
    session.distributed = init_distributed(cluster, device, environment, meeting, stop_flag)
    session.agreement = StopAgreement(stop_flag, session.distributed.control_group)
    if watchdog:
        _watch(limits if watchdog is True else replace(limits, min_s=watchdog), session.distributed, session.agreement)
    atexit.register(_let_go)
    run_path = session.context.run_dir.path if session.context else Path.cwd()
    return Run(environment.rank, environment.world_size, environment.local_rank, session.distributed.device, run_path)


def _watch(limits: WatchdogConfig, distributed: DistributedContext, agreement: StopAgreement) -> None:
    """Start to watch whether this rank calls `should_stop`."""
    from slurmtrain.runtime.watchdog.progress import Position
    from slurmtrain.runtime.watchdog.watchdog import Watchdog

    attempt_dir = session.context.attempt_dir if session.context is not None else None
    # The ranks of a program may end at different times, so one that is gone has not failed.
    session.watchdog = Watchdog(limits, distributed, attempt_dir, leaves_with_rank_0=False)
    session.watchdog.follow(
        lambda: Position(agreement.rounds, session.first_step + agreement.rounds, agreement.rounds > 0)
    )


def should_stop() -> bool:
    """Return whether any rank was told to stop: the same answer on all ranks. Call it once a step, on every rank.

    It costs one small all-reduce on the CPU.
    """
    agreement = session.initialised()[1]
    agreement.begin()
    return agreement.finish().stop


def exit_for_requeue() -> NoReturn:
    """Exit after a save: all ranks together, with the exit code (75) that makes the job start again.

    Raises:
        CheckpointError: the last save failed, so there is less to continue from than it would seem.
    """
    distributed = session.initialised()[0]
    for checkpointer in list(session.checkpointers):
        checkpointer.wait()
    distributed.leave_together()
    if session.watchdog is not None:
        session.watchdog.close()
    from slurmtrain.runtime.main import leave

    leave(EXIT_REQUEUE)


def _let_go() -> None:
    """End our gloo groups, and with them their threads, at the end of the script, while the interpreter still works.

    A thread of gloo frees a finished collective's tensors a little after the script has gone on, and needs the
    interpreter for it. If the interpreter is gone by then, the process ends with SIGABRT: a finished job would look
    like a crash.
    """
    lost = [checkpointer.lost for checkpointer in list(session.checkpointers) if checkpointer.lost is not None]
    if session.watchdog is not None:
        session.watchdog.close()
    distributed, session.distributed, session.agreement = session.distributed, None, None
    if lost and distributed is not None:
        if session.context is not None:
            attempts.record_failure(
                session.context.attempt_dir,
                distributed.environment.rank,
                exit_code=lost[0].exit_code,
                sentence=lost[0].message,
                superseded=isinstance(lost[0], SupersededError),
            )
        from slurmtrain.runtime.main import leave

        leave(lost[0].exit_code)
    import torch.distributed as dist

    for group in (distributed.control_group, distributed.checkpoint_group) if distributed is not None else ():
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _record_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Record an uncaught error in the attempt, and show ours as one sentence, the user's with its traceback."""
    expected = isinstance(error, SlurmtrainError)
    if expected:
        show_error(error)
    else:
        traceback.print_exception(kind, error, trace)
    for checkpointer in list(session.checkpointers):
        from slurmtrain.checkpoint.save.pending_save import DRAIN_S  # with a Checkpointer it is loaded already

        with suppress(CheckpointError):
            checkpointer.close(DRAIN_S)
    code = exit_code_of(error)
    if session.context is not None:
        sentence = error.message if isinstance(error, SlurmtrainError) else f"{kind.__name__}: {error}"
        attempts.record_failure(
            session.context.attempt_dir,
            rank_or_zero(),
            exit_code=code,
            sentence=sentence,
            superseded=isinstance(error, SupersededError),
            on_any_node=isinstance(error, CheckpointMismatchError),
        )
    if session.watchdog is not None:
        session.watchdog.failed()
    from slurmtrain.runtime.main import leave

    leave(code)
