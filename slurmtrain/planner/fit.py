"""Does it fit? A config's bytes on each GPU, before anything is submitted, and what would fit instead."""

from __future__ import annotations

import dataclasses

from slurmtrain.config.layout import Layout, as_overrides, layout_of, micro_batch_size, nearest_layouts
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.planner.memory import RankMemory, Work, memory_per_rank
from slurmtrain.planner.shape import DecoderShape

GIB = 2**30
MORE_NODES = 32  # so many times more, at most, are tried


def memory_of(config: Config, layout: Layout) -> list[RankMemory] | None:
    """Of the rank of each pipeline stage that has most; None where the model is no Decoder, or the sequence is not known."""
    seq_len = config.data.get("seq_len")
    known = config.job.kind == "train" and config.model.get("_target_") == "slurmtrain.models.Decoder"
    if not known or not isinstance(seq_len, int):
        return None
    parallel, micro_batch = config.parallel, micro_batch_size(config, layout)
    reshard = parallel.reshard_after_forward
    work = Work(
        micro_batch_size=micro_batch,
        seq_len=seq_len,
        compute_bytes=4 if parallel.param_dtype is None else 2,
        checkpointing=parallel.activation_checkpointing,  # type: ignore[arg-type]  # validated
        reshard_after_forward=layout.pp == 1 if reshard is None else reshard,
        in_flight=config.train.global_batch_size // (layout.dp * micro_batch)
        if parallel.pp_schedule == "gpipe"
        else None,
    )
    return memory_per_rank(
        DecoderShape.of(config.model), work, dp_shard=layout.dp_shard, tp=layout.tp, pp=layout.pp, cp=layout.cp
    )


def check_fits(config: Config) -> None:
    """Compare with `cluster.gpu_memory_gb`, where that is set.

    Raises:
        ConfigError: it cannot fit; with the bytes, and what would fit.
    """
    limit = config.cluster.gpu_memory_gb
    needed = _most(config, layout_of(config)) if limit is not None else None
    if needed is None or limit is None or needed.total <= limit * GIB:
        return
    raise ConfigError(
        f"{layout_of(config)} needs {describe(needed)} on a GPU of cluster.gpu_memory_gb={limit:g}",
        hint=_what_would(config, limit),
    )


def describe(memory: RankMemory) -> str:
    """As in "21.3 GB (parameters 4.0, gradients 4.0, optimiser 8.0, gathered 1.2, activations 4.1)"."""
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimiser": memory.optimizer,
        "gathered": memory.gathered,
        "activations": memory.activations,
    }
    words = ", ".join(f"{name} {count / GIB:.1f}" for name, count in parts.items())
    return f"{memory.total / GIB:.1f} GB ({words})"


def _most(config: Config, layout: Layout) -> RankMemory | None:
    return max(memory_of(config, layout) or [], key=lambda memory: memory.total, default=None)


def _what_would(config: Config, limit: float) -> str:
    """The smallest changes that help: another layout, or one with activations computed again; else more nodes."""
    again = dataclasses.replace(config.parallel, activation_checkpointing="full")
    found = [
        _first_that_fits(config, limit),
        _first_that_fits(dataclasses.replace(config, parallel=again), limit, "parallel.activation_checkpointing=full"),
    ]
    factor = 2
    while not any(found) and factor <= MORE_NODES:
        cluster = dataclasses.replace(config.cluster, nodes=factor * config.cluster.nodes)
        more = dataclasses.replace(config, cluster=cluster, parallel=again)
        words = f"cluster.nodes={cluster.nodes} parallel.activation_checkpointing=full"
        found, factor = [_first_that_fits(more, limit, words)], 2 * factor
    return f"what would fit: {'; or '.join(filter(None, found))}" if any(found) else "it is far too large"


def _first_that_fits(config: Config, limit: float, words: str = "") -> str | None:
    for layout in nearest_layouts(config):
        memory = _most(config, layout)
        if memory is not None and memory.total <= limit * GIB:
            return f"{as_overrides(layout, config)} {words}".strip() + f" ({memory.total / GIB:.0f} GB)"
    return None
