"""What training asks once a step, and evaluation once a round."""

from __future__ import annotations

from typing import Protocol


class Answer(Protocol):
    """What all ranks do after this step: give up; or else, stop; or else, save."""

    @property
    def give_up(self) -> bool: ...

    @property
    def stop(self) -> bool: ...

    @property
    def save(self) -> bool: ...


class StopCheck(Protocol):
    """How all ranks learn in the same step that one of them was told to stop, or that it is time to save."""

    def begin(self, *, save: bool | None = None, give_up: bool = False) -> None:
        """Start to ask; returns at once. save=None: this is no moment for a checkpoint."""

    def finish(self) -> Answer:
        """The answer, the same on all ranks."""
