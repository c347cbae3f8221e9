"""A checkpoint of adapters -> a folder as `PeftModel.from_pretrained` of peft reads it, which also merges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.config import known_models
from slurmtrain.models.huggingface import HuggingFace
from slurmtrain.weights import hf_names
from slurmtrain.weights.export import Exported, json_bytes, opened
from slurmtrain.weights.hf_export import GENERATION, MODEL, companions, is_of_adapters


def export_peft(path: Path, out: Path) -> Exported:
    """Write the adapters of the checkpoint `path` to the folder `out`, for PeftModel.from_pretrained of peft.

    Raises:
        UsageError: `out` is not valid.
        CheckpointError: the checkpoint is damaged or holds no adapters, the weights beside them are in no folder of Hugging
            Face, or `out` cannot be written.
    """
    config = read_manifest(path).config
    if not is_of_adapters(config):
        raise CheckpointError(f"{path.name} holds a whole model, and no adapters", hint="--format hf")
    model = config.get("model")
    base = model.get("path") if isinstance(model, Mapping) else None
    if not isinstance(base, str):
        raise CheckpointError(
            f"{path.name} holds adapters of a model whose weights were drawn at random, not read from model.path",
            hint="export FILE.safetensors writes the adapters by themselves",
        )
    if not (Path(base) / "config.json").is_file():
        raise CheckpointError(f"{path.name} holds adapters beside the weights of {base}, which is not there any more")
    with opened(path, MODEL, None) as checkpoint:
        entries, layers = [], {}
        for entry in checkpoint.entries:
            layer, _, rest = entry.name.partition(".lora_")
            layers[layer] = _name_in_folder(layer, model or {})
            entries.append(replace(entry, name=f"base_model.model.{layers[layer]}.lora_{rest[:1]}.weight"))
        lora = config["lora"]
        adapter_config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": lora["r"],
            "lora_alpha": lora["alpha"],
            "lora_dropout": lora["dropout"],
            "target_modules": list(layers.values()),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        files, _, notes = companions(config, Path(base))
        files.pop(GENERATION, None)
        # The names that peft gives.
        files["adapter_config.json"] = json_bytes(adapter_config)
        written = checkpoint.write_folder(out, entries, files, stem="adapter_model", one_file=True)
        return replace(written, notes=notes)


def _name_in_folder(layer: str, model: Mapping[str, Any]) -> str:
    if model.get("_target_") == known_models.HUGGING_FACE:
        return HuggingFace.stored_name(layer)
    name = hf_names.hugging_face_name(f"{layer}.weight")
    if name is None:
        raise CheckpointError(
            f"{layer} has no name in a folder of Hugging Face", hint="export to a file: FILE.safetensors"
        )
    return name.removesuffix(".weight")
