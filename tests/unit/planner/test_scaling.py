"""The efficiency of each size against the one before, and what costs most."""

from __future__ import annotations

import pytest

from slurmtrain.planner.plan import doublings, first_not_worth_it
from slurmtrain.planner.step_time import StepTime


def size(nodes: int, tokens: int, **seconds: float) -> StepTime:
    return StepTime(tokens, nodes, 8 * nodes, seconds)


ONE = size(1, 1000, computation=10.0)


@pytest.mark.parametrize(
    ("before", "after", "efficiency", "cause", "share", "worth_it"),
    [
        # Half the time on twice the nodes (strong scaling), but for 0.5 s.
        (ONE, size(2, 1000, computation=5.0, dp_shard=0.5), 10 / 11, "dp_shard", 0.5 / 5.5, True),
        # The same time for twice the tokens (weak scaling), but for 4 s.
        (ONE, size(2, 2000, computation=10.0, tp=1.0, bubble=3.0), 10 / 14, "bubble", 3 / 14, False),
        # A fixed time costs twice as much on twice the ranks.
        (size(1, 1000, computation=10.0, optimiser=2.0), size(2, 1000, computation=5.0, optimiser=2.0),
         12 / 14, "optimiser", 1 / 7, True),
        # Nothing is named where nothing is lost.
        (size(1, 1000, computation=10.0, tp=1.0), size(2, 1000, computation=5.0, tp=0.55), 11 / 11.1, None, 0.0, True),
        # The line is 80 % for each doubling: from 1 to 4 nodes are two of them.
        (ONE, size(4, 1000, computation=10.0 / 4, tp=10.0 / 4 * 3 / 7), 0.7, "tp", 0.3, True),
        (ONE, size(2, 1000, computation=10.0 / 2, tp=10.0 / 2 * 3 / 7), 0.7, "tp", 0.3, False),
    ],
)  # fmt: skip
def test_a_size_is_judged_by_what_a_token_costs(
    before: StepTime, after: StepTime, efficiency: float, cause: str | None, share: float, worth_it: bool
) -> None:
    (found,) = doublings([before, after])
    assert found.efficiency == found.total == pytest.approx(efficiency)
    assert (found.cause, found.worth_it) == (cause, worth_it)
    assert found.share == pytest.approx(share)


def test_each_size_is_judged_against_the_one_before() -> None:
    """Losses of an earlier doubling are not those of a later one."""
    sizes = [
        size(1, 8000, computation=80.0),
        size(2, 8000, computation=40.0, data=8.0),
        size(4, 8000, computation=20.0, data=4.0, dp_replicate=9.0),
    ]
    first, second = doublings(sizes)
    assert (first.cause, second.cause) == ("data", "dp_replicate")
    assert second.efficiency == pytest.approx(24 / 33)
    assert second.total == pytest.approx(20 / 33)
    assert first_not_worth_it([first, second]) is second
    assert first_not_worth_it([first]) is None
