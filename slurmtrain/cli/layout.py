"""layout: show the coordinates of each rank and the memory that it needs, before anything is submitted."""

from __future__ import annotations

import argparse

from slurmtrain.choices import JobKind
from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.parallel_dims import AXES, at_most, at_size, parallel_dims_of, usable_sizes
from slurmtrain.errors import UsageError
from slurmtrain.launch.memory_check import memory_by_dry_run
from slurmtrain.planner.fit import check_fits, in_gb, memory_of


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    asked, dims = compose_and_validate(arguments)
    config = at_most(asked)
    if arguments.memory and config.job.kind != JobKind.TRAIN:
        raise UsageError(f"--memory is of the trainer's model, and job.kind is {config.job.kind!r}", hint="job=train")
    stages = memory_by_dry_run(config) if arguments.memory else memory_of(config, dims)
    sizes = {nodes: parallel_dims_of(at_size(asked, nodes)) for nodes in usable_sizes(asked)}
    tasks_per_node = config.cluster.tasks_per_node
    if arguments.json:
        ranks = [
            {
                "rank": rank,
                "node": rank // tasks_per_node,
                "local_rank": rank % tasks_per_node,
                "coordinates": dims.coordinates(rank),
                "groups": {axis: dims.group(rank, axis) for axis in AXES},
            }
            for rank in range(dims.world_size)
        ]
        axes = dict(zip(AXES, dims.shape, strict=True))
        by_nodes = {str(nodes): str(each) for nodes, each in sizes.items()}
        print_json({"layout": str(dims), "axes": axes, "sizes": by_nodes, "memory": stages, "ranks": ranks})
        return 0
    print(dims)
    if len(sizes) > 1:
        print_table(["nodes used", "layout"], [[str(nodes), str(each)] for nodes, each in sizes.items()])
        print(f"below: the layout on {config.cluster.node_range.most} nodes")
    if arguments.memory and stages is not None:
        parts = "parameters gradients optimizer gathered activations total".split()
        header = ["stage", "first rank", *"parameters gradients optimiser gathered* activations* total".split()]
        rows = []
        for stage in stages:
            values = [getattr(stage, part) for part in parts]
            rows.append([str(stage.stage), str(stage.rank), *("?" if x is None else in_gb(x) for x in values)])
        print_table(header, rows)
        print("GB of 2^30 bytes. * estimated; ? is not known of this model")
        check_fits(config, dims, stages)
        if config.cluster.gpu_memory_gb is not None:
            print(f"fits into cluster.gpu_memory_gb={config.cluster.gpu_memory_gb:g}")
        return 0
    for stage in stages or []:
        print(f"a rank{f' of stage {stage.stage}' if dims.pp > 1 else ''} needs about {stage}")
    used = [axis for axis, size in zip(AXES, dims.shape, strict=True) if size > 1]
    rows = []
    for rank in range(dims.world_size):
        own = dims.coordinates(rank)  # on every axis in use, and the ranks that it shares the axis with
        cells = [f"{own[axis]} of {ranks_text(dims.group(rank, axis))}" for axis in used]
        rows.append([str(rank), str(rank // tasks_per_node), *cells])
    print_table(["rank", "node", *used], rows)
    return 0


def ranks_text(ranks: list[int]) -> str:
    """Format evenly spaced ranks as SLURM writes them: 0-7, or 0-28:4."""
    if len(ranks) <= 2:
        return ",".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
