"""cluster=local: the same job as processes of this machine, in the foreground.

It does what srun does on a cluster: it starts one process per rank, and ends all of them when one fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO

from slurmtrain.choices import JobKind, RequeueMode
from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.launched_program import node_shape
from slurmtrain.report.status.sentences import how_to_continue
from slurmtrain.runs.failures import record_killed_task
from slurmtrain.runs.outcome import AttemptOutcome
from slurmtrain.runs.reasons import Verdict, exit_code_of_run
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.command_environment import is_of_ranks
from slurmtrain.slurm.environment import LAUNCHER_VARIABLE, own_node_name
from slurmtrain.supervise.loop import supervise
from slurmtrain.supervise.platforms import rank_environment
from slurmtrain.system import process as processes
from slurmtrain.system.process import end_with_parent
from slurmtrain.system.signals import STOP_SIGNALS

log = logging.getLogger(__name__)

POLL_S = 0.02  # between two looks at the ranks; the kernel has no event for the end of a grandchild
GONE_S = 5.0  # how long killed processes may take to be gone
OUTPUT_S = 5.0  # how long the rest of rank 0's output may take, when all its processes are gone
# By default, OpenMP's threads spin while they wait, for milliseconds (libgomp) or 200 ms (libiomp). That takes the CPU from
# the very thread that they wait for as soon as there are more threads than CPUs: two quick starts on two busy CPUs took four
# times the processor time. A thousand turns, some microseconds, bridge the time between two loops; then they sleep.
WAITS_OF_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def run_local(run_dir: RunDir) -> int:
    """Run attempts until one is the last, and return the exit code: 0 finished, 75 stopped, 78 config, else a crash."""
    return supervise(run_dir, ThisMachine(run_dir))


class ThisMachine:
    """A run in the foreground. Ctrl-C, or TERM to this process, stops it for good."""

    client = None
    can_start_again = False

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._read_config()
        secrets.take(self.config.secrets)

    def _read_config(self) -> None:
        self.config = load_frozen(self._run_dir.config_file)

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
        try:
            return self._run(number, caught)
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _run(self, number: int, caught: list[int]) -> int:
        """Start the ranks and wait for their end.

        Args:
            caught: the signals that this process has caught and has not passed on yet.
        """
        attempt_dir = self._run_dir.attempt(number)
        sys.stdout.flush()
        # On a full disk, or where nobody reads any more (`submit | head`), tee reads on: a rank whose output nobody reads
        # waits for ever in its next print. Ctrl-C does not reach tee, which has a session of its own.
        shows = ["bash", "-c", 'trap "" PIPE; tee -p "$1"; exec cat >/dev/null', "show", str(attempt_dir.rank_log(0))]
        show = subprocess.Popen(shows, stdin=subprocess.PIPE, start_new_session=True)
        assert show.stdin is not None
        with show.stdin:
            ranks = [self._start(number, 0, show.stdin)]
        for rank in range(1, node_shape(self.config).tasks):
            with attempt_dir.rank_log(rank).open("wb") as rank_log:
                ranks.append(self._start(number, rank, rank_log))
        codes: dict[int, int] = {}
        kill_at = math.inf
        while len(codes) < len(ranks):
            if caught:
                self._stop_for_good()
                _signal(ranks, caught.pop(0))
            if time.monotonic() > kill_at:
                end_sessions([process.pid for process in ranks])
            left = {rank: _exit_code(process.pid) for rank, process in enumerate(ranks) if rank not in codes}
            # A rank that a signal has ended comes first: what the others say then is only that they have lost it.
            for code, rank in sorted((code, rank) for rank, code in left.items() if code is not None):
                codes[rank] = code if code >= 0 else 128 - code
                if code and kill_at == math.inf:  # srun --kill-on-bad-exit
                    if code < 0:
                        record_killed_task(attempt_dir, own_node_name() or socket.gethostname(), rank, -code)
                    _signal(ranks, signal.SIGTERM)
                    kill_at = time.monotonic() + self.config.cluster.srun_wait_s
            time.sleep(POLL_S)
        # As SLURM does at the end of a step: a rank that was killed may have left its program behind.
        end_sessions([process.pid for process in ranks])
        for process in ranks:
            process.wait()
        try:
            show.wait(OUTPUT_S)
        except subprocess.TimeoutExpired:
            log.warning("the output of rank 0 does not end: what it has started lives on, or nobody reads it")
        if caught:
            self._stop_for_good()
        return max(codes.values())

    def _stop_for_good(self) -> None:
        never = dataclasses.replace(self.config.requeue, mode=RequeueMode.OFF)
        self.config = dataclasses.replace(self.config, requeue=never)

    def _start(self, number: int, rank: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        shape = node_shape(self.config)
        variables = {name: value for name, value in os.environ.items() if not is_of_ranks(name)}
        environment = {
            **rank_environment(self._run_dir, number, {**WAITS_OF_THREADS, **variables}, shape.threads),
            **self.config.cluster.env,
            LAUNCHER_VARIABLE: "local",
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(shape.tasks)),
        }
        return subprocess.Popen(
            [self.config.cluster.python or sys.executable, "-u", "-m", "slurmtrain", "train", str(self._run_dir.path)],
            cwd=self._run_dir.workdir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
            preexec_fn=_prepare_rank,
        )

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
            from slurmtrain.checkpoint.node_folder import remove_run

            remove_run(Path(self.config.checkpoint.local), self._run_dir.checkpoints, self._run_dir.id)
        if outcome.verdict is not Verdict.REQUEUE:
            return exit_code_of_run(outcome.verdict, outcome.reason, code)
        return None


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
