"""The program of every rank of a training job: from its environment to its exit code.

It reads top-down as the life of a rank. Signal handlers are installed before torch is imported, which is why torch and
everything that needs it are imported inside functions here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slurmtrain.config import secrets
from slurmtrain.config.compose import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_REQUEUE, CheckpointMismatch, LostPeers, SlurmtrainError, Superseded, exit_code_of
from slurmtrain.rundir import RunDir
from slurmtrain.runtime import attempts, place, signals
from slurmtrain.runtime.environment import Environment, check_world_size
from slurmtrain.runtime.place import Place
from slurmtrain.runtime.settle import run_hook_of, settle
from slurmtrain.runtime.slurm import SlurmClient
from slurmtrain.runtime.timeline import Timeline
from slurmtrain.runtime.watch import Watch

if TYPE_CHECKING:
    from slurmtrain.runtime.agreement import StopAgreement
    from slurmtrain.runtime.world import World


def run_submitted(run_dir: RunDir) -> NoReturn:
    """Run a rank of a run that has a run directory."""

    def find() -> tuple[Config, Callable[[], RunDir]]:
        return load_frozen(run_dir.config_file), lambda: run_dir

    _run(find, place.given_place(run_dir), strict=True)


def run_by_hand(config: Config, create_run_dir: Callable[[], RunDir], *, strict: bool) -> NoReturn:
    """Run a rank that srun, torchrun or a person started with overrides.

    Args:
        create_run_dir: called by rank 0 alone.
        strict: nodes and tasks were given explicitly, so the ranks that run have to match them.
    """
    _run(lambda: (config, create_run_dir), None, strict=strict)


def _run(find: Callable[[], tuple[Config, Callable[[], RunDir]]], given: Place | None, *, strict: bool) -> NoReturn:
    """Run a rank from beginning to end: find its environment, meet the others, train, exit with the right code.

    Args:
        find: reads the config, and returns it with the function that rank 0 calls for the run directory.
        given: the place that a batch script has named; None: the ranks find out together.
    """
    stop = signals.arm()
    timeline = Timeline()
    environment: Environment | None = None
    where = given
    watch: Watch | None = None
    try:
        environment = Environment.detect()
        config, find_or_create = find()
        secrets.take(config.secrets)
        if strict:
            check_world_size(environment, nodes=config.cluster.nodes, tasks_per_node=config.cluster.tasks_per_node)
        if config.job.kind in ("command", "prepare"):  # whose ranks do not meet
            where = given or place.alone(config.job.kind, environment, find_or_create)
            watch = _begin(where, environment, config, stop) if environment.rank == 0 else None
            code = _program(config.job.kind)(config, environment, where, stop, watch)
            _settle_by_hand(config, environment, where, code)
            leave(code)
        timeline.aloud = environment.rank == 0
        timeline.begin("loading PyTorch")
        if given is not None and environment.rank == 0:
            watch = _begin(given, environment, config, stop)
        world, where = _join(config, environment, given, find_or_create, stop, timeline)
        if given is None and environment.rank == 0:
            watch = _begin(where, environment, config, stop)
        code = _train(config, world, where, stop, timeline, watch)
        if watch is not None and code == EXIT_REQUEUE:
            watch.wait_for_record()
        _settle_by_hand(config, environment, where, code)
        leave(code)
    except _stop_during_start():
        if watch is not None:
            watch.wait_for_record()
        leave(EXIT_REQUEUE)
    except SlurmtrainError as error:
        print(f"slurmtrain: error: {error}", file=sys.stderr, flush=True)
        _fail(
            where,
            environment,
            error.exit_code,
            error.message,
            because_of_peer=isinstance(error, LostPeers),
            superseded=isinstance(error, Superseded),
            on_any_node=isinstance(error, CheckpointMismatch),
        )
    except BaseException as error:
        traceback.print_exc()
        sentence = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        _fail(where, environment, exit_code_of(error), sentence, because_of_peer=_lost_a_peer(error))


def _program(kind: str) -> Callable[[Config, Environment, Place, signals.StopSignals, Watch | None], int]:
    """Return the function that a rank of a job of this kind runs, which returns its exit code."""
    if kind == "command":
        from slurmtrain.runtime.command import run_command

        return run_command
    from slurmtrain.runtime.prepare import run_prepare

    return run_prepare


def _begin(where: Place, environment: Environment, config: Config, stop: signals.StopSignals) -> Watch:
    """Open the attempt's record on rank 0, and start to watch the clock and SLURM."""
    place.open_attempt(where, environment, config)
    client = SlurmClient() if environment.source == "slurm" else None
    # A program of the user's own does not notice a switch: only a signal reaches it.
    run_dir = where.run_dir if config.job.kind != "command" else None
    return Watch(stop, where.attempt_dir, client, signal_lead_s=config.cluster.signal_lead_s, run_dir=run_dir)


def _join(
    config: Config,
    environment: Environment,
    given: Place | None,
    find_or_create: Callable[[], RunDir],
    stop: signals.StopSignals,
    timeline: Timeline,
) -> tuple[World, Place]:
    """Meet the other ranks, and return the world and the place of this attempt."""
    from slurmtrain.runtime.world import join

    timeline.mark("interpreter and imports")
    if environment.world_size > 1:
        timeline.begin(f"waiting for the other {environment.world_size - 1} ranks")
    meeting = None
    if given is None and environment.source == "slurm" and environment.world_size > 1:
        meeting = place.meeting_directory(environment, Path(config.job.runs_dir))
    world = join(config.cluster, config.train.device, environment, given.attempt_dir if given else meeting, stop)
    timeline.mark("rendezvous")
    if given is not None:
        return world, given
    return world, place.agree_on_place(environment, find_or_create, world.tell, meeting)


def _train(
    config: Config,
    world: World,
    where: Place,
    stop: signals.StopSignals,
    timeline: Timeline,
    watch: Watch | None,
) -> int:
    """Train, record rank 0's outcome, and return the exit code of this rank."""
    from slurmtrain.runtime.agreement import StopAgreement
    from slurmtrain.runtime.training_job import build_trainer

    agreement = StopAgreement(stop, world.control, watch.take_save if watch is not None else lambda: False)
    if config.job.kind == "evaluate":
        return _evaluate(config, world, where, agreement, timeline)
    trainer = build_trainer(config, world, where, agreement, timeline, watch)
    try:
        outcome = trainer.fit()
    except BaseException:
        if world.environment.rank == 0 and trainer.step:  # otherwise the last logged step would be all that is known
            with contextlib.suppress(OSError, SlurmtrainError):  # a full disk must not hide what has happened
                place.update_attempt(where, last_step=trainer.step)
        raise
    if world.environment.rank == 0:
        said = "finished" if outcome.finished else "stopped"
        place.update_attempt(where, said=said, last_step=outcome.step)
        where.run_dir.event(
            f"training {said}",
            attempt=where.number,
            step=outcome.step,
            save_s=outcome.saved.seconds if outcome.saved else None,
        )
    if not outcome.finished:
        first = stop.first
        cause = first.cause if first else "another rank"
        print(f"slurmtrain: told to stop ({cause}): leaving after step {outcome.step}", flush=True)
    world.leave_together()
    return 0 if outcome.finished else EXIT_REQUEUE


def _evaluate(config: Config, world: World, where: Place, stop: StopAgreement, timeline: Timeline) -> int:
    """Measure a checkpoint, and return the exit code of this rank."""
    from slurmtrain.runtime.evaluate import evaluate_checkpoint

    done = evaluate_checkpoint(config, world, where, stop, timeline)
    if world.environment.rank == 0:
        place.update_attempt(where, said="finished" if done else "stopped")
    world.leave_together()
    return 0 if done else EXIT_REQUEUE


def _settle_by_hand(config: Config, environment: Environment, where: Place, code: int) -> None:
    """Settle an attempt of ranks started by hand: no batch script judges it, nor could one start them again."""
    if where.supervised or environment.rank != 0:
        return
    never = dataclasses.replace(config, requeue=dataclasses.replace(config.requeue, mode="off"))
    judgement = settle(where.run_dir, where.number, code, never, None)
    run_hook_of(where.run_dir, where.number, config)
    print(f"slurmtrain: {judgement.sentence}. Run {where.run_dir.id} in {where.run_dir.path}", flush=True)


def _fail(
    where: Place | None,
    environment: Environment | None,
    code: int,
    sentence: str,
    *,
    because_of_peer: bool = False,
    superseded: bool = False,
    on_any_node: bool = False,
) -> NoReturn:
    """Record a failure and exit. No collectives are used: the other ranks may be gone, or wait for something else."""
    if where is not None:
        rank = environment.rank if environment else int(os.environ.get("SLURM_PROCID", os.environ.get("RANK", "0")))
        try:
            attempts.record_failure(
                where.attempt_dir,
                rank,
                exit_code=code,
                sentence=sentence,
                because_of_peer=because_of_peer,
                superseded=superseded,
                on_any_node=on_any_node,
            )
            if environment is not None and not where.supervised:
                _settle_by_hand(load_frozen(where.run_dir.config_file), environment, where, code)
        except OSError as error:
            print(f"slurmtrain: cannot record the failure: {error}", file=sys.stderr)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process now: no exit handlers that could hang, no child left behind, no signal that changes the code."""
    signals.ignore_stop_signals()
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _stop_during_start() -> tuple[type[BaseException], ...]:
    """Return the exception class StopDuringStart if its module was ever loaded.

    Importing it here would import torch before signals are handled.
    """
    module = sys.modules.get("slurmtrain.runtime.rendezvous")
    return (module.StopDuringStart,) if module is not None else ()


def _lost_a_peer(error: BaseException) -> bool:
    """Return whether this is an error that gloo or NCCL raises when another rank has gone: that rank's failure came first."""
    return isinstance(error, RuntimeError) and any(
        words in str(error)
        for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    )
