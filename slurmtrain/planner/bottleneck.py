"""What holds a job up on more nodes: a name for what costs more there, from measured times and from the plan of the layout.

Pure: times, sizes of axes and shares in, a name and a sentence out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurmtrain.planner.scaling import NOTICEABLE, REST, Doubling

SLOW_RANK = 1.15  # times the median rank's own work from which a slow rank explains that the others wait
MOSTLY = 0.5  # share of a loss that the arithmetic has to expect before it is named by it
FORWARD_BACKWARD, COMMUNICATION = "forward_backward", "communication"


class Kind(StrEnum):
    """What holds a job up."""

    DATA = "data"
    COMMUNICATION = "communication"
    BUBBLE = "bubble"
    IMBALANCE = "imbalance"
    COMPUTATION = "computation"
    OPTIMIZER = "optimizer"
    OTHER = "other"


@dataclass(frozen=True)
class Expected:
    """What the arithmetic says of the larger of two sizes.

    Attributes:
        axes: sizes of the axes that are larger than 1.
        losses: share of a step by cause that it loses against the smaller size, as `Doubling.losses`; empty: not known.
        between_nodes: bytes that each axis sends between nodes in a step.
    """

    axes: Mapping[str, int]
    losses: Mapping[str, float]
    between_nodes: Mapping[str, float]


@dataclass(frozen=True)
class SlowRank:
    """The slowest rank by its own work, and how many times the median's time it takes."""

    rank: int
    ratio: float


@dataclass(frozen=True)
class Bottleneck:
    """What costs most on more nodes that it did not cost before.

    Attributes:
        axis: whose communication it is; None: it is none, or not known.
        share: its share of the larger size's step.
        measured: whether the run itself has measured it; otherwise it follows from what is left.
    """

    kind: Kind
    axis: str | None
    share: float
    sentence: str
    measured: bool = True


def bottleneck(
    doubling: Doubling, expected: Expected, slow: SlowRank | None = None, missing: Sequence[str] = ()
) -> Bottleneck | None:
    """Return what holds a job up on the larger of two sizes; None: nothing costs noticeably more.

    Args:
        doubling: measured; its causes are the parts of a step that runs log: data, forward_backward, communication,
            optimizer, other, and what none of them accounts for.
        expected: of the larger size.
        slow: its slowest rank; None: not known.
        missing: parts that the runs have not measured.
    """
    cause, share = doubling.cause, doubling.share
    if cause is None:
        return None
    if cause in (COMMUNICATION, FORWARD_BACKWARD) and slow is not None and slow.ratio >= SLOW_RANK:
        return Bottleneck(
            Kind.IMBALANCE,
            None,
            share,
            f"rank {slow.rank} takes {slow.ratio:.2g} times as long as the median rank for its own work, and the others wait",
        )
    if cause == COMMUNICATION:
        return _communication(expected, share, measured=True)
    if cause == FORWARD_BACKWARD:
        return _within_passes(expected, share, missing)
    if cause == "data":
        return Bottleneck(Kind.DATA, None, share, "ranks wait longer for their data: more train.data_workers may help")
    if cause == "optimizer":
        return Bottleneck(
            Kind.OPTIMIZER,
            None,
            share,
            "the optimiser takes as long on more ranks, each of which holds as many parameters: parallel=fsdp divides them",
        )
    if cause == REST and FORWARD_BACKWARD in missing:  # the passes are within the rest
        return _within_passes(expected, share, missing)
    what = "hooks, logging and the like" if cause != REST else "what no phase of the step accounts for"
    return Bottleneck(Kind.OTHER, None, share, f"{what} takes longer for each token", measured=cause != REST)


def _communication(expected: Expected, share: float, *, measured: bool) -> Bottleneck:
    axis = costliest_axis(expected)
    whose = f"of {axis} (parallel.{axis}={expected.axes[axis]})" if axis is not None else "between the ranks"
    how = (
        "that nothing hides takes longer"
        if measured
        else "within the passes, which was not measured apart, takes longer"
    )
    return Bottleneck(Kind.COMMUNICATION, axis, share, f"communication {whose} {how}", measured=measured)


def _within_passes(expected: Expected, share: float, missing: Sequence[str]) -> Bottleneck:
    """Return what makes forward and backward passes longer: a bubble, or communication within them, or computation itself."""
    bubble = expected.losses.get("bubble", 0.0)
    if expected.axes.get("pp", 1) > 1 and bubble >= max(NOTICEABLE, MOSTLY * share):
        return Bottleneck(
            Kind.BUBBLE,
            "pp",
            share,
            f"stages of the pipeline (parallel.pp={expected.axes['pp']}) wait longer for each other, since a rank has fewer "
            "micro batches",
            measured=False,
        )
    if COMMUNICATION in missing and expected.axes:
        return _communication(expected, share, measured=False)
    return Bottleneck(
        Kind.COMPUTATION,
        None,
        share,
        "computation itself takes longer for each token: smaller micro batches, or cores and memory that ranks share",
    )


def costliest_axis(expected: Expected) -> str | None:
    """Return the axis whose communication grows most by arithmetic; or of those that send between nodes, what sends most.

    None: there is no axis, or several of which nothing is known.
    """
    if len(expected.axes) == 1:
        return next(iter(expected.axes))
    growing = {axis: expected.losses.get(axis, 0.0) for axis in expected.axes}
    if growing and max(growing.values()) > 0:
        return max(growing, key=lambda axis: growing[axis])
    sending = {axis: expected.between_nodes.get(axis, 0.0) for axis in expected.axes}
    if sending and max(sending.values()) > 0:
        return max(sending, key=lambda axis: sending[axis])
    return None
