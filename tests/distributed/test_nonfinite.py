"""Loss or gradients that are no numbers: the run ends with a sentence, and what it has saved before stays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.errors import EXIT_CONFIG
from slurmtrain.models import Decoder
from slurmtrain.training.nonfinite import DivergedError, NonfiniteSteps, all_finite
from tests.distributed.test_training import StopAt, alone, fit, losses
from tests.support.gloo import GlooRanks
from tests.support.local_runs import Project


class Breaking(Decoder):
    """As a `model._target_`: its logits are not finite from one training pass on.

    Args:
        at: number of that pass, from 1.
        until: and of the first that is sound again.
        rank: where this happens; None: everywhere.
        value: what is added to the logits.
    """

    def __init__(self, at: int, until: int = 1 << 30, value: str = "nan", **settings: Any):
        super().__init__(**settings)
        self.at, self.until, self.value, self.passes = at, until, float(value), 0

    def forward(self, tokens_BS: Tensor, *more: Any, **named: Any) -> Tensor:
        self.passes += self.training
        logits = super().forward(tokens_BS, *more, **named)
        broken = self.training and self.at <= self.passes < self.until
        return logits + self.value if broken else logits


class BreakingText(Decoder):
    """As a `model._target_`: not finite wherever a sequence has a certain byte at a certain place."""

    def forward(self, tokens_BS: Tensor, *more: Any, **named: Any) -> Tensor:
        logits = super().forward(tokens_BS, *more, **named)
        return logits + torch.where(tokens_BS[:, :1, None] % 16 == 7, math.nan, 0.0)


def breaking(at: int, **more: Any) -> list[str]:
    words = [f"+model.{name}={value}" for name, value in {"at": at, **more}.items()]
    return [f"model._target_={__name__}.Breaking", *words, "checkpoint.every_steps=5", "train.eval_every=0"]


def saved(run_path: Path) -> list[int]:
    return [step_of(path) for path in committed(run_path / "checkpoints")]


def test_after_some_steps_in_a_row_that_are_not_finite_it_ends_and_keeps_what_was_sound(tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as caught:
        fit(alone(), tmp_path / "run", [*breaking(12), "train.max_nonfinite=4", "train.steps=100"])
    assert caught.value.exit_code == EXIT_CONFIG
    for words in (
        "for 4 steps in a row",
        "train.max_nonfinite=4",
        "from step 12 on",
        "loss nan",
        "norm nan",
        "step 10",
    ):
        assert words in caught.value.message
    assert saved(tmp_path / "run") == [5, 10]  # and not 15, which would have been due
    assert list(losses(tmp_path / "run"))[-1] == 16


def test_all_ranks_end_together_when_one_of_them_sees_it(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    words = [f"model._target_={__name__}.BreakingText", "train.max_nonfinite=2", "cluster.tasks_per_node=2"]
    endings = gloo_ranks.start_joined(2, fit, tmp_path / "run", words).endings()
    for ending in endings:
        assert (
            ending.error is not None
            and "DivergedError: loss or gradient norm are not finite for 2 steps" in ending.error
        )
    assert saved(tmp_path / "run") == []


def test_a_stop_meanwhile_saves_nothing_and_the_next_attempt_goes_on_from_what_was_sound(tmp_path: Path) -> None:
    words = [*breaking(12), "train.max_nonfinite=100", "train.steps=100"]
    outcome = fit(alone(), tmp_path / "run", words, StopAt(13))
    assert (outcome.finished, outcome.step) == (False, 13)
    assert saved(tmp_path / "run") == [5, 10]
    assert fit(alone(), tmp_path / "run", words, StopAt(3), attempt=2).first_step == 10


@pytest.mark.parametrize("limit", [0, 5])
def test_a_run_is_not_finished_when_its_weights_are_no_numbers(limit: int, tmp_path: Path) -> None:
    words = [*breaking(19), "checkpoint.every_steps=20", f"train.max_nonfinite={limit}"]
    with pytest.raises(DivergedError, match="the parameters are not finite after step 20"):
        fit(alone(), tmp_path / "run", words)
    assert saved(tmp_path / "run") == []


def test_the_command_line_says_so_and_does_not_try_it_again(project: Project) -> None:
    (project.path / "mine.py").write_text(
        "from slurmtrain.models import Decoder\n"
        "class Mine(Decoder):\n"
        "    def forward(self, tokens):\n"
        "        return super().forward(tokens) * float('nan')\n"
    )
    run = project.submit("model._target_=mine.Mine", "train.max_nonfinite=2", "~model.dropout")
    assert run.wait() == EXIT_CONFIG
    (attempt,) = run.attempts()
    assert (attempt.first_step, attempt.last_step) == (0, 3)  # one more, since a step is looked at during the next one
    assert not committed(run.run_dir.checkpoints)
    status = project.cli("status", "last").stdout
    assert "not finite for 2 steps in a row" in " ".join(status.split()) and "finished" not in status


def test_a_finite_step_begins_the_count_anew() -> None:
    steps, one, nothing = NonfiniteSteps(2), torch.tensor(1.0), torch.tensor(math.inf)
    answers = []
    for number, (loss, norm) in enumerate([(one, nothing), (one, one), (nothing, one), (nothing, one)], start=1):
        steps.note(number, loss, norm, 4)
        answers.append(steps.update())
    assert answers == [False, False, False, True]
    assert (steps.first, steps.last, steps.in_a_row) == (3, 4, 2)
    assert steps.update() and steps.in_a_row == 2  # nothing new


@pytest.mark.parametrize(
    ("values", "finite"), [([1.0, -3e38, 3e38], True), ([1.0, math.nan], False), ([-math.inf], False), ([], True)]
)
def test_parameters_are_finite_or_not(values: list[float], finite: bool) -> None:
    counts = nn.Parameter(torch.tensor([1]), requires_grad=False)
    assert all_finite([nn.Parameter(torch.tensor(values)), counts, nn.Parameter(torch.ones(2, 2))]) is finite
