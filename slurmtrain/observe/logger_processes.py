"""The processes of a run's loggers, on rank 0: they are started, told what rank 0 alone knows, and ended in time.

Rank 0 never waits for them before the end: it writes metrics.jsonl, and they follow that file (`observe.logger_process`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.config.schema import ObserveConfig
from slurmtrain.observe.logger import Ending
from slurmtrain.observe.logger_process import AGAIN
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import process
from slurmtrain.system.files import read_json
from slurmtrain.system.modes import file_mode, folder_mode
from slurmtrain.system.redaction import redact

log = logging.getLogger(__name__)

CLOSE_S = {Ending.FINISHED: 30.0, Ending.STOPPED: 5.0, Ending.FAILED: 5.0}  # the grace time of a stop is short
STARTS = 10  # of a logger's process in an attempt
AGAIN_WITHIN_S = 2.0  # what another process needs at least to close what one could not
KILL_S = 1.0
LOOK_EVERY_S = 5.0
# SLURM sends its signals to all processes of a job. A logger leaves the end to rank 0, which saves first.
BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def loggers_of(observe: ObserveConfig) -> tuple[str, ...]:
    """Return the names of the loggers that a config asks for."""
    built_in = [name for name in ("wandb", "mlflow") if getattr(observe, name).enabled]
    return (*built_in, *observe.loggers)


class LoggerProcess:
    """The process of one logger.

    Args:
        say: shows a sentence to the person who watches.
    """

    def __init__(self, run_dir: RunDir, name: str, attempt: int, say: Callable[[str], None]):
        self._run_dir, self._name, self._attempt, self._say = run_dir, name, attempt, say
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._shown: set[str] = set()
        self._start()

    @property
    def log_file(self) -> Path:
        return self._run_dir.attempt(self._attempt).path / f"logger-{self._name}.log"

    def look(self) -> None:
        """Start it again if it has died, and show what it has to say."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            again = self._starts < STARTS
            if code == AGAIN and again:  # it has said why
                self._start()
                return
            then = "it is started again" if again else "the rest is left to the next attempt"
            self._warn(f"the logger {self._name} ended with exit code {code}, and {then}: {self.log_file}")
            if again:
                self._start()
        self._show_note()

    def tell(self, line: str) -> None:
        """Write a line to it."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone, or does not read
                os.write(self._process.stdin.fileno(), f"{line}\n".encode())

    def close(self, ending: Ending, deadline: float) -> None:
        """Tell it to close its logger by `deadline`, in seconds of time.monotonic. Returns at once."""
        self.tell(f"close {ending} {max(0.0, deadline - time.monotonic()):.1f}")

    def wait(self, ending: Ending, deadline: float) -> None:
        """Wait until it has closed its logger; if it could not, let another process try; end it if `deadline` is over."""
        tried_again = False
        while (running := self._process) is not None:
            try:
                code = running.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = 0
                self._warn(
                    f"the logger {self._name} has not closed in time, and is ended; what it lacks is in metrics.jsonl, from "
                    "where the next attempt takes it"
                )
                _kill(running)
            if running.stdin is not None:
                running.stdin.close()
            self._process = None
            if code == AGAIN and not tried_again and deadline - time.monotonic() > AGAIN_WITHIN_S:
                tried_again = True
                self._start()
                self.close(ending, deadline)
        self._show_note()

    def _start(self) -> None:
        self._starts += 1
        words = [sys.executable, "-m", "slurmtrain.observe.logger_process"]
        words += [str(self._run_dir.path), self._name, str(self._attempt)]
        # The pools of numerical libraries and the GPU belong to training.
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            self._run_dir.loggers.mkdir(mode=folder_mode(self._run_dir.path), exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            output = os.open(self.log_file, flags, file_mode(self.log_file.parent))
            try:
                # Not to the rank's own log: SLURM waits until nobody has that open any more.
                self._process = subprocess.Popen(
                    ["nice", "-n", "10", *words], env=variables, stdin=subprocess.PIPE, stdout=output, stderr=output
                )
            finally:
                os.close(output)
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        except OSError as error:
            self._warn(f"the logger {self._name} cannot be started: {error.strerror or error}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _show_note(self) -> None:
        """Show what it has noted for a person: where the numbers go, or why it fails."""
        try:
            note: dict[str, Any] = read_json(self._run_dir.logger_file(self._name)) or {}
        except Exception:  # a hiccup of a shared file system
            return
        if note.get("attempt") != self._attempt:
            return
        if isinstance(said := note.get("said"), str) and said not in self._shown:
            self._shown.add(said)
            self._say(redact(said))
        if isinstance(error := note.get("error"), str):
            self._warn(f"the logger {self._name} fails, and is tried again: {error}")

    def _warn(self, sentence: str) -> None:
        if sentence not in self._shown:
            self._shown.add(sentence)
            log.warning("%s", sentence)


class LoggerProcesses:
    """All loggers of a run, on rank 0."""

    def __init__(self, run_dir: RunDir, names: Sequence[str], attempt: int, say: Callable[[str], None]):
        self._processes = [LoggerProcess(run_dir, name, attempt, say) for name in names]
        self._looked = time.monotonic()

    def look(self) -> None:
        """Look after them, now and then."""
        if time.monotonic() - self._looked > LOOK_EVERY_S:
            self._looked = time.monotonic()
            for each in self._processes:
                each.look()

    def rewind(self) -> None:
        """Tell them that records of metrics.jsonl were dropped."""
        for each in self._processes:
            each.tell("rewind")

    def close(self, ending: Ending) -> None:
        """Have all of them close at the same time, and wait for that, but not for long."""
        deadline = time.monotonic() + CLOSE_S[ending]
        for each in self._processes:
            each.close(ending, deadline)
        for each in self._processes:
            each.wait(ending, deadline)


def _kill(running: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started, such as wandb-core, which has a session of its own."""
    below = process.living_descendants(running.pid)
    running.kill()
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(KILL_S)
