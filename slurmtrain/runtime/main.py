"""The program of every rank of a training job: from its environment to its exit code.

It reads top-down as the life of a rank. Signal handlers are installed before torch is imported, which is why torch and
everything that needs it are imported inside functions here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slurmtrain.choices import JobKind, PreflightMode, RequeueMode
from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.launched_program import node_shape
from slurmtrain.config.parallel_dims import on_given_nodes, parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_REQUEUE, SlurmtrainError
from slurmtrain.observe.profile_switch import ProfileRequest, ProfileSwitch
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import LastWord
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import attempt_context
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.gpu_sampler import start_gpu_sampler
from slurmtrain.runtime.leaving import fail, leave, show, undeterred
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.runtime.stop_watcher import ANSWER_S, StopWatcher, stated_seconds_left
from slurmtrain.slurm.client import SlurmClient, run_command
from slurmtrain.slurm.environment import Environment, check_world_size, rank_or_zero
from slurmtrain.supervise.end_of_attempt import finish_attempt
from slurmtrain.supervise.hooks import run_hook_of
from slurmtrain.system import logs, signals
from slurmtrain.system.activity import EVALUATION, doing
from slurmtrain.system.signals import StopCause

if TYPE_CHECKING:
    from slurmtrain.runtime.agreement import StopAgreement
    from slurmtrain.runtime.distributed_context import DistributedContext
    from slurmtrain.runtime.watchdog.watchdog import Watchdog

log = logging.getLogger(__name__)


def run_submitted(run_dir: RunDir, began: float | None = None) -> NoReturn:
    """Run a rank of a run that has a run directory.

    Args:
        began: when this rank was told to, in unix seconds; None: when its process was started.
    """

    def find() -> tuple[Config, Callable[[], RunDir]]:
        return load_frozen(run_dir.config_file), lambda: run_dir

    _run(find, attempt_context.given_attempt(run_dir), strict=True, began=began)


def run_by_hand(config: Config, create_run_dir: Callable[[], RunDir], *, strict: bool) -> NoReturn:
    """Run a rank that srun, torchrun or a person started with overrides.

    Args:
        create_run_dir: called by rank 0 alone.
        strict: nodes and tasks were given explicitly, so the ranks that run have to match them.
    """
    _run(lambda: (config, create_run_dir), None, strict=strict)


def _run(
    find: Callable[[], tuple[Config, Callable[[], RunDir]]],
    given: AttemptContext | None,
    *,
    strict: bool,
    began: float | None = None,
) -> NoReturn:
    """Run a rank from beginning to end: find its environment, meet the others, train, exit with the right code.

    Args:
        find: reads the config, and returns it with the function that rank 0 calls for the run directory.
        given: the attempt that a supervisor has named; None: the ranks find out together.
        began: as for `run_submitted`.
    """
    stop_flag = signals.install_signal_handlers()
    timeline = Timeline(began)
    environment: Environment | None = None
    context = given
    stop_watcher: StopWatcher | None = None
    watchdog: Watchdog | None = None
    try:
        environment = Environment.detect()
        logs.set_up(environment.rank)
        config, find_or_create = find()
        secrets.take(config.secrets)
        if strict:
            config = on_given_nodes(config, len(environment.nodes))
            nodes, tasks = config.cluster.node_range.most, node_shape(config).tasks
            check_world_size(environment, nodes=nodes, tasks_per_node=tasks)
        if config.job.kind in (JobKind.COMMAND, JobKind.PREPARE):  # whose ranks do not meet
            context = given or attempt_context.alone(config.job.kind, environment, find_or_create)
            stop_watcher = _begin(context, environment, config, stop_flag) if environment.rank == 0 else None
            start_gpu_sampler(context.attempt_dir, environment)
            code = _program(config.job.kind)(config, environment, context, stop_flag, stop_watcher)
            with undeterred("complete the record of the attempt"):
                _finish_by_hand(config, environment, context, code)
            leave(code)
        timeline.aloud = environment.rank == 0
        timeline.begin("loading PyTorch")
        if given is not None and environment.rank == 0:
            stop_watcher = _begin(given, environment, config, stop_flag)

        def watch(met: DistributedContext) -> None:
            nonlocal watchdog
            if given is not None:  # else the ranks have yet to agree on the attempt
                watchdog = _watch(config, met, given)

        distributed, context = _join(config, environment, given, find_or_create, stop_flag, timeline, watch)
        if given is None and environment.rank == 0:
            stop_watcher = _begin(context, environment, config, stop_flag)
        watchdog = watchdog or _watch(config, distributed, context)
        _check(config, distributed, context, timeline, stop_flag)
        start_gpu_sampler(context.attempt_dir, environment)
        code = _train(config, distributed, context, stop_flag, timeline, stop_watcher, watchdog)
        if watchdog is not None:
            watchdog.close()
        if stop_watcher is not None and code == EXIT_REQUEUE:
            stop_watcher.wait_for_record()
        with undeterred("complete the record of the attempt"):
            _finish_by_hand(config, environment, context, code)
        leave(code)
    except signals.StopDuringStartError:
        if stop_watcher is not None:
            stop_watcher.wait_for_record()
        leave(EXIT_REQUEUE)
    except BaseException as error:
        _fail(error, context, environment, watchdog)


def _program(kind: str) -> Callable[[Config, Environment, AttemptContext, signals.StopFlag, StopWatcher | None], int]:
    """Return the function that a rank of a job of this kind runs, which returns its exit code."""
    if kind == JobKind.COMMAND:
        from slurmtrain.runtime.jobs.command import run_command

        return run_command
    from slurmtrain.runtime.jobs.prepare import run_prepare

    return run_prepare


def _begin(
    context: AttemptContext, environment: Environment, config: Config, stop_flag: signals.StopFlag
) -> StopWatcher:
    """Open the attempt's record on rank 0, and start to watch the clock and SLURM."""
    attempt_context.open_attempt(context, environment, config)
    in_slurm = environment.source == "slurm"
    # A program of the user's own does not notice a switch: only a signal reaches it.
    run_dir = context.run_dir if config.job.kind != JobKind.COMMAND else None
    switch = None
    if config.job.kind == JobKind.TRAIN:
        request = ProfileRequest(ranks=tuple(config.observe.profile_ranks) or None)
        switch = ProfileSwitch(context.run_dir, request)
    return StopWatcher(
        stop_flag,
        context.attempt_dir,
        SlurmClient(run=functools.partial(run_command, timeout_s=ANSWER_S)) if in_slurm else None,
        signal_lead_s=config.cluster.signal_lead_s,
        left_s=stated_seconds_left(context.run_dir, context.number) if in_slurm else None,
        run_dir=run_dir,
        profile_switch=switch,
    )


def _join(
    config: Config,
    environment: Environment,
    given: AttemptContext | None,
    find_or_create: Callable[[], RunDir],
    stop_flag: signals.StopFlag,
    timeline: Timeline,
    on_met: Callable[[DistributedContext], None],
) -> tuple[DistributedContext, AttemptContext]:
    """Meet the other ranks, and return what connects this rank with them, and its run and attempt.

    Args:
        on_met: see `init_distributed`.
    """
    from slurmtrain.runtime.distributed_context import init_distributed
    from slurmtrain.runtime.dynamo_on_demand import load_dynamo_on_demand
    from slurmtrain.training.seeds import use_deterministic_kernels

    if not config.parallel.compile:
        load_dynamo_on_demand()
    if config.train.deterministic:
        use_deterministic_kernels()
    timeline.mark("interpreter and imports")
    if environment.world_size > 1:
        others = environment.world_size - 1
        timeline.begin("waiting for the other rank" if others == 1 else f"waiting for the other {others} ranks")
    rendezvous_dir = None
    if given is None and environment.source == "slurm" and environment.world_size > 1:
        rendezvous_dir = attempt_context.rendezvous_directory(environment, Path(config.job.runs_dir))
    directory = given.attempt_dir.path if given else rendezvous_dir
    distributed = init_distributed(
        config.cluster, config.train.device, environment, directory, stop_flag, on_met=on_met
    )
    timeline.mark("rendezvous")
    if given is not None:
        return distributed, given
    return distributed, attempt_context.agree_on_attempt(
        environment, find_or_create, distributed.broadcast_text, rendezvous_dir
    )


def _check(
    config: Config,
    distributed: DistributedContext,
    context: AttemptContext,
    timeline: Timeline,
    stop_flag: signals.StopFlag,
) -> None:
    """Check ranks and nodes before they train, unless preflight.mode is off."""
    if config.preflight.mode == PreflightMode.OFF:
        return
    from slurmtrain.runtime.preflight.check import run_preflight

    run_preflight(config, distributed, context)
    timeline.mark("preflight")


def _watch(config: Config, distributed: DistributedContext, context: AttemptContext) -> Watchdog | None:
    """Start the watch over this rank's main thread, unless watchdog.enabled is false."""
    if not config.watchdog.enabled:
        return None
    from slurmtrain.runtime.watchdog.watchdog import Watchdog

    return Watchdog(config.watchdog, distributed, context.attempt_dir)


def _train(
    config: Config,
    distributed: DistributedContext,
    context: AttemptContext,
    stop_flag: signals.StopFlag,
    timeline: Timeline,
    stop_watcher: StopWatcher | None,
    watchdog: Watchdog | None,
) -> int:
    """Train, record rank 0's outcome, and return the exit code of this rank."""
    from slurmtrain.hangs.beats import Position
    from slurmtrain.runtime.agreement import StopAgreement
    from slurmtrain.runtime.compile_cache import compile_cache_of
    from slurmtrain.runtime.gpu_memory import explain_out_of_memory
    from slurmtrain.runtime.jobs.train import build_trainer

    agreement = StopAgreement(
        stop_flag, distributed.control_group, stop_watcher.take_save if stop_watcher is not None else lambda: False
    )
    if watchdog is not None:
        watchdog.follow(lambda: Position(agreement.rounds, None, False))
    if config.job.kind == JobKind.PREFLIGHT:  # the checks are over, and nothing else is to be done
        if distributed.environment.rank == 0:
            attempt_context.record_last_word(context, LastWord.FINISHED, stepping=time.time())
        distributed.leave_together()
        return 0
    if config.job.kind == JobKind.EVALUATE:
        return _evaluate(config, distributed, context, agreement, timeline)
    compiled = compile_cache_of(config, parallel_dims_of(config), distributed.environment, distributed.device)
    if compiled is not None:
        compiled.load()
        timeline.mark("compiled code")
    switch = stop_watcher.profile_switch if stop_watcher is not None else None
    environment, device = distributed.environment, distributed.device
    with explain_out_of_memory(environment, device, lambda: 0):
        trainer = build_trainer(config, distributed, context, agreement, timeline, stop_watcher, profile_switch=switch)
    if watchdog is not None:
        state = trainer.state
        watchdog.follow(lambda: Position(agreement.rounds, state.step, state.step > state.first_step))
    try:
        with explain_out_of_memory(environment, device, lambda: trainer.step):
            outcome = trainer.fit()
    except BaseException:
        # Otherwise the last logged step would be all that is known.
        if distributed.environment.rank == 0 and trainer.step:
            with contextlib.suppress(OSError, SlurmtrainError):  # a full disk must not hide what has happened
                attempt_context.update_attempt(context, last_step=trainer.step)
        raise
    if distributed.environment.rank == 0:
        said = LastWord.FINISHED if outcome.finished else LastWord.STOPPED
        attempt_context.record_last_word(context, said, last_step=outcome.step)
        with undeterred("record that it has ended"):
            context.run_dir.event(
                Event.TRAINING_FINISHED if outcome.finished else Event.TRAINING_STOPPED,
                attempt=context.number,
                step=outcome.step,
                save_s=outcome.saved.seconds if outcome.saved else None,
            )
    if not outcome.finished:
        first = stop_flag.first
        cause = first.cause if first else StopCause.OTHER_RANK
        log.info("told to stop (%s): leaving after step %d", cause, outcome.step)
    if compiled is not None:
        compiled.publish()
    distributed.leave_together()
    return 0 if outcome.finished else EXIT_REQUEUE


def _evaluate(
    config: Config,
    distributed: DistributedContext,
    context: AttemptContext,
    stop_agreement: StopAgreement,
    timeline: Timeline,
) -> int:
    """Measure a checkpoint, and return the exit code of this rank."""
    from slurmtrain.runtime.jobs.evaluate import evaluate_checkpoint

    with doing(EVALUATION):
        done = evaluate_checkpoint(config, distributed, context, stop_agreement, timeline)
    if distributed.environment.rank == 0:
        attempt_context.record_last_word(context, LastWord.FINISHED if done else LastWord.STOPPED)
    distributed.leave_together()
    return 0 if done else EXIT_REQUEUE


def _finish_by_hand(config: Config, environment: Environment, context: AttemptContext, code: int) -> None:
    """Finish the attempt of ranks started by hand: no supervisor does, nor could one start them again."""
    if context.supervised or environment.rank != 0:
        return
    never = dataclasses.replace(config, requeue=dataclasses.replace(config.requeue, mode=RequeueMode.OFF))
    outcome = finish_attempt(context.run_dir, context.number, code, never, None)
    run_hook_of(context.run_dir, context.number, config)
    log.info("%s. Run %s in %s", outcome.sentence, context.run_dir.id, context.run_dir.path)


def _fail(
    error: BaseException,
    context: AttemptContext | None,
    environment: Environment | None,
    watchdog: Watchdog | None,
) -> NoReturn:
    """Show and record a failure, and exit."""
    show(error)
    rank = environment.rank if environment is not None else rank_or_zero()

    def finish(code: int) -> None:
        if context is not None and environment is not None and not context.supervised:
            _finish_by_hand(load_frozen(context.run_dir.config_file), environment, context, code)

    fail(error, rank, context.attempt_dir if context is not None else None, watchdog, finish=finish)
