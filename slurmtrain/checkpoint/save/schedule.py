"""The decision when to save: how often, when to stop before the time limit, and what to do when told to stop.

How often. A save holds training up for C seconds; a failure (every M seconds on average) loses the steps done since the
last save. The interval that loses the least time:
  - Young 1974:  sqrt(2 C M), of first order. J. W. Young, "A first order approximation to the optimum checkpoint
    interval", Communications of the ACM 17(9).
  - Daly 2006:  sqrt(2 C M) (1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)) - C  for C < 2M, else M. J. T. Daly, "A higher order
    estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3). The duration of
    a restart does not move the optimum.
C is the time for which training is held up, not that of writing in the background: the latter makes each failure lose a
constant time more, which does not move the optimum either.

How often jobs fail. 6.5 failures per 1,000 node-days on one large cluster over 11 months, 2.34 on its sister; but 128
nodes there failed every 7.9 h, not every 28.8 h as the rate says (arXiv 2410.21680). So the rate is only the initial
estimate, and what a run observes itself soon weighs more.

This module reads no clock: every function gets the time as an argument. Ranks have different clocks: ask on one rank
and broadcast the answer.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

DAY_S = 86400.0

# `auto` stays between these two. The shortest is also when the first save is made, in order to measure: the measured
# stall does not show what writing all the time would cost the file system and those who share it.
SHORTEST_S = 60.0
# The failure rate is that of hardware. Bugs, full disks and operators come on top, and nobody wants to lose more than
# an hour, as long as not doing so is cheap: while an hourly save holds the run up for less than this share of the time.
LONGEST_S = 3600.0
CHEAP_STALL = 0.01
# There is no limit to the share that saving takes: where Daly's interval costs much, failures cost as much, and saving
# less often makes it worse (C = 36 s, M = 1 h: every 8 minutes. At most 1 % would mean once an hour, and a run half as
# long again).
# The slowest of this many saves counts: a shared file system has slow days, and the first save also allocates.
STALLS_REMEMBERED = 3


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval between the end of one save and the beginning of the next, in seconds.

    Args:
        cost_s: seconds for which one save holds training up.
        mtbf_s: mean seconds between failures of the whole job.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s if cost_s > 0 else 0.0


def mean_time_between_failures(
    nodes: int, *, observed_failures: int, observed_s: float, per_node_day: float = 6.5e-3
) -> float:
    """Return the mean seconds between failures of a job on `nodes` nodes.

    It is the usual rate, corrected by what this run has observed.

    Failures come at a constant rate (Poisson). The prior of the rate is a gamma distribution with the weight of one
    failure: as if one had been observed in the time in which one is expected. Observations are added to it, so that the
    mean rate is (1 + failures) / (time until one is expected + time observed); its inverse is returned.

    Args:
        nodes: number of nodes, all of which are needed: one that fails ends the attempt.
        observed_failures: attempts of this run that ended without a chance to save, without those that were preempted
            or reached the time limit: they saved, and lost nothing that a shorter interval would have kept.
        observed_s: seconds that the run has been running on so many nodes, over all attempts.
        per_node_day: the usual rate. Default: published for 8 GPUs a node (see above).
    """
    expected_s = DAY_S / (nodes * per_node_day)
    return (expected_s + observed_s) / (1 + observed_failures)


@dataclass(frozen=True)
class Interval:
    """The rule for how often to save.

    If several are given, whichever comes first; if none, only at a stop and at the end.

    Attributes:
        steps: save after every step that is a multiple of this; 0: not by steps.
        minutes: save when this much time has passed since the last save; 0: not by time.
        auto: save at the interval that loses the least time, given what saves cost and how often jobs fail.
    """

    steps: int = 0
    minutes: float = 0.0
    auto: bool = False


class SaveSchedule:
    """The schedule of saves of one attempt, on one rank.

    Attributes:
        step, moment: the next save is due after this step, or at this moment of the clock, whichever comes first.

    Args:
        interval: the rule that the user chose.
        now: when the attempt began; by the same monotonic clock as every later `now`.
        step: the step that the attempt began with, which needs no save.
        mtbf_s: for `auto`, from `mean_time_between_failures`. Infinite when nothing is known.
    """

    def __init__(self, interval: Interval, *, now: float, step: int = 0, mtbf_s: float = math.inf):
        self._interval, self._mtbf_s = interval, mtbf_s
        self._stalls: deque[float] = deque(maxlen=STALLS_REMEMBERED)
        self.saved(step, now)

    @property
    def seconds(self) -> float:
        """The seconds between two saves as of now; infinite if saves do not depend on time."""
        by_time = self._interval.minutes * 60 if self._interval.minutes > 0 else math.inf
        return min(by_time, self._auto_s()) if self._interval.auto else by_time

    def saved(self, step: int, now: float) -> None:
        """Record that a save of `step` was made, for whatever reason, and that training goes on from `now`.

        It is also called after a failed save, which is tried again after an interval, not after every step.
        """
        every = self._interval.steps
        self.step = (step // every + 1) * every if every > 0 else math.inf
        self._since = now
        self.moment = now + self.seconds

    def measured(self, stall_s: float) -> None:
        """Record for how many seconds a save has held up training in all, which is known only afterwards."""
        if math.isfinite(stall_s):
            self._stalls.append(stall_s)
            self.moment = self._since + self.seconds

    def _auto_s(self) -> float:
        if not self._stalls:
            return SHORTEST_S
        stall_s = max(self._stalls)
        at_most = max(LONGEST_S, stall_s * (1 / CHEAP_STALL - 1))
        return max(min(daly(stall_s, self._mtbf_s), at_most), SHORTEST_S)


def latest_stop(end_time: float, *, step_s: float, save_s: float, margin: float = 1.5, floor_s: float = 30.0) -> float:
    """Return the time by which a stop has to be requested, so that the current step and one save are done at `end_time`.

    Args:
        end_time: when the job is ended, in seconds of any clock.
        step_s: seconds of the longest step measured. The stop can be requested at its very beginning.
        save_s: seconds of the longest save measured, from its beginning to its commit, waiting for one in flight
            included.
        margin: how many times as long as ever measured both may take.
        floor_s: never less than this many seconds before the end, however quick step and save are: the ranks still have
            to exit and the supervisor to ask for a requeue. Default: SLURM checks time limits every 30 s.
    """
    return end_time - max(floor_s, margin * (step_s + save_s))


def is_better_discarded(*, grace_s: float | None, running_s: float, save_s: float | None, steps_behind: int) -> bool:
    """Return whether to discard the save in flight for one of the present step, when told to stop.

    Only where there is time for a whole save, but not for both. Otherwise it is finished first: something is committed as
    soon as possible, and the present step is saved after it if there is time, which is known then at the latest.

    Args:
        grace_s: seconds left until the kill, less what exiting takes; None: not known.
        running_s: seconds since the save in flight began.
        save_s: seconds of a whole save, from its beginning to its commit; None: none has been measured yet.
        steps_behind: steps done since the one in flight began.
    """
    if steps_behind == 0 or grace_s is None or save_s is None:
        return False
    left_s = max(0.0, save_s - running_s)
    return save_s <= grace_s < left_s + save_s
