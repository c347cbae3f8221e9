"""The judgement of a training by the numbers of its steps: what is skipped, and what is done about it.

Pure: it looks at one step's numbers after the other, and everything that it remembers is saved in checkpoints, so that a
run that was interrupted decides as if it had not been.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from slurmtrain.choices import OnNonfinite
from slurmtrain.config.schema import TrainConfig
from slurmtrain.training.step_numbers import StepNumbers

HINT = (
    "the same steps would do the same again, so nothing is tried again: a smaller optim.lr, more optim.warmup_steps or "
    "optim.grad_clip=1 may help, or other data; `resume RUN optim.lr=...` goes on from the newest checkpoint, if there is one"
)


class Action(Enum):
    """What is done about a step."""

    GO_ON = auto()
    ROLL_BACK = auto()
    STOP = auto()


@dataclass
class Health:
    """What is remembered of the steps so far.

    Attributes:
        skipped: number of steps of the run whose update was skipped.
        in_a_row: number of these that came directly one after another, up to the last step that was looked at.
        first: first step of these.
        sound_step: the newest step whose parameters gave finite numbers in the step after it; None: not known.
        checked_step: the last step that was looked at.
        rollbacks: number of times that training has gone back since it last got any further.
        furthest: the step from which it went back last.
        due: why it is to go back before the next step; None: it is not.
    """

    skipped: int = 0
    in_a_row: int = 0
    first: int = 0
    sound_step: int | None = None
    checked_step: int = 0
    rollbacks: int = 0
    furthest: int = 0
    due: str | None = None

    def look(self, numbers: StepNumbers, train: TrainConfig) -> Action | None:
        """Note the numbers of the next step; None: they are finite."""
        self.checked_step = numbers.step
        if not numbers.finite:
            return self._look_at_nonfinite(numbers, train)
        self.in_a_row = 0
        if numbers.step > self.furthest:
            self.rollbacks = 0
        self.sound_step = max(self.sound_step or 0, numbers.step - 1)  # not that of a step before a rollback
        return None

    def _look_at_nonfinite(self, numbers: StepNumbers, train: TrainConfig) -> Action:
        self.skipped += 1
        self.in_a_row += 1
        self.first = numbers.step - self.in_a_row + 1
        if train.on_nonfinite == OnNonfinite.STOP:
            return Action.STOP
        too_many = 0 < train.max_skipped <= self.in_a_row
        return Action.ROLL_BACK if too_many or train.on_nonfinite == OnNonfinite.ROLLBACK else Action.GO_ON

    def went_back(self, before: Health, *, from_step: int, to_step: int) -> None:
        """Go on from what was remembered at step `to_step`, which this is, after a trouble.

        Args:
            before: what was remembered when it went back, from step `from_step`.
        """
        self.sound_step = to_step  # which the steps after it have shown, before they are done anew with other samples
        self.checked_step = to_step
        self.skipped, self.rollbacks, self.furthest = (
            before.skipped,
            before.rollbacks + 1,
            max(from_step, before.furthest),
        )
        self.due = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Health:
        """Return what `to_json` has saved."""
        return cls(**values)
