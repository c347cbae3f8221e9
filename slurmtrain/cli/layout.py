"""layout: show the coordinates of each rank and the memory that it needs, before anything is submitted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slurmtrain.choices import JobKind
from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.elastic import at_most, at_size, usable_sizes
from slurmtrain.config.node_range import nodes_to_use
from slurmtrain.config.parallel_dims import AXES, ParallelDims, parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import UsageError
from slurmtrain.launch.memory_check import memory_by_dry_run
from slurmtrain.planner.fit import StageMemory, check_fits, in_gb, memory_of


def main(arguments: Arguments) -> int:
    """Run the verb and return its exit code."""
    asked, dims = compose_and_validate(arguments)
    config = at_most(asked)
    laid = "--memory" in arguments.options
    if laid and config.job.kind != JobKind.TRAIN:
        raise UsageError(f"--memory is of the trainer's model, and job.kind is {config.job.kind!r}", hint="job=train")
    stages = memory_by_dry_run(config) if laid else memory_of(config, dims)
    places = [_place(dims, rank, config.cluster.tasks_per_node) for rank in range(dims.world_size)]
    if "--json" in arguments.options:
        memory = None if stages is None else [asdict(stage) | {"total": stage.total} for stage in stages]
        axes = dict(zip(AXES, dims.shape, strict=True))
        sizes = {str(nodes): str(parallel_dims_of(at_size(asked, nodes))) for nodes in usable_sizes(asked)}
        print_json({"layout": str(dims), "axes": axes, "sizes": sizes, "memory": memory, "ranks": places})
        return 0
    print(dims)
    if asked.cluster.node_range.elastic:
        _print_sizes(asked)
    if laid and stages is not None:
        return _print_memory(config, dims, stages)
    for stage in stages or []:
        where = f"a rank of stage {stage.stage}" if dims.pp > 1 else "a rank"
        print(f"{where} needs about {stage}")
    _print_table(dims, places)
    return 0


def _print_memory(config: Config, dims: ParallelDims, stages: list[StageMemory]) -> int:
    """Print a row for each pipeline stage, whose ranks are alike, and whether the model fits; raise if it does not."""
    rows = []
    for stage in stages:
        sizes = (stage.parameters, stage.gradients, stage.optimizer, stage.gathered, stage.activations, stage.total)
        rows.append([str(stage.stage), str(stage.rank), *("?" if size is None else in_gb(size) for size in sizes)])
    print_table(["stage", "first rank", *"parameters gradients optimiser gathered* activations* total".split()], rows)
    print("GB of 2^30 bytes. * estimated; ? is not known of this model")
    check_fits(config, dims, stages)
    if config.cluster.gpu_memory_gb is not None:
        print(f"fits into cluster.gpu_memory_gb={config.cluster.gpu_memory_gb:g}")
    return 0


def _print_sizes(config: Config) -> None:
    """Print a row for each number of nodes that SLURM may give: what is used of it, and how a step is divided."""
    rows, nodes = [], config.cluster.node_range
    sizes = usable_sizes(config)
    for given in range(nodes.most, nodes.least - 1, -1):
        used = nodes_to_use(sizes, given)
        assert used is not None  # the least is usable
        sized = at_size(config, used)
        dims, train = parallel_dims_of(sized), sized.train
        step = f"{dims.micro_batches(train)} x {dims.micro_batch_size(train)}"
        rows.append([str(given), str(used), str(dims), step if config.job.kind == JobKind.TRAIN else "-"])
    print_table(["nodes given", "used", "layout", "micro batches x sequences"], rows)
    print(f"below: the layout on {sizes[-1]} nodes")


def _place(dims: ParallelDims, rank: int, tasks_per_node: int) -> dict[str, Any]:
    """Return a rank as `layout --json` prints it; each group has the ranks that differ on one axis only."""
    node, local_rank = divmod(rank, tasks_per_node)
    return {
        "rank": rank,
        "node": node,
        "local_rank": local_rank,
        "coordinates": dims.coordinates(rank),
        "groups": {axis: dims.group(rank, axis) for axis in AXES},
    }


def _print_table(dims: ParallelDims, places: list[dict[str, Any]]) -> None:
    """Print a row for each rank: its coordinate on every axis that is in use, and the ranks it shares that axis with."""
    axes = [axis for axis, size in zip(AXES, dims.shape, strict=True) if size > 1]
    rows = [
        [str(place["rank"]), str(place["node"])]
        + [f"{place['coordinates'][axis]} of {ranks_text(place['groups'][axis])}" for axis in axes]
        for place in places
    ]
    print_table(["rank", "node", *axes], rows)


def ranks_text(ranks: list[int]) -> str:
    """Format evenly spaced ranks as SLURM writes them: 0-7, or 0-28:4."""
    if len(ranks) <= 2:
        return ",".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
