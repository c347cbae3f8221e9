"""Estimate a config's bytes on each GPU before anything is submitted, and find changes with which it would fit.

Estimates are arithmetic, so that hundreds of layouts can be tried on a login node. The sizes of a model of the user's own are
not known.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from slurmtrain.choices import ActivationCheckpointing, JobKind, PpSchedule, ReduceDtype
from slurmtrain.config.known_models import is_our_decoder
from slurmtrain.config.parallel_dims import (
    ParallelDims,
    as_overrides,
    extreme_sizes,
    nearest_layouts,
    parallel_dims_of,
    sequence_lengths,
)
from slurmtrain.config.schema import Config, ParallelConfig
from slurmtrain.errors import ConfigError
from slurmtrain.planner.memory import ADAM_STATES, GIB, MemorySettings, StageMemory, memory_per_rank
from slurmtrain.planner.shape import DecoderShape

CHECKPOINTING = tuple(ActivationCheckpointing)  # each keeps less than the one before, and takes longer
# The keys that a proposal may change; those that slow training down least come first.
CHEAPEST_FIRST = "dp_shard dp_replicate micro_batch_size activation_checkpointing tp cp pp nodes".split()
NODE_DOUBLINGS = 5  # doublings of the nodes that are tried if nothing else helps
PROPOSALS = 3
ROOM = 0.9  # share of a GPU's memory that a proposal may take: CUDA, NCCL and the allocator need some


def memory_of(config: Config, dims: ParallelDims) -> list[StageMemory] | None:
    """Estimate the memory of each stage by arithmetic.

    Returns:
        None if the model is not our decoder, or if its sizes are not valid, which it reports itself when it is built.
    """
    if config.job.kind != JobKind.TRAIN or not is_our_decoder(config.model):
        return None
    sizes = [config.model.get(name) for name in ("vocab_size", "dim", "n_layers", "n_heads")]
    sizes += [size for name in ("n_kv_heads", "head_dim", "hidden_dim") if (size := config.model.get(name)) is not None]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    parallel, reshard = config.parallel, config.parallel.reshard_after_forward
    work = MemorySettings(
        micro_batch_size=dims.micro_batch_size(config.train),
        seq_len=max(sequence_lengths(config.data).values(), default=0),
        compute_bytes=2 if parallel.param_dtype else 4,
        reduce_bytes=2 if parallel.reduce_dtype == ReduceDtype.BFLOAT16 else 4,
        checkpointing=parallel.activation_checkpointing,
        reshard_after_forward=dims.pp == 1 if reshard is None else reshard,
        in_flight=in_flight(parallel.pp_schedule, dims.pp, dims.micro_batches(config.train)) if dims.pp > 1 else (1,),
        fsdp=dims.uses_fsdp(parallel),
        whole_gradients=dims.pp > 1,
    )
    shape = DecoderShape.of(config.model)
    stages = memory_per_rank(shape, work, dims)
    if not config.lora.r:
        return stages
    # The model's own parameters are frozen.
    adapters = work.parameter_bytes * shape.adapter_elements(config.lora.r, dims.dp_shard * dims.cp)
    trained = {"gradients": adapters, "optimizer": adapters * ADAM_STATES}
    return [dataclasses.replace(each, parameters=each.parameters + adapters, **trained) for each in stages]


def check_fits(config: Config, dims: ParallelDims) -> None:
    """Compare the memory of each stage with `cluster.gpu_memory_gb`, if that is set; of a range of nodes, for its ends.

    Raises:
        ConfigError: the model cannot fit; the message gives the bytes, and changes with which it would fit.
    """
    limit = config.cluster.gpu_memory_gb
    if limit is None:
        return
    if config.cluster.node_range.elastic:
        for sized in extreme_sizes(config):
            check_fits(sized, parallel_dims_of(sized))
        return
    stages = memory_of(config, dims)
    if stages is None:
        return
    fullest = max(stages, key=lambda stage: stage.total)
    if fullest.total <= limit * GIB:
        return
    changes = changes_that_fit(config, ROOM * limit * GIB)
    hint = "share it out over more ranks (parallel=fsdp, more nodes), or take a smaller model"
    if changes:
        hint = f"what would fit: {'; or '.join(changes)}"
    if fullest.kept <= limit * GIB:
        hint += "; cluster.gpu_memory_gb=null submits without this check, whose activations are an estimate"
    raise ConfigError(f"{dims} needs {fullest} on a GPU of cluster.gpu_memory_gb={limit:g}", hint=hint)


def changes_that_fit(config: Config, limit: float) -> list[str]:
    """Return up to three sets of overrides with which the model fits: those that change least, none of which contains another.

    They leave the results as they are: other layouts, activation checkpointing, smaller micro batches. If none of them
    helps, they also use more nodes.

    Args:
        limit: bytes on a GPU.
    """
    for doublings in range(NODE_DOUBLINGS + 1):
        nodes = config.cluster.node_range.most * 2**doublings
        larger = replace(config, cluster=replace(config.cluster, nodes=nodes))
        more = [f"cluster.nodes={nodes}"] if doublings else []
        found: dict[frozenset[str], str] = {}  # changed keys -> overrides
        for words, total in sorted(_fitting(larger, limit, more), key=lambda change: _cost(change[0])):
            keys = frozenset(_keys(words))
            if keys and not any(other <= keys for other in found):
                found[keys] = f"{' '.join(words)} ({total / GIB:.0f} GB)"
        if found:
            return list(found.values())[:PROPOSALS]
    return []


def _cost(words: list[str]) -> tuple[int, int]:
    return len(words), sum(CHEAPEST_FIRST.index(key) for key in _keys(words))


def _keys(words: list[str]) -> list[str]:
    return [word.partition("=")[0].partition(".")[2] for word in words]


def _fitting(config: Config, limit: float, more: list[str]) -> Iterator[tuple[list[str], float]]:
    """Yield, for every possible layout, the least set of overrides with which it fits, and the bytes then.

    The layouts nearest to the config's come first.
    """
    for dims in nearest_layouts(config):
        if config.lora.r and dims.tp * dims.pp > 1:  # which adapters do not go with
            continue
        kinds = CHECKPOINTING[CHECKPOINTING.index(config.parallel.activation_checkpointing) :]
        ways = sorted(forms_of(config, dims, kinds, config.parallel), key=lambda way: (len(way[1]), way[0]))
        if not ways or most_bytes(ways[-1][2], dims) > limit:  # the change that needs least memory
            continue
        for _, further, changed in ways:
            if (total := most_bytes(changed, dims)) <= limit:
                yield [*more, *as_overrides(dims, config).split(), *further], total
                break


def most_bytes(config: Config, dims: ParallelDims) -> float:
    """Return the bytes on the GPU of the fullest rank, by arithmetic; infinity if the sizes of the model are not known."""
    return max((stage.total for stage in memory_of(config, dims) or []), default=math.inf)


def forms_of(
    config: Config, dims: ParallelDims, kinds: Sequence[ActivationCheckpointing], parallel: ParallelConfig
) -> Iterator[tuple[int, list[str], Config]]:
    """Yield the forms of a layout: the size of the change, the overrides beside those of the layout, and the changed config.

    Args:
        kinds: kinds of activation checkpointing to try.
        parallel: what is kept of the config's.
    """
    for (slower, kind), (halvings, size) in itertools.product(
        enumerate(kinds), enumerate(micro_batch_sizes(config, dims))
    ):
        words = [f"train.micro_batch_size={size}"] if halvings else []
        if kind != config.parallel.activation_checkpointing:
            words.append(f"parallel.activation_checkpointing={kind}")
        changed = replace(parallel, activation_checkpointing=kind)
        train = replace(config.train, micro_batch_size=size)
        yield slower + halvings, words, replace(config, parallel=changed, train=train)


def micro_batch_sizes(config: Config, dims: ParallelDims) -> list[int]:
    """Return the micro batch size and its halves down to a single sequence; each divides a rank's share of the global batch."""
    share, sizes = config.train.global_batch_size // dims.dp, [dims.micro_batch_size(config.train)]
    while sizes[-1] > 1:
        sizes.append(next(size for size in range(sizes[-1] // 2, 0, -1) if share % size == 0))
    return [size for size in sizes if share and share % size == 0]


def in_flight(schedule: str, pp: int, micro_batches: int) -> tuple[float, ...]:
    """Return the number of micro batches whose activations each rank of a pipeline keeps at once.

    See Narayanan et al. 2021, section 2.2.

    With two stages a rank, each keeps half of a micro batch's. Zero bubble keeps them until the weights' gradients are
    done.
    """
    if schedule == PpSchedule.GPIPE:
        return (micro_batches,) * pp
    if schedule == PpSchedule.ZERO_BUBBLE:
        return (min(micro_batches, pp),) * pp
    if schedule == PpSchedule.ONE_F_ONE_B:
        return tuple(min(micro_batches, pp - rank) for rank in range(pp))
    return tuple(min(micro_batches, (2 * (pp - rank - 1) + pp + 1) / 2) for rank in range(pp))
