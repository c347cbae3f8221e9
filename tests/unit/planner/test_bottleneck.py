"""What holds a job up on more nodes is named from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from slurmtrain.planner.bottleneck import Bottleneck, Expected, Kind, SlowRank, bottleneck
from slurmtrain.planner.scaling import Size, doublings

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
