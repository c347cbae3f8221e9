"""The question whether to stop or to save, which training asks once a step and evaluation once a round."""

from __future__ import annotations

from typing import Protocol


class StepDecision(Protocol):
    """The decision of all ranks after a step: give up; or else, stop; or else, go back to a checkpoint; or else, save."""

    @property
    def give_up(self) -> bool: ...

    @property
    def stop(self) -> bool: ...

    @property
    def save(self) -> bool: ...

    @property
    def roll_back(self) -> bool: ...

    @property
    def profile(self) -> bool: ...


class StopCheck(Protocol):
    """The check by which all ranks learn in the same step that one of them was told to stop, or that it is time to save."""

    def begin(
        self, *, save: bool | None = None, give_up: bool = False, roll_back: bool = False, profile: bool = False
    ) -> None:
        """Start to ask, and return at once. save=None: no checkpoint can be written at this moment."""

    def finish(self) -> StepDecision:
        """Wait for the answer, which is the same on all ranks."""


class StopPlanner(Protocol):
    """Rank 0's plan of when to stop before the time limit, and its knowledge of the time left."""

    def plan_stop(self, step_s: float, save_s: float) -> None:
        """Plan by the longest step and the longest save so far, in seconds, whenever they were measured."""

    def seconds_left(self) -> float | None:
        """Return the seconds until this job is killed, after it was told to stop; None: not known."""
