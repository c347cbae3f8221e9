"""Folders of Hugging Face that are made of checkpoints while training goes on (checkpoint.export_every_steps).

A process of its own makes each from a committed checkpoint, `checkpoints ... export --format hf`, at the lowest priority and
one at a time. Until it is there, its checkpoint is held, so that it is not removed, and the next attempt makes what this one
could not. A failure is told, and that is all. When a step is done again from an older checkpoint, its folder is replaced by one
of the new checkpoint.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.store import retention
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.patience import BestEffort

log = logging.getLogger(__name__)

FINISH_WAITS_S = 600.0  # after the last step, whose checkpoint is exported, too
STOP_WAITS_S = 5.0
LOOK_EVERY_S = 0.2
HOLDER = "export"  # for whom the checkpoints are held


def finish_waits_s(collective_timeout_s: float) -> float:
    """Return how long the last exports are waited for: the other ranks wait in a collective, which has a timeout."""
    return min(FINISH_WAITS_S, collective_timeout_s / 2)


def command_of(checkpoint: Path, out: Path, dtype: str | None) -> list[str]:
    """Return the command that exports a checkpoint."""
    words = [sys.executable, "-m", "slurmtrain", "checkpoints", str(checkpoint), "export", str(out), "--format", "hf"]
    return [*words, *(["--force"] if out.is_dir() else []), *(["--dtype", dtype] if dtype else [])]


class Exports:
    """The exports of a run, on rank 0. `committed` is called by the thread that writes checkpoints.

    Args:
        is_due: whether the checkpoint of a step is to be exported.
        dtype: element type of the weights; None: as saved.
        event: records what has happened.
        finish_waits_s: longest wait of `finish` in seconds, see `finish_waits_s`.
    """

    def __init__(
        self,
        run_dir: RunDir,
        is_due: Callable[[int], bool],
        dtype: str | None,
        event: Callable[..., None],
        finish_waits_s: float = FINISH_WAITS_S,
    ):
        self._run_dir, self._is_due, self._dtype, self._event = run_dir, is_due, dtype, event
        self._finish_waits_s = finish_waits_s
        self._lock = threading.RLock()
        self._running: subprocess.Popen[bytes] | None = None
        self._step, self._began = 0, 0.0  # of the export that is under way
        self._log_file = run_dir.exports / "export.log"
        self._storage = BestEffort(f"exports of {run_dir.id}", "`checkpoints RUN export` makes up for them")
        # What an attempt before this one has left, also if it was killed as soon as its checkpoint was there.
        for newest in committed(run_dir.checkpoints)[-1:]:
            if not self._folder(step_of(newest)).is_dir():
                self.committed(step_of(newest))
        self._storage.attempt(self._go_on)

    def committed(self, step: int) -> None:
        """Export the checkpoint of this step if it is due, or was done again and has an export."""
        with self._lock:
            if self._running is not None and self._step == step:
                self._end()
        if self._is_due(step) or self._folder(step).is_dir():
            self._storage.attempt(lambda: retention.hold(self._run_dir.checkpoints, step, HOLDER))
        self._storage.attempt(self._go_on)

    def finish(self) -> None:
        """Wait until all is exported, but not for ever: the training's GPUs are idle meanwhile."""
        deadline = time.monotonic() + self._finish_waits_s
        self._storage.attempt(self._go_on)
        while self._running is not None and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
            self._storage.attempt(self._go_on)
        if self._running is not None:
            log.warning(
                "an export has not ended %.0f s after training, and is ended: `checkpoints %s export` does it again",
                self._finish_waits_s,
                self._run_dir.path,
            )

    def close(self) -> None:
        """End what is under way; the next attempt begins it again."""
        with self._lock:
            if self._running is not None and self._running.poll() is not None:
                self._storage.attempt(self._settle)
            elif self._running is not None:
                self._end()

    def _folder(self, step: int) -> Path:
        return self._run_dir.exports / f"step_{step:07d}"

    def _go_on(self) -> None:
        """Settle the export that has ended, and begin the next one whose checkpoint is there."""
        with self._lock:
            if self._running is not None and (self._running.poll() is None or not self._settle()):
                return
            there = {step_of(path): path for path in committed(self._run_dir.checkpoints)}
            held = [step for step, by in retention.held(self._run_dir.checkpoints) if by == HOLDER and step in there]
            if held:
                self._begin(held[0], there[held[0]])

    def _begin(self, step: int, checkpoint: Path) -> None:
        """Start the export of a step."""
        self._run_dir.exports.mkdir(mode=folder_mode(self._run_dir.path), exist_ok=True)
        # One thread per pool and no GPU: the rest belongs to training.
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        words = ["nice", "-n", "19", *command_of(checkpoint, self._folder(step), self._dtype)]
        with self._log_file.open("wb") as output:
            # Not to the rank's own log: SLURM waits until nobody has that open any more.
            self._running = subprocess.Popen(
                words, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            self._step, self._began = step, time.monotonic()

    def _settle(self) -> bool:
        """Tell how the export that was under way has ended, after which it is asked for no more.

        Returns:
            False if it was ended, by SLURM with all processes of a job that is preempted, say: it is asked for still.
        """
        assert self._running is not None
        code, step, self._running = self._running.returncode, self._step, None
        if code == -signal.SIGTERM:
            return False
        retention.release(self._run_dir.checkpoints, step, HOLDER)
        if code == 0:
            seconds = round(time.monotonic() - self._began, 1)
            self._event(Event.EXPORTED, step=step, folder=str(self._folder(step)), seconds=seconds)
            return True
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines[-1:] or [f"exit code {code}"]
        log.warning("step %d was not exported: %s", step, errors[0][:500])
        self._event(Event.EXPORT_FAILED, step=step, error=errors[0][:500])
        return True

    def _end(self) -> None:
        """End the export that is under way, and remove what it has written; it is asked for still."""
        assert self._running is not None
        process, self._running = self._running, None
        process.terminate()
        try:
            process.wait(STOP_WAITS_S)
        except subprocess.TimeoutExpired:
            process.kill()
        for folder in self._run_dir.exports.glob(".step_*.tmp*"):
            shutil.rmtree(folder, ignore_errors=True)
