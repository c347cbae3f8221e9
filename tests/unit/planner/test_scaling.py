"""The efficiency of each size against the one before, and what costs most."""

from __future__ import annotations

import pytest

from slurmtrain.planner.scaling import REST, Size, doublings, first_not_worth_it, losses_of


def size(nodes: int, tokens: int, **seconds: float) -> Size:
    return Size(nodes, 8 * nodes, tokens, sum(seconds.values()), seconds)


def test_strong_scaling_is_half_the_time_on_twice_the_nodes() -> None:
    """10 s become 5.5 s, of which 0.5 s are communication: 10 / 11."""
    (found,) = doublings([size(1, 1000, computation=10.0), size(2, 1000, computation=5.0, dp_shard=0.5)])
    assert found.efficiency == found.total == pytest.approx(10 / 11)
    assert found.cause == "dp_shard"
    assert found.share == pytest.approx(0.5 / 5.5)
    assert found.worth_it


def test_weak_scaling_is_the_same_time_for_twice_the_tokens() -> None:
    """10 s become 14 s: 10 / 14, below 80 %."""
    (found,) = doublings([size(1, 1000, computation=10.0), size(2, 2000, computation=10.0, tp=1.0, bubble=3.0)])
    assert found.efficiency == pytest.approx(10 / 14)
    assert (found.cause, found.worth_it) == ("bubble", False)
    assert [name for name, _ in found.losses][:2] == ["bubble", "tp"]


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


def test_a_fixed_time_costs_twice_as_much_on_twice_the_ranks() -> None:
    sizes = [size(1, 1000, computation=10.0, optimiser=2.0), size(2, 1000, computation=5.0, optimiser=2.0)]
    (found,) = doublings(sizes)
    assert found.cause == "optimiser"
    assert dict(found.losses)["optimiser"] == pytest.approx(1.0 / 7)
    assert dict(found.losses)["computation"] == pytest.approx(0)


def test_nothing_is_named_where_nothing_is_lost() -> None:
    (found,) = doublings([size(1, 1000, computation=10.0, tp=1.0), size(2, 1000, computation=5.0, tp=0.55)])
    assert found.cause is None


def test_what_no_part_accounts_for_is_the_rest() -> None:
    """9 of 10 s before, 8.5 of 9 s on twice the ranks: 136 rank-seconds where there were 72, of 144."""
    before, after = Size(1, 8, 1000, 10.0, {"data": 1.0}), Size(2, 16, 1000, 9.0, {"data": 0.5})
    assert dict(losses_of(before, after)) == pytest.approx({REST: (136 - 72) / 144, "data": 0})
    assert losses_of(Size(1, 8, 1000, 10.0), after)[0][0] == REST


def test_the_line_is_eighty_percent_for_each_doubling() -> None:
    """From 1 to 4 nodes are two doublings: 0.64."""
    four = [Size(1, 8, 1000, 10.0), Size(4, 32, 1000, 10.0 / 4 / 0.7)]
    two = [Size(1, 8, 1000, 10.0), Size(2, 16, 1000, 10.0 / 2 / 0.7)]
    assert doublings(four)[0].worth_it
    assert not doublings(two)[0].worth_it
