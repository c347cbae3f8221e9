"""Weights of a folder of Hugging Face, in every layout: a run that begins with them, adapters beside them, fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.format.manifest import Box
from slurmtrain.checkpoint.tensors import box_of, local, module_state
from slurmtrain.config.compose import compose
from slurmtrain.config.known_models import HUGGING_FACE, with_sizes
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config, LoraConfig
from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder, initialize
from slurmtrain.models.huggingface import HuggingFace
from slurmtrain.models.lora import add_adapters, draw_adapters, without_adapters
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.jobs.build_model import distribute_model
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.weights import export as weights_export
from slurmtrain.weights.hf_export import export_hf
from slurmtrain.weights.hf_names import hugging_face_name
from slurmtrain.weights.lora_export import export_peft
from slurmtrain.weights.pretrained import load_pretrained, tensors_of
from tests.distributed.test_training import StopAt, alone, fit, losses, trainer
from tests.support import transformers_models as theirs
from tests.support.gloo import GlooRanks
from tests.support.local_runs import assert_same_tensors
from tests.support.reading import checkpoint_tensors
from tests.unit.data.test_chat import QWEN, SPECIAL, messages, prepare, write_model_folder

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {},
        "fsdp": {"dp_shard": 2},
        "tp": {"tp": 2, "sequence_parallel": True},
        "pp": {"pp": 2},
    },
    4: {
        "fsdp": {"dp_shard": 4},
        "fsdp x tp": {"dp_shard": 2, "tp": 2, "sequence_parallel": False},
        "fsdp x pp": {"dp_shard": 2, "pp": 2},
    },
}
# Tied and untied, GQA, biases, norms of queries and keys; a vocabulary that no number of ranks divides, except for tensor
# parallelism, which wants one that they do.
FAMILIES = ("llama3", "qwen2_5", "qwen3")
VOCABULARIES = {61: "odd", 62: "even"}
TOLERANCE = 2e-5  # as in tests/unit/weights/test_pretrained.py


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        for size, name in VOCABULARIES.items():
            theirs.save(family, root / f"{family}-{name}", vocab_size=size)
    return root


def load_in_all_layouts(distributed: DistributedContext, root: Path, size: int) -> dict[str, list[str]]:
    """By layout and model, the tensors whose bits differ, and whether a rank holds more than its part."""
    plain = compose(["experiment=smoke", "train.device=cpu", f"cluster.tasks_per_node={size}"])
    found = {}
    for number, (layout, sizes) in enumerate(LAYOUTS[size].items()):
        for family in FAMILIES if size == 2 else [FAMILIES[number]]:
            folder = root / f"{family}-{'even' if 'tp' in sizes else 'odd'}"
            model = with_sizes({"_target_": "slurmtrain.models.Decoder", "path": str(folder)})
            name = f"{layout}, {family}"
            found[name] = loaded_wrongly(distributed, plain, sizes, model, folder, hugging_face_name)
    if size == 2:
        folder = root / "qwen2_5-odd"
        model = {"_target_": HUGGING_FACE, "path": str(folder)}
        name = "fsdp, model=huggingface"
        found[name] = loaded_wrongly(distributed, plain, {"dp_shard": 2}, model, folder, HuggingFace.stored_name)
    return found


def loaded_wrongly(
    distributed: DistributedContext,
    plain: Config,
    sizes: dict[str, Any],
    model: dict[str, Any],
    folder: Path,
    name_of: Callable[[str], str | None],
) -> list[str]:
    config = replace(plain, model=model, parallel=replace(plain.parallel, **sizes))
    laid_out, parameters, *_ = distribute_model(config, parallel_dims_of(config), distributed)
    load_pretrained(laid_out.model, folder)
    wrong = differing(laid_out.model, folder, name_of)
    held = sum(local(parameter).numel() for parameter in laid_out.model.parameters())
    shards = sizes.get("dp_shard", 1) if sizes.keys() == {"dp_shard"} else 1
    uneven = sum(parameter.shape[-1] for parameter in laid_out.model.parameters())  # a row more or less of each
    return wrong + ([f"it holds {held} of {parameters}"] if held > parameters / shards + uneven else [])


def differing(model: torch.nn.Module, folder: Path, name_of: Callable[[str], str | None]) -> list[str]:
    """The tensors that this rank holds, and whose bits are not those of the folder."""
    stored, wrong = tensors_of(folder), []
    for name, tensor in module_state(model).entries.items():
        source = stored.get(name_of(name) or "") or stored["model.embed_tokens.weight"]
        if not torch.equal(source[:][box_of(name, tensor).within(Box.whole(tensor.shape))], local(tensor.detach())):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_weights_are_those_of_the_folder_in_every_layout(ranks: int, folders: Path, gloo_ranks: GlooRanks) -> None:
    for found in gloo_ranks(ranks, load_in_all_layouts, folders, ranks, timeout_s=400):
        assert {where: what for where, what in found.items() if what} == {}


def test_a_run_begins_with_the_weights_is_exported_and_goes_on_without_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder, run = tmp_path / "model", RunDir(tmp_path / "run")
    theirs.save("mistral", folder, vocab_size=259)
    words = ["model=hf", f"model.path={folder}", "data.seq_len=32", "train.eval_every=0", "checkpoint.every_steps=0"]
    begun = trainer(alone(), run.path, words, StopAt(0))
    assert begun.fit().step == 0
    assert differing(begun.state.distributed_model.model, folder, hugging_face_name) == []
    (started,) = [event for event in run.events() if event["event"] == "fresh start"]
    assert (started["weights_from"], started["step"]) == (str(folder), 0) and "weights_of_step" not in started

    trained = trainer(alone(), run.path, [*words, "train.steps=2"])
    assert trained.fit().finished
    out = tmp_path / "out"
    export_hf(committed(run.checkpoints)[-1], out, dtype="bfloat16")
    again = theirs.read(out)
    assert type(again).__name__ == "MistralForCausalLM"
    assert {name: value.tolist() for name, value in again.state_dict().items()} == {
        hugging_face_name(name): value.bfloat16().tolist()
        for name, value in trained.state.distributed_model.model.state_dict().items()
    }

    # From here on its own checkpoints count.
    for file in folder.glob("*.safetensors"):
        file.unlink()
    words += ["train.steps=4", "checkpoint.allow=[config]"]
    assert fit(alone(), run.path, words, attempt=2).first_step == 2


ADAPTED = ["lora.r=4", "lora.dropout=0.1", "train.steps=6", "train.eval_every=0", "checkpoint.every_steps=0"]


def decoder(r: int, **settings: object) -> Decoder:
    """A small decoder with values in its adapters, if it has some."""
    with torch.device("meta"):
        model = Decoder(vocab_size=64, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_seq_len=16)
    if r:
        add_adapters(model, LoraConfig(r=r, **settings))  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    initialize(model, 3)
    if r:
        draw_adapters(model, 3)
    return model


def test_a_model_with_new_adapters_computes_what_it_did_without() -> None:
    plain, adapted = decoder(0), decoder(4)
    tokens = torch.arange(32).reshape(2, 16)
    assert torch.equal(plain(tokens), adapted(tokens))
    assert_same_tensors(dict(plain.named_parameters()), without_adapters(adapted))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained == set(adapted.state_dict()) and all("lora_" in name for name in trained)


def test_target_modules_choose_the_layers() -> None:
    model = decoder(4, target_modules=["query", "blocks.1.feed_forward.down"])
    layers = {name.rpartition(".lora_")[0] for name in model.state_dict()}
    assert layers == {"blocks.0.attention.query", "blocks.1.attention.query", "blocks.1.feed_forward.down"}
    with pytest.raises(ConfigError, match=r"the model has no linear layer 'querry'") as refused:
        decoder(4, target_modules=["querry"])
    assert "query" in (refused.value.hint or "")


def stop_and_resume(distributed: DistributedContext, folder: Path, layouts: dict[str, list[str]]) -> None:
    """In each layout a run that is stopped and resumed, one that is not, and a step that changes nothing."""
    for name, layout in layouts.items():
        words = [*ADAPTED, *layout]
        fit(distributed, folder / f"{name} undisturbed", words)
        fit(distributed, folder / f"{name} stopped", words, StopAt(3))
        fit(distributed, folder / f"{name} stopped", words, attempt=2)
        fit(distributed, folder / f"{name} still", [*words, "train.steps=1", "optim.lr=1e-60"])  # 0 in float32


def test_a_stopped_run_of_adapters_resumes_to_the_same_bits_on_every_layout(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    stop_and_resume(alone(), tmp_path, {"alone": []})
    two = "cluster.tasks_per_node=2"  # started once for both, since ranks take longer to start than to train
    gloo_ranks(2, stop_and_resume, tmp_path, {"ddp": [two], "fsdp": [two, "parallel=fsdp"]})

    def saved(name: str) -> dict[str, torch.Tensor]:
        return checkpoint_tensors(RunDir(tmp_path / name).checkpoints)

    def adapters(name: str) -> dict[str, torch.Tensor]:
        return {key: tensor for key, tensor in saved(name).items() if key.startswith("model.")}

    for layout in ("alone", "ddp", "fsdp"):
        assert losses(tmp_path / f"{layout} stopped") == losses(tmp_path / f"{layout} undisturbed")
        assert_same_tensors(saved(f"{layout} stopped"), saved(f"{layout} undisturbed"))
        kept = {key: value for key, value in saved(f"{layout} stopped").items() if key.startswith(("model.", "optim"))}
        assert kept and all("lora_" in key for key in kept)
        assert all(value.any() for key, value in kept.items() if "lora_B" in key)  # they have learnt
        assert_same_tensors(adapters(f"{layout} still"), adapters("alone still"))  # they began with the same values


def test_other_adapters_than_the_checkpoints_are_refused_and_those_of_drawn_weights_have_no_folder(
    tmp_path: Path,
) -> None:
    fit(alone(), tmp_path / "run", [*ADAPTED, "train.steps=1"])
    with pytest.raises(CheckpointError, match="drawn at random"):
        export_peft(committed(RunDir(tmp_path / "run").checkpoints)[-1], tmp_path / "out")
    with pytest.raises(Exception, match=r"lora\.r: 4 -> 8|shape"):
        trainer(alone(), tmp_path / "run", [*ADAPTED, "lora.r=8"], attempt=2).fit()


@pytest.mark.parametrize("group", ["hf", "huggingface"])
def test_adapters_beside_read_weights_are_exported_and_merged_as_the_page_shows(group: str, tmp_path: Path) -> None:
    """transformers computes with them, beside and in the base, what the model computes that was trained."""
    peft = pytest.importorskip("peft")

    base = tmp_path / "base"
    theirs.save("qwen2_5", base, vocab_size=256)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    words = [*ADAPTED, f"model={group}", f"model.path={base}", "data.seq_len=32", "optim.lr=0.05"]
    fit(alone(), tmp_path / "run", words, StopAt(3))
    trained = trainer(alone(), tmp_path / "run", words, attempt=2)
    assert trained.fit().first_step == 3
    path = committed(RunDir(tmp_path / "run").checkpoints)[-1]
    assert sum(file.stat().st_size for file in path.iterdir()) < sum(map(len, before.values()))

    model = trained.state.distributed_model.model.eval()
    tokens = theirs.TOKENS
    with torch.no_grad():
        ours = model(tokens)
        plain = theirs.read(base)(tokens).logits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights_export, "SHARD_BYTES", 1)
            export_peft(path, tmp_path / "adapters")
        beside = peft.PeftModel.from_pretrained(theirs.read(base), tmp_path / "adapters").eval()
        adapted = beside(tokens).logits
        beside.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = theirs.read(tmp_path / "merged")(tokens).logits
    with pytest.raises(CheckpointError, match="holds adapters, and no whole model"):
        export_hf(path, tmp_path / "out")
    assert (ours - plain).abs().max() > 100 * TOLERANCE  # the adapters matter
    assert (ours - adapted).abs().max() < TOLERANCE
    assert (ours - merged).abs().max() < TOLERANCE
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


def test_the_recipe_ends_with_a_folder_that_transformers_answers_from(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    base, answer = write_model_folder(tmp_path / "model", QWEN), "It is 42."
    theirs.save("qwen2_5", base, vocab_size=256 + len(SPECIAL), max_position_embeddings=128)
    said = [{"messages": messages([f"Question {n}?", answer])} for n in range(16)]
    data = prepare(tmp_path, said, tokenizer=f"{base / 'tokenizer.json'}")
    words = ["experiment=sft", f"model.path={base}", f"data.path={data}", "parallel=ddp", "data.seq_len=96"]
    words += ["train.global_batch_size=4", "train.eval_every=0", "optim.warmup_steps=2"]
    fit(alone(), tmp_path / "run", [*words, "train.steps=45", "optim.lr=5e-3"])
    found = losses(tmp_path / "run")
    assert found[45] < 0.1 < found[1]
    export_hf(committed(RunDir(tmp_path / "run").checkpoints)[-1], tmp_path / "answers")

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "answers")
    model = theirs.read(tmp_path / "answers")
    asked = tokenizer.apply_chat_template(
        messages(["Question 3?"]), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**asked, max_new_tokens=96, do_sample=False)  # which knows where an answer ends
    text = tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=False)
    assert text == f"<think>\n\n</think>\n\n{answer}<|im_end|>"
    assert json.loads((tmp_path / "answers" / "config.json").read_text())["model_type"] == "qwen2"
