"""Weights of a folder of Hugging Face in, and out again: the same numbers, in each family."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.config.compose import compose
from slurmtrain.config.known_models import decoder_fields, with_sizes
from slurmtrain.data.format.manifest import TokenizerFacts
from slurmtrain.data.sources.config_check import PREPARED
from slurmtrain.errors import ConfigError
from slurmtrain.models.decoder import Decoder
from slurmtrain.models.huggingface import HuggingFace
from slurmtrain.rank.jobs.build_model import build_model, fill
from slurmtrain.weights import export as weights_export
from slurmtrain.weights.hf_export import companions, export_hf
from slurmtrain.weights.hf_names import INDEX
from slurmtrain.weights.pretrained import load_pretrained, tensors_of
from tests.support import transformers_models as theirs
from tests.support.prepared import write_prepared
from tests.support.transformers_models import FAMILIES, TOKENS

DECODER = "slurmtrain.models.Decoder"
# Both sum the same float32 terms, in orders that a kernel may choose: 80 terms of values below 8 at most, twice a layer;
# 8 * sqrt(4 * 80) * 2**-24. Measured: no difference at all.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        theirs.save(family, root / family)
    return {family: root / family for family in FAMILIES}


def begun(folder: Path, **changes: Any) -> tuple[Decoder, dict[str, Any]]:
    """The decoder of model=hf, and its config."""
    config = with_sizes({"_target_": DECODER, "path": str(folder), "max_seq_len": None, "dropout": 0.0, **changes})
    model = Decoder(**{name: value for name, value in config.items() if name != "_target_"})
    load_pretrained(model, folder)
    return model, config


def saved(directory: Path, model: nn.Module, config: dict[str, Any]) -> Path:
    checkpointer = Checkpointer(directory, run_id="r1", config={"model": config})
    checkpointer.save(7, model=model)
    checkpointer.close()
    return committed(directory)[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_in_and_goes_out_with_the_same_logits(
    family: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = begun(folders[family])
    expected = theirs.read(folders[family])
    torch.testing.assert_close(model(TOKENS), theirs.logits_of(expected), rtol=0, atol=TOLERANCE)

    checkpoint = saved(tmp_path / "checkpoints", model, config)
    with monkeypatch.context() as patch:
        patch.setattr(weights_export, "SHARD_BYTES", 20_000)
        exported = export_hf(checkpoint, tmp_path / "out")
    again = theirs.read(tmp_path / "out")
    assert type(again) is type(expected) and len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 5
    assert {name: value.tolist() for name, value in again.state_dict().items()} == {
        name: value.tolist() for name, value in expected.state_dict().items()
    }
    assert torch.equal(theirs.logits_of(again), theirs.logits_of(expected))
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(TOKENS, **greedy), expected.generate(TOKENS, **greedy))
    assert exported.tensors == len(tensors_of(folders[family]))

    # Without the folder that it began with: the same function, by what the decoder knows of itself.
    elsewhere = saved(tmp_path / "alone", model, {name: value for name, value in config.items() if name != "path"})
    export_hf(elsewhere, tmp_path / "anew")
    anew = theirs.read(tmp_path / "anew")
    assert torch.equal(theirs.logits_of(anew), theirs.logits_of(expected))
    assert (tmp_path / "anew" / "model.safetensors").is_file()


def test_weights_in_bfloat16_come_back_bit_by_bit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    theirs.save("qwen2_5", tmp_path / "in", torch.bfloat16)
    model, config = begun(tmp_path / "in")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    export_hf(saved(tmp_path / "checkpoints", model, config), tmp_path / "out", dtype="bfloat16")
    before, after = (theirs.read(tmp_path / name).state_dict() for name in ("in", "out"))
    assert before.keys() == after.keys() and {value.dtype for value in after.values()} == {torch.bfloat16}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_model_hf_takes_its_sizes_from_the_folder(folders: dict[str, Path]) -> None:
    config = compose(["model=hf", f"model.path={folders['qwen3']}"]).model
    assert (config["dim"], config["n_kv_heads"], config["head_dim"], config["qk_norm"]) == (48, 2, 16, True)
    assert config["max_seq_len"] == 64 and config["rope_theta"] == 1e6
    assert compose(["model=hf", f"model.path={folders['qwen3']}", "model.max_seq_len=16"]).model["max_seq_len"] == 16
    # Within its window, a token of Mistral's attends to all before it.
    assert compose(["model=hf", f"model.path={folders['mistral']}"]).model["max_seq_len"] == 32


LLAMA = {"model_type": "llama", **theirs.SIZES}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gemma2"}, r"model_type is 'gemma2'; our decoder computes one of llama, mistral, qwen2, qwen3"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_type is 'yarn'; our decoder computes one of default, llama3",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": None}, "a value that is not a number"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        decoder_fields({**LLAMA, **values}, "/models/x")
    assert "\n" not in error.value.message


def test_files_of_transformers_4_and_5_say_the_same() -> None:
    four = {**LLAMA, "rope_theta": 500.0, "rope_scaling": {**theirs.LLAMA3, "original_max_position_embeddings": 16}}
    five = {**LLAMA, "rope_parameters": {**four["rope_scaling"], "rope_theta": 500.0}}
    assert decoder_fields(four, "/x") == decoder_fields(five, "/x")
    assert decoder_fields(four, "/x")["rope_scaling"]["original_seq_len"] == 16


def test_a_field_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    for values, message in (
        ({"n_layers": 3}, "model.n_layers=3, but the weights .* are of a model with 2"),
        ({"max_seq_len": 64}, "model.max_seq_len=64, but the layers .* attend to the last 32 tokens only"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mistral", "sliding_window": 32}))
        with pytest.raises(ConfigError, match=message):
            with_sizes({"_target_": DECODER, "path": str(tmp_path), **values})
    with pytest.raises(ConfigError, match=r"model.path=/nowhere: its config.json cannot be read: No such file"):
        compose(["model=hf", "model.path=/nowhere"])


def test_a_folder_that_is_not_whole_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["qwen3"], tmp_path / "m")
    last = sorted((tmp_path / "m").glob("*.safetensors"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="was it copied completely"):
        begun(tmp_path / "m")
    last.unlink()
    with pytest.raises(CheckpointError, match=f"{last.name} cannot be read"):
        begun(tmp_path / "m")
    last.write_bytes(content)
    index = tmp_path / "m" / INDEX
    files = json.loads(index.read_text())["weight_map"]
    left = {name: file for name, file in files.items() if file != last.name}
    index.write_text(json.dumps({"weight_map": left}))
    with pytest.raises(ConfigError, match="lacks tensors that the model has"):
        begun(tmp_path / "m")
    index.write_text(json.dumps({"weight_map": {**files, "more": "../other/model.safetensors"}}))
    with pytest.raises(
        CheckpointError, match=r"names '\.\./other/model.safetensors', which is not a file in that folder"
    ):
        begun(tmp_path / "m")


@pytest.mark.parametrize("group", ["hf", "huggingface"])
def test_weights_of_eight_bits_are_refused_and_not_read_as_if_they_were_whole(
    group: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders["qwen3"], tmp_path / "m")
    index = json.loads((tmp_path / "m" / INDEX).read_text())["weight_map"]
    name = "model.layers.0.mlp.up_proj.weight"
    file = tmp_path / "m" / index[name]
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    model = build_model(compose([f"model={group}", f"model.path={tmp_path / 'm'}"]))
    fill(model, torch.device("cpu"), 1)
    with pytest.raises(ConfigError, match=f"{name} is F8_E4M3 there: quantised weights cannot be read"):
        load_pretrained(model, tmp_path / "m")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(2)}, file, {"format": "pt"})
    if group == "hf":
        with pytest.raises(ConfigError, match=r"does not have: model\.layers\.0\.self_attn\.q_proj\.bias"):
            load_pretrained(model, tmp_path / "m")


# The tokenizer.


def test_the_tokenizer_of_the_data_goes_with_the_weights(tmp_path: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    write_prepared(tmp_path / "bytes", {"train": [[[1, 2]]]}, vocab_size=256)
    files, special, notes = companions({"data": {"_target_": PREPARED, "path": str(tmp_path / "bytes")}}, None)
    assert (files, special) == ({}, {"bos_token_id": None, "eos_token_id": None})
    assert notes == ("no tokenizer is written: each token is a byte of UTF-8",)

    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2, "</s>": 3}, unk_token="?"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.add_special_tokens(["</s>"])
    own.save(str(tmp_path / "tokenizer.json"))
    manifest = write_prepared(tmp_path / "words", {"train": [[[1, 2]]]}, vocab_size=4)
    content = (tmp_path / "tokenizer.json").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    facts = TokenizerFacts("tokenizers", "tokenizer.json", digest, 4, None, 3)
    dataclasses.replace(manifest, tokenizer=facts).write(tmp_path / "words")
    (tmp_path / "words" / "tokenizer.json").write_bytes(content)
    data = {"sources": {"web": {"_target_": PREPARED, "path": str(tmp_path / "words")}}}
    files, special, _ = companions({"data": data}, None)
    (tmp_path / "b").mkdir()
    for name, value in files.items():
        (tmp_path / "b" / name).write_bytes(value)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert (tokenizer.eos_token, tokenizer("b a </s>")["input_ids"]) == ("</s>", [1, 0, 3])
    assert special == {"bos_token_id": None, "eos_token_id": 3}

    # The same tokenizer in the folder of the first weights: all of its files, with the chat template.
    (tmp_path / "base").mkdir()
    for name, value in {**files, "chat_template.jinja": b"{{ messages }}", "generation_config.json": b"{}"}.items():
        (tmp_path / "base" / name).write_bytes(value)
    assert companions({"data": data}, tmp_path / "base")[0].keys() == {
        *files, "chat_template.jinja", "generation_config.json",
    }  # fmt: skip
    assert "no tokenizer is written" in companions({"data": {}}, None)[2][0]


# model=huggingface


@pytest.mark.parametrize("family", ["llama3_tied", "qwen3"])
def test_a_model_of_transformers_takes_no_memory_before_it_is_filled(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = {"_target_": "slurmtrain.models.huggingface.HuggingFace", "path": str(folders[family]), "config": None}
    model = build_model(compose(["model=huggingface", f"model.path={folders[family]}"]))
    assert isinstance(model, HuggingFace) and all(parameter.is_meta for parameter in model.parameters())
    fill(model, torch.device("cpu"), 1)
    load_pretrained(model, folders[family])
    expected = theirs.read(folders[family])
    assert len(list(model.parameters())) == len(list(expected.parameters()))  # tied as before
    assert torch.equal(model(TOKENS), theirs.logits_of(expected))

    export_hf(saved(tmp_path / "checkpoints", model, config), tmp_path / "out")
    assert tensors_of(tmp_path / "out").keys() == tensors_of(folders[family]).keys()
    assert torch.equal(theirs.logits_of(theirs.read(tmp_path / "out")), theirs.logits_of(expected))


def test_a_checkpoint_that_names_no_family_is_refused_with_what_to_do(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "checkpoints", nn.Linear(2, 2), {"_target_": "my.Model"})
    with pytest.raises(CheckpointError, match=r"my\.Model, which transformers does not know") as error:
        export_hf(checkpoint, tmp_path / "out")
    assert error.value.hint == "export to a file: FILE.safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


# A model of transformers as a plain module.

SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"model_type": "lama"}}, "lama"),
        ({}, "either model.config"),
        ({"config": SMALL_LLAMA, "path": "/models"}, "either model.config"),
        ({"path": "/nowhere"}, "model.path=/nowhere: there is no such folder"),
    ],
)
def test_what_transformers_cannot_build_is_refused(arguments: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=message) as error:
        HuggingFace(**arguments)
    assert "\n" not in error.value.message and len(error.value.message) < 300


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError) as error:
        HuggingFace(config=SMALL_LLAMA)
    assert error.value.hint == "pip install 'slurmtrain[hf]'"
