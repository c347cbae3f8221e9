"""Efficiency of each size, and what holds a job up on more nodes: plain numbers in, a name out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from slurmtrain.planner.bottleneck import Bottleneck, Expected, Kind, SlowRank, bottleneck
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


FSDP = Expected({"dp_shard": 16}, {"dp_shard": 0.05}, {"dp_shard": 1e9})
HSDP_TP = Expected(
    {"dp_replicate": 2, "dp_shard": 4, "tp": 2},
    {"dp_replicate": 0.3, "dp_shard": 0.01, "tp": 0.0},
    {"dp_replicate": 1e9},
)
PIPELINE = Expected({"pp": 4, "dp_shard": 4}, {"bubble": 0.2, "dp_shard": 0.01}, {})
ALONE = {"data": 0.1, "forward_backward": 8.0, "communication": 0.4, "optimizer": 0.5}


def named(
    after: Mapping[str, float],
    expected: Expected = FSDP,
    *,
    step_s: float | None = None,
    slow: SlowRank | None = None,
    missing: tuple[str, ...] = (),
) -> Bottleneck | None:
    """What is named where 1 node takes the times of ALONE, and 2 nodes with twice the tokens these."""
    sizes = [
        Size(1, 8, 1000, sum(ALONE.values()), ALONE),
        Size(2, 16, 2000, step_s or sum({**ALONE, **after}.values()), {**ALONE, **after}),
    ]
    (found,) = doublings(sizes)
    return bottleneck(found, expected, slow, missing)


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        ({"data": 3.0}, Kind.DATA),
        ({"communication": 3.0}, Kind.COMMUNICATION),
        ({"optimizer": 3.0}, Kind.OPTIMIZER),
        ({"forward_backward": 12.0}, Kind.COMPUTATION),
        ({"other": 2.0}, Kind.OTHER),
    ],
)
def test_the_part_that_grows_is_named(after: dict[str, float], kind: Kind) -> None:
    found = named(after)
    assert found is not None
    assert (found.kind, found.measured) == (kind, True)
    (name,) = after
    grown = after[name] - ALONE.get(name, 0.0)
    assert found.share == pytest.approx(grown / sum({**ALONE, **after}.values()))


def test_nothing_is_named_for_noise() -> None:
    assert named({"data": 0.15, "forward_backward": 8.05}) is None


def test_communication_is_that_of_the_only_axis_or_of_the_one_that_should_grow() -> None:
    only = named({"communication": 3.0}, Expected({"dp_replicate": 16}, {}, {}))
    assert only is not None and only.axis == "dp_replicate"
    assert only.sentence == "communication of dp_replicate (parallel.dp_replicate=16) that nothing hides takes longer"
    several = named({"communication": 3.0}, HSDP_TP)
    assert several is not None and several.axis == "dp_replicate"


def test_without_a_plan_it_is_that_of_the_axis_that_leaves_the_node() -> None:
    found = named({"communication": 3.0}, Expected({"dp_shard": 4, "tp": 8}, {}, {"dp_shard": 5e9}))
    assert found is not None and found.axis == "dp_shard"
    unknown = named({"communication": 3.0}, Expected({"dp_shard": 4, "tp": 8}, {}, {}))
    assert unknown is not None and unknown.axis is None
    assert "between the ranks" in unknown.sentence


def test_a_slow_rank_explains_that_the_others_wait() -> None:
    found = named({"communication": 3.0}, slow=SlowRank(11, 1.5))
    assert found is not None and found.kind == Kind.IMBALANCE
    assert "rank 11 takes 1.5 times as long as the median rank" in found.sentence
    even = named({"communication": 3.0}, slow=SlowRank(11, 1.05))
    assert even is not None and even.kind == Kind.COMMUNICATION
    data = named({"data": 3.0}, slow=SlowRank(11, 1.5))
    assert data is not None and data.kind == Kind.DATA


def test_passes_that_take_longer_are_the_bubble_where_a_plan_expects_it() -> None:
    found = named({"forward_backward": 11.0}, PIPELINE, missing=("communication",))
    assert found is not None
    assert (found.kind, found.axis, found.measured) == (Kind.BUBBLE, "pp", False)
    none = named({"forward_backward": 11.0}, Expected({"pp": 4, "dp_shard": 4}, {"bubble": 0.0, "dp_shard": 0.1}, {}))
    assert none is not None and none.kind == Kind.COMPUTATION


def test_communication_within_the_passes_is_told_by_what_is_left() -> None:
    found = named({"forward_backward": 11.0}, missing=("communication",))
    assert found is not None
    assert (found.kind, found.axis, found.measured) == (Kind.COMMUNICATION, "dp_shard", False)
    assert "which was not measured apart" in found.sentence


def test_what_no_part_accounts_for_is_said_to_be_unknown() -> None:
    found = named({}, step_s=14.0)
    assert found is not None
    assert (found.kind, found.measured) == (Kind.OTHER, False)
    assert "what no phase of the step accounts for" in found.sentence
    unmeasured = named({}, step_s=14.0, missing=("forward_backward", "communication"))
    assert unmeasured is not None and unmeasured.kind == Kind.COMMUNICATION
