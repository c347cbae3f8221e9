"""Which rank is slower than its peers, in which part of a step: a decision from the times that all ranks have measured.

In synchronous training every rank's step takes as long as that of the slowest, since the others wait for it. So what counts
is the time that a rank needs for its own work, without waiting for others: there the slow one stands out.

A rank is named when it has been slow in most of the last windows of several steps each, so that noise names nobody.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.observe.phases import Phase

WATCHED = (Phase.DATA, Phase.FORWARD_BACKWARD, Phase.OPTIMIZER, Phase.OTHER)  # the others wait for all ranks
LOOKS, NEEDED, LEFT = 6, 5, 1  # slow in 5 of the last 6 windows: named; in 1 of them at most: not slow any more
WORDS = {
    Phase.DATA: "waiting for data",
    Phase.FORWARD_BACKWARD: "forward and backward",
    Phase.OPTIMIZER: "the optimiser",
    Phase.OTHER: "hooks and all else",
}


# What is slow: at least so many times as long as the median of its peers; longer by at least such a share of what a rank needs
# for a step; and by so many robust standard deviations of its peers, if there are enough to tell.
RATIO, SHARE, DEVIATIONS = 1.25, 0.03, 3.0
PEERS_FOR_DEVIATION = 4  # among more ranks than this, their deviation can be told
NUMBERS = len(WATCHED) + 1  # that a rank tells the others


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than its peers.

    Attributes:
        phase: the part of the step in which it is.
        ratio: its time in this part over the median of its peers'.
        excess_s: seconds that it takes longer.
        step_s: median seconds of a step.
    """

    rank: int
    phase: Phase
    ratio: float
    excess_s: float
    step_s: float


def summary(steps: Sequence[Mapping[Phase, float]]) -> list[float]:
    """Return what a rank tells the others of some steps: the medians of each watched part, and of a whole step.

    NaN if there are no steps.
    """
    if not steps:
        return [math.nan] * NUMBERS
    medians = [statistics.median(step[phase] for step in steps) for phase in WATCHED]
    return [*medians, statistics.median(sum(step.values()) for step in steps)]


class StragglerDetector:
    """Finds slow ranks, window by window. Every rank that is given the same numbers finds the same.

    Args:
        groups: for each rank, the number of its group of peers, which do the same work.
        unwatched: parts, for each rank, in which it cannot be compared with its peers.
    """

    def __init__(self, groups: Sequence[int], unwatched: Mapping[int, Sequence[Phase]] | None = None):
        self._unwatched = unwatched or {}
        self._peers: dict[int, list[int]] = {}
        for rank, group in enumerate(groups):
            self._peers.setdefault(group, []).append(rank)
        self._looks: dict[tuple[int, Phase], deque[Straggler | None]] = {}
        self._windows = 0
        self.named: dict[tuple[int, Phase], Straggler] = {}

    def look(self, told: Sequence[Sequence[float]]) -> tuple[list[Straggler], list[Straggler]]:
        """Look at a window.

        Args:
            told: what each rank has told by `summary`; a window in which one could tell nothing does not count.

        Returns:
            Those that are named from now on, and those that are not slow any more.
        """
        if not all(math.isfinite(number) for numbers in told for number in numbers):
            return [], []
        self._windows += 1
        found = self._found(told)
        new, over = [], []
        for key in list(self._looks.keys() | found.keys()):
            looks = self._looks.setdefault(key, deque(maxlen=LOOKS))
            looks.append(found.get(key))
            slow = [each for each in looks if each is not None]
            if key not in self.named and len(slow) >= NEEDED:
                self.named[key] = slow[-1]
                new.append(slow[-1])
            elif key in self.named and len(looks) == LOOKS and len(slow) <= LEFT:
                over.append(self.named.pop(key))
            if not slow:
                del self._looks[key]
        return sorted(new, key=_order), sorted(over, key=_order)

    def _found(self, told: Sequence[Sequence[float]]) -> dict[tuple[int, Phase], Straggler]:
        """Return the ranks that are slow in this window."""
        found: dict[tuple[int, Phase], Straggler] = {}
        step_s = statistics.median(numbers[-1] for numbers in told)
        work_s = statistics.median(sum(numbers[: len(WATCHED)]) for numbers in told)
        for column, phase in enumerate(WATCHED):
            for peers in self._peers.values():
                times = {rank: told[rank][column] for rank in peers if phase not in self._unwatched.get(rank, ())}
                for rank, (ratio, excess_s) in _slow(times, work_s).items():
                    found[rank, phase] = Straggler(rank, phase, ratio, excess_s, step_s)
        return found


def _slow(times: Mapping[int, float], work_s: float) -> dict[int, tuple[float, float]]:
    """Return the ranks that are slow, by their times in one part: how many times as long, and how many seconds longer.

    Args:
        work_s: what a rank usually needs for all of its own work in a step.
    """
    if len(times) < 2:
        return {}
    many = len(times) > PEERS_FOR_DEVIATION
    median, deviation = statistics.median(times.values()), 0.0
    if many:  # 1.4826 times the median absolute deviation is the standard deviation of a normal distribution
        deviation = 1.4826 * statistics.median(abs(seconds - median) for seconds in times.values())
    found = {}
    for rank, seconds in times.items():
        # Among few, the rank itself would move the median far.
        usual = median if many else statistics.median(other for peer, other in times.items() if peer != rank)
        excess = seconds - usual
        if excess >= max(SHARE * work_s, DEVIATIONS * deviation) and seconds >= RATIO * usual:
            found[rank] = seconds / usual if usual > 0 else math.inf, excess
    return found


def _order(straggler: Straggler) -> tuple[int, int]:
    return straggler.rank, WATCHED.index(straggler.phase)
