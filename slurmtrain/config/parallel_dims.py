"""The layout: how many ranks each kind of parallelism takes, the coordinates of each rank, and which layouts are impossible.

Pure arithmetic on a config. Ranks are counted with tensor parallelism innermost, since it communicates most: a
tensor-parallel group is neighbours on one node. Outermost are pipeline stages, which communicate least.

    pp  >  dp_replicate  >  dp_shard  >  cp  >  tp

The known example: 64 GPUs = 8 data-parallel groups x TP 4 x PP 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from slurmtrain.choices import CpMethod, JobKind, PpSchedule, ReduceDtype
from slurmtrain.config.fields import NodeRange
from slurmtrain.config.schema import Config, ParallelConfig, TrainConfig
from slurmtrain.errors import ConfigError, EnvironmentMismatchError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # the outermost first
LAYOUTS_SHOWN = 3  # that would be possible, in the hint of an error
STAGES_PER_RANK: dict[str, int] = {
    schedule: 1 + (schedule in (PpSchedule.INTERLEAVED_1F1B, PpSchedule.ZERO_BUBBLE)) for schedule in PpSchedule
}

Sizes = dict[str, int]
Problem = tuple[str, str | None]  # a sentence, and a hint unless another layout is the way out
TRAINS = (JobKind.TRAIN, JobKind.EVALUATE)  # kinds of jobs whose batches are divided among the ranks


class ParallelDims(Struct, frozen=True):
    """The sizes of all axes, which determine every rank's coordinates.

    Attributes:
        pp: pipeline stages.
        dp_replicate: full copies of the model.
        dp_shard: ranks over which a copy's parameters, gradients and optimiser state are sharded.
        cp: ranks that share a sequence.
        tp: ranks that share every matrix.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """The number of data-parallel groups: ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    def uses_fsdp(self, parallel: ParallelConfig) -> bool:
        """Return whether FSDP2 is used, or else DistributedDataParallel.

        The latter's replicas compute with the very parameters that they train.
        """
        shares = self.world_size > self.dp_replicate  # a rank holds a part of the model
        return shares or parallel.param_dtype is not None or parallel.reduce_dtype != ReduceDtype.FLOAT32

    def sequence_ranks(self, parallel: ParallelConfig) -> int:
        """Return the number of ranks that share the activations of every sequence, which has to divide its length."""
        return self.cp * (self.tp if parallel.sequence_parallel else 1)

    def micro_batch_size(self, train: TrainConfig) -> int:
        """Return the sequences per forward pass: as configured, or a rank's share of a step for each pipeline stage."""
        return train.micro_batch_size or max(1, train.global_batch_size // (self.dp * self.pp))

    def micro_batches(self, train: TrainConfig) -> int:
        """Return the number of forward passes of a rank per step."""
        return train.global_batch_size // (self.dp * self.micro_batch_size(train))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` on every axis."""
        found: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + coordinates[axis]
        return rank

    def dp_rank(self, rank: int) -> int:
        """Return the index of `rank` among the `dp` groups that see different samples."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def group(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks that differ from `rank` on `axes` only, in order, itself included."""
        at = self.coordinates(rank)
        places = itertools.product(*(range(getattr(self, axis)) for axis in axes))
        return sorted(self.rank_at({**at, **dict(zip(axes, place, strict=True))}) for place in places)

    def __str__(self) -> str:
        """Return a text such as "64 ranks = 8 data-parallel groups x TP 4 x PP 2"."""
        parts = [f"{self.dp} data-parallel group{'s' if self.dp != 1 else ''}"]
        if self.dp_shard > 1 and self.dp_replicate > 1:
            parts[0] += f" ({self.dp_replicate} replicas x {self.dp_shard} shards)"
        elif self.dp_shard > 1:
            parts[0] += f" ({self.dp_shard} shards)"
        parts += [f"{axis.upper()} {getattr(self, axis)}" for axis in ("tp", "pp", "cp") if getattr(self, axis) > 1]
        return f"{self.world_size} rank{'s' if self.world_size != 1 else ''} = {' x '.join(parts)}"


def parallel_dims_of(config: Config) -> ParallelDims:
    """Return the sizes of all axes that a config asks for; the only place that checks what divides what.

    Raises:
        ConfigError: the layout is impossible; the message gives the values, and the nearest possible layouts.
    """
    wanted, sizes = _sizes(config)
    open_axes = [axis for axis, size in wanted.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(
            f"{' and '.join(f'parallel.{axis}' for axis in open_axes)} are both -1",
            hint="only one axis can take the remaining ranks: give the other one a size, as parallel=fsdp does",
        )
    wrong = [f"parallel.{axis}={size}" for axis, size in wanted.items() if size < 1 and size != -1]
    if wrong:
        raise ConfigError(f"{wrong[0]} must be at least 1", hint="or -1, for the ranks that the other axes leave")
    if sizes is None:
        given = " x ".join(f"parallel.{axis}={size}" for axis, size in wanted.items() if size > 1) or "a single rank"
        raise ConfigError(
            f"{given} {'does not divide' if open_axes else 'is not'} {config.world_size}, the ranks of "
            f"cluster.nodes={config.cluster.nodes} x cluster.tasks_per_node={config.cluster.tasks_per_node}",
            hint=_nearest(config),
        )
    for problem, hint in _problems(sizes, config):
        raise ConfigError(problem, hint=hint or _nearest(config))
    return ParallelDims(**sizes)


def is_possible(config: Config) -> bool:
    """Return whether `parallel_dims_of` finds sizes for this config."""
    _, sizes = _sizes(config)
    return sizes is not None and next(_problems(sizes, config), None) is None


def _sizes(config: Config) -> tuple[Sizes, Sizes | None]:
    """Return the sizes that a config asks for, and these with -1 replaced; None when the product cannot be the world size."""
    wanted = {axis: getattr(config.parallel, axis) for axis in AXES}
    given = math.prod(size for size in wanted.values() if size != -1)
    if given < 1:
        return wanted, None
    sizes = {axis: config.world_size // given if size == -1 else size for axis, size in wanted.items()}
    return wanted, sizes if math.prod(sizes.values()) == config.world_size else None


def _problems(sizes: Sizes, config: Config) -> Iterator[Problem]:
    """Yield what cannot work with these sizes, whose product is the world size."""
    group, shards, tp = config.parallel.reshard_after_forward, sizes["dp_shard"] * sizes["cp"], sizes["tp"]
    if config.cluster.tasks_per_node % tp:
        yield (
            f"parallel.tp={tp} does not divide cluster.tasks_per_node={config.cluster.tasks_per_node}: the ranks of a "
            "tensor-parallel group stand on one node",
            None,
        )
    if group is not None and not isinstance(group, bool):
        fitting = [str(size) for size in range(2, shards) if shards % size == 0]
        if str(group) not in fitting:
            yield (
                f"parallel.reshard_after_forward={group} does not cut {shards} shards into groups of several",
                f"set it to {', '.join([*fitting, 'true'])} or false",
            )
        elif tp > 1:
            yield (
                f"parallel.reshard_after_forward={group} with parallel.tp={tp}: FSDP2 has no groups for parts of matrices",
                "set it to true or false",
            )
    if config.job.kind in TRAINS:
        yield from _model_problems(sizes, config)
        yield from _batch_problems(sizes, config)


def _model_problems(sizes: Sizes, config: Config) -> Iterator[Problem]:
    model, parallel, tp, pp, cp = config.model, config.parallel, sizes["tp"], sizes["pp"], sizes["cp"]
    parts = {"n_heads": tp, "n_kv_heads": tp, "vocab_size": tp}
    by = f"parallel.tp={tp}"
    if cp > 1 and parallel.cp_method == CpMethod.ULYSSES:
        parts |= {"n_heads": tp * cp, "n_kv_heads": tp * cp}
        by += f" x parallel.cp={cp} (parallel.cp_method=ulysses)"
    for name, divisor in parts.items():
        if isinstance(size := model.get(name), int) and size % divisor:
            yield f"model.{name}={size} does not divide by {by}", None
    stages = pp * STAGES_PER_RANK.get(parallel.pp_schedule, 1)
    if isinstance(layers := model.get("n_layers"), int) and pp > 1 and layers < stages:
        yield f"model.n_layers={layers} are too few for {stages} stages of parallel.pp={pp}", None
    if tp > 1 and model.get("dropout") and not parallel.sequence_parallel:
        yield (
            f"model.dropout={model['dropout']} with parallel.sequence_parallel=false and parallel.tp={tp}: each rank would "
            "drop other elements of the same activations",
            "set parallel.sequence_parallel=true, or model.dropout=0",
        )
    axes = [axis for axis in ("cp", "tp") if sizes[axis] > 1 and (axis == "cp" or parallel.sequence_parallel)]
    for key, length in sequence_lengths(config.data).items():
        if length % math.prod(sizes[axis] for axis in axes):
            by = " x ".join(f"parallel.{axis}={sizes[axis]}" for axis in axes)
            yield f"{key}={length} does not divide by {by}", None


def sequence_lengths(data: Mapping[str, Any], group: str = "data") -> dict[str, int]:
    """Return `seq_len` of a data config, or of each source of a mixture, by its key, as far as they are numbers."""
    if isinstance(length := data.get("seq_len"), int):
        return {f"{group}.seq_len": length}
    sources = data.get("sources")
    return {
        key: length
        for name, source in (sources.items() if isinstance(sources, Mapping) else ())
        if isinstance(source, Mapping)
        for key, length in sequence_lengths(source, f"{group}.sources.{name}").items()
    }


def _batch_problems(sizes: Sizes, config: Config) -> Iterator[Problem]:
    train, dp, pp = config.train, sizes["dp_replicate"] * sizes["dp_shard"], sizes["pp"]
    unit = dp * (train.micro_batch_size or 1) * (pp if train.micro_batch_size is None else 1)
    what = f"{dp} {'ranks' if dp == config.world_size else 'data-parallel ranks'}"
    if train.micro_batch_size:
        what += f" x train.micro_batch_size={train.micro_batch_size}"
    elif pp > 1:
        what += f" x parallel.pp={pp} micro batches"
    if train.global_batch_size % unit:
        below, above = train.global_batch_size // unit * unit, (train.global_batch_size // unit + 1) * unit
        near = " or ".join(str(size) for size in (below, above) if size)
        yield (
            f"train.global_batch_size={train.global_batch_size} does not divide by {what}",
            f"the nearest that do: {near}",
        )
        return
    schedule, micro_batches = config.parallel.pp_schedule, train.global_batch_size // unit
    given = f"train.global_batch_size={train.global_batch_size} over {what} gives {micro_batches}"
    if pp == 1 or not train.micro_batch_size:
        return
    if micro_batches < pp:
        yield (
            f"parallel.pp={pp} stages want at least as many micro batches; {given}",
            f"set train.global_batch_size={unit * pp}, or a smaller train.micro_batch_size",
        )
    # torch's interleaved schedules go in rounds of at least pp micro batches, all alike.
    elif STAGES_PER_RANK.get(schedule) == 2 and micro_batches % (micro_batches // pp):
        yield (
            f"parallel.pp_schedule={schedule} wants a multiple of parallel.pp={pp} micro batches; {given}",
            f"set train.global_batch_size={unit * (micro_batches // pp) * pp}, or parallel.pp_schedule=1f1b",
        )


def nearest_layouts(config: Config) -> list[ParallelDims]:
    """Return all possible layouts, those that differ least from the config's first."""
    wanted, _ = _sizes(config)

    def distance(sizes: Sizes) -> tuple[int, float]:
        """Return how many axes differ, and by how many doublings; another number of shards is the smallest change."""
        doublings = {axis: abs(math.log2(sizes[axis] / wanted[axis])) for axis in AXES if wanted[axis] != -1}
        return sum(value > 0 and axis != "dp_shard" for axis, value in doublings.items()), sum(doublings.values())

    possible = [sizes for sizes in _all_sizes(config.world_size) if next(_problems(sizes, config), None) is None]
    return [ParallelDims(**sizes) for sizes in sorted(possible, key=distance)]


def as_overrides(dims: ParallelDims, config: Config) -> str:
    """Return the overrides that change the config's layout to `dims`."""
    wanted, _ = _sizes(config)
    changed = [axis for axis in AXES if wanted[axis] not in (-1, getattr(dims, axis))]
    return " ".join(f"parallel.{axis}={getattr(dims, axis)}" for axis in changed)


def _nearest(config: Config) -> str | None:
    texts = [as_overrides(dims, config) for dims in nearest_layouts(config)[:LAYOUTS_SHOWN]]
    return f"what can be: {'; or '.join(texts)}" if texts else None


def _all_sizes(world_size: int, axes: Sequence[str] = AXES) -> Iterator[Sizes]:
    """Yield every way to write the world size as a product of the axes."""
    if len(axes) == 1:
        yield {axes[0]: world_size}
        return
    for size in (size for size in range(1, world_size + 1) if world_size % size == 0):
        for others in _all_sizes(world_size // size, axes[1:]):
            yield {axes[0]: size, **others}


# A job whose number of nodes SLURM chooses (cluster.nodes=2-4): the sizes that can be used, and the config for each.
# The global batch, the order of the samples and the schedule are the same for every size. Only the micro batches of a rank
# follow the number of ranks. What works with a config takes that of one size; what is frozen is the range.


def usable_sizes(config: Config) -> list[int]:
    """Return the numbers of nodes on which the ranks can run, in ascending order; of a fixed size only that.

    A size is left out if its ranks cannot divide the global batch, or no axis of the layout can take them.

    Raises:
        ConfigError: the least number of nodes is not among them, so that a job could get nodes which it cannot use.
    """
    nodes = config.cluster.node_range
    if not nodes.elastic:
        return [nodes.most]
    sizes = [size for size in range(nodes.least, nodes.most + 1) if is_possible(_with_nodes(config, size))]
    if nodes.least not in sizes:
        hint = f"cluster.nodes={NodeRange(sizes[0], nodes.most)} begins with a size that can be used" if sizes else None
        if -1 not in _sizes(config)[0].values():
            hint = f"with cluster.nodes={nodes} one axis has to be -1, to take what is left: parallel.dp_replicate=-1"
        try:
            parallel_dims_of(_with_nodes(config, nodes.least))
        except ConfigError as error:
            raise ConfigError(f"cluster.nodes={nodes}: {error.message}", hint=hint or error.hint) from None
    return sizes


def at_size(config: Config, nodes: int) -> Config:
    """Return the config for this number of nodes, one of `usable_sizes`.

    With a range, and without train.micro_batch_size, a forward pass is never larger than on the most nodes, so that fewer
    nodes need no more memory for it: a rank's larger share becomes several micro batches.
    """
    sized = _with_nodes(config, nodes)
    train = config.train
    if not config.cluster.node_range.elastic or train.micro_batch_size is not None or config.job.kind not in TRAINS:
        return sized
    most = parallel_dims_of(_with_nodes(config, usable_sizes(config)[-1])).micro_batch_size(train)
    share = parallel_dims_of(sized).micro_batch_size(train)
    micro = next(size for size in range(min(most, share), 0, -1) if share % size == 0)
    return replace(sized, train=replace(train, micro_batch_size=micro))


def at_most(config: Config) -> Config:
    """Return the config for the largest size that can be used."""
    return at_size(config, usable_sizes(config)[-1]) if config.cluster.node_range.elastic else config


def extreme_sizes(config: Config) -> Iterator[Config]:
    """Yield the config for the smallest size, whose ranks hold most of a sharded model, and for the largest."""
    sizes = usable_sizes(config)
    for nodes in dict.fromkeys((sizes[0], sizes[-1])):
        yield at_size(config, nodes)


def on_given_nodes(config: Config, given: int) -> Config:
    """Return the config for the number of nodes that the ranks have been started on.

    Raises:
        EnvironmentMismatchError: the config has a range, and this number cannot be used.
    """
    if not config.cluster.node_range.elastic:
        return config
    sizes = usable_sizes(config)
    if given not in sizes:
        raise EnvironmentMismatchError(
            f"ranks were started on {given} nodes, but cluster.nodes={config.cluster.nodes} can use "
            f"{', '.join(map(str, sizes))}",
            hint=f"start them with --nodes={max((size for size in sizes if size <= given), default=sizes[0])}",
        )
    return at_size(config, given)


def _with_nodes(config: Config, nodes: int) -> Config:
    return replace(config, cluster=replace(config.cluster, nodes=nodes))
