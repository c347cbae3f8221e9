"""A checkpoint -> a folder that transformers, and what reads its folders, loads: names, config.json, tokenizer.

See `weights.export` for how it is read and written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.tensors import dtype_name
from slurmtrain.config import known_models
from slurmtrain.config.known_models import is_our_decoder
from slurmtrain.data.format import manifest as prepared
from slurmtrain.data.format.reading import DataError, TokenStream
from slurmtrain.data.sources.config_check import PREPARED
from slurmtrain.errors import ConfigError
from slurmtrain.models.huggingface import HuggingFace, stored_names
from slurmtrain.weights import hf_names
from slurmtrain.weights.export import Entry, Exported, json_bytes, opened

MODEL = "model"  # the object of a checkpoint that is exported
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
# What is taken over from the folder that the weights came from.
TOKENIZER_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", TEMPLATE, "chat_template.json"),
)
LOOKED_AT = 1 << 16  # tokens of chat data that show how its answers end
TO_FILE = "export to a file: FILE.safetensors"


def export_hf(
    path: Path, out: Path, *, dtype: str | None = None, progress: Callable[[int], None] = lambda count: None
) -> Exported:
    """Write the model of the checkpoint `path` to the folder `out`, which is there completely or not at all.

    Args:
        dtype: element type of the weights, as "bfloat16"; None: as saved.
        progress: called with the number of bytes of every tensor read.

    Raises:
        UsageError: `out` is not valid.
        CheckpointError: the checkpoint is damaged, does not say what model it holds, or holds one that Hugging Face has no
            family for, or adapters alone; or `out` cannot be written.
    """
    config = read_manifest(path).config
    if is_of_adapters(config):
        raise CheckpointError(
            f"{path.name} holds adapters, and no whole model",
            hint="--format peft, and merge that with merge_and_unload() of peft: see `help models`",
        )
    with opened(path, MODEL, dtype, progress) as checkpoint:
        try:
            described, names, base, described_notes = describe(config, checkpoint.entries)
        except ConfigError as error:
            raise CheckpointError(f"{path.name}: {error.message}", hint=error.hint) from None
        ours = {entry.name: entry for entry in checkpoint.entries}
        entries = [replace(ours[name], name=theirs) for name, theirs in names.items() if theirs]
        files, special, notes = companions(config, base)
        dtypes = {dtype_name(entry.dtype) for entry in entries if entry.dtype.is_floating_point}
        values = {**described, **{name: value for name, value in special.items() if value is not None}}
        values.pop("dtype", None)
        values["torch_dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
        files[GENERATION] = _generation(values, files.get(GENERATION), _ends_of_answers(config))
        files[known_models.CONFIG] = json_bytes(values)
        return replace(checkpoint.write_folder(out, entries, files), notes=(*described_notes, *notes))


def is_of_adapters(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint that is bound to this config holds adapters, and no other weights."""
    lora = config.get("lora")
    return isinstance(lora, Mapping) and bool(lora.get("r"))


def describe(
    config: Mapping[str, Any], entries: Sequence[Entry]
) -> tuple[Mapping[str, Any], Mapping[str, str | None], Path | None, list[str]]:
    """Describe a model, from the config that its checkpoint is bound to and its tensors.

    Returns:
        Its config.json, but for what depends on types and tokenizer; its tensors' names there by those in the checkpoint,
            None if one is left out; the folder that its weights came from, if that is there; and notes.

    Raises:
        ConfigError: the config does not say what model it is, or Hugging Face has no family for it.
    """
    model = config.get("model")
    if not isinstance(model, Mapping) or not model.get("_target_"):
        raise ConfigError("it does not say what model it holds, as one of a program of your own", hint=TO_FILE)
    base_folder = Path(model["path"]) if isinstance(model.get("path"), str) else None
    base, notes = None, []
    if base_folder is not None:
        try:
            base = known_models.read_config(base_folder)
        except ConfigError:
            notes.append(
                f"{base_folder}, whose weights it began with, is not there any more: config.json is written anew"
            )
    if is_our_decoder(model):
        names = {entry.name: hf_names.hugging_face_name(entry.name) for entry in entries}
        described = hf_names.config_json(model, {entry.name: entry.shape for entry in entries}, base=base)
    elif model.get("_target_") == known_models.HUGGING_FACE:
        described, names = _of_transformers(model, base, entries)
    else:
        raise ConfigError(f"it holds a {model['_target_']}, which transformers does not know", hint=TO_FILE)
    return described, names, base_folder if base is not None else None, notes


def _of_transformers(
    model: Mapping[str, Any], base: Mapping[str, Any] | None, entries: Sequence[Entry]
) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return config.json and the names of tensors of a model of transformers."""
    values = base if base is not None else model.get("config")
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"model.path={model.get('path')} is not there any more, which has its config.json", hint=TO_FILE
        )
    described, stored = stored_names(values)
    names: dict[str, str | None] = {}
    for entry in entries:
        name = HuggingFace.stored_name(entry.name)
        names[entry.name] = name if name in stored else None  # a tied one has another name, too
    missing = stored - set(names.values())
    if missing:
        raise ConfigError(f"it lacks {min(missing)}, which its model has", hint=TO_FILE)
    return dict(base if base is not None else described), names


def _generation(config: Mapping[str, Any], given: bytes | None, ends: Sequence[int]) -> bytes:
    """Return generation_config.json: `given`, or a new one; generation stops at the ends of answers, too."""
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    new = {"_from_model_config": True, **{name: value for name, value in ids.items() if value is not None}}
    values = new if given is None else json.loads(given)
    known = values.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    more = [end for end in ends if end not in known]
    if not more:
        return json_bytes(new) if given is None else given
    return json_bytes({**values, "_from_model_config": False, "eos_token_id": [*known, *more]})


# The tokenizer.


def companions(
    config: Mapping[str, Any], base: Path | None
) -> tuple[dict[str, bytes], dict[str, int | None], tuple[str, ...]]:
    """Return the files of the tokenizer that made the training's data, the ids of its special tokens, and notes.

    Args:
        config: what the checkpoint is bound to, with `data`.
        base: the folder that the weights came from; its files are taken unless the data was made by another tokenizer.
    """
    known = (*TOKENIZER_FILES, GENERATION)
    files = {name: (base / name).read_bytes() for name in known if (base / name).is_file()} if base else {}
    found = _prepared_data(config.get("data"))
    if found is None:
        none = () if TOKENIZER in files else ("no tokenizer is written: the run's data does not say which one made it",)
        return files, {}, none
    folder, facts = found[0], found[1].tokenizer
    # Chat data has its own template, which the weights' folder need not have.
    beside = {name: (folder / name).read_bytes() for name in (TEMPLATE, TOKENIZER_CONFIG) if (folder / name).is_file()}
    template = {TEMPLATE: beside[TEMPLATE]} if TEMPLATE in beside else {}
    if facts.sha256 is not None and TOKENIZER in files and hashlib.sha256(files[TOKENIZER]).hexdigest() == facts.sha256:
        return {**files, **template}, {}, ()
    special = {"bos_token_id": facts.bos, "eos_token_id": facts.eos}
    if facts.kind == "bytes":
        return template, special, ("no tokenizer is written: each token is a byte of UTF-8",)
    content = (folder / TOKENIZER).read_bytes()
    return {TOKENIZER: content, TOKENIZER_CONFIG: _tokenizer_config(content, facts), **beside}, special, ()


def _prepared_data(data: Any) -> tuple[Path, prepared.Manifest] | None:
    """Return the first prepared data set that a config names, at any depth, and that is there: its folder and manifest."""
    if not isinstance(data, Mapping):
        return None
    if data.get("_target_") == PREPARED and isinstance(data.get("path"), str):
        with suppress(ConfigError):
            return Path(data["path"]), prepared.read_manifest(Path(data["path"]))
    return next(filter(None, map(_prepared_data, data.values())), None)


def _ends_of_answers(config: Mapping[str, Any]) -> list[int]:
    """Return the special tokens with which the answers of the training's conversations end, which base models do not know."""
    found = _prepared_data(config.get("data"))
    if found is None or found[1].chat is None or found[1].tokenizer.kind == "bytes":
        return []
    folder, manifest = found
    try:
        stream = TokenStream(folder, manifest, "train")
        tokens = np.empty(min(stream.tokens, LOOKED_AT), stream.dtype)
        counts = np.empty(len(tokens), np.uint8)
        stream.read_into(tokens, 0)
        stream.read_into(counts, 0, prepared.LOSS_MASK)
        known = json.loads((folder / TOKENIZER).read_bytes()).get("added_tokens") or []
    except (ConfigError, DataError, OSError):
        return []
    special = {token["id"] for token in known if token.get("special")}
    return sorted(special & set(tokens[:-1][counts[:-1] > counts[1:]].tolist()))


def _tokenizer_config(content: bytes, facts: prepared.TokenizerFacts) -> bytes:
    values = json.loads(content)
    vocabulary = values.get("model", {}).get("vocab")
    texts = {id: text for text, id in vocabulary.items()} if isinstance(vocabulary, dict) else {}
    texts |= {token["id"]: token["content"] for token in values.get("added_tokens") or []}
    special = {"bos_token": texts.get(facts.bos), "eos_token": texts.get(facts.eos)}
    return json_bytes(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{name: text for name, text in special.items() if text is not None},
        }
    )
