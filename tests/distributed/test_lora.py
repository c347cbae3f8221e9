"""Adapters: only they are trained and saved; a run of them stops and resumes to the same bits, on any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.config.schema import LoraConfig
from slurmtrain.errors import CheckpointError, ConfigError
from slurmtrain.models import Decoder, initialize
from slurmtrain.models.hf_export import export_hf, export_peft
from slurmtrain.models.lora import add_adapters, draw_adapters, without_adapters
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.distributed_context import DistributedContext
from tests.distributed.test_pretrained import TOLERANCE
from tests.distributed.test_training import StopAt, alone, fit, losses, trainer
from tests.support import transformers_models as theirs
from tests.support.gloo import GlooRanks
from tests.support.local_runs import assert_same_tensors
from tests.support.reading import checkpoint_tensors

WORDS = ["lora.r=4", "lora.dropout=0.1", "train.steps=6", "train.eval_every=0", "checkpoint.every_steps=0"]


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
    spread = [
        value.std().item() * (3 * value.shape[1]) ** 0.5
        for name, value in adapted.named_parameters()
        if "lora_A" in name
    ]
    assert len(spread) == 14 and sum(spread) / len(spread) == pytest.approx(1, abs=0.1)


def test_a_layer_that_has_the_weights_of_the_embedding_gets_no_adapters() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.raises(ConfigError, match="head has the same weights as another layer"):
        add_adapters(model, LoraConfig(r=2, target_modules=["head"]))


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
        words = [*WORDS, *layout]
        fit(distributed, folder / f"{name} undisturbed", words)
        fit(distributed, folder / f"{name} stopped", words, StopAt(3))
        fit(distributed, folder / f"{name} stopped", words, attempt=2)
        fit(distributed, folder / f"{name} still", [*words, "train.steps=1", "optim.lr=0"])


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


def test_other_adapters_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    fit(alone(), tmp_path / "run", [*WORDS, "train.steps=2"])
    with pytest.raises(Exception, match=r"lora\.r: 4 -> 8|shape"):
        trainer(alone(), tmp_path / "run", [*WORDS, "lora.r=8"], attempt=2).fit()


@pytest.mark.parametrize("group", ["hf", "huggingface"])
def test_adapters_beside_read_weights_are_exported_merged_and_alone(group: str, tmp_path: Path) -> None:
    """transformers computes from both folders what the model computes that was trained, and the base stays as it was."""
    peft = pytest.importorskip("peft")

    base = tmp_path / "base"
    theirs.save("qwen2_5", base, vocab_size=256)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    words = [*WORDS, f"model={group}", f"model.path={base}", "data.seq_len=32", "optim.lr=0.05"]
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
        export_hf(path, tmp_path / "merged")
        merged = theirs.read(tmp_path / "merged")(tokens).logits
        export_peft(path, tmp_path / "adapters")
        adapted = peft.PeftModel.from_pretrained(theirs.read(base), tmp_path / "adapters").eval()(tokens).logits
    assert (ours - plain).abs().max() > 100 * TOLERANCE  # the adapters matter
    assert (ours - adapted).abs().max() < TOLERANCE
    assert (ours - merged).abs().max() < TOLERANCE
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


def test_adapters_of_weights_that_were_drawn_cannot_be_merged(tmp_path: Path) -> None:
    fit(alone(), tmp_path / "run", [*WORDS, "train.steps=1"])
    with pytest.raises(CheckpointError, match="drawn at random"):
        export_hf(committed(RunDir(tmp_path / "run").checkpoints)[-1], tmp_path / "out")
