"""The bytes that each axis of a layout sends in a step, and the seconds that they take, by arithmetic.

What is counted is what `parallel/` does. Collectives go in rings, in which each of n ranks sends (n - 1) / n of the whole
to all-gather or reduce-scatter it, and twice that to all-reduce (Thakur et al. 2005, "Optimization of collective
communication operations in MPICH", sections 4.1 and 4.5). A ring over several nodes is as fast as its slowest link:
that between nodes, for which the group uses the adapters of all its ranks on a node. Each hop takes its latency, too:
those of NCCL's own cost model, with which it chooses its algorithms (src/graph/tuning.cc, hwLat, ring, "Simple").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurmtrain.choices import ActivationCheckpointing, CpMethod, GradientCompression, PpSchedule, ReduceDtype
from slurmtrain.config.parallel_dims import AXES, STAGES_PER_RANK, ParallelDims
from slurmtrain.config.schema import Config, ParallelConfig
from slurmtrain.planner.hardware import Hardware
from slurmtrain.planner.memory import block_elements, layers_of_stages
from slurmtrain.planner.shape import DecoderShape, elements_per_rank

HOP_IN_NODE_S, HOP_BETWEEN_NODES_S = 3.4e-6, 14e-6
BUCKET_BYTES = 25 * 2**20  # DDP sends gradients in buckets of this size
ALL_REDUCE, ONE_WAY, EXCHANGE, SEND = "all-reduce", "all-gather or reduce-scatter", "all-to-all", "send"


@dataclass(frozen=True)
class Traffic:
    """What one axis sends in a step, from the rank that sends most.

    Attributes:
        axis: name of the axis.
        kind: one of ALL_REDUCE, ONE_WAY, EXCHANGE and SEND.
        ranks: size of a group.
        ranks_in_node: number of a group's ranks that share a node.
        bytes_sent: by one rank, in the whole step.
        messages: number of collectives in the whole step, or of messages.
    """

    axis: str
    kind: str
    ranks: int
    ranks_in_node: int
    bytes_sent: float
    messages: int

    @property
    def nodes(self) -> int:
        """The number of nodes that a group is on."""
        return math.ceil(self.ranks / self.ranks_in_node)

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds that it takes if nothing else is done meanwhile."""
        link, network = hardware.link * hardware.link_share, hardware.network * hardware.link_share
        if self.nodes == 1:
            sending = self.bytes_sent / link
        elif self.kind == EXCHANGE:
            away = (self.ranks - self.ranks_in_node) / max(1, self.ranks - 1)
            sending = max(self.bytes_sent * (1 - away) / link, self.bytes_sent * away / network)
        elif self.kind == SEND:
            sending = self.bytes_sent / network
        else:
            sending = self.bytes_sent / min(link, self.ranks_in_node * network)
        return sending + self.messages * self._latency(hardware)

    def _latency(self, hardware: Hardware) -> float:
        if math.isinf(hardware.network if self.nodes > 1 else hardware.link):
            return 0.0
        if self.kind in (SEND, EXCHANGE):
            return HOP_IN_NODE_S if self.nodes == 1 else HOP_BETWEEN_NODES_S
        between = self.nodes - 1
        once = (self.ranks - 1 - between) * HOP_IN_NODE_S + between * HOP_BETWEEN_NODES_S
        return once * (2 if self.kind == ALL_REDUCE else 1)


@dataclass(frozen=True)
class Work:
    """What a rank does in a step.

    Attributes:
        tokens: of a micro batch on a rank: micro batch size x sequence / cp.
        micro_batches: forward passes in a step.
    """

    tokens: float
    micro_batches: int


def ranks_in_node(dims: ParallelDims, axis: str, ranks_per_node: int) -> int:
    """Return how many ranks of a group along `axis` share a node.

    Ranks are counted with the innermost axis first, so neighbours on an axis are as far apart as the product of the axes
    within it.
    """
    size: int = getattr(dims, axis)
    stride: int = math.prod(getattr(dims, inner) for inner in AXES[AXES.index(axis) + 1 :])
    return max(1, min(size, ranks_per_node // stride))


def traffic_of(config: Config, dims: ParallelDims, shape: DecoderShape, work: Work) -> list[Traffic]:
    """Return what every axis that is larger than 1 sends in a step. Of a pipeline, from the stage that sends most."""
    found = []
    if dims.tp > 1:
        found.append(_tensor(config, dims, shape, work))
    if dims.cp > 1:
        found.append(_context(config, dims, shape, work))
    if dims.pp > 1:
        found.append(_pipeline(config, dims, shape, work))
    return [*found, *_data(config, dims, shape, work)]


def _group(config: Config, dims: ParallelDims, axis: str) -> tuple[int, int]:
    return getattr(dims, axis), ranks_in_node(dims, axis, config.cluster.tasks_per_node)


def _compute_bytes(parallel: ParallelConfig) -> int:
    return 2 if parallel.param_dtype else 4


def _recomputing(parallel: ParallelConfig) -> bool:
    """Return whether the backward pass repeats the forward pass's communication within blocks."""
    return parallel.activation_checkpointing != ActivationCheckpointing.NONE


def _layers(shape: DecoderShape, dims: ParallelDims) -> int:
    return layers_of_stages(shape.n_layers, dims.pp)[0]


def _tensor(config: Config, dims: ParallelDims, shape: DecoderShape, work: Work) -> Traffic:
    """Return the traffic of tensor parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

    In each layer the input of attention and that of the feed-forward are gathered, and both outputs are scattered: four
    collectives of the residual stream in the forward pass, and their counterparts in the backward pass. Without sequence
    parallelism two all-reduces send as much. The ends of the model take two more each way.
    """
    ranks, inside = _group(config, dims, "tp")
    each_way = 4 * _layers(shape, dims) * (1.5 if _recomputing(config.parallel) else 1.0) + 2
    collectives = round(2 * each_way * work.micro_batches)
    whole = work.tokens * shape.dim * _compute_bytes(config.parallel)
    return Traffic("tp", ONE_WAY, ranks, inside, collectives * whole * (ranks - 1) / ranks, collectives)


def _context(config: Config, dims: ParallelDims, shape: DecoderShape, work: Work) -> Traffic:
    """Return the traffic of context parallelism: `parallel/context.py`."""
    parallel = config.parallel
    ranks, inside = _group(config, dims, "cp")
    passes = 3 if _recomputing(parallel) else 2
    times = passes * _layers(shape, dims) * work.micro_batches
    size = work.tokens * _compute_bytes(parallel) / dims.tp
    if parallel.cp_method == CpMethod.ULYSSES:  # queries, keys and values in one exchange, the results in another
        sent = size * (2 * shape.query_width + 2 * shape.kv_width) * (ranks - 1) / ranks
        return Traffic("cp", EXCHANGE, ranks, inside, times * sent, 2 * times)
    sent = size * 2 * shape.kv_width * (ranks - 1)  # keys and values of the whole sequence
    return Traffic("cp", ONE_WAY, ranks, inside, times * sent, times)


def _pipeline(config: Config, dims: ParallelDims, shape: DecoderShape, work: Work) -> Traffic:
    """Return the traffic of a stage in the middle: the stream to the next stage, and its gradient to the one before."""
    parallel = config.parallel
    ranks, inside = _group(config, dims, "pp")
    cut = dims.tp if parallel.sequence_parallel else 1
    messages = 2 * work.micro_batches * STAGES_PER_RANK[parallel.pp_schedule]
    size = work.tokens * shape.dim * _compute_bytes(parallel) / cut
    # If any neighbours are on two nodes, they are who the others wait for.
    return Traffic("pp", SEND, ranks, inside, messages * size, messages)


def _data(config: Config, dims: ParallelDims, shape: DecoderShape, work: Work) -> list[Traffic]:
    """Return the traffic of the axes over which gradients are added up: `parallel/sharded.py` and `parallel/ddp.py`."""
    parallel = config.parallel
    shards = dims.dp_shard * dims.cp
    elements = _elements(shape, dims) if not config.lora.r else shape.adapter_elements(config.lora.r, 1)
    reduce_bytes = 2 if parallel.reduce_dtype == ReduceDtype.BFLOAT16 else 4
    units = _layers(shape, dims) + 1
    found = []
    if shards > 1:
        inside = ranks_in_node(dims, "dp_shard", config.cluster.tasks_per_node)
        inside *= ranks_in_node(dims, "cp", config.cluster.tasks_per_node)
        gathers, scatters = _gathers(parallel, dims, work.micro_batches, shards)
        whole = _elements(shape, dims) * _compute_bytes(parallel) * gathers + elements * reduce_bytes * scatters
        sent = whole * (shards - 1) / shards
        found.append(Traffic("dp_shard", ONE_WAY, shards, inside, sent, math.ceil(units * (gathers + scatters))))
    if dims.dp_replicate > 1:
        ranks, inside = _group(config, dims, "dp_replicate")
        if not dims.uses_fsdp(parallel):
            reduce_bytes = {GradientCompression.NONE: 4}.get(parallel.gradient_compression, 2)
        sent = 2 * elements / shards * reduce_bytes * (ranks - 1) / ranks
        messages = units if dims.uses_fsdp(parallel) else math.ceil(4 * elements / BUCKET_BYTES)
        found.append(Traffic("dp_replicate", ALL_REDUCE, ranks, inside, sent, messages))
    return found


def _elements(shape: DecoderShape, dims: ParallelDims) -> int:
    """Return the parameters of the first stage, the largest but for a last one with an output of its own, on one TP rank."""
    ends = elements_per_rank(shape.ends(first=True, last=dims.pp == 1), dims.tp, 1)
    return _layers(shape, dims) * block_elements(shape, dims.tp, 1) + ends


def _gathers(parallel: ParallelConfig, dims: ParallelDims, micro_batches: int, shards: int) -> tuple[float, int]:
    """Return how often a step gathers all parameters of a rank's layers, and how often it scatters their gradients.

    In a pipeline both once. Else gradients are scattered after each micro batch, and parameters gathered before each of
    its two passes; if they stay gathered, once a step; in groups that keep them, once and within the group once more.
    """
    if dims.pp > 1:
        return 1.0, 1
    keep = parallel.reshard_after_forward
    if keep is False:
        return 1.0, micro_batches
    if keep is None or keep is True:
        return 2.0 * micro_batches, micro_batches
    within = (keep - 1) / keep / ((shards - 1) / shards)
    return (1 + within) * micro_batches, micro_batches


def bubble_passes(schedule: str, pp: int) -> float:
    """Return how many micro batches' forward and backward passes a rank of a pipeline waits in a step.

    pp - 1 with 1F1B and GPipe; half of that with two stages on a rank (Narayanan et al. 2021, arXiv:2104.04473, section
    2.2); with zero bubble a third of the latter, since a weight's gradient, a third of the work, can wait (Qi et al.
    2024, arXiv:2401.10241, table 1: ZB-H1).
    """
    waiting = (pp - 1) / STAGES_PER_RANK[schedule]
    return waiting / 3 if schedule == PpSchedule.ZERO_BUBBLE else waiting
