"""Folders of Hugging Face that are made of checkpoints while training goes on (checkpoint.export_every_steps).

A process of its own makes each from a committed checkpoint, `checkpoints ... export --format hf`, at the lowest priority and
one at a time. Until it is there, a file with the step's name says that it is asked for, so that the next attempt makes what
this one could not; and the checkpoint is marked as being read, so that it is not removed. A failure is told, and that is all.
When a step is done again from an older checkpoint, its folder is replaced by one of the new checkpoint. After a rollback the
folders of the steps that were taken back get another name at once, since those steps need not come again.
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
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.directory import MANIFEST, checkpoint_name, committed, step_of
from slurmtrain.checkpoint.store import retention
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.patience import BestEffort

log = logging.getLogger(__name__)

FINISH_WAITS_S = 600.0  # after the last step, whose checkpoint is exported, too
STOP_WAITS_S = 5.0
ASKED = ".asked-"  # begins the name of the file of a step whose folder is not there yet
ROLLED_BACK = "rolled-back-"  # begins the name of the folder of a step that was taken back; the last one stays
LOG = "export.log"


def finish_waits_s(collective_timeout_s: float) -> float:
    """Return how long the last exports are waited for: the other ranks wait in a collective, which has a timeout."""
    return min(FINISH_WAITS_S, collective_timeout_s / 2)


class Exports:
    """The exports of a run, on rank 0. `committed` is called by the thread that writes checkpoints.

    Args:
        dtype: element type of the weights; None: as saved.
        event: records what has happened.
        finish_waits_s: longest wait of `finish` in seconds, see `finish_waits_s`.
    """

    def __init__(
        self,
        run_dir: RunDir,
        dtype: str | None,
        event: Callable[..., None],
        finish_waits_s: float = FINISH_WAITS_S,
    ):
        self._run_dir, self._dtype, self._event, self._finish_waits_s = run_dir, dtype, event, finish_waits_s
        self._condition = threading.Condition()
        self._reading: dict[int, AbstractContextManager[None]] = {}  # by step asked for, what keeps its checkpoint
        self._due: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._thread: threading.Thread | None = None
        self._storage = BestEffort(f"exports of {run_dir.id}", "`checkpoints RUN export` makes up for them")
        self._remove_leftovers()
        self._storage.attempt(self._begin_what_is_left)

    def _begin_what_is_left(self) -> None:
        """Begin what an attempt before this one has left."""
        for step in self._asked():
            self._keep(step)
            self._begin(step)

    def ask(self, step: int, *, restored: bool = False) -> None:
        """Have the checkpoint of this step exported once it is committed.

        Args:
            restored: training continues from that checkpoint, and a folder that is there already is of it. Else the
                step was just done, and such a folder is of an earlier time that it was done.
        """
        if restored and self._folder(step).is_dir():
            return
        folder = self._run_dir.exports
        try:
            folder.mkdir(mode=folder_mode(self._run_dir.path), exist_ok=True)
            (folder / f"{ASKED}{step}").touch()
        except OSError as error:  # a full disk, on which training goes on
            log.warning("step %d is not exported: %s: %s", step, folder, error.strerror or error)
            return
        self._keep(step)
        if restored:
            self._storage.attempt(lambda: self._begin(step))

    def committed(self, step: int) -> None:
        """Begin the export of a step that was asked for, or of one that was done again and has an export."""
        if step not in self._reading and self._folder(step).is_dir():
            self.ask(step)
        if step in self._reading:
            self._storage.attempt(lambda: self._begin(step))

    def rolled_back(self, step: int) -> None:
        """Give the folders of later steps another name: training has gone back to `step`."""
        for folder in self._run_dir.exports.glob("step_*"):
            number = folder.name.removeprefix("step_")
            if number.isdigit() and int(number) > step:
                self._put_aside(folder)

    def _put_aside(self, folder: Path) -> None:
        if not folder.is_dir():
            return
        aside = folder.with_name(f"{ROLLED_BACK}{folder.name}")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        except OSError as error:  # training goes on all the same
            log.warning("%s is of a step that was taken back, and keeps its name: %s", folder, error.strerror or error)

    def finish(self) -> None:
        """Wait until all is exported, but not for ever: the training's GPUs are idle meanwhile."""
        with self._condition:
            done = self._condition.wait_for(lambda: not self._due and self._process is None, self._finish_waits_s)
        if not done:
            log.warning(
                "an export has not ended %.0f s after training, and is ended: `checkpoints %s export` does it again",
                self._finish_waits_s,
                self._run_dir.path,
            )

    def close(self) -> None:
        """End what is under way; the next attempt begins it again."""
        with self._condition:
            self._ended, self._due = True, []
            process = self._process
            self._condition.notify_all()
        if process is not None:
            process.terminate()
        if self._thread is not None:
            self._thread.join(STOP_WAITS_S)
        for reading in self._reading.values():
            with suppress(OSError):
                reading.__exit__(None, None, None)
        self._reading = {}
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove what exports that were ended have written."""
        for folder in self._run_dir.exports.glob(".step_*.tmp*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _asked(self) -> list[int]:
        """Return the steps that were asked for, of which there is a checkpoint; forget others."""
        there = {step_of(path) for path in committed(self._run_dir.checkpoints)}
        steps = []
        for file in self._run_dir.exports.glob(f"{ASKED}*"):
            number = file.name.removeprefix(ASKED)
            if number.isdigit() and int(number) in there:  # a folder that is there may be of an earlier checkpoint
                steps.append(int(number))
            else:
                file.unlink(missing_ok=True)
        return sorted(steps)

    def _folder(self, step: int) -> Path:
        return self._run_dir.exports / f"step_{step:07d}"

    def _checkpoint(self, step: int) -> Path | None:
        found = [path for path in committed(self._run_dir.checkpoints) if step_of(path) == step]
        return found[-1] if found else None

    def _identity(self, step: int) -> tuple[Path, int, int] | None:
        """Return what tells the checkpoint of a step from another one of that step; None: there is none."""
        with suppress(OSError):
            path = self._checkpoint(step)
            found = os.stat(path / MANIFEST) if path is not None else None
            return (path, found.st_ino, found.st_mtime_ns) if path is not None and found is not None else None
        return None

    def _keep(self, step: int) -> None:
        with self._condition:
            if step in self._reading:
                return
            self._reading[step] = retention.reading(self._run_dir.checkpoints / checkpoint_name(step))
            self._reading[step].__enter__()

    def _begin(self, step: int) -> None:
        """Line up the export of a step if its checkpoint is there, and return at once."""
        if self._checkpoint(step) is None:
            return
        with self._condition:
            if self._ended or step in self._due:
                return
            self._due.append(step)
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._ended or self._due)
                if self._ended:
                    return
                step = self._due[0]
            identity, begun = self._identity(step), time.monotonic()
            try:
                text, code, seconds = self._export(step)
            except Exception as error:  # a storage that fails, say: that ends this export, and not those that come
                text, code, seconds = f"{type(error).__name__}: {error}", 1, time.monotonic() - begun
            with self._condition:
                self._due = [other for other in self._due if other != step]
                try:
                    self._conclude(step, identity, text, code, seconds)
                except Exception as error:
                    log.warning("how the export of step %d has ended is not recorded: %s", step, error)
                self._condition.notify_all()

    def _conclude(
        self, step: int, identity: tuple[Path, int, int] | None, text: str, code: int, seconds: float
    ) -> None:
        """Settle an export of the checkpoint that had this identity; line the step up again if it has another one now."""
        now = self._identity(step)
        if now == identity:
            self._settle(step, text, code, seconds)
            return
        # It was rolled back meanwhile; what it is now, or will be, is exported.
        if code == 0 and now is None:
            self._put_aside(self._folder(step))
        self._begin(step)

    def _export(self, step: int) -> tuple[str, int, float]:
        """Export a step, and return what the export has said, its exit code, and the seconds that it took."""
        path, out, begun = self._checkpoint(step), self._folder(step), time.monotonic()
        text, code = "", 1
        if path is None:
            text = "its checkpoint is gone"
        else:
            words = [sys.executable, "-m", "slurmtrain", "checkpoints", str(path), "export", str(out), "--format", "hf"]
            words += ["--force"] if out.is_dir() else []
            words += ["--dtype", self._dtype] if self._dtype else []
            text, code = self._run(words)
        return text, code, time.monotonic() - begun

    def _settle(self, step: int, text: str, code: int, seconds: float) -> None:
        """Tell how the export of a step has ended, after which it is asked for no more."""
        if code == -signal.SIGTERM or (self._ended and code != 0):
            return  # ended by us, or by SLURM with all processes of a job that is preempted: it is asked for still
        values: dict[str, Any] = {"step": step}
        if code == 0:
            self._tell(Event.EXPORTED, **values, folder=str(self._folder(step)), seconds=round(seconds, 1))
        else:
            log.warning("step %d was not exported: %s", step, text)
            self._tell(Event.EXPORT_FAILED, **values, error=text)
        with suppress(OSError):
            (self._run_dir.exports / f"{ASKED}{step}").unlink(missing_ok=True)
        reading = self._reading.pop(step, None)
        if reading is not None:
            reading.__exit__(None, None, None)

    def _tell(self, event: Event, **values: Any) -> None:
        """Record what has happened, if the disk lets us: it may be full, so that the export has failed, too."""
        try:
            self._event(event, **values)
        except OSError as error:
            log.warning("the event %s of step %d is not recorded: %s", event, values["step"], error.strerror or error)

    def _run(self, words: list[str]) -> tuple[str, int]:
        """Run the export, and return the last line of what it says, and its exit code."""
        # One thread per pool and no GPU: the rest belongs to training.
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        log_file = self._run_dir.exports / LOG
        try:
            with log_file.open("ab") as output:
                begin = output.tell()
                # Not to the rank's own log: SLURM waits until nobody has that open any more.
                process = subprocess.Popen(
                    ["nice", "-n", "19", *words], env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
                with self._condition:
                    self._process = process
                    if self._ended:
                        process.terminate()
                code = process.wait()
            with log_file.open("rb") as said:
                said.seek(begin)
                lines = said.read().decode(errors="replace").strip().splitlines()
        except OSError as error:
            return f"it cannot be started: {error.strerror or error}", 1
        finally:
            with self._condition:
                self._process = None
                self._condition.notify_all()
        errors = [line for line in lines if "error" in line.lower()] or lines[-1:]
        return (errors[0][:500] if errors else f"exit code {code}"), code
