"""cluster=local: the same job as processes of this machine, in the foreground.

It does what srun does on a cluster: it starts one process per rank, and ends all of them when one fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import pty
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from slurmtrain.choices import Backend, JobKind, RequeueMode
from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.launched_program import node_shape
from slurmtrain.config.schema import Config
from slurmtrain.launch.next_change import apply_next_change
from slurmtrain.report.status.sentences import how_to_continue
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.outcome import AttemptOutcome
from slurmtrain.runs.reasons import Verdict, exit_code_of_run
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.srun_log import record_killed_task
from slurmtrain.slurm.command_environment import is_of_ranks
from slurmtrain.slurm.environment import LAUNCHER_VARIABLE, own_node_name
from slurmtrain.supervise.loop import supervise
from slurmtrain.supervise.platforms import rank_environment, working_directory
from slurmtrain.supervise.platforms.plain_log import PlainLog
from slurmtrain.system import process as processes
from slurmtrain.system.parent_death import end_with_parent
from slurmtrain.system.signals import STOP_SIGNALS

log = logging.getLogger(__name__)

GONE_S = 5.0  # how long killed processes may take to be gone
GONE_POLL_S = 0.02  # the kernel has no event for the end of a grandchild
OUTPUT_S = 5.0  # how long the rest of a rank's output may take, when all its processes are gone


def signal_rank_0(run_dir: RunDir, attempt: Attempt, number: int) -> None:
    """Send a signal to rank 0 of an attempt on this host; it tells the other ranks.

    A rank of cluster=local leads its group, whose programs rely on it that all of them are told, as SLURM does.

    Raises:
        ProcessLookupError, PermissionError: the process has left, or is somebody else's.
    """
    if attempt.pid is None:
        raise ProcessLookupError(errno.ESRCH, "no rank 0 has begun")
    leads = run_dir.info()["backend"] == Backend.LOCAL and os.getpgid(attempt.pid) == attempt.pid
    (os.killpg if leads else os.kill)(attempt.pid, number)


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
        """Run the ranks of an attempt; see `LocalAttempt`."""
        attempt = LocalAttempt(self._run_dir, number, self.config)
        code = attempt.run()
        if attempt.told_to_stop:
            never = dataclasses.replace(self.config.requeue, mode=RequeueMode.OFF)
            self.config = dataclasses.replace(self.config, requeue=never)
        return code

    def go_on(self, number: int, outcome: AttemptOutcome, code: int) -> int | None:
        """Say how the attempt has ended; return the exit code, or None if another attempt begins."""
        ended = outcome.verdict is Verdict.END
        how = f". {how_to_continue(self._run_dir, self._run_dir.info(), outcome.reason)}" if ended else ""
        try:
            print(f"slurmtrain: {outcome.sentence}{how}", flush=True)  # the result of the verb
        except BrokenPipeError:
            _go_on_unseen()
        own_is_done = outcome.verdict is Verdict.DONE and self.config.job.kind == JobKind.COMMAND
        if (ended or own_is_done) and self.config.checkpoint.local is not None:
            # It loads numpy, for which `submit` has no time.
            from slurmtrain.checkpoint.node_copies.folder import remove_run

            remove_run(Path(self.config.checkpoint.local), self._run_dir.checkpoints, self._run_dir.id)
        if outcome.verdict is not Verdict.REQUEUE:
            return exit_code_of_run(outcome.verdict, outcome.reason, code)
        if self._run_dir.next_change_file.exists():
            apply_next_change(self._run_dir)
            self._read_config()
        return None


class LocalAttempt:
    """One start of all ranks, and the wait for their end."""

    def __init__(self, run_dir: RunDir, number: int, config: Config):
        self.told_to_stop = False
        self._run_dir, self._number, self._config = run_dir, number, config
        self._attempt_dir = run_dir.attempt(number)
        self._copiers: list[threading.Thread] = []
        # SimpleQueue.put may be called from a signal handler; Queue.put may not.
        self._events: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()

    def run(self) -> int:
        """Return the highest exit code of all ranks, as srun does; 128 + n for a rank killed by signal n."""
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            ranks = [self._start(rank) for rank in range(node_shape(self._config).tasks)]
            return self._wait(ranks)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._events.put(("signal", number, 0))

    def _wait(self, ranks: list[subprocess.Popen[bytes]]) -> int:
        codes: dict[int, int] = {}
        killer: threading.Timer | None = None
        while len(codes) < len(ranks):
            kind, subject, value = self._events.get()
            if kind == "signal":
                self.told_to_stop = True
                self._signal(ranks, subject)
                continue
            codes[subject] = value if value >= 0 else 128 - value
            if value < 0 and killer is None:  # what the others say then is only that they have lost it
                record_killed_task(self._attempt_dir, own_node_name() or socket.gethostname(), subject, -value)
            if value != 0 and killer is None:  # srun --kill-on-bad-exit
                self._signal(ranks, signal.SIGTERM)
                killer = threading.Timer(self._config.cluster.srun_wait_s, end_sessions, [[each.pid for each in ranks]])
                killer.daemon = True
                killer.start()
        if killer is not None:
            killer.cancel()
            killer.join()
        # As SLURM does at the end of a step: a rank that was killed may have left its program behind.
        end_sessions([process.pid for process in ranks])
        for process in ranks:
            process.wait()
        until = time.monotonic() + OUTPUT_S
        for rank, copier in enumerate(self._copiers):
            copier.join(max(0.0, until - time.monotonic()))
            if copier.is_alive():
                log.warning(
                    "the output of rank %d does not end: what it has started lives on, or nobody reads it", rank
                )
        return max(codes.values())

    def _signal(self, ranks: list[subprocess.Popen[bytes]], number: int) -> None:
        """Signal all ranks, and what those have left behind that have left themselves.

        SLURM also signals every process of the step, data workers included. Ctrl-C is for the rank alone.
        """
        for process in ranks:  # none is reaped before all have left, so each number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number) if number == signal.SIGINT else os.killpg(process.pid, number)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        ours, theirs = _terminal_like_ours() if rank == 0 else os.pipe()
        process = subprocess.Popen(
            [self._config.cluster.python or sys.executable, "-u", "-m", "slurmtrain", "train", str(self._run_dir.path)],
            cwd=working_directory(self._run_dir),
            env=self._environment(rank),
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
            preexec_fn=_prepare_rank,
        )
        os.close(theirs)
        log = self._attempt_dir.rank_log(rank).open("wb")
        copier = threading.Thread(target=_copy, args=(ours, log, rank == 0), daemon=True)
        copier.start()
        self._copiers.append(copier)
        left = threading.Thread(target=lambda: self._events.put(("left", rank, _exit_code(process.pid))), daemon=True)
        left.start()
        return process

    def _environment(self, rank: int) -> dict[str, str]:
        shape = node_shape(self._config)
        size = str(shape.tasks)
        variables = {name: value for name, value in os.environ.items() if not is_of_ranks(name)}
        variables |= waits_of_threads(variables)
        return {
            **rank_environment(self._run_dir, self._number, variables, shape.threads),
            **self._config.cluster.env,
            LAUNCHER_VARIABLE: "local",
            "RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": size,
        }


def _exit_code(pid: int) -> int:
    """Wait until a child has left, without reaping it, and return its exit code; minus the signal that has killed it."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
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
        time.sleep(GONE_POLL_S)


def waits_of_threads(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables by which OpenMP's threads wait in a way that suits a shared machine; none if `variables` decide it.

    By default they spin, for milliseconds (libgomp) or 200 ms (libiomp), which takes the CPU from the very thread that
    they wait for as soon as there are more threads than CPUs: two quick starts on two busy CPUs took four times the
    processor time. A thousand turns, some microseconds, bridge the time between two loops; then they sleep.
    """
    if any(name in variables for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return {}
    return {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def _terminal_like_ours() -> tuple[int, int]:
    """Return a pseudo terminal of our size if we write to one, so that rank 0 draws its bar; else a pipe."""
    if not sys.stdout.isatty():
        return os.pipe()
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    size = shutil.get_terminal_size()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    return ours, theirs


def _copy(source: int, log: BinaryIO, show: bool) -> None:
    """Copy a rank's output to its log, and rank 0's also to the terminal.

    Drawings on the terminal are left out of the log.
    """
    plain = PlainLog() if os.isatty(source) else None
    while True:
        try:
            data = os.read(source, 65536)
        except OSError:  # how a pseudo terminal says that its other end is closed
            break
        if not data:
            break
        # Whatever cannot be written, reading goes on: a rank whose output nobody reads waits for ever in its next print.
        with contextlib.suppress(OSError):  # a full disk, for instance; a part of it is written with the next piece
            log.write(plain.feed(data) if plain else data)
            log.flush()
        if show:
            _show(data)
    with contextlib.suppress(OSError):
        log.write(plain.close() if plain else b"")
        log.flush()
    with contextlib.suppress(OSError):
        log.close()
    os.close(source)


def _show(data: bytes) -> None:
    """Write what a rank has printed to our own output."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _go_on_unseen()
    except OSError:  # the disk of a file is full: what is shown matters less than what goes on
        pass


def _go_on_unseen() -> None:
    """Write our output nowhere from now on, since whoever read it has left, as with `submit | head`: a run outlives that."""
    log.info("nobody reads this output any more; the run goes on, and logs RUN shows what it prints")
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _prepare_rank() -> None:
    """Prepare the new process, before Python starts in it.

    Signals are blocked until the rank has handlers. A rank whose launcher was killed gets SIGTERM, so that it saves and
    exits instead of training on for nobody.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    end_with_parent(signal.SIGTERM)
