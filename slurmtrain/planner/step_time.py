"""The time that a step takes under a layout, by arithmetic: computation, waiting in a pipeline, and communication that shows.

What overlaps: gathering parameters and adding up gradients run beside the computation, which they slow down by a part of
their time; what takes longer than that shows, and so do its two ends. What tensor and context parallelism exchange is
needed at once, and shows in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurmtrain.choices import ActivationCheckpointing, CpMethod
from slurmtrain.config.parallel_dims import ParallelDims, sequence_lengths
from slurmtrain.config.schema import Config
from slurmtrain.planner.flops import FROZEN, TRAINED, decoder_flops, matrix_elements, multiplied_elements
from slurmtrain.planner.hardware import Hardware
from slurmtrain.planner.memory import layers_of_stages
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.planner.traffic import Traffic, Work, bubble_passes, traffic_of

COMPUTATION, BUBBLE, IMBALANCE = "computation", "bubble", "imbalance"
AT_ONCE = ("tp", "cp", "pp")  # axes whose communication is needed before the computation can go on
PER_ELEMENT, PASSES = 2, 3  # operations of an element of a matrix for a token; forward, and twice as much backward
# Share of the communication beside the computation that it takes longer by, since both use the same memory and processors.
# From 8 to 128 GPUs, torchtitan's steps of 8B take 0.06 s longer if compiled, and 0.08 s if not, for 0.1 s of communication
# more; those of KempnerForge from 8 to 32 GPUs take 0.3 to 0.6 of it longer.
SLOWED = 0.3
BACKWARD = 2 / 3  # share of the computation that is in the backward pass


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by what they are spent on, for the rank that has most to do.

    Attributes:
        seconds: computation, the pipeline's bubble, imbalance of its stages, and by axis the communication that shows.
            They add up to `expected_s`.
        traffic: what each axis sends.
        traffic_s: by axis, the seconds that this takes, hidden or not.
        bubble_share: share of a pipeline's time in which a rank waits for other stages.
        flops_per_token: operations that the model needs in training, with dense attention, as papers count it.
        peak_flops: most operations per second of a rank; None: not known.
    """

    tokens: int
    nodes: int
    ranks: int
    seconds: Mapping[str, float]
    traffic: tuple[Traffic, ...] = ()
    traffic_s: Mapping[str, float] = field(default_factory=dict)
    bubble_share: float = 0.0
    flops_per_token: float = 0.0
    peak_flops: float | None = None

    @property
    def expected_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.expected_s

    @property
    def rank_seconds_per_token(self) -> float:
        return self.ranks * self.expected_s / self.tokens

    @property
    def mfu(self) -> float | None:
        """The model FLOPs utilisation that is expected, with dense attention, as papers count it: `mfu` of a run."""
        if self.peak_flops is None:
            return None
        return self.tokens * self.flops_per_token / (self.ranks * self.peak_flops * self.expected_s)


def sequence_length(config: Config) -> int:
    """Return the tokens of a sequence; of a mixture the longest; of data that do not say so, as many as the model takes."""
    return max(sequence_lengths(config.data).values(), default=0) or int(config.model["max_seq_len"])


def step_time(config: Config, dims: ParallelDims, hardware: Hardware) -> StepTime | None:
    """Return the time of a step; None: no peak of the cluster is known.

    Args:
        config: with a model that is our decoder.
    """
    shape, seq_len, train = DecoderShape.of(config.model), sequence_length(config), config.train
    flops = hardware.flops
    if flops is None:
        return None
    micro_batch_size, micro_batches = dims.micro_batch_size(train), dims.micro_batches(train)
    stages = stage_flops(config, dims, shape, micro_batch_size * seq_len, seq_len)
    slowest, mean = max(stages), sum(stages) / len(stages)
    bubble = bubble_passes(config.parallel.pp_schedule, dims.pp) * slowest / flops
    seconds = {COMPUTATION: micro_batches * mean / flops, BUBBLE: bubble}
    seconds[IMBALANCE] = micro_batches * (slowest - mean) / flops
    traffic = traffic_of(Work(config, dims, shape, seq_len))
    traffic_s = {each.axis: each.seconds(hardware) for each in traffic}
    seconds |= _showing(traffic, traffic_s, micro_batches * slowest / flops, micro_batches, dims)
    return StepTime(
        tokens=train.global_batch_size * seq_len,
        nodes=config.cluster.node_range.most,
        ranks=dims.world_size,
        seconds=seconds,
        traffic=tuple(traffic),
        traffic_s=traffic_s,
        bubble_share=bubble / (bubble + micro_batches * slowest / flops),
        flops_per_token=training_flops(shape, seq_len, config.lora.r),
        peak_flops=hardware.peak_flops,
    )


def training_flops(shape: DecoderShape, seq_len: int, lora_rank: int = 0) -> float:
    """Return the operations of one token in training, with dense attention, as mfu counts them; see `planner.shape`.

    With adapters of `lora_rank` the matrices of the
    model are frozen.
    """
    whole = decoder_flops(shape).of(1, seq_len)
    if not lora_rank:
        return whole
    return whole - (TRAINED - FROZEN) * multiplied_elements(shape) + TRAINED * shape.adapter_elements(lora_rank, 1)


def stage_flops(config: Config, dims: ParallelDims, shape: DecoderShape, tokens: float, seq_len: int) -> list[float]:
    """Return the operations of one rank of each pipeline stage for a micro batch of `tokens` tokens.

    They include what activation checkpointing computes again. Attention counts half, since kernels skip what comes after
    a token; but not with gathered keys and values, whose attention takes a mask.
    """
    causal = not (dims.cp > 1 and config.parallel.cp_method == CpMethod.ALL_GATHER)
    forward, attention = matrix_elements(shape) * PER_ELEMENT, 2 * PER_ELEMENT * shape.query_width * seq_len
    if causal:
        attention //= 2
    passes = PASSES - (1 if config.lora.r else 0)  # frozen matrices have no gradient of their own
    again = 1 if config.parallel.activation_checkpointing == ActivationCheckpointing.FULL else 0
    adapters = PER_ELEMENT * shape.adapter_elements(config.lora.r, 1) / shape.n_layers if config.lora.r else 0.0
    layer = forward * (passes + again) + (adapters + attention) * (PASSES + again)
    output = PER_ELEMENT * shape.vocab_size * shape.dim * passes
    layers = layers_of_stages(shape.n_layers, dims.pp)
    found = [tokens * layer * count for count in layers]
    found[-1] += tokens * output
    return [each / (dims.tp * dims.cp) for each in found]


def _showing(
    traffic: list[Traffic],
    traffic_s: Mapping[str, float],
    computing_s: float,
    micro_batches: int,
    dims: ParallelDims,
) -> dict[str, float]:
    """Return by axis the seconds of communication that make the step longer."""
    found = {}
    for each in traffic:
        taken = traffic_s[each.axis]
        if each.axis == "pp":  # beside the computation, but for the way through the pipeline and back
            found["pp"] = 2 * (dims.pp - 1) * taken / each.messages
        elif each.axis in AT_ONCE:
            found[each.axis] = taken
        else:
            room, ends = computing_s, 2  # the first layer's parameters, and the last one's gradients
            if each.axis != "dp_shard":  # replicas add up in the last micro batch's backward pass
                room, ends = BACKWARD * computing_s / micro_batches, 1
            found[each.axis] = taken - (1 - SLOWED) * min(taken, room) + ends * taken / each.messages
    return found


def at_nodes(config: Config, nodes: int) -> Config:
    """Return the config on another number of nodes; if no axis takes what others leave, the data-parallel one grows."""
    before = config.cluster.node_range.most
    cluster = replace(config.cluster, nodes=nodes)
    parallel = config.parallel
    if -1 not in (parallel.dp_replicate, parallel.dp_shard, parallel.tp, parallel.pp, parallel.cp):
        axis = "dp_shard" if parallel.dp_replicate == 1 and parallel.dp_shard > 1 else "dp_replicate"
        grown = getattr(parallel, axis) * nodes
        if grown % before == 0:
            parallel = replace(parallel, **{axis: grown // before})
    return replace(config, cluster=cluster, parallel=parallel)
