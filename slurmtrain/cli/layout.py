"""layout: which rank stands where, before anything is submitted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.as_json import print_json
from slurmtrain.cli.runs import print_table
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.layout import AXES, Layout, layout_of
from slurmtrain.planner.fit import describe, memory_of


def main(arguments: Arguments) -> int:
    config = compose_and_validate(arguments)
    layout = layout_of(config)
    memory = memory_of(config, layout)
    places = [_place(layout, rank, config.cluster.tasks_per_node) for rank in range(layout.world_size)]
    if "--json" in arguments.options:
        bytes_of_stages = None if memory is None else [asdict(stage) | {"total": stage.total} for stage in memory]
        axes = dict(zip(AXES, layout.shape, strict=True))
        print_json({"layout": str(layout), "axes": axes, "memory": bytes_of_stages, "ranks": places})
        return 0
    print(layout)
    for number, stage in enumerate(memory or []):
        where = f"a rank of stage {number}" if layout.pp > 1 else "a rank"
        print(f"{where} needs about {describe(stage)}")
    _print_table(layout, places)
    return 0


def _place(layout: Layout, rank: int, tasks_per_node: int) -> dict[str, Any]:
    """A rank as `layout --json` prints it; groups are of ranks that differ on one axis only."""
    node, local_rank = divmod(rank, tasks_per_node)
    return {
        "rank": rank,
        "node": node,
        "local_rank": local_rank,
        "coordinates": layout.coordinates(rank),
        "groups": {axis: layout.group(rank, axis) for axis in AXES},
    }


def _print_table(layout: Layout, places: list[dict[str, Any]]) -> None:
    """A row for each rank: its coordinate on every axis that is in use, and the ranks it shares that axis with."""
    axes = [axis for axis, size in zip(AXES, layout.shape, strict=True) if size > 1]
    rows = [
        [str(place["rank"]), str(place["node"])]
        + [f"{place['coordinates'][axis]} of {ranks_text(place['groups'][axis])}" for axis in axes]
        for place in places
    ]
    print_table(["rank", "node", *axes], rows)


def ranks_text(ranks: list[int]) -> str:
    """Evenly spaced ranks, as SLURM writes them: 0-7, or 0-28:4."""
    if len(ranks) <= 2:
        return ",".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
