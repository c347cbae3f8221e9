"""cluster=local: the same job as processes of this machine, in the foreground; and the ranks on this machine, also of a pod.

Nothing like srun starts ranks here. `LocalRanks` does what srun does on a node: it starts one process per rank, and ends all of
them when one fails.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from msgspec.structs import replace

from slurmtrain.choices import JobKind, RequeueMode
from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.report.status.state import how_to_continue
from slurmtrain.runs.decide import AttemptOutcome
from slurmtrain.runs.failures import record_killed_task
from slurmtrain.runs.reasons import Verdict, exit_code_of_run
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.command_environment import is_of_ranks
from slurmtrain.slurm.environment import LAUNCHER_VARIABLE, own_node_name
from slurmtrain.supervise.loop import supervise
from slurmtrain.supervise.platforms import rank_environment
from slurmtrain.system import process as processes
from slurmtrain.system.process import end_with_parent
from slurmtrain.system.signals import STOP_SIGNALS


def run_local(run_dir: RunDir) -> int:
    """Run attempts until one is the last, and return the exit code: 0 finished, 75 stopped, 78 config, else a crash."""
    return supervise(run_dir, ThisMachine(run_dir))


class ThisMachine:
    """A run in the foreground. Ctrl-C, or TERM to this process, stops it for good."""

    client = None
    can_start_again = False

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir, self.config = run_dir, load_frozen(run_dir.config_file)
        secrets.take(self.config.secrets)

    def begin(self) -> int | None:
        """Nobody but this process starts the run here."""
        return None

    def claim(self) -> int:
        """Claim the next attempt."""
        return self._run_dir.new_attempt()

    def run(self, number: int, nodes: Sequence[str]) -> int:
        """Run all ranks; return their highest exit code, as srun does: 128 + n for a rank killed by signal n."""
        caught: list[int] = []
        before = {
            each: signal.signal(each, lambda got, _: caught.append(got)) for each in (signal.SIGINT, signal.SIGTERM)
        }
        ranks = LocalRanks(self._run_dir, self.config, number, Place())
        try:
            return ranks.run(lambda: self._stop_for_good(caught))
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _stop_for_good(self, caught: list[int]) -> int | None:
        """Return the next signal that a person has sent, if there is one: then the run does not start again."""
        if not caught:
            return None
        never = replace(self.config.requeue, mode=RequeueMode.OFF)
        self.config = replace(self.config, requeue=never)
        return caught.pop(0)

    def carry_out(self, number: int, outcome: AttemptOutcome, code: int) -> int | None:
        """Say how the attempt has ended; return the exit code, or None if another attempt begins."""
        ended = outcome.verdict is Verdict.END
        how = f". {how_to_continue(self._run_dir, self._run_dir.info(), outcome.reason)}" if ended else ""
        try:
            print(f"slurmtrain: {outcome.sentence}{how}", flush=True)  # the result of the verb
        except BrokenPipeError:  # nobody reads it any more, as with `submit | head`; a run outlives that
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        own_is_done = outcome.verdict is Verdict.DONE and self.config.job.kind == JobKind.COMMAND
        if (ended or own_is_done) and self.config.checkpoint.local is not None:
            # It loads numpy, for which `submit` has no time.
            from slurmtrain.checkpoint.node_folder import NodeFolder

            NodeFolder(Path(self.config.checkpoint.local), self._run_dir.checkpoints, self._run_dir.id).remove()
        if outcome.verdict is not Verdict.REQUEUE:
            return exit_code_of_run(outcome.verdict, outcome.reason, code)
        return None


log = logging.getLogger(__name__)

# The ranks on this machine: all of a run, or those of a pod (`pods`).

POLL_S = 0.02  # between two looks at the ranks; the kernel has no event for the end of a grandchild
GONE_S = 5.0  # how long killed processes may take to be gone
OUTPUT_S = 5.0  # how long the rest of rank 0's output may take, when all its processes are gone
# By default, OpenMP's threads spin while they wait, for milliseconds (libgomp) or 200 ms (libiomp). That takes the CPU from
# the very thread that they wait for as soon as there are more threads than CPUs: two quick starts on two busy CPUs took four
# times the processor time. A thousand turns, some microseconds, bridge the time between two loops; then they sleep.
WAITS_OF_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


@dataclass(frozen=True)
class Place:
    """The place of this machine among those of a run.

    Attributes:
        launcher: the word for what starts the ranks.
        node, nodes: the number of this machine, and how many there are.
        variables: further variables of the ranks.
    """

    launcher: str = "local"
    node: int = 0
    nodes: int = 1
    variables: dict[str, str] = field(default_factory=dict)


class LocalRanks:
    """The ranks of an attempt on this machine."""

    def __init__(self, run_dir: RunDir, config: Config, number: int, place: Place) -> None:
        self._run_dir, self._config, self._number, self._place = run_dir, config, number, place
        self._tasks = config.cluster.tasks_per_node

    def run(self, next_signal: Callable[[], int | None]) -> int:
        """Start the ranks, and wait until all have left; return their highest exit code, 128 + n for a signal.

        Args:
            next_signal: returns a signal that the ranks are to get, once, or None. Called often.
        """
        attempt_dir, first = self._run_dir.attempt(self._number), self._place.node * self._tasks
        sys.stdout.flush()
        # On a full disk, or where nobody reads any more (`submit | head`), tee reads on: a rank whose output nobody reads
        # waits for ever in its next print. Ctrl-C does not reach tee, which has a session of its own.
        shows = [
            "bash",
            "-c",
            'trap "" PIPE; tee -p "$1"; exec cat >/dev/null',
            "show",
            str(attempt_dir.rank_log(first)),
        ]
        show = subprocess.Popen(shows, stdin=subprocess.PIPE, start_new_session=True)
        assert show.stdin is not None
        with show.stdin:
            ranks = [self._start(0, show.stdin)]
        for rank in range(1, self._tasks):
            with attempt_dir.rank_log(first + rank).open("wb") as rank_log:
                ranks.append(self._start(rank, rank_log))
        codes: dict[int, int] = {}
        kill_at = math.inf
        while len(codes) < len(ranks):
            signalled = next_signal()
            if signalled is not None:
                _signal(ranks, signalled)
            if time.monotonic() > kill_at:
                end_sessions([process.pid for process in ranks])
            left = {rank: _exit_code(process.pid) for rank, process in enumerate(ranks) if rank not in codes}
            # A rank that a signal has ended comes first: what the others say then is only that they have lost it.
            for code, rank in sorted((code, rank) for rank, code in left.items() if code is not None):
                codes[rank] = code if code >= 0 else 128 - code
                if code and kill_at == math.inf:  # srun --kill-on-bad-exit
                    if code < 0:
                        record_killed_task(attempt_dir, own_node_name() or socket.gethostname(), first + rank, -code)
                    _signal(ranks, signal.SIGTERM)
                    kill_at = time.monotonic() + self._config.cluster.srun_wait_s
            time.sleep(POLL_S)
        # As SLURM does at the end of a step: a rank that was killed may have left its program behind.
        end_sessions([process.pid for process in ranks])
        for process in ranks:
            process.wait()
        try:
            show.wait(OUTPUT_S)
        except subprocess.TimeoutExpired:
            log.warning("the output of rank 0 does not end: what it has started lives on, or nobody reads it")
        next_signal()  # one that came when the last rank had left
        return max(codes.values())

    def _start(self, rank: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        place, cluster = self._place, self._config.cluster
        variables = {name: value for name, value in os.environ.items() if not is_of_ranks(name)}
        environment = {
            **rank_environment(self._run_dir, self._number, {**WAITS_OF_THREADS, **variables}, cluster.cpus_per_task),
            **cluster.env,
            LAUNCHER_VARIABLE: place.launcher,
            "RANK": str(place.node * self._tasks + rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(place.nodes * self._tasks),
            "LOCAL_WORLD_SIZE": str(self._tasks),
            **place.variables,
        }
        return subprocess.Popen(
            [cluster.python or sys.executable, "-u", "-m", "slurmtrain", "train", str(self._run_dir.path)],
            cwd=self._run_dir.workdir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
            preexec_fn=_prepare_rank,
        )


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Signal all ranks, and what those have left behind that have left themselves.

    SLURM also signals every process of the step, data workers included. Ctrl-C is for the rank alone.
    """
    for process in ranks:  # none is reaped before all have left, so each number is still its own
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number) if number == signal.SIGINT else os.killpg(process.pid, number)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child that has left, without reaping it; minus the signal that has killed it."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def end_sessions(leaders: Collection[int]) -> None:
    """Kill all processes of the sessions that these have begun, and wait until they are gone, at most GONE_S seconds.

    Args:
        leaders: pids of children that are not reaped yet.
    """
    give_up = time.monotonic() + GONE_S
    while (left := processes.living_in_sessions(leaders)) and time.monotonic() < give_up:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _prepare_rank() -> None:
    """Prepare the new process, before Python starts in it.

    Signals are blocked until the rank has handlers. A rank whose launcher was killed gets SIGTERM, so that it saves and
    exits instead of training on for nobody.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    end_with_parent(signal.SIGTERM)
