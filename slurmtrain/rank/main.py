"""The program of every rank of a training job: from its environment to its exit code.

It reads top-down as the life of a rank. Signal handlers are installed before torch is imported, which is why torch and
everything that needs it are imported inside functions here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from slurmtrain.choices import JobKind, RequeueMode
from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.parallel_dims import on_given_nodes
from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_REQUEUE, SlurmtrainError
from slurmtrain.rank import attempt_context
from slurmtrain.rank.attempt_context import AttemptContext, Timeline
from slurmtrain.rank.leaving import fail, leave, show, undeterred
from slurmtrain.rank.stop_watcher import ANSWER_S, StopWatcher
from slurmtrain.runs.reasons import Event, LastWord
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient, run_command
from slurmtrain.slurm.environment import Environment, check_world_size, rank_or_zero
from slurmtrain.supervise.end_of_attempt import finish_attempt
from slurmtrain.supervise.hooks import run_hook_of
from slurmtrain.system import logs, signals
from slurmtrain.system.activity import EVALUATION, doing
from slurmtrain.system.signals import StopCause

if TYPE_CHECKING:
    from slurmtrain.rank.distributed_context import DistributedContext
    from slurmtrain.rank.watchdog import Watchdog
    from slurmtrain.training.agreement import StopAgreement

log = logging.getLogger(__name__)


Find = Callable[[], tuple[Config, Callable[[], RunDir]]]


def run_submitted(run_dir: RunDir) -> NoReturn:
    """Run a rank of a run that has a run directory."""

    def find() -> tuple[Config, Callable[[], RunDir]]:
        return load_frozen(run_dir.config_file), lambda: run_dir

    Rank(attempt_context.given_attempt(run_dir)).run(find, strict=True)


def run_by_hand(config: Config, create_run_dir: Callable[[], RunDir], *, strict: bool) -> NoReturn:
    """Run a rank that srun, torchrun or a person started with overrides.

    Args:
        create_run_dir: called by rank 0 alone.
        strict: nodes and tasks were given explicitly, so the ranks that run have to match them.
    """
    Rank(None).run(lambda: (config, create_run_dir), strict=strict)


class Rank:
    """The life of a rank.

    Args:
        given: the attempt that a supervisor has named; None: the ranks find out together.
    """

    environment: Environment
    config: Config
    context: AttemptContext
    distributed: DistributedContext

    def __init__(self, given: AttemptContext | None) -> None:
        self.stop_flag = signals.install_signal_handlers()
        self.timeline = Timeline()
        self.given = given
        self.stop_watcher: StopWatcher | None = None
        self.watchdog: Watchdog | None = None

    def run(self, find: Find, *, strict: bool) -> NoReturn:
        """Run from beginning to end: find the environment, meet the others, train, exit with the right code.

        Args:
            find: reads the config, and returns it with the function that rank 0 calls for the run directory.
            strict: see `run_by_hand`.
        """
        try:
            self.environment = Environment.detect()
            logs.set_up(self.environment.rank)
            self.config, find_or_create = find()
            secrets.take(self.config.secrets)
            if strict:
                self.config = on_given_nodes(self.config, len(self.environment.nodes))
                cluster = self.config.cluster
                tasks = cluster.tasks_per_node
                check_world_size(self.environment, nodes=cluster.node_range.most, tasks_per_node=tasks)
            meets = self.config.job.kind not in (JobKind.COMMAND, JobKind.PREPARE)
            code = self._with_others(find_or_create) if meets else self._alone(find_or_create)
            if self.watchdog is not None:
                self.watchdog.close()
            if self.stop_watcher is not None and meets and code == EXIT_REQUEUE:  # a program may say so by itself
                self.stop_watcher.wait_for_record()
            with undeterred("complete the record of the attempt"):
                self._finish_by_hand(code)
            leave(code)
        except signals.StopDuringStartError:
            if self.stop_watcher is not None:
                self.stop_watcher.wait_for_record()
            leave(EXIT_REQUEUE)
        except BaseException as error:
            self._fail(error)

    def _alone(self, find_or_create: Callable[[], RunDir]) -> int:
        """Run the program of a job whose ranks do not meet, and return its exit code."""
        config, environment = self.config, self.environment
        self.context = self.given or attempt_context.alone(config.job.kind, environment, find_or_create)
        self._begin()
        if config.job.kind == JobKind.COMMAND:
            from slurmtrain.rank.jobs.command import run_command as run_program
        else:
            from slurmtrain.rank.jobs.prepare import run_prepare as run_program
        return run_program(config, environment, self.context, self.stop_flag, self.stop_watcher)

    def _with_others(self, find_or_create: Callable[[], RunDir]) -> int:
        """Meet the other ranks, check the nodes, do the job, and return the exit code of this rank."""
        self.timeline.aloud = self.environment.rank == 0
        self.timeline.begin("loading PyTorch")
        if self.given is not None:
            self.context = self.given
            self._begin()
        self.join(find_or_create)
        if self.given is None:
            self._begin()
            self._watch(self.distributed)
        # It loads PyTorch, which takes seconds: the attempt has begun, and is watched, before that.
        from slurmtrain.rank.preflight.check import run_preflight

        run_preflight(self.config, self.distributed, self.context)
        self.timeline.mark("preflight")
        return self._work()

    def _begin(self) -> None:
        """Open the attempt's record on rank 0, and start to watch the clock and SLURM."""
        context, config = self.context, self.config
        if self.environment.rank != 0:
            return
        attempt_context.open_attempt(context, self.environment, config)
        in_slurm = self.environment.source == "slurm"
        # A program of the user's own does not notice a switch: only a signal reaches it.
        run_dir = context.run_dir if config.job.kind != JobKind.COMMAND else None
        self.stop_watcher = StopWatcher(
            self.stop_flag,
            context.attempt_dir,
            SlurmClient(run=functools.partial(run_command, timeout_s=ANSWER_S)) if in_slurm else None,
            signal_lead_s=config.cluster.signal_lead_s,
            run_dir=run_dir,
            profiles=config.job.kind == JobKind.TRAIN,
        )

    def join(self, find_or_create: Callable[[], RunDir]) -> None:
        """Meet the other ranks, and agree with them on run and attempt where no supervisor has named them."""
        from slurmtrain.rank.distributed_context import init_distributed
        from slurmtrain.rank.seeds import use_deterministic_kernels

        config, environment, given = self.config, self.environment, self.given
        if config.train.deterministic:
            use_deterministic_kernels()
        self.timeline.mark("interpreter and imports")
        if environment.world_size > 1:
            others = environment.world_size - 1
            self.timeline.begin(
                "waiting for the other rank" if others == 1 else f"waiting for the other {others} ranks"
            )
        directory = attempt_context.rendezvous_directory(given, environment, Path(config.job.runs_dir))

        def on_met(met: DistributedContext) -> None:
            if given is not None:  # else the ranks have yet to agree on the attempt
                self._watch(met)

        self.distributed = init_distributed(
            config.cluster, config.train.device, environment, directory, self.stop_flag, on_met=on_met
        )
        self.timeline.mark("rendezvous")
        if given is None:
            self.context = attempt_context.agree_on_attempt(
                environment, find_or_create, self.distributed.broadcast_text, directory
            )

    def _watch(self, distributed: DistributedContext) -> None:
        """Start the watch over this rank's main thread, unless watchdog.enabled is false."""
        if self.config.watchdog.enabled:
            from slurmtrain.rank.watchdog import Watchdog

            self.watchdog = Watchdog(self.config.watchdog, distributed, self.context.attempt_dir)

    def _work(self) -> int:
        """Train, or do what else the job is; record rank 0's outcome, and return the exit code of this rank."""
        from slurmtrain.hangs.beats import Position
        from slurmtrain.training.agreement import StopAgreement

        distributed = self.distributed
        agreement = StopAgreement(self.stop_flag, distributed.control_group)
        if self.watchdog is not None:
            self.watchdog.follow(lambda: Position(agreement.rounds, None, False))
        if self.config.job.kind == JobKind.PREFLIGHT:  # the checks are over, and nothing else is to be done
            finished = True
            self._record_last_word(finished, stepping=time.time())
        elif self.config.job.kind == JobKind.EVALUATE:
            from slurmtrain.rank.jobs.evaluate import evaluate_checkpoint

            with doing(EVALUATION):
                finished = evaluate_checkpoint(self.config, distributed, self.context, agreement, self.timeline)
            self._record_last_word(finished)
        else:
            finished = self._train(agreement)
        distributed.leave_together()
        return 0 if finished else EXIT_REQUEUE

    def _train(self, agreement: StopAgreement) -> bool:
        """Train, record rank 0's outcome, and return whether all steps are done."""
        from slurmtrain.hangs.beats import Position
        from slurmtrain.rank.distributed_context import explain_out_of_memory
        from slurmtrain.rank.jobs.train import build_trainer

        config, distributed, context, stop_watcher = self.config, self.distributed, self.context, self.stop_watcher
        environment = distributed.environment
        with explain_out_of_memory(environment, lambda: 0):
            trainer = build_trainer(config, distributed, context, agreement, self.timeline, stop_watcher)
        if self.watchdog is not None:
            state = trainer.state
            self.watchdog.follow(lambda: Position(agreement.rounds, state.step, state.step > state.first_step))
        try:
            with explain_out_of_memory(environment, lambda: trainer.step):
                outcome = trainer.fit()
        except BaseException:
            # Otherwise the last logged step would be all that is known.
            if environment.rank == 0 and trainer.step:
                with contextlib.suppress(OSError, SlurmtrainError):  # a full disk must not hide what has happened
                    attempt_context.update_attempt(context, last_step=trainer.step)
            raise
        self._record_last_word(outcome.finished, last_step=outcome.step)
        if environment.rank == 0:
            with undeterred("record that it has ended"):
                context.run_dir.event(
                    Event.TRAINING_FINISHED if outcome.finished else Event.TRAINING_STOPPED,
                    attempt=context.number,
                    step=outcome.step,
                    save_s=outcome.saved.seconds if outcome.saved else None,
                )
        if not outcome.finished:
            first = self.stop_flag.first
            cause = first.cause if first else StopCause.OTHER_RANK
            log.info("told to stop (%s): leaving after step %d", cause, outcome.step)
        return outcome.finished

    def _record_last_word(self, finished: bool, **changes: Any) -> None:
        if self.environment.rank == 0:
            said = LastWord.FINISHED if finished else LastWord.STOPPED
            attempt_context.record_last_word(self.context, said, **changes)

    def _finish_by_hand(self, code: int) -> None:
        """Finish the attempt of ranks started by hand: no supervisor does, nor could one start them again."""
        context = self.context
        if context.supervised or self.environment.rank != 0:
            return
        requeue = replace(self.config.requeue, mode=RequeueMode.OFF)
        never = replace(self.config, requeue=requeue)
        outcome = finish_attempt(context.run_dir, context.number, code, never, None)
        run_hook_of(context.run_dir, context.number, self.config)
        log.info("%s. Run %s in %s", outcome.sentence, context.run_dir.id, context.run_dir.path)

    def _fail(self, error: BaseException) -> NoReturn:
        """Show and record a failure, and exit."""
        show(error)
        context: AttemptContext | None = getattr(self, "context", self.given)  # it may have failed before
        environment: Environment | None = getattr(self, "environment", None)

        def finish(code: int) -> None:
            if context is not None and not context.supervised:
                self._finish_by_hand(code)

        rank = environment.rank if environment is not None else rank_or_zero()
        fail(error, rank, context.attempt_dir if context is not None else None, self.watchdog, finish=finish)
