"""A checkpoint of adapters -> a folder that others load: merged into the weights that they stand beside, or by themselves.

Merged, each weight W beside adapters becomes W + alpha / r * B A (Hu et al. 2021, arXiv:2106.09685, section 4.1), computed in
float32 and written in the element type of W. One weight is in memory at a time. By themselves the adapters are a folder as
`PeftModel.from_pretrained` of peft reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.safetensors_files import StoredTensor, tensors_of
from slurmtrain.checkpoint.tensors import dtype_of
from slurmtrain.config import known_models
from slurmtrain.models.huggingface import HuggingFace
from slurmtrain.system.files import write_synced
from slurmtrain.weights import hf_names
from slurmtrain.weights.export import Entry, Exported, appearing, in_type, json_bytes, opened, write_safetensors

MODEL = "model"
WEIGHTS = "adapter_model.safetensors"  # the names that peft gives
CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Adapters:
    """The adapters of a checkpoint.

    Attributes:
        config: the config that the checkpoint is bound to.
        base: the folder of the weights beside which they stand.
        layers: A [r, in] and B [out, r] of each layer, by its name in a folder of Hugging Face, without ".weight".
        about: what an export says of where it comes from.
    """

    config: Mapping[str, Any]
    base: Path
    layers: Mapping[str, tuple[Tensor, Tensor]]
    about: Mapping[str, str]

    @property
    def scale(self) -> float:
        lora = self.config["lora"]
        return float(lora["alpha"]) / float(lora["r"])


def is_of_adapters(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint that is bound to this config holds adapters, and no other weights."""
    lora = config.get("lora")
    return isinstance(lora, Mapping) and bool(lora.get("r"))


def read_adapters(path: Path, progress: Callable[[int], None] = lambda count: None) -> Adapters:
    """Read the adapters of the checkpoint `path` into memory.

    Raises:
        CheckpointError: the checkpoint is damaged, or the weights beside its adapters are in no folder of Hugging Face.
    """
    with opened(path, MODEL, None) as checkpoint:
        config, about = checkpoint.manifest.config, checkpoint.about
        tensors = list(checkpoint.tensors(checkpoint.entries, progress))
    model = config.get("model")
    base = model.get("path") if isinstance(model, Mapping) else None
    if not isinstance(base, str):
        raise CheckpointError(
            f"{path.name} holds adapters of a model whose weights were drawn at random, not read from model.path",
            hint="--format safetensors writes the adapters by themselves",
        )
    if not (Path(base) / "config.json").is_file():
        raise CheckpointError(f"{path.name} holds adapters beside the weights of {base}, which is not there any more")
    found: dict[str, dict[str, Tensor]] = {}
    for entry, tensor in tensors:
        layer, _, rest = entry.name.partition(".lora_")
        found.setdefault(_name_in_folder(layer, model or {}), {})[rest[:1]] = tensor
    layers = {layer: (pair["A"], pair["B"]) for layer, pair in found.items()}
    return Adapters(config, Path(base), layers, about)


def merged_entries(adapters: Adapters, dtype: str | None) -> dict[Entry, StoredTensor]:
    """Return the tensors of the merged model, in their order, and where the weights lie that they begin with.

    Args:
        dtype: element type of the result; None: that of the weights.

    Raises:
        CheckpointError: the folder of the weights cannot be read, or lacks a layer that has adapters.
    """
    stored = tensors_of(adapters.base)
    missing = [name for name in adapters.layers if f"{name}.weight" not in stored]
    if missing:
        raise CheckpointError(f"{adapters.base} lacks {missing[0]}.weight, which has adapters")
    target = None if dtype is None else dtype_of(dtype)
    return {
        Entry(
            name, each.shape, each.dtype, each.dtype if target is None or not each.dtype.is_floating_point else target
        ): each
        for name, each in stored.items()
    }


def merged(adapters: Adapters, entries: Mapping[Entry, StoredTensor]) -> Iterator[tuple[Entry, Tensor]]:
    """Yield all tensors of the merged model. Raises CheckpointError when the weights cannot be read."""
    for entry, stored in entries.items():
        weight = stored.read()
        pair = adapters.layers.get(entry.name.removesuffix(".weight"))
        if pair is not None:
            a, b = (part.float() for part in pair)
            weight = weight.float().addmm_(b, a, alpha=adapters.scale)
        yield entry, in_type(entry, weight)


def export_adapters(adapters: Adapters, out: Path, files: Mapping[str, bytes], *, force: bool = False) -> Exported:
    """Write a folder of adapters as peft reads it, with the tokenizer's files. Raises as `write_hf_folder`."""
    tensors = {
        f"base_model.model.{layer}.lora_{which}.weight": tensor
        for layer, pair in adapters.layers.items()
        for which, tensor in zip("AB", pair, strict=True)
    }
    entries = [Entry(name, tuple(tensor.shape), tensor.dtype, tensor.dtype) for name, tensor in tensors.items()]
    lora = adapters.config["lora"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(adapters.base),
        "r": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": list(adapters.layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with appearing(out, folder=True, force=force) as temporary:
        write_safetensors(
            temporary / WEIGHTS, entries, adapters.about, lambda some: zip(some, tensors.values(), strict=True)
        )
        for name, content in {**files, CONFIG: json_bytes(config)}.items():
            write_synced(temporary / name, content)
    return Exported(out, len(entries), sum(path.stat().st_size for path in out.iterdir()))


def _name_in_folder(layer: str, model: Mapping[str, Any]) -> str:
    if model.get("_target_") == known_models.HUGGING_FACE:
        return HuggingFace.stored_name(layer)
    name = hf_names.hugging_face_name(f"{layer}.weight")
    if name is None:
        raise CheckpointError(f"{layer} has no name in a folder of Hugging Face", hint="--format safetensors")
    return name.removesuffix(".weight")
