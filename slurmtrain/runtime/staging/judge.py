"""Which nodes use their copies, decided from what all of them say: a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from slurmtrain.runs.stage_record import ALL_COPIES, NodeReport, Plan

SHOWN = 3  # sentences about single nodes


@dataclass(frozen=True)
class Judgement:
    """What has become of the copies.

    Attributes:
        without: nodes whose ranks use the shared folders, in the plan's order, each with the reason.
        seconds: how long the slowest of the others took.
        in_memory: nodes whose copies take memory of the job.
    """

    without: Mapping[str, str]
    seconds: float
    in_memory: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Say which nodes have no sound copy, and why."""
        said = [f"{node} has no sound copy: {why}" for node, why in list(self.without.items())[:SHOWN]]
        more = len(self.without) - SHOWN
        return "; ".join([*said, *([f"and {more} more nodes"] if more > 0 else [])])


def judge(plan: Plan, reports: Mapping[str, NodeReport], limit: str | None = None) -> Judgement:
    """Return which nodes use their copies.

    All copies of a thing have to be equal. If those of some nodes differ, what most nodes have is right; where no copy is that
    of more than half of the nodes, none is used.

    Args:
        limit: the time after which the copying was ended, in words; None: all nodes had the time that they needed.
    """
    without: dict[str, str] = {}
    for node in plan.nodes:
        report = reports.get(node)
        if report is None:
            late = "its copying ended without a word (see attempts/NNNN/stage/log)"
            without[node] = late if limit is None else f"its copying was not done after {limit}"
        elif report.error is not None:
            without[node] = report.error
    whats = {
        ALL_COPIES: "copies differ from those",
        **{each.name: f"copy of {each.source} differs from that" for each in plan.items},
    }
    for name, what in whats.items():
        found = {node: reports[node].digests.get(name, "") for node in plan.nodes if node not in without}
        if len(set(found.values())) < 2:
            continue
        common, count = Counter(found.values()).most_common(1)[0]
        right = common if 2 * count > len(found) else None
        for node, digest in found.items():
            if digest != right:
                without[node] = f"its {what} of " + (
                    "most nodes" if right is not None else "the other nodes: was it changed meanwhile?"
                )
    ordered = {node: without[node] for node in plan.nodes if node in without}
    sound = [node for node in plan.nodes if node not in without]
    return Judgement(
        ordered,
        max((reports[node].seconds for node in sound), default=0.0),
        tuple(node for node in sound if reports[node].in_memory),
    )
