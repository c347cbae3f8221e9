"""What is done about a step, by its numbers and those of the steps before: pure decisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.choices import OnNonfinite
from slurmtrain.config.schema import TrainConfig
from slurmtrain.training.step_numbers import Health, RunningBuffers, StepNumbers, skip_sentence


def step(number: int, loss: float = 1.0, norm: float = 1.0) -> StepNumbers:
    return StepNumbers(number, (8 * number - 8, 8 * number), loss, norm)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, ["skip"] * 4 + ["rollback"]),
        ({"max_skipped": 2}, ["skip", "rollback", "rollback"]),
        ({"max_skipped": 0}, ["skip"] * 20),
        ({"on_nonfinite": "rollback"}, ["rollback"]),
        ({"on_nonfinite": "stop"}, ["stop"]),
    ],
)
@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"loss": math.inf}, {"norm": math.inf}])
def test_steps_in_a_row_that_are_not_finite(train: dict[str, Any], expected: list[str], bad: dict[str, float]) -> None:
    health, config = Health(), TrainConfig(**train)
    assert health.look(step(1), config) is None
    found = [health.look(step(2 + number, **bad), config) for number in range(len(expected))]
    assert found == expected
    assert (health.first, health.in_a_row, health.sound_step) == (2, len(expected), 0)


def test_a_finite_step_begins_the_count_anew_and_shows_that_the_step_before_was_sound() -> None:
    health, config = Health(), TrainConfig(max_skipped=2)
    for number, loss in enumerate([1.0, math.nan, 1.0, math.nan, 1.0], start=1):
        assert health.look(step(number, loss), config) in (None, "skip")
    assert (health.skipped, health.in_a_row, health.sound_step) == (2, 0, 4)


def test_after_going_back_the_count_of_rollbacks_ends_when_training_gets_further() -> None:
    before, config = Health(skipped=3, sound_step=8), TrainConfig()
    health = Health(sound_step=6)
    health.went_back(before, from_step=12, to_step=8)
    assert (health.rollbacks, health.furthest, health.skipped, health.sound_step) == (1, 12, 3, 8)
    health.look(step(7), config)  # read only after going back
    assert health.sound_step == 8
    health.look(step(12), config)
    assert health.rollbacks == 1
    health.look(step(13), config)
    assert health.rollbacks == 0


def test_running_statistics_come_back_when_an_update_is_skipped() -> None:
    norm = nn.BatchNorm1d(3)
    norm.register_buffer("table", torch.arange(3.0))
    undo = RunningBuffers([norm])
    before = {}
    for value, skips in [(1.0, False), (math.nan, True), (2.0, False)]:
        undo.begin_step()
        before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        norm(torch.full((4, 3), value) + torch.randn(4, 3))
        undo.end_step(torch.tensor(skips))
        changed = [name for name, buffer in norm.named_buffers() if not torch.equal(buffer, before[name])]
        assert changed == ([] if skips else ["running_mean", "running_var", "num_batches_tracked"])
    assert len(undo._buffers) == 3  # what never changes costs nothing


@pytest.mark.parametrize(
    ("choice", "goes_back"), [("skip", "; after 5 such steps in a row it goes back to a checkpoint"), ("rollback", "")]
)
def test_a_skipped_step_says_how_many_more_are_waited_for_only_if_any_are(choice: str, goes_back: str) -> None:
    said = skip_sentence(StepNumbers(3, (16, 24), 2.0, math.inf), TrainConfig(on_nonfinite=OnNonfinite(choice)))
    assert said == f"step 3: loss or gradient norm are not finite, so its update was left out{goes_back}"
