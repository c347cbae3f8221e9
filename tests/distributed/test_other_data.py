"""Data that is no text: a table of numbers, with a class for each row, and noise that is drawn anew for every sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurmtrain.checkpoint.errors import CheckpointMismatchError
from slurmtrain.errors import ConfigError
from tests.distributed.test_training import StopAt, alone, fit, losses
from tests.support.gloo import GlooRanks
from tests.support.local_runs import assert_same_run

CLASSES = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))


class Table(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label = torch.tensor(index % 5)
        return {"inputs": CLASSES[label] + torch.randn(12), "targets": label}


class Noisy:
    """As a `data._target_`."""

    def __init__(self, **ignored: Any):
        self.train, self.valid = Table(200), Table(20)


class Classifier(nn.Sequential):
    """As a `model._target_`."""

    def __init__(self, **ignored: Any):
        super().__init__(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))


WORDS = [f"data._target_={__name__}.Noisy", f"model._target_={__name__}.Classifier", "train.global_batch_size=40"]
SHORT = [*WORDS, "train.steps=30", "optim.lr=3e-3", "train.eval_every=10", "checkpoint.every_steps=0"]
# A step's loss is a sum over 40 samples; sums in another order differ by about sqrt(40) * 2**-24 relative (Higham 2002,
# section 2.8), and 30 steps by sqrt(30) of that.
TOLERANCE = (30 * 40) ** 0.5 * 2**-24


def test_a_classifier_learns_the_same_on_any_ranks_and_workers(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    """Also what each sample draws is the same."""
    fit(alone(), tmp_path / "one", SHORT)
    two = [*SHORT, "train.micro_batch_size=5", "train.data_workers=1", "cluster.tasks_per_node=2"]
    gloo_ranks(2, fit, tmp_path / "two", two)
    assert losses(tmp_path / "one", "data_hash") == losses(tmp_path / "two", "data_hash")
    for field in ("loss", "valid_loss"):
        one, many = losses(tmp_path / "one", field), losses(tmp_path / "two", field)
        assert one.keys() == many.keys()
        assert [step for step in one if abs(one[step] - many[step]) > TOLERANCE * one[step]] == []
    assert losses(tmp_path / "one")[30] < 0.8 * losses(tmp_path / "one")[1]


def test_stopped_and_resumed_with_workers_it_draws_what_it_would_have(tmp_path: Path) -> None:
    fit(alone(), tmp_path / "undisturbed", SHORT)
    stopped_at = fit(alone(), tmp_path / "stopped", [*SHORT, "train.data_workers=2"], StopAt(13)).step
    assert 10 < stopped_at == fit(alone(), tmp_path / "stopped", SHORT, attempt=2).first_step
    assert_same_run(tmp_path / "stopped", tmp_path / "undisturbed")
    with pytest.raises(CheckpointMismatchError, match=r"train\.shuffle"):  # samples would come twice, or never
        fit(alone(), tmp_path / "stopped", [*SHORT, "train.shuffle=false"], attempt=3)


class Given(Table):
    """Rows of what no model takes."""

    def __init__(self, kind: str):
        super().__init__(40)
        self._kind = kind

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index)
        return {**row, "text": "a"} if self._kind == "text" else tuple(row.values())


class Odd:
    """As a `data._target_`."""

    def __init__(self, kind: str, **ignored: Any):
        self.train = Given(kind)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("text", "'text' of the data's samples is a list; a model is called with tensors by name"),
        ("tuple", "without 'inputs' and 'targets'"),
    ],
)
def test_samples_that_no_model_takes_are_told_in_a_sentence(kind: str, said: str, tmp_path: Path) -> None:
    words = [*SHORT, f"data._target_={__name__}.Odd", f"+data.kind={kind}", "train.data_workers=1"]
    with pytest.raises(ConfigError, match=said) as caught:
        fit(alone(), tmp_path / "run", words)
    assert caught.value.hint
