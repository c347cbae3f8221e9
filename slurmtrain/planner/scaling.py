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
        seconds: seconds of a step by what they are spent on; what is missing from `step_s` is "the rest".
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


REST = "the rest"


@dataclass(frozen=True)
class Doubling:
    """What became of a job from one size to the next, larger one.

    Attributes:
        efficiency: 1: a token costs the rank-seconds that it did; 0.5: twice as many.
        total: the same against the first size.
        cause: what costs most that it did not cost before; None: nothing worth naming.
        share: the cause's share of the larger size's step that it did not have before.
        losses: share of the larger size's step by cause, largest first.
    """

    before: Size
    after: Size
    efficiency: float
    total: float
    cause: str | None
    share: float
    losses: tuple[tuple[str, float], ...]

    @property
    def worth_it(self) -> bool:
        """Whether the efficiency is at least 80 % for each doubling of the ranks."""
        return math.log(self.efficiency) >= math.log(WORTH_IT) * math.log2(self.after.ranks / self.before.ranks)


def doublings(sizes: Sequence[Size]) -> list[Doubling]:
    """Return what became of each size against the one before; sizes in ascending order."""
    found = []
    for before, after in itertools.pairwise(sizes):
        losses = losses_of(before, after)
        worst = losses[0] if losses and losses[0][1] >= NOTICEABLE else None
        found.append(
            Doubling(
                before,
                after,
                efficiency=before.rank_seconds_per_token / after.rank_seconds_per_token,
                total=sizes[0].rank_seconds_per_token / after.rank_seconds_per_token,
                cause=worst[0] if worst is not None else None,
                share=worst[1] if worst is not None else 0.0,
                losses=tuple(losses),
            )
        )
    return found


def losses_of(before: Size, after: Size) -> list[tuple[str, float]]:
    """Return by cause what a token costs more than before, as a share of all that it costs, largest first."""
    whole = after.rank_seconds_per_token
    names = dict.fromkeys([*before.seconds, *after.seconds])
    found = {name: (after.cost(name) - before.cost(name)) / whole for name in names}
    known = [sum(size.cost(name) for name in names) for size in (before, after)]
    rest = (after.rank_seconds_per_token - known[1]) - (before.rank_seconds_per_token - known[0])
    if names:
        found[REST] = rest / whole
    return sorted(found.items(), key=lambda item: -item[1])


def first_not_worth_it(found: Sequence[Doubling]) -> Doubling | None:
    """Return the first step to more nodes that is not worth it."""
    return next((each for each in found if not each.worth_it), None)
