"""Check which adapters are added, and beside which layers."""

from __future__ import annotations

from slurmtrain.config.checks.values import at_least
from slurmtrain.config.families import EMBEDDINGS, HUGGING_FACE, LINEAR_LAYERS, OUTPUTS, ties_embeddings
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config, LoraConfig
from slurmtrain.errors import ConfigError, nearest
from slurmtrain.our_decoder import is_our_decoder

PARALLELISM = {"tp": "tensor parallelism", "pp": "pipeline parallelism"}


def check_lora(lora: LoraConfig, dims: ParallelDims) -> None:
    """Raise for sizes that adapters cannot have, and for axes that they cannot be combined with."""
    at_least("lora.r", lora.r, 0)
    if not lora.r:
        return
    if lora.alpha < 1:
        raise ConfigError(f"lora.alpha={lora.alpha} must be at least 1", hint="for example twice lora.r")
    if not 0 <= lora.dropout < 1:
        raise ConfigError(f"lora.dropout={lora.dropout} must be at least 0, and below 1")
    for axis in ("tp", "pp"):
        if getattr(dims, axis) > 1:
            raise ConfigError(
                f"lora.r={lora.r} with parallel.{axis}={getattr(dims, axis)}: LoRA adapters cannot be combined with "
                f"{PARALLELISM[axis]}",
                hint=f"set parallel.{axis}=1; parallel=fsdp shards the frozen weights over all ranks",
            )


def check_adapted_layers(config: Config) -> None:
    """Raise if adapters are asked for beside an embedding, or a layer that has its weights, or that the decoder lacks."""
    if not config.lora.r:
        return
    for target in config.lora.target_modules:
        layer = target.rpartition(".")[2]
        known = is_our_decoder(config.model) or config.model.get("_target_") == HUGGING_FACE
        if known and layer in EMBEDDINGS:
            raise ConfigError(
                f"lora.target_modules names {target!r}, which is an embedding: adapters are added to linear layers",
                hint="leave it out; lora.target_modules=[] adds adapters to all linear layers but the last",
            )
        if is_our_decoder(config.model) and layer not in LINEAR_LAYERS:
            ours = {theirs: name for name, theirs in LINEAR_LAYERS.items()}
            raise ConfigError(
                f"lora.target_modules names {target!r}, and the built-in decoder has no linear layer of that name",
                hint=f"it calls this layer {ours[layer]!r}" if layer in ours else nearest(layer, LINEAR_LAYERS),
            )
        if layer in OUTPUTS and ties_embeddings(config.model):
            raise ConfigError(
                f"lora.target_modules names {target!r}, which has the same weights as the embedding: adapters beside it "
                "could not be merged into one of the two for an export",
                hint=f"leave {target} out of lora.target_modules",
            )
