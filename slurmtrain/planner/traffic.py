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

from slurmtrain.choices import ActivationCheckpointing, CpMethod, PpSchedule, ReduceDtype
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
    """What the ranks of a layout do in a step.

    Attributes:
        seq_len: tokens of a whole sequence.
    """

    config: Config
    dims: ParallelDims
    shape: DecoderShape
    seq_len: int

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def micro_batches(self) -> int:
        """Forward passes in a step."""
        return self.dims.micro_batches(self.config.train)

    @property
    def size(self) -> float:
        """Bytes of one number for each token of a micro batch on a rank."""
        tokens = self.dims.micro_batch_size(self.config.train) * self.seq_len / self.dims.cp
        return tokens * self.compute_bytes

    @property
    def compute_bytes(self) -> int:
        return 2 if self.parallel.param_dtype else 4

    @property
    def passes(self) -> int:
        """Passes through a layer that communicate: recomputing repeats the forward pass in the backward pass."""
        return 2 if self.parallel.activation_checkpointing == ActivationCheckpointing.NONE else 3

    @property
    def layers(self) -> int:
        """The layers of the first stage."""
        return layers_of_stages(self.shape.n_layers, self.dims.pp)[0]

    @property
    def elements(self) -> int:
        """The parameters of the first stage, the largest but for a last one with an output of its own, on one TP rank."""
        ends = elements_per_rank(self.shape.ends(first=True, last=self.dims.pp == 1), self.dims.tp, 1)
        return self.layers * block_elements(self.shape, self.dims.tp, 1) + ends

    def inside(self, axis: str) -> int:
        """Return how many ranks of a group along an axis share a node."""
        return ranks_in_node(self.dims, axis, self.config.cluster.tasks_per_node)


def ranks_in_node(dims: ParallelDims, axis: str, ranks_per_node: int) -> int:
    """Return how many ranks of a group along `axis` share a node.

    Ranks are counted with the innermost axis first, so neighbours on an axis are as far apart as the product of the axes
    within it.
    """
    size: int = getattr(dims, axis)
    stride: int = math.prod(getattr(dims, inner) for inner in AXES[AXES.index(axis) + 1 :])
    return max(1, min(size, ranks_per_node // stride))


def traffic_of(work: Work) -> list[Traffic]:
    """Return what every axis that is larger than 1 sends in a step. Of a pipeline, from the stage that sends most."""
    dims = work.dims
    found = [_tensor(work)] if dims.tp > 1 else []
    found += [_context(work)] if dims.cp > 1 else []
    found += [_pipeline(work)] if dims.pp > 1 else []
    found += [_shards(work)] if dims.dp_shard * dims.cp > 1 else []
    return found + ([_replicas(work)] if dims.dp_replicate > 1 else [])


def _tensor(work: Work) -> Traffic:
    """Return the traffic of tensor parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

    In each layer the input of attention and that of the feed-forward are gathered, and both outputs are scattered: four
    collectives of the residual stream in the forward pass, and their counterparts in the backward pass. Without sequence
    parallelism two all-reduces send as much. The ends of the model take two more each way.
    """
    ranks = work.dims.tp
    collectives = (4 * work.layers * work.passes + 4) * work.micro_batches
    sent = collectives * work.size * work.shape.dim * (ranks - 1) / ranks
    return Traffic("tp", ONE_WAY, ranks, work.inside("tp"), sent, collectives)


def _context(work: Work) -> Traffic:
    """Return the traffic of context parallelism: `parallel/context.py`."""
    shape, ranks, inside = work.shape, work.dims.cp, work.inside("cp")
    times = work.passes * work.layers * work.micro_batches
    size = work.size / work.dims.tp
    if work.parallel.cp_method == CpMethod.ULYSSES:  # queries, keys and values in one exchange, the results in another
        sent = size * (2 * shape.query_width + 2 * shape.kv_width) * (ranks - 1) / ranks
        return Traffic("cp", EXCHANGE, ranks, inside, times * sent, 2 * times)
    sent = size * 2 * shape.kv_width * (ranks - 1)  # keys and values of the whole sequence
    return Traffic("cp", ONE_WAY, ranks, inside, times * sent, times)


def _pipeline(work: Work) -> Traffic:
    """Return the traffic of a stage in the middle: the stream to the next stage, and its gradient to the one before."""
    cut = work.dims.tp if work.parallel.sequence_parallel else 1
    messages = 2 * work.micro_batches * STAGES_PER_RANK[work.parallel.pp_schedule]
    # If any neighbours are on two nodes, they are who the others wait for.
    return Traffic("pp", SEND, work.dims.pp, work.inside("pp"), messages * work.size * work.shape.dim / cut, messages)


def _shards(work: Work) -> Traffic:
    """Return the traffic of FSDP, over the ranks of dp_shard and cp: `parallel/sharded.py`."""
    shards = work.dims.dp_shard * work.dims.cp
    gathers, scatters = _gathers(work, shards)
    whole = work.elements * work.compute_bytes * gathers + _trained(work) * _reduce_bytes(work) * scatters
    inside = work.inside("dp_shard") * work.inside("cp")
    messages = math.ceil((work.layers + 1) * (gathers + scatters))
    return Traffic("dp_shard", ONE_WAY, shards, inside, whole * (shards - 1) / shards, messages)


def _replicas(work: Work) -> Traffic:
    """Return the traffic of adding up the gradients of replicas: `parallel/ddp.py`, and FSDP's own."""
    ranks, trained, reduce_bytes = work.dims.dp_replicate, _trained(work), _reduce_bytes(work)
    messages = work.layers + 1
    if not work.dims.uses_fsdp(work.parallel):
        messages = math.ceil(4 * trained / BUCKET_BYTES)
    sent = 2 * trained / (work.dims.dp_shard * work.dims.cp) * reduce_bytes * (ranks - 1) / ranks
    return Traffic("dp_replicate", ALL_REDUCE, ranks, work.inside("dp_replicate"), sent, messages)


def _trained(work: Work) -> int:
    """Return the number of parameters with gradients."""
    rank = work.config.lora.r
    return work.shape.adapter_elements(rank, 1) if rank else work.elements


def _reduce_bytes(work: Work) -> int:
    return 2 if work.parallel.reduce_dtype == ReduceDtype.BFLOAT16 else 4


def _gathers(work: Work, shards: int) -> tuple[float, int]:
    """Return how often a step gathers all parameters of a rank's layers, and how often it scatters their gradients.

    In a pipeline both once. Else gradients are scattered after each micro batch, and parameters gathered before each of
    its two passes; if they stay gathered, once a step; in groups that keep them, once and within the group once more.
    """
    keep, micro_batches = work.parallel.reshard_after_forward, work.micro_batches
    if work.dims.pp > 1:
        return 1.0, 1
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
