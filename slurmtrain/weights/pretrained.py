"""Weights of a folder of Hugging Face into a model in any layout: each rank reads the parts that it holds, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.manifest import Box
from slurmtrain.checkpoint.tensors import box_of, local, module_state
from slurmtrain.config import known_models
from slurmtrain.config.known_models import is_our_decoder
from slurmtrain.errors import ConfigError
from slurmtrain.models.decoder import Decoder
from slurmtrain.models.huggingface import HuggingFace
from slurmtrain.models.lora import has_adapters, name_without_adapters, without_adapters
from slurmtrain.weights import hf_names

SHOWN = 3
COMPUTED = "rotary_emb.inv_freq"  # where it is used, so that nobody needs it


def weights_path(model: Mapping[str, Any]) -> Path | None:
    """Return the folder that the config group `model` begins with the weights of; None: it names none."""
    path = model.get("path")
    known = is_our_decoder(model) or model.get("_target_") == known_models.HUGGING_FACE
    return Path(path) if known and isinstance(path, str) else None


def check_config(model: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if the config group `model` is of another model than that in `folder`."""
    if is_our_decoder(model):
        fields = known_models.decoder_fields(known_models.read_config(folder), str(folder))
        known_models.check_agrees(model, fields, str(folder))


def load_pretrained(model: nn.Module, folder: Path) -> None:
    """Fill the parameters of `model` that this rank holds (whole, DTensors, or a stage of a pipeline) from `folder`.

    Args:
        model: a Decoder, or a HuggingFace; wrapped by DDP, or by torch.compile, or not.

    Raises:
        ConfigError: the folder lacks a tensor, or has one of another shape, or one that the model has no place for.
        CheckpointError: a file cannot be read.
    """
    stored = tensors_of(folder)
    its = module_state(model)
    inner = its.root
    entries = without_adapters(inner) if has_adapters(inner) else its.entries
    held = {name: tensor for name, tensor in entries.items() if isinstance(tensor, Tensor)}
    if isinstance(inner, HuggingFace):
        names = [name_without_adapters(name) for name, _ in inner.named_parameters()]  # of a tied one the first
        if not all(HuggingFace.stored_name(name) in stored for name in names if name in held):
            _load_converted(held, folder)
            return
        wanted = _wanted(held, stored, HuggingFace.stored_name, folder)
    elif isinstance(inner, Decoder):
        wanted = _wanted(held, stored, hf_names.hugging_face_name, folder)
        known = {_of_any_layer(hf_names.hugging_face_name(name) or "") for name in held}
        # Other ranks may hold these. A tied output is in some folders all the same; it equals the embedding.
        known |= {f"{module}.weight" for module in hf_names.OUTSIDE.values()}
        unknown = [name for name in stored if _of_any_layer(name) not in known and not name.endswith(COMPUTED)]
        if unknown:
            raise ConfigError(
                f"model.path={folder} has tensors that the built-in decoder does not have: {_shown(unknown)}",
                hint=known_models.ANY_FAMILY,
            )
    else:
        raise ConfigError(
            f"{type(inner).__name__} has no weights in folders of Hugging Face", hint=known_models.ANY_FAMILY
        )
    for source, index, part in wanted:
        if part.numel():
            part.copy_(source[index])


def tensors_of(folder: Path) -> dict[str, Any]:
    """Return the tensors of a folder by name, as the slices of the safetensors library, which reads what they are asked for.

    Raises:
        CheckpointError: there is none, or one is damaged.
    """
    found: dict[str, Any] = {}
    for path in _files(folder):
        try:
            file: Any = safe_open(path, "pt")
            found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}", hint="was it copied completely?") from None
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / hf_names.INDEX
    if index.is_file():
        try:
            names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error}") from None
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{index} names {name!r}, which is not a file in that folder")
        return [folder / name for name in sorted(names)]
    if (folder / hf_names.SINGLE).is_file():
        return [folder / hf_names.SINGLE]
    pickled = next(folder.glob("*.bin"), None)
    raise CheckpointError(
        f"{folder} has neither {hf_names.SINGLE} nor {hf_names.INDEX}",
        hint=f"{pickled.name} is a pickle; write the folder again with save_pretrained of a newer transformers"
        if pickled is not None
        else "name a folder written by save_pretrained",
    )


def _load_converted(held: Mapping[str, Tensor], folder: Path) -> None:
    """Fill `held` from a model whose tensors transformers names or joins otherwise than the files do (experts of an MoE).

    Each rank then has the whole model in memory for a while, in the element type of the files.
    """
    import transformers

    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto").state_dict()
    with torch.no_grad():
        for name, tensor in held.items():
            box = box_of(name, tensor)
            part = whole[HuggingFace.stored_name(name)][box.within(Box.whole(tensor.shape))]
            if part.numel():
                local(tensor.detach()).copy_(part)


def _wanted(
    held: Mapping[str, Tensor],
    stored: Mapping[str, Any],
    name_of: Callable[[str], str | None],
    folder: Path,
) -> list[tuple[Any, tuple[slice, ...], Tensor]]:
    """Return where to read each tensor that this rank holds from, the index of its part there, and its memory."""
    wanted, missing, wrong = [], {}, []
    filled: set[int] = set()
    for name, tensor in held.items():
        source = stored.get(name_of(name) or "")
        part = local(tensor.detach())
        if source is None:
            missing[name_of(name) or name] = part
        elif source.get_shape() != list(tensor.shape):
            wrong.append(f"{name_of(name)} is {source.get_shape()} there, and {list(tensor.shape)} in the model")
        elif tensor.is_floating_point() and source.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            wrong.append(f"{name_of(name)} is {source.get_dtype()} there: quantised weights cannot be read")
        else:
            wanted.append((source, box_of(name, tensor).within(Box.whole(tensor.shape)), part))
            filled.add(part.data_ptr())
    # A tied matrix has two names, and one of them is in the folder.
    absent = [name for name, part in missing.items() if part.numel() and part.data_ptr() not in filled]
    if absent:
        raise ConfigError(
            f"model.path={folder} lacks tensors that the model has: {_shown(absent)}",
            hint="was it copied completely, and does it contain a causal language model?",
        )
    if wrong:
        raise ConfigError(f"model.path={folder} belongs to another model: {_shown(wrong)}")
    return wanted


def _of_any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
