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
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import ClusterConfig, WatchdogConfig
from slurmtrain.errors import EXIT_REQUEUE
from slurmtrain.rank import attempt_context
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.rank.leaving import close_client_loggers, fail, failure_of, leave, show, undeterred
from slurmtrain.runs.failures import record_failure
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from slurmtrain.slurm.environment import Environment, rank_or_zero
from slurmtrain.system import logs, signals
from slurmtrain.system.paths import runs_root

if TYPE_CHECKING:
    import torch

    from slurmtrain.checkpoint.checkpointer import Checkpointer
    from slurmtrain.observe.profiling import Profiling
    from slurmtrain.rank.distributed_context import DistributedContext
    from slurmtrain.rank.watchdog import Watchdog
    from slurmtrain.training.agreement import StopAgreement

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0  # for RUN/profile: a loop of somebody's own has no other thread for it


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
        local_copies: checkpoint.local of the job; None: it has none, or the script was not submitted.
        profiling: profiles between calls of `should_stop`; None: the script was not submitted.
        look_at: when rank 0 looks next whether somebody has asked for a profile, by the monotonic clock.
        by_itself: the program is one process that looks for a stop without `init`.
    """

    context: AttemptContext | None = None
    distributed: DistributedContext | None = None
    agreement: StopAgreement | None = None
    checkpointers: weakref.WeakSet[Checkpointer] = field(default_factory=weakref.WeakSet)
    watchdog: Watchdog | None = None
    first_step: int = 0
    local_copies: str | None = None
    profiling: Profiling | None = None
    look_at: float = 0.0
    by_itself: bool = False

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
    the script does that. A rank that is told to stop before all ranks are there ends here, with exit code 75. A process
    group that exists already (Trainer's, Accelerate's) is used as it is. Workers of DataLoaders ignore stop signals from
    here on.

    Args:
        device: "auto" (as the job's train.device says: a GPU if the job has asked for some or one is visible), "cpu" or
            "cuda".
        rendezvous_timeout_s: seconds to wait for the other ranks, unless the job's config sets them.
        watchdog: end the program when a rank does not get on, and name that rank: when `should_stop`, which is called once a
            step, is not called for so many seconds, nor for watchdog.factor times the longest step. True: for
            watchdog.program_s seconds. Choose more than an evaluation of yours takes. Only in a program that was submitted.

    Raises:
        EnvironmentMismatchError, RendezvousError: shown as one sentence; the process ends with the right exit
            code.
        RuntimeError: it was called before in this process.
    """
    if session.distributed is not None:
        raise RuntimeError("slurmtrain.init() was already called: call it once, and keep the Run that it returns")
    stop_flag = signals.install_signal_handlers()
    logs.set_up(leave_to_others=True)
    import torch.distributed as dist  # torch, which takes seconds

    from slurmtrain.data.loading.workers import let_all_workers_ignore_stop_signals
    from slurmtrain.hangs.beats import Position
    from slurmtrain.rank.distributed_context import environment_of_process_group, init_distributed
    from slurmtrain.training.agreement import StopAgreement

    let_all_workers_ignore_stop_signals()
    sys.excepthook = _record_and_show
    environment = Environment.detect()
    if dist.is_initialized():
        environment = environment_of_process_group(environment)
    cluster, limits = ClusterConfig(rendezvous_timeout_s=rendezvous_timeout_s), WatchdogConfig()
    directory = os.environ.get(RUN_DIR_VARIABLE)
    if directory and ATTEMPT_VARIABLE in os.environ:
        session.context = AttemptContext(RunDir(Path(directory)), int(os.environ[ATTEMPT_VARIABLE]), supervised=True)
        config = load_frozen(session.context.run_dir.config_file)
        secrets.take(config.secrets)
        cluster, limits = config.cluster, config.watchdog
        session.local_copies = config.checkpoint.local
        device = config.train.device if device == "auto" else device
    rendezvous_dir = attempt_context.rendezvous_directory(session.context, environment, runs_root())

    def watch(met: DistributedContext) -> None:
        if watchdog and session.context is not None:
            from slurmtrain.rank.watchdog import Watchdog

            own_limits = replace(limits, min_s=limits.program_s if watchdog is True else watchdog)
            session.watchdog = Watchdog(own_limits, met, session.context.attempt_dir)

    try:
        session.distributed = init_distributed(cluster, device, environment, rendezvous_dir, stop_flag, on_met=watch)
        # Anew: torch puts a hook around ours that keeps what ours says until it returns, and ours never does.
        sys.excepthook = _record_and_show
        session.agreement = StopAgreement(stop_flag, session.distributed.control_group)
        if session.context is not None:
            from slurmtrain.rank.preflight.check import run_preflight

            run_preflight(config, session.distributed, session.context)
    except signals.StopDuringStartError:
        leave(EXIT_REQUEUE)
    if session.context is not None:
        session.profiling = _profiling(session.context, session.distributed, config.observe.profile_ranks)
    if session.watchdog is not None:
        agreement = session.agreement
        session.watchdog.follow(
            lambda: Position(agreement.rounds, session.first_step + agreement.rounds, agreement.rounds > 0)
        )
    atexit.register(_let_go)
    run_path = session.context.run_dir.path if session.context else Path.cwd()
    return Run(environment.rank, environment.world_size, environment.local_rank, session.distributed.device, run_path)


def _profiling(context: AttemptContext, distributed: DistributedContext, ranks: Sequence[int]) -> Profiling:
    """Return what takes profiles between calls of `should_stop`, when somebody touches RUN/profile."""
    from slurmtrain.checkpoint.ranks import RankGroup
    from slurmtrain.observe.profiling import Profiling

    def event(event: Event, values: dict[str, Any]) -> None:
        with suppress(OSError):
            context.run_dir.event(event, attempt=context.number, **values)

    group = RankGroup(distributed.control_group)
    on_gpu = distributed.device.type == "cuda"
    return Profiling(context.run_dir, group, ranks, on_gpu=on_gpu, event=event)


def should_stop(asked: bool = False) -> bool:
    """Return whether any rank was told to stop: the same answer on all ranks. Call it once a step, on every rank.

    It costs one small all-reduce on the CPU. Profiles that are asked for by `touch RUN/profile` begin and end here.

    Args:
        asked: this rank was told to stop otherwise than by a signal, as by a file. One rank is enough.
    """
    (distributed, agreement), profiling = session.initialised(), session.profiling
    if asked:
        signals.install_signal_handlers().request(signals.StopCause.PROGRAM)
    if session.context is not None and distributed.environment.rank == 0 and time.monotonic() >= session.look_at:
        session.look_at = time.monotonic() + LOOK_EVERY_S
        run_dir, flag = session.context.run_dir, signals.install_signal_handlers()
        run_dir.take_switch(run_dir.profile_switch, Event.PROFILE_FILE_FOUND, flag.profile_asked.set)
    agreement.begin(profile=profiling is not None and not profiling.left)
    decision = agreement.finish()
    if profiling is None:
        return decision.stop
    if decision.stop:
        profiling.abandon()
    elif profiling.left:
        said = profiling.step()
        if said is not None:
            log.info(said)
    elif decision.profile:
        profiling.begin(session.first_step + agreement.rounds + 1)
    return decision.stop


def stop_requested() -> bool:
    """Return whether this process was told to stop. From the first call on, a stop signal does not end the process.

    It is for programs of one process, such as functions that `slurmtrain.map` calls: it needs no `init` and loads no
    torch. Ranks that have to stop after the same step call `should_stop`.
    """
    session.by_itself = True
    return signals.install_signal_handlers().requested


def exit_for_requeue() -> NoReturn:
    """Exit after a save: all ranks together, with the exit code (75) that makes the job start again.

    A program that uses `stop_requested` needs no `init` for it, and leaves by itself.

    Raises:
        CheckpointError: the last save failed, so there is less to continue from than it would seem.
        RuntimeError: neither `init` nor `stop_requested` has been called.
    """
    if session.distributed is None and session.by_itself:
        close_client_loggers()
        leave(EXIT_REQUEUE)
    distributed = session.initialised()[0]
    for checkpointer in list(session.checkpointers):
        checkpointer.wait()
    close_client_loggers()  # before any rank leaves: srun ends those that are left
    distributed.leave_together()
    if session.watchdog is not None:
        session.watchdog.close()
    leave(EXIT_REQUEUE)


def _let_go() -> None:
    """End our gloo groups, and with them their threads, at the end of the script, while the interpreter still works.

    A thread of gloo frees a finished collective's tensors a little after the script has gone on, and needs the
    interpreter for it. If the interpreter is gone by then, the process ends with SIGABRT: a finished job would look
    like a crash.
    """
    if session.profiling is not None:
        session.profiling.abandon()
    lost = [checkpointer.lost for checkpointer in list(session.checkpointers) if checkpointer.lost is not None]
    if session.watchdog is not None:
        session.watchdog.close()
    # All of these hold the groups, which end with the last reference to them.
    distributed, session.distributed = session.distributed, None
    session.agreement = session.profiling = session.watchdog = None
    if lost and distributed is not None:
        failure = failure_of(lost[0], distributed.environment.rank)
        if session.context is not None:
            with undeterred("record the failure"):
                record_failure(session.context.attempt_dir, distributed.environment.rank, failure)
        leave(failure.exit_code)
    import torch.distributed as dist

    for group in (distributed.control_group, distributed.checkpoint_group) if distributed is not None else ():
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _record_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Record an uncaught error in the attempt, and show ours as one sentence, the user's with its traceback."""
    failed_at = time.time()  # the save below may take a while, and the first rank that failed is the cause
    show(error)
    for checkpointer in list(session.checkpointers):
        from slurmtrain.checkpoint.save.job import DRAIN_S  # with a Checkpointer it is loaded already

        with undeterred("complete the last save"):
            checkpointer.close(DRAIN_S)
    attempt_dir = session.context.attempt_dir if session.context is not None else None
    fail(error, rank_or_zero(), attempt_dir, session.watchdog, when=failed_at)
