"""Profiles of a running job: all ranks begin one at the same step, the chosen ones write it.

Rank 0 alone sees the wish for one. The ranks' agreement after each step, which is there anyway, carries one bit of it; only
when a profile begins do they exchange more.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slurmtrain.observe.profile_switch import ProfileRequest, ProfileSwitch
from slurmtrain.observe.profiler import StepProfiler
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of the job. All of them call each method together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and return its JSON value on all."""


class Profiling:
    """The profiles of an attempt. On all ranks.

    Args:
        run_dir: the run.
        ranks: this rank and its peers.
        on_gpu: the model is on a GPU.
        switch: rank 0's; None on the others, and where nobody can ask.
        event: records an event; used on rank 0.
    """

    def __init__(
        self,
        run_dir: RunDir,
        ranks: Ranks,
        *,
        on_gpu: bool,
        switch: ProfileSwitch | None = None,
        event: Callable[[Event, dict[str, Any]], None] = lambda event, values: None,
    ):
        self._run_dir, self._ranks, self._on_gpu = run_dir, ranks, on_gpu
        self._switch, self._record = switch, event
        self._profiler: StepProfiler | None = None
        self._left = 0  # steps until the profile is done, with the one that warms up
        self._facts: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        """Whether a profile is under way, on this rank or another."""
        return self._left > 0

    @property
    def wanted(self) -> bool:
        """Whether this rank knows of a wish for a profile."""
        return not self.active and self._switch is not None and self._switch.asked() is not None

    def look(self) -> bool:
        """Return `wanted`, after a look at the switch now and then: for a loop that has no other thread for it."""
        if self._switch is not None and not self.active:
            self._switch.look_now_and_then()
        return self.wanted

    def begin(
        self, step: int, *, most: int | None = None, request: ProfileRequest | None = None, warmup: int = 1
    ) -> None:
        """Begin a profile before step `step`. All ranks call it together.

        Args:
            most: steps that are left to do.
            request: what to profile; None: what rank 0's switch asks for.
            warmup: steps before the first that is recorded.
        """
        plan = self._ranks.on_rank_0(lambda: self._plan(step, most, request, warmup))
        if plan is None:
            return
        self._facts = plan
        asked = ProfileRequest(plan["steps"], tuple(plan["ranks"]), plan["stacks"])
        self._left = plan["warmup"] + asked.steps
        if self._ranks.rank in plan["ranks"]:
            folder = Path(plan["folder"])
            self._profiler = StepProfiler(folder, self._ranks.rank, asked, warmup=plan["warmup"], on_gpu=self._on_gpu)
            self._profiler.start()

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
        missing, self._left = self._left, 0
        if self._profiler is not None:
            self._profiler.stop(write=True)
            self._profiler = None
        return self._tell(missing)

    def cut_short(self) -> str | None:
        """End the profile that is under way, if one is, with the steps that it has: no further step follows.

        Returns:
            On rank 0, a sentence that says so; None: there is nothing of it yet.
        """
        if self.active and self._left <= self._facts["steps"]:
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
        self._left = 0
        if self._profiler is not None:
            self._profiler.stop(write=False)
            self._profiler = None
        if self._ranks.rank == 0 and not failed:
            folder = Path(self._facts["folder"])
            for path in (folder, folder.parent):
                with contextlib.suppress(OSError):  # other ranks have left files in it
                    path.rmdir()

    def _plan(self, step: int, most: int | None, request: ProfileRequest | None, warmup: int) -> dict[str, Any] | None:
        """Decide on rank 0 what is profiled, and make its folder."""
        asked = request
        if asked is None and self._switch is not None:
            asked = self._switch.asked()
            self._switch.take()
        if asked is None:  # it has been taken back since
            return None
        size = self._ranks.size
        ranks = [rank for rank in range(size) if asked.ranks is None or rank in asked.ranks]
        if not ranks:
            self._refused(f"none of the ranks that it is asked of exists: this attempt has {size}, from 0 on")
            return None
        warmup = warmup if most is None or most > warmup else 0
        steps = asked.steps if most is None else min(asked.steps, most - warmup)
        try:
            folder = _new_folder(self._run_dir, step + warmup)
        except OSError as error:
            self._refused(str(error))
            return None
        return {
            "steps": steps,
            "ranks": ranks,
            "stacks": asked.stacks,
            "warmup": warmup,
            "folder": str(folder),
            "first": step + warmup,
        }

    def _refused(self, sentence: str) -> None:
        log.warning("no profile: %s", printable(sentence))
        self._event(Event.PROFILE_REFUSED, {"sentence": sentence})

    def _event(self, event: Event, values: dict[str, Any]) -> None:
        """Record an event; a full disk must not end a training for it."""
        with contextlib.suppress(OSError):
            self._record(event, values)

    def _tell(self, missing: int) -> str | None:
        if self._ranks.rank != 0:
            return None
        facts = self._facts
        first, last = facts["first"], facts["first"] + facts["steps"] - 1 - missing
        ranks = facts["ranks"]
        self._event(Event.PROFILED, {"first": first, "last": last, "ranks": ranks, "folder": facts["folder"]})
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        of_ranks = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        return f"profile of {which} on {of_ranks}: {facts['folder']}"


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
