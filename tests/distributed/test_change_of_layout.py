"""Saved on one layout, resumed on another: the same parameters and optimiser state, and the loss goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from slurmtrain.checkpoint.format.directory import checkpoint_name
from slurmtrain.checkpoint.state import flatten, live_state
from slurmtrain.errors import ConfigError
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.training.hooks.base import TrainingHook, TrainingState
from tests.distributed.test_training import RAGGED, TOLERANCE, StopAt, alone, fit, losses, trainer
from tests.distributed.test_training import trainer as trainer_of
from tests.support.gloo import GlooRanks
from tests.support.local_runs import assert_same_run
from tests.support.reading import checkpoint_tensors, load

MODEL = [*RAGGED, "model.n_layers=4", "checkpoint.every_steps=0", "train.eval_every=0"]
# Ranks, and the layout.
CHAIN = [
    (2, ["parallel=ddp"]),
    (2, ["parallel=fsdp"]),
    (4, ["parallel=fsdp_tp"]),
    (4, ["parallel.pp=2", "parallel.dp_shard=2", "parallel.pp_schedule=interleaved_1f1b"]),
    (2, ["parallel=ddp"]),
]
STEPS_EACH = 2


class Comparison(TrainingHook):
    """Notes the names of restored tensors that are not as they were saved."""

    def __init__(self) -> None:
        self.different: list[str] = []

    def start(self, state: TrainingState) -> None:
        if state.restored is None:
            return
        objects = {"model": state.distributed_model.model, "optimizer": state.optimizer}
        found = flatten(live_state(objects, None, 0)).tensors
        assert any(name.endswith("exp_avg_sq") for name in found)
        saved = load(state.restored.path)
        self.different += [name for name, tensor in found.items() if not torch.equal(whole(tensor), saved[name])]


def on_one_layout(
    distributed: DistributedContext, run_path: Path, overrides: list[str], attempt: int
) -> tuple[list[str], str, float]:
    """Restore, a few steps, a save.

    Returns:
        The names of what was not restored as it was saved, of all that a rank has; and its tied matrix in the end, as text,
        which is empty where it has none. And a number that it draws, as dropout would.
    """
    stop = StopAt(STEPS_EACH) if distributed.environment.rank == 0 else None
    comparison = Comparison()
    trainer = trainer_of(distributed, run_path, overrides, stop, attempt, hooks=[comparison])
    trainer.fit()
    found = flatten(live_state({"model": trainer.state.distributed_model.model}, None, 0)).tensors
    tied = "".join(str(whole(tensor).tolist()) for name, tensor in found.items() if "embedding" in name)
    return comparison.different, tied, torch.rand(()).item()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_a_run_goes_on_through_all_layouts_as_on_one_process(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    for attempt, (ranks, layout) in enumerate(CHAIN, start=1):
        overrides = [*MODEL, *layout, f"cluster.tasks_per_node={ranks}"]
        different, embeddings, draws = zip(
            *gloo_ranks(ranks, on_one_layout, tmp_path / "run", overrides, attempt), strict=True
        )
        assert different == ([],) * ranks
        assert attempt > 1 or len(set(draws)) == ranks  # of two replicas, dropout hits other elements on each
        # At both ends of a pipeline the same bits.
        assert len({embedding for embedding in embeddings if embedding}) == 1
    fit(alone(), tmp_path / "one", MODEL)
    steps = STEPS_EACH * len(CHAIN)
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "one")
    assert list(ours) == list(range(1, steps + 1))
    hashes = losses(tmp_path / "one", "data_hash")
    assert losses(tmp_path / "run", "data_hash") == {step: hashes[step] for step in ours}
    assert [step for step in ours if abs(ours[step] - theirs[step]) > TOLERANCE * theirs[step]] == []


# The same layout: bits, not figures. Dropout, so that every rank's random state matters.
SAME_BITS = [
    pytest.param(4, ["parallel=fsdp_tp"], marks=pytest.mark.slow, id="FSDP x TP"),
    pytest.param(4, ["parallel.pp=2", "parallel.dp_replicate=1", "parallel.dp_shard=2"], id="FSDP x PP"),
]


def stopped_and_resumed(distributed: DistributedContext, run_path: Path, overrides: list[str]) -> None:
    stop = StopAt(3) if distributed.environment.rank == 1 else None
    assert fit(distributed, run_path / "stopped", overrides, stop).step == 3
    assert fit(distributed, run_path / "stopped", overrides, attempt=2).first_step == 3
    fit(distributed, run_path / "undisturbed", overrides)


@pytest.mark.parametrize(("ranks", "layout"), SAME_BITS)
def test_stopped_and_resumed_it_finishes_with_the_bits_of_the_undisturbed_run(
    gloo_ranks: GlooRanks, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    model = [*MODEL, "model.tie_embeddings=false", "model.dropout=0.1"]
    overrides = [*model, "train.steps=6", *layout, f"cluster.tasks_per_node={ranks}"]
    gloo_ranks(ranks, stopped_and_resumed, tmp_path, overrides)
    assert_same_run(tmp_path / "stopped", tmp_path / "undisturbed")


WORDS = ["train.eval_every=0", "checkpoint.every_steps=0", "model.dropout=0.1"]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The last checkpoint of a run of 6 steps."""
    fit(alone(), tmp_path / "first", [*WORDS, "train.steps=6"])
    return tmp_path / "first" / "checkpoints" / checkpoint_name(6)


def test_with_the_weights_alone_everything_else_begins_anew(first: Path, tmp_path: Path) -> None:
    """Other steps, optimiser and data; the same weights."""
    words = [*WORDS, "train.steps=3", "data.seq_len=32", "optim.weight_decay=0.2", "train.seed=7"]
    fit(alone(), tmp_path / "fresh", words)
    words += [f"checkpoint.restore_from={first}", "checkpoint.restore_only=model"]
    second = tmp_path / "second"
    outcome = fit(alone(), second, words)
    assert (outcome.first_step, outcome.step) == (0, 3)
    for field in ("data_hash", "lr"):
        assert losses(second, field) == losses(tmp_path / "fresh", field)
    assert losses(second)[1] < losses(tmp_path / "fresh")[1]
    (started,) = [event for event in RunDir(second).events() if event["event"] == "fresh start"]
    assert (started["weights_from"], started["weights_of_step"], started["step"]) == (str(first), 6, 0)
    tensors = checkpoint_tensors(second / "checkpoints")
    assert {float(value) for name, value in tensors.items() if name.endswith(".step")} == {3.0}


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
