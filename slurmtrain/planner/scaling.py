"""How well a job scales: the efficiency of each size against the one before, and what costs most.

A size is judged by the rank-seconds that a token costs: twice the ranks should take half the time for the same tokens
(strong scaling), or the same time for twice as many (weak scaling); either way a token costs what it did. What costs more
is what does not scale. Pure functions of plain numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WORTH_IT = 0.8  # efficiency at a doubling below which more nodes waste more than a fifth of themselves
NOTICEABLE = 0.02  # share of a step's time below which a cause is noise


@dataclass(frozen=True)
class Size:
    """A size of a job, and the time of its steps.

    Attributes:
        tokens: of a step, over all ranks.
        step_s: seconds of a step.
        seconds: seconds of a step by what they are spent on.
    """

    nodes: int
    ranks: int
    tokens: int
    step_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def rank_seconds_per_token(self) -> float:
        return self.ranks * self.step_s / self.tokens

    def cost(self, name: str) -> float:
        """Return the rank-seconds that a token costs by one cause."""
        return self.ranks * self.seconds.get(name, 0.0) / self.tokens


@dataclass(frozen=True)
class Doubling:
    """What became of a job from one size to the next, larger one.

    Attributes:
        efficiency: 1: a token costs the rank-seconds that it did; 0.5: twice as many.
        total: the same against the first size.
        cause: what costs most that it did not cost before; None: nothing worth naming.
        share: the cause's share of the larger size's step that it did not have before.
    """

    before: Size
    after: Size
    efficiency: float
    total: float
    cause: str | None
    share: float

    @property
    def worth_it(self) -> bool:
        """Whether the efficiency is at least 80 % for each doubling of the ranks."""
        return math.log(self.efficiency) >= math.log(WORTH_IT) * math.log2(self.after.ranks / self.before.ranks)


def doublings(sizes: Sequence[Size]) -> list[Doubling]:
    """Return what became of each size against the one before; sizes in ascending order."""
    found = []
    for before, after in itertools.pairwise(sizes):
        cost = after.rank_seconds_per_token
        lost = {name: (after.cost(name) - before.cost(name)) / cost for name in {**before.seconds, **after.seconds}}
        worst = max(lost, key=lambda name: lost[name], default=None)
        if worst is not None and lost[worst] < NOTICEABLE:
            worst = None
        efficiency, total = (size.rank_seconds_per_token / cost for size in (before, sizes[0]))
        share = 0.0 if worst is None else lost[worst]
        found.append(Doubling(before, after, efficiency, total, cause=worst, share=share))
    return found


def first_not_worth_it(found: Sequence[Doubling]) -> Doubling | None:
    """Return the first step to more nodes that is not worth it."""
    return next((each for each in found if not each.worth_it), None)
