"""Profiles of a running job: all ranks begin one at the same step, the chosen ones write it.

A person asks for one by a file: `touch RUN/profile`, or `echo 5 > RUN/profile` for five steps. Rank 0 alone sees it. The
ranks' agreement after each step, which is there anyway, carries one bit of it; only when a profile begins do they exchange
more.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slurmtrain.config.fields import PROFILED_MAX
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.observe.profiler import StepProfiler
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

STEPS = 3  # of a profile, unless the file has another number
LOOK_EVERY_S = 2.0  # seconds between looks of a loop that has no other thread for it

T = TypeVar("T")


class ProfileSwitch:
    """Looks for the file RUN/profile, and removes it when the profile begins, so that it happens once. On rank 0.

    `look` may be called by another thread than the others.

    Attributes:
        steps: the number of steps that are asked for; None: nobody asks.
    """

    def __init__(self, run_dir: RunDir):
        self._path = run_dir.profile_switch
        self.steps: int | None = None
        self._stuck = False  # the file cannot be removed, so nobody looks for it any more
        self._lock = threading.Lock()

    def look(self) -> None:
        """Look for the file, and read it. One that cannot be read is removed."""
        with self._lock:
            if self._stuck:
                return
            try:
                text = records.read_text(self._path, at_most=4096).strip()
                steps = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0 if text else STEPS
                if not 1 <= steps <= PROFILED_MAX:
                    what = f"expected a number of steps from 1 to {PROFILED_MAX}, or an empty file"
                    raise UnreadableRecordError(f"the file profile has {text[:60]!r}, {what}")
                self.steps = steps
            except FileNotFoundError:
                self.steps = None
            except UnreadableRecordError as error:
                log.warning("no profile: %s", printable(error.message))
                self._remove()

    def take(self) -> int | None:
        """Return the number of steps that are asked for, and remove the file: they are profiled now."""
        with self._lock:
            steps = self.steps
            self._remove()
            return steps

    def _remove(self) -> None:
        self.steps = None
        try:
            is_folder = self._path.is_dir() and not self._path.is_symlink()
            shutil.rmtree(self._path) if is_folder else self._path.unlink(missing_ok=True)
        except OSError as error:
            self._stuck = True
            log.warning("%s cannot be removed, so nobody looks for it any more: %s", self._path, error)


class Ranks(Protocol):
    """The ranks of the job. All of them call each method together."""

    @property
    def rank(self) -> int: ...

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and return its JSON value on all."""


class Profiling:
    """The profiles of an attempt. On all ranks.

    Args:
        run_dir: the run.
        ranks: this rank and its peers.
        writers: the ranks that write a profile (observe.profile_ranks); none: all.
        on_gpu: the model is on a GPU.
        switch: rank 0's; None on the others, and where nobody can ask.
        event: records an event; used on rank 0.
    """

    def __init__(
        self,
        run_dir: RunDir,
        ranks: Ranks,
        writers: Collection[int] = (),
        *,
        on_gpu: bool,
        switch: ProfileSwitch | None = None,
        event: Callable[[Event, dict[str, Any]], None] = lambda event, values: None,
    ):
        self._run_dir, self._ranks, self._writers, self._on_gpu = run_dir, ranks, sorted(writers), on_gpu
        self._switch, self._record, self._look_at = switch, event, 0.0
        self._profiler: StepProfiler | None = None
        self._left = 0  # steps until the profile is done, with the one that warms up
        self._steps, self._first, self._folder = 0, 0, Path()  # of the profile that is under way

    @property
    def active(self) -> bool:
        """Whether a profile is under way, on this rank or another."""
        return self._left > 0

    @property
    def wanted(self) -> bool:
        """Whether this rank knows of a wish for a profile."""
        return not self.active and self._switch is not None and self._switch.steps is not None

    def look(self) -> bool:
        """Return `wanted`, after a look at the switch now and then: for a loop that has no other thread for it."""
        if self._switch is not None and not self.active and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._switch.look()
        return self.wanted

    def begin(self, step: int, *, most: int | None = None, steps: int | None = None, warmup: int = 1) -> None:
        """Begin a profile before step `step`. All ranks call it together.

        Args:
            most: steps that are left to do.
            steps: number of steps to profile; None: what rank 0's switch asks for.
            warmup: steps before the first that is recorded.
        """
        plan = self._ranks.on_rank_0(lambda: self._plan(step, most, steps, warmup))
        if plan is None:
            return
        self._steps, warmup, folder = plan
        self._left, self._first, self._folder = warmup + self._steps, step + warmup, Path(folder)
        rank = self._ranks.rank
        if not self._writers or rank in self._writers:
            self._profiler = StepProfiler(self._folder, rank, self._steps, warmup=warmup, on_gpu=self._on_gpu)
            self._profiler.start()

    def _plan(self, step: int, most: int | None, steps: int | None, warmup: int) -> tuple[int, int, str] | None:
        """Decide on rank 0 how many steps are profiled and how many warm up, and make the folder."""
        if steps is None and self._switch is not None:
            steps = self._switch.take()
        if steps is None:  # the wish has been taken back since
            return None
        if most is not None:
            warmup = warmup if most > warmup else 0
            steps = min(steps, most - warmup)
        try:
            return steps, warmup, str(_new_folder(self._run_dir, step + warmup))
        except OSError as error:
            log.warning("no profile: %s", printable(str(error)))
            return None

    def step(self, *, last: bool = False) -> str | None:
        """Note that a step has ended, while a profile is under way.

        Args:
            last: no further step follows.

        Returns:
            On rank 0, when the profile is done, a sentence that says so; else None.
        """
        self._left -= 1
        if self._profiler is not None:
            self._profiler.step()
        if self._left > 0 and not last:
            return None
        missing = self._end(write=True)
        if self._ranks.rank != 0:
            return None
        first, last_one, folder = self._first, self._first + self._steps - 1 - missing, str(self._folder)
        with contextlib.suppress(OSError):  # a full disk must not end a training for it
            facts = {"first": first, "last": last_one, "ranks": self._writers, "folder": folder}
            self._record(Event.PROFILED, facts)
        return f"profile of step{f's {first} to {last_one}' if last_one > first else f' {first}'}: {folder}"

    def cut_short(self) -> str | None:
        """End the profile that is under way, if one is, with the steps that it has: no further step follows.

        Returns:
            On rank 0, a sentence that says so; None: there is nothing of it yet.
        """
        if 0 < self._left <= self._steps:
            return self.step(last=True)
        self.abandon()
        return None

    def abandon(self, *, failed: bool = False) -> None:
        """Drop the profile that is under way, if one is: the attempt ends before it is done.

        Args:
            failed: by an error, for which the profile may be the reason: its folder stays, so that the next attempt does not
                profile the same steps of the config again.
        """
        if not self.active:
            return
        self._end(write=False)
        if self._ranks.rank == 0 and not failed:
            for path in (self._folder, self._folder.parent):
                with contextlib.suppress(OSError):  # other ranks have left files in it
                    path.rmdir()

    def _end(self, *, write: bool) -> int:
        """End this rank's part, and return how many steps are missing."""
        missing, self._left = self._left, 0
        if self._profiler is not None:
            self._profiler.stop(write=write)
            self._profiler = None
        return missing


def _new_folder(run_dir: RunDir, first: int) -> Path:
    """Make the folder of a profile that begins with step `first`: profiles/step_0000100; of a second one with .2 behind.

    Raises:
        OSError: it cannot be made.
    """
    run_dir.profiles.mkdir(mode=folder_mode(run_dir.path), exist_ok=True)
    number = 1
    while True:
        folder = run_dir.profile(first, number)
        try:
            folder.mkdir(mode=folder_mode(run_dir.profiles))
            return folder
        except FileExistsError:
            number += 1
