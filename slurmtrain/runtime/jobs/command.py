"""job=command: any program on every rank, with the same attempts, signals, requeue and status as our own trainer.

This process stands between SLURM and the program: it survives the signals, sets the variables that torch.distributed's
env:// reads to ranks and addresses, waits for all processes that the program has started, and turns the program's end
into the exit codes of our contract. With job.launcher it starts that launcher, one on each node, which starts the
program's processes. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from slurmtrain.choices import Device
from slurmtrain.config.launched_program import has_launcher, node_shape, program_of, script_and_module
from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ConfigError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.events import Event
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runs.reasons import LastWord
from slurmtrain.runtime import attempt_context
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.jobs.own_checkpoints import look_before_start
from slurmtrain.runtime.jobs.program_exit_code import FinishedWhen, contract_code, described, is_crash, signal_lag_s
from slurmtrain.runtime.jobs.program_loggers import program_text_file
from slurmtrain.runtime.jobs.program_start import DIED_OF_A_STOP, ProgramStart, start_of
from slurmtrain.runtime.jobs.program_stop import ProgramStopper, told_facts
from slurmtrain.runtime.leaving import undeterred
from slurmtrain.runtime.shared_file_wait import Published
from slurmtrain.runtime.stop_watcher import StopWatcher
from slurmtrain.runtime.watchdog.program import RANK, ProgramWatch
from slurmtrain.slurm.environment import Environment, check_gpu_files
from slurmtrain.system import process
from slurmtrain.system.signals import StopFlag

log = logging.getLogger(__name__)

POLL_S = 0.05  # seconds between looks at a file: a shared file system has no event to await
LISTINGS_PER_S = 500  # directory listings per second of all ranks together, while they wait for each other
SAVING_S = 600.0  # how long a child may go on after a stop, where nobody knows when SLURM ends the job
MARGIN_S = 2.0  # before that end: what the way out takes


def run_command(
    config: Config,
    environment: Environment,
    context: AttemptContext,
    stop_flag: StopFlag,
    stop_watcher: StopWatcher | None,
) -> int:
    """Run job.command as this rank's program, and return the exit code for this rank.

    0: finished; 75: it ended after a stop signal, or exited with 75 itself; 78: it exited with 78; anything else is a
    crash. It returns when no process that the program has started is left, and, unless it has failed, when those of the
    other ranks have ended.

    Args:
        stop_watcher: rank 0's; None on the others.

    Raises:
        ConfigError: there is no such program.
        EnvironmentMismatchError: GPUs were asked for, and this node has none.
        StopDuringStartError: this rank was told to stop while it waited for rank 0.
    """
    _check_node(config, environment)
    if environment.rank == 0:
        look_before_start(config, context, lambda: stop_flag.requested)
    start = start_of(config, environment, context, lambda: stop_flag.requested)
    process.adopt_orphans()
    program = _start_process(start)
    stopper = ProgramStopper(config.job, environment.source, context, stop_flag, start.folder, environment.rank)
    watch = _watch(config, environment, context, program.pid, stop_flag)
    text_file = program_text_file(config, environment, context)
    code, ended_at = program.wait(), time.time()
    # The program had the signal at the same moment as this process, whose reader thread may be a little behind.
    stop_flag.wait(signal_lag_s(code))
    rule = FinishedWhen.of(config.job.finished_when)
    crashed = code not in DIED_OF_A_STOP and is_crash(code, told=stop_flag.requested, rule=rule)
    if crashed and start.folder is None and not (watch is not None and watch.fired):
        # At once: what is done next takes time, in which other ranks fail for want of this one, and all are told to stop.
        _record_crash(context.attempt_dir, environment.rank, start.name, code, ended_at)
    if text_file is not None:
        text_file.close()
    if watch is not None:
        watch.close()
    Published(context.attempt_dir.master_file, environment).forget()
    _wait_for_descendants(config, code, context, environment, stop_flag)
    stopper.close()
    told = stop_flag.requested and not crashed  # a stop that came after a crash, perhaps because of it, excuses nothing
    end = start.end(code, told=told)
    code = end.code
    if watch is not None and watch.fired:  # however it took that
        if environment.rank == 0:
            _record_code(context, code)
        with contextlib.suppress(OSError):  # the others are told to leave, and those that save wait for all programs
            context.attempt_dir.ended_file(environment.rank).touch()
        return code if 0 < code < EXIT_REQUEUE else 1
    if contract_code(code, told=told, rule=rule, there=True) in (0, EXIT_REQUEUE):
        _wait_for_ranks(context.attempt_dir, environment)
    # Looked for after the wait: the file may be that of another rank.
    left_with = contract_code(code, told=told, rule=rule, there=rule is not None and rule.is_there(context))
    if left_with == EXIT_REQUEUE and code not in (0, EXIT_REQUEUE):
        log.info("the program ended with %s after it was told to stop", described(code))
    if left_with not in (0, EXIT_REQUEUE, EXIT_CONFIG):
        failed_rank = end.rank if end.rank >= 0 else first_rank(config, environment)
        _record_crash(context.attempt_dir, failed_rank, start.name, code, end.time or ended_at)
    if stop_watcher is not None and stop_flag.requested:
        stop_watcher.wait_for_record()
    if environment.rank == 0:
        said = {0: LastWord.FINISHED, EXIT_REQUEUE: LastWord.STOPPED}.get(left_with)
        if said is not None:
            attempt_context.record_last_word(context, said, program_code=code)
        else:
            _record_code(context, code)
    return left_with if left_with >= 0 else 128 - left_with


def _check_node(config: Config, environment: Environment) -> None:
    """Check that this node has what the program needs.

    Raises:
        ConfigError: there is no such script.
        EnvironmentMismatchError: GPUs were asked for, and there are none.
    """
    if config.train.device != Device.CPU:
        check_gpu_files(environment, config.cluster.gpus_per_node)
    script, _ = script_and_module(program_of(config))
    if script is not None and not Path(script).exists():
        raise ConfigError(
            f"job.command: there is no {script} on {environment.node}, in {Path.cwd()}",
            hint="is its file system mounted there, and is it in the snapshot?",
        )


def _start_process(start: ProgramStart) -> subprocess.Popen[bytes]:
    """Start the program, or its launcher.

    Raises:
        ConfigError: there is no such program, or it cannot be executed.
    """
    name = start.words[0]
    try:
        return subprocess.Popen(start.words, env=start.variables, preexec_fn=start.prepare)
    except OSError as error:
        raise ConfigError(
            f"job.command: cannot start {name!r}: {error.strerror}",
            hint="is it on the PATH of the nodes?" if os.sep not in name else f"see `ls -l {name}` on a node",
        ) from None


def _watch(
    config: Config, environment: Environment, context: AttemptContext, pid: int, stop_flag: StopFlag
) -> ProgramWatch | None:
    """Start the watch over this rank's program; None if nobody asks for it, or rank 0 alone watches the file of all."""
    limits = config.watchdog
    if not limits.enabled or limits.heartbeat_file is None:
        return None
    if environment.rank != 0 and RANK not in limits.heartbeat_file:
        return None
    folders = context.run_dir.program_folders
    limits = replace(limits, heartbeat_file=limits.heartbeat_file.replace(RANK, str(first_rank(config, environment))))
    return ProgramWatch(limits, folders, environment, context.attempt_dir, pid, lambda: stop_flag.requested)


def first_rank(config: Config, environment: Environment) -> int:
    """Return this process's rank; with a launcher, the first of those that it starts on this node."""
    return environment.node_rank * node_shape(config).processes if has_launcher(config) else environment.rank


def _record_code(context: AttemptContext, code: int) -> None:
    """Record the exit code of rank 0's program."""
    with undeterred("record how the program has ended"):
        attempt_context.update_attempt(context, program_code=code)


def _record_crash(attempt_dir: AttemptDir, rank: int, name: str, code: int, when: float) -> None:
    """Record that a rank's program has ended in this way, unless it has said itself why it failed."""
    with undeterred("record the failure"):
        if not attempt_dir.failure_file(rank).exists():
            record_failure(attempt_dir, rank, Failure(code, f"{name} ended with {described(code)}"), when=when)


def _wait_for_descendants(
    config: Config, code: int, context: AttemptContext, environment: Environment, stop_flag: StopFlag
) -> None:
    """Wait until no process that the program has started is left; end and name those that stay too long."""
    ended = time.monotonic()

    def until() -> float:
        if stop_flag.requested:
            return max(ended, _end_of_grace(context, stop_flag, config.job.stop_grace_s))
        return ended + (config.cluster.srun_wait_s if code in (0, EXIT_REQUEUE) else 0)

    left = process.wait_until_gone(until)
    if left:
        shown = "; ".join(left[:5]) + ("; ..." if len(left) > 5 else "")
        log.warning("left behind by the program, and ended: %s", shown)
        with contextlib.suppress(OSError):  # a full disk must not make a crash of it
            context.run_dir.event(Event.LEFT_BEHIND, attempt=context.number, rank=environment.rank, processes=left[:20])


def _end_of_grace(context: AttemptContext, stop_flag: StopFlag, grace_s: float | None) -> float:
    """Return until when a child may save after a stop, by the monotonic clock: the end of the job, as far as it is known."""
    assert stop_flag.first is not None
    facts = told_facts(context.attempt_dir)
    left_s = math.inf if facts is None or facts.seconds_left is None else facts.seconds_left - MARGIN_S
    return stop_flag.first.moment + min(grace_s or SAVING_S, left_s)


def _wait_for_ranks(attempt_dir: AttemptDir, environment: Environment) -> None:
    """Wait until the programs of all ranks have ended, or one has failed.

    srun ends all others when one exits with another code than 0, and some time after one has exited with 0: a rank that
    has ended well must not cost those that still save their state. The pauses grow with the wait, and with the number
    of ranks.
    """
    if environment.world_size == 1:
        return
    try:
        attempt_dir.ended_file(environment.rank).touch()
    except OSError as error:  # the disk is full: leaving with what is known is better than a crash
        log.warning("cannot tell the other ranks that this one has ended: %s", error)
        return
    began = time.monotonic()
    shortest = max(POLL_S, environment.world_size / LISTINGS_PER_S)
    while True:
        try:
            ended, failed = attempt_dir.count_ended_and_failed()
        except OSError:  # a hiccup of a shared file system; srun ends this rank when all others have left
            ended = failed = 0
        if ended >= environment.world_size or failed:
            return
        waited = time.monotonic() - began
        time.sleep(max(shortest, min(10.0, waited / 10)) * random.uniform(0.8, 1.2))
