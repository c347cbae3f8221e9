"""A run that begins from another run's checkpoint: it goes on at its step, or begins anew with its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slurmtrain.checkpoint.format.directory import checkpoint_name
from slurmtrain.errors import ConfigError
from slurmtrain.runs.run_dir import RunDir
from tests.distributed.test_training import StopAt, alone, fit, losses, trainer
from tests.support.gloo import GlooRanks
from tests.support.reading import checkpoint_tensors

WORDS = ["train.eval_every=0", "checkpoint.every_steps=0", "model.dropout=0.1"]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The last checkpoint of a run of 6 steps."""
    fit(alone(), tmp_path / "first", [*WORDS, "train.steps=6"])
    return tmp_path / "first" / "checkpoints" / checkpoint_name(6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_the_weights_alone_everything_else_begins_anew(
    ranks: int, first: Path, gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    """Other steps, optimiser and data; the same weights."""
    words = [*WORDS, "train.steps=3", "data.seq_len=32", "optim.weight_decay=0.2", "train.seed=7"]
    fit(alone(), tmp_path / "fresh", words)
    words += [f"checkpoint.restore_from={first}", "checkpoint.restore_only=model", f"cluster.tasks_per_node={ranks}"]
    second = tmp_path / "second"
    outcome = fit(alone(), second, words) if ranks == 1 else gloo_ranks(ranks, fit, second, words)[0]
    assert (outcome.first_step, outcome.step) == (0, 3)
    for field in ("data_hash", "lr"):
        assert losses(second, field) == losses(tmp_path / "fresh", field)
    assert losses(second)[1] < losses(tmp_path / "fresh")[1]
    (started,) = [event for event in RunDir(second).events() if event["event"] == "fresh start"]
    assert (started["weights_from"], started["weights_of_step"], started["step"]) == (str(first), 6, 0)
    tensors = checkpoint_tensors(second / "checkpoints")
    assert {float(value) for name, value in tensors.items() if name.endswith(".step")} == {3.0}


def test_the_weights_are_those_of_the_checkpoint(first: Path, tmp_path: Path) -> None:
    words = [*WORDS, f"checkpoint.restore_from={first}", "checkpoint.restore_only=model"]
    begun = trainer(alone(), tmp_path / "second", words, StopAt(0))
    assert begun.fit().step == 0
    expected = checkpoint_tensors(first.parent)
    for name, parameter in begun.state.distributed_model.model.named_parameters():
        assert torch.equal(parameter, expected[f"model.{name}"])


def test_a_model_of_another_config_is_refused_with_weights_alone_too(first: Path, tmp_path: Path) -> None:
    words = [*WORDS, f"checkpoint.restore_from={first}", "checkpoint.restore_only=model", "model.rope_theta=500"]
    with pytest.raises(Exception, match=r"rope_theta: 10000\.0 -> 500"):
        fit(alone(), tmp_path / "second", words)


@pytest.mark.parametrize("steps", [4, 6])
def test_a_checkpoint_that_has_done_all_steps_is_refused(steps: int, first: Path, tmp_path: Path) -> None:
    words = [*WORDS, f"checkpoint.restore_from={first}", f"train.steps={steps}", "checkpoint.allow=[config]"]
    with pytest.raises(ConfigError, match=f"at step 6 already, and train.steps={steps}") as caught:
        fit(alone(), tmp_path / "second", words)
    assert "checkpoint.restore_only=model" in (caught.value.hint or "")


def test_the_optimiser_is_set_as_the_config_of_now_says(first: Path, tmp_path: Path) -> None:
    words = [*WORDS, f"checkpoint.restore_from={first}", "checkpoint.allow=[config]", "train.steps=8"]
    words += ["optim.weight_decay=0.25", "optim.betas=[0.8,0.9]", "optim.eps=1e-6"]
    goes_on = trainer(alone(), tmp_path / "second", words)
    assert goes_on.fit().first_step == 6
    matrices, vectors = goes_on.state.optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.25, 0.0)
    assert [(tuple(group["betas"]), group["eps"]) for group in (matrices, vectors)] == [((0.8, 0.9), 1e-6)] * 2
    assert losses(tmp_path / "second", "lr").keys() == {7, 8}
