"""job=command: any program on every rank, with the same attempts, signals, requeue and status as our own trainer.

This process stands between SLURM and the program: it survives the signals, sets the variables that torch.distributed's
env:// reads to ranks and addresses, waits for all processes that the program has started, and turns the program's end
into the exit codes of our contract. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import random
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.choices import Device
from slurmtrain.config.launched_program import script_and_module
from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ConfigError, signal_name
from slurmtrain.rank import attempt_context
from slurmtrain.rank.addresses import hold_port
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.rank.jobs.own_checkpoints import look_before_start
from slurmtrain.rank.jobs.program_start import STOPS, start_program
from slurmtrain.rank.jobs.program_stop import ProgramStopper, end_of_grace, told_facts
from slurmtrain.rank.leaving import undeterred
from slurmtrain.rank.stop_watcher import StopWatcher
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runs.reasons import Event, LastWord
from slurmtrain.slurm.environment import Environment, check_gpu_files
from slurmtrain.system import process
from slurmtrain.system.signals import StopFlag

log = logging.getLogger(__name__)

POLL_S = 0.05  # seconds between looks at a file: a shared file system has no event to await
LISTINGS_PER_S = 500  # directory listings per second of all ranks together, while they wait for each other
SAVING_S = 600.0  # how long a child may go on after a stop, where nobody knows when SLURM ends the job


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
    process.become_subreaper()  # a wrapper such as bash may die of a stop signal while its child still saves
    port = hold_port(config.cluster.ports, environment.node) if environment.rank == 0 else None
    program = start_program(config, environment, context, port, lambda: stop_flag.requested)
    name = shlex.split(config.job.command or "")[0]
    stopper = ProgramStopper(config.job, environment.source, context, stop_flag, environment.rank)
    code, ended_at = program.wait(), time.time()
    # The program had the signal at the same moment as this process, whose reader thread may be a little behind.
    stop_flag.wait(signal_lag_s(code))
    rule = FinishedWhen.of(config.job.finished_when)
    crashed = code not in DIED_OF_A_STOP and is_crash(code, told=stop_flag.requested, rule=rule)
    if crashed:
        # At once: what is done next takes time, in which other ranks fail for want of this one, and all are told to stop.
        _record_crash(context.attempt_dir, environment.rank, name, code, ended_at)
    _wait_for_descendants(config, code, context, environment, stop_flag)
    stopper.close()
    if port is not None:
        port.close()
    told = stop_flag.requested and not crashed  # a stop that came after a crash, perhaps because of it, excuses nothing
    if contract_code(code, told=told, rule=rule, there=True) in (0, EXIT_REQUEUE):
        _wait_for_ranks(context.attempt_dir, environment)
    # Looked for after the wait: the file may be that of another rank.
    left_with = contract_code(code, told=told, rule=rule, there=rule is not None and rule.is_there(context))
    if left_with == EXIT_REQUEUE and code not in (0, EXIT_REQUEUE):
        log.info("the program ended with %s after it was told to stop", described(code))
    if left_with not in (0, EXIT_REQUEUE, EXIT_CONFIG):
        _record_crash(context.attempt_dir, environment.rank, name, code, ended_at)
    if stop_watcher is not None and stop_flag.requested:
        stop_watcher.wait_for_record()
    if environment.rank == 0:
        said = {0: LastWord.FINISHED, EXIT_REQUEUE: LastWord.STOPPED}.get(left_with)
        if said is not None:
            attempt_context.record_last_word(context, said, program_code=code)
        else:
            with undeterred("record how the program has ended"):
                attempt_context.update_attempt(context, program_code=code)
    return left_with if left_with >= 0 else 128 - left_with


def _check_node(config: Config, environment: Environment) -> None:
    """Check that this node has what the program needs.

    Raises:
        ConfigError: there is no such script.
        EnvironmentMismatchError: GPUs were asked for, and there are none.
    """
    if config.train.device != Device.CPU:
        check_gpu_files(environment, config.cluster.gpus_per_node)
    script, _ = script_and_module(config.job.command or "")
    if script is not None and not Path(script).exists():
        raise ConfigError(
            f"job.command: there is no {script} on {environment.node}, in {Path.cwd()}",
            hint="is its file system mounted there, and is it in the snapshot?",
        )


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
            assert stop_flag.first is not None
            grace_s = config.job.stop_grace_s or SAVING_S
            return max(ended, end_of_grace(stop_flag.first.moment, grace_s, told_facts(context.attempt_dir)))
        return ended + (config.cluster.srun_wait_s if code in (0, EXIT_REQUEUE) else 0)

    left = process.wait_until_gone(until)
    if left:
        shown = "; ".join(left[:5]) + ("; ..." if len(left) > 5 else "")
        log.warning("left behind by the program, and ended: %s", shown)
        with contextlib.suppress(OSError):  # a full disk must not make a crash of it
            context.run_dir.event(Event.LEFT_BEHIND, attempt=context.number, rank=environment.rank, processes=left[:20])


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
    began, shortest_s = time.monotonic(), max(POLL_S, environment.world_size / LISTINGS_PER_S)
    while True:
        # A hiccup of a shared file system shows nothing; srun ends this rank when others have left.
        with contextlib.suppress(OSError):
            ended, failed = attempt_dir.count_ended_and_failed()
            if ended >= environment.world_size or failed:
                return
        # A tenth of the wait: the first rank that leaves ends those that have not looked since within KillWait.
        waited_s = time.monotonic() - began
        time.sleep(max(shortest_s, min(10.0, waited_s / 10)) * random.uniform(0.8, 1.2))


# What the exit code of a program means, in the exit codes of our contract.

SIGNAL_LAG_S, SHORT_SIGNAL_LAG_S = 1.0, 0.25
# Exit codes of a program that died of a stop signal, directly or as a shell reports it.
DIED_OF_A_STOP = {sign for number in STOPS for sign in (-number, 128 + number)}


@dataclass(frozen=True)
class FinishedWhen:
    """The value of job.finished_when: an exit code, or a file. One of the two is None."""

    code: int | None
    file: Path | None

    @classmethod
    def of(cls, text: str | None) -> FinishedWhen | None:
        if text is None:
            return None
        return cls(int(text), None) if text.isdigit() else cls(None, Path(text))

    def is_there(self, context: AttemptContext) -> bool:
        """Return whether the file exists: in the run directory, or in the folder in which the program runs."""
        return self.file is not None and any(
            (folder / self.file).exists() for folder in context.run_dir.program_folders
        )


def contract_code(code: int, *, told: bool, rule: FinishedWhen | None, there: bool) -> int:
    """Return the exit code of our contract for the end of a program.

    Exit code 0 means that it has finished, unless it was told to stop before: many programs that trap the signal save
    and exit with 0. If one had finished all the same, it exits with 0 at once when it is started again.

    Args:
        code: the program's own; minus the signal's number when one has killed it.
        told: this rank was told to stop before the program ended.
        there: the file that `rule` names exists.
    """
    if rule is not None and rule.code is not None:
        if code == rule.code:
            return 0
        if code == 0:
            return EXIT_REQUEUE
    if rule is not None and rule.file is not None and (code == 0 or (told and code in DIED_OF_A_STOP)):
        return 0 if there else EXIT_REQUEUE
    if code in (EXIT_REQUEUE, EXIT_CONFIG):
        return code
    return EXIT_REQUEUE if told else code


def signal_lag_s(code: int) -> float:
    """Return how many seconds after the end of a program a stop signal may come that was the cause of that end.

    A program that was killed by another signal has not ended for it. One that exits with an error may have handled it so; but
    when a rank has crashed, all others are soon told to stop, too, and that must not be taken for the cause.
    """
    if code in DIED_OF_A_STOP or code == 0:
        return SIGNAL_LAG_S
    return SHORT_SIGNAL_LAG_S if code > 0 else 0.0


def is_crash(code: int, *, told: bool, rule: FinishedWhen | None) -> bool:
    """Return whether a program has crashed that ended with this code, as `contract_code`."""
    return contract_code(code, told=told, rule=rule, there=False) not in (0, EXIT_REQUEUE, EXIT_CONFIG)


def described(code: int) -> str:
    """Return the end of a program in words: "exit code 1", "signal 9 (SIGKILL)"."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal_name(-code)})"
