"""From objects to named tensors and JSON, and back to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from tests.support.own_objects import Bare, Own


def trained(*, seed: int = 0, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(5, 3) * torch.arange(5).unsqueeze(1)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_saved_before_its_first_step_was_not_moved_and_is_restored_without_state(tmp_path: Path) -> None:
    """torch's own get_optimizer_state_dict runs a step to make the state, which advances AdamW (pytorch#164929)."""
    model, optimizer = trained(steps=0)
    before = [parameter.clone() for parameter in model.parameters()]
    Checkpointer(tmp_path).save(0, model=model, optimizer=optimizer).result()
    assert optimizer.state_dict()["state"] == {}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    other_model, other_optimizer = trained(seed=1, steps=2)
    Checkpointer(tmp_path).restore(model=other_model, optimizer=other_optimizer)
    assert other_optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize(("name", "here"), [("foreach", True), ("fused", False)])
def test_how_a_step_is_computed_is_this_runs_choice_and_not_the_checkpoints(
    tmp_path: Path, name: str, here: bool
) -> None:
    """A checkpoint of a run on GPUs, with fused=True, continues on a device or in a layout without that."""

    def make(value: bool, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = trained(steps=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        optimizer.param_groups[0][name] = value
        return model, optimizer

    model, optimizer = make(not here, lr=0.25)
    Checkpointer(tmp_path).save(3, model=model, optimizer=optimizer).result()
    model, optimizer = make(here, lr=0.5)
    Checkpointer(tmp_path).restore(model=model, optimizer=optimizer)
    (group,) = optimizer.param_groups
    assert (group[name], group["lr"]) == (here, 0.25)


@pytest.mark.parametrize(
    "value",
    [
        (1, "two", (3.5, None)),
        {"a": [1, {"b": True}], "c": ()},
        {1: "int keys", 2: (3,)},
        {"__tuple__": [1, 2], "__tensor__": "no reference"},
        {},
        [],
        1e-300,
        float("inf"),
        -0.0,
        "ünïcode\n",
    ],
)
def test_plain_values_come_back_equal_and_of_the_same_type(tmp_path: Path, value: Any) -> None:
    saved, restored = Own(value), Own(None)
    Checkpointer(tmp_path).save(1, own=saved).result()
    Checkpointer(tmp_path).restore(own=restored)
    assert restored.value == value
    assert type(restored.value) is type(value)
    assert repr(restored.value) == repr(value)


def test_tensors_inside_a_users_object_come_back_and_those_whose_paths_look_alike_are_kept_apart(
    tmp_path: Path,
) -> None:
    tensors = {"mean": torch.arange(3.0), "count": torch.tensor(7), "nested": [(torch.ones(2, dtype=torch.bfloat16),)]}
    alike = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.ones(2)}
    whole = torch.full((2,), 2.0)  # a state that is nothing but a tensor
    objects: dict[str, Any] = {"own": Own({**tensors, **alike}), "whole": Bare(whole)}
    restored: dict[str, Any] = {"own": Own(None), "whole": Bare(None)}
    on_rank = Bare(torch.zeros(2))
    Checkpointer(tmp_path).save(1, **objects, per_rank={"mean": Bare(torch.ones(2))}).result()
    assert Checkpointer(tmp_path).restore(**restored, per_rank={"mean": on_rank})
    assert repr(restored["own"].value) == repr(objects["own"].value)
    assert torch.equal(restored["whole"].value, whole) and on_rank.value.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object(), np.float64(1.5).reshape(1), Path("here")])
def test_what_is_neither_tensor_nor_json_is_refused_by_name_and_type(tmp_path: Path, value: Any) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=rf"own\.value is a {type(value).__name__}, which is neither") as caught:
        checkpointer.save(1, own=Own(value))
    assert "state_dict()" in (caught.value.hint or "")
    assert checkpointer.restore(own=Own(None)) is None


def loose() -> list[Any]:
    return [torch.ones(2), [1, (torch.ones(2),)], {"a": {"b": torch.ones(2)}}, nn.Linear(2, 2).state_dict()]


@pytest.mark.parametrize(("number", "own"), [(0, False), (1, True), (2, True), (3, False)])
def test_tensors_that_nothing_would_take_back_are_refused_by_save_and_by_restore(
    tmp_path: Path, number: int, own: bool
) -> None:
    """As in save(step, model=model.state_dict()): the run would go on with the weights that it began with."""
    given: dict[str, Any] = {"per_rank": {"model": loose()[number]}} if own else {"model": loose()[number]}
    checkpointer = Checkpointer(tmp_path)
    for call in (lambda: checkpointer.save(1, **given), lambda: checkpointer.restore(**given)):
        with pytest.raises(
            CheckpointError, match=r"^model is of type \w+, and nothing would take its tensors"
        ) as caught:
            call()
        assert "model=model, not model=model.state_dict()" in (caught.value.hint or "")
    assert list(tmp_path.glob("checkpoint_*")) == []


def test_plain_values_that_are_handed_to_restore_are_told_to_stay_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, own=Own(1), schedule={"last_epoch": 7}).result()
    assert checkpointer.restore(own=Own(0), schedule={"last_epoch": 0})
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("not restored, since plain values cannot be changed in place: schedule;")


def test_an_optimizer_without_its_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    for its_own in ({}, {"model": model}):  # what a rank has for itself is no part of what all ranks share
        with pytest.raises(CheckpointError, match=r"shape \[4, 3\] that no given module has"):
            Checkpointer(tmp_path).save(1, optimizer=optimizer, per_rank=its_own).result()
