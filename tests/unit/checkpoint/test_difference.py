"""Which tensors differ between two checkpoints, also of other programs, none of whose code is run."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slurmtrain.checkpoint.difference import differences
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.manifest import Box
from tests.support.pickles import Evil
from tests.unit.weights.test_export import by_ranks, cut, save


def names(a: Path, b: Path) -> list[str]:
    return sorted(each.name for each in differences(a, b)[0] if each.name.startswith("model."))


def test_layouts_leave_no_difference(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = {"model.w": torch.randn(37, 11), "model.scale": torch.randn(()), "optimizer.m": torch.randn(5)}

    def saved(name: str, parts: int, dimension: int, tensors: dict[str, torch.Tensor]) -> Path:
        files = [[piece] for piece in cut(tensors["model.w"], "model.w", parts, dimension)]
        files[0] += [(key, Box.whole(value.shape), value) for key, value in tensors.items() if key != "model.w"]
        return by_ranks(tmp_path / name, files, tensors)

    rows, columns = saved("rows", 4, 0, whole), saved("columns", 3, 1, whole)
    assert names(rows, columns) == []
    other = {**whole, "model.w": whole["model.w"].clone(), "optimizer.m": torch.zeros(5)}
    other["model.w"][36, 10] += 1
    assert names(rows, saved("other", 3, 1, other)) == ["model.w"]


def test_a_whole_comparison_names_each_tensor_of_every_object_that_differs(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    a = save(tmp_path / "a", model=model, optimizer=optimizer)
    assert differences(a, save(tmp_path / "b", model=model, optimizer=optimizer)) == ([], [])
    optimizer.param_groups[0]["lr"] = 0.5
    state_alone = save(tmp_path / "state", model=model, optimizer=optimizer)
    assert differences(a, state_alone) == ([], ["optimizer.param_groups.0.lr"])
    with torch.no_grad():
        moment = optimizer.state[model.weight]["exp_avg"]
        moment[-1, -1] = torch.nextafter(moment[-1, -1], torch.tensor(9.0))
    tensors, state = differences(a, save(tmp_path / "c", model=model, optimizer=optimizer))
    assert [each.name.endswith("weight.exp_avg") for each in tensors] == [True]
    assert state == ["optimizer.param_groups.0.lr"]
    tensors, _ = differences(a, save(tmp_path / "d", model=model.double(), optimizer=optimizer))
    assert {each.why for each in tensors if each.name.startswith("model.")} == {"another shape or type"}


# Checkpoints of other programs.

WEIGHTS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.zeros(2, dtype=torch.bfloat16)}


def folder(path: Path, *, weights: dict[str, Any] | None = None, step: int = 20, momentum: float = 1.0) -> Path:
    path.mkdir()
    save_file(weights or WEIGHTS, path / "model.safetensors")
    state = {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.full((3,), momentum)}}}
    torch.save({**state, "param_groups": [{"lr": 0.1 / step, "params": [0]}]}, path / "optimizer.pt")
    return path


def test_what_differs_is_named_by_file_and_place(tmp_path: Path) -> None:
    a = folder(tmp_path / "a")
    other = {**WEIGHTS, "layer.bias": torch.tensor([0.0, 4.0], dtype=torch.bfloat16), "extra": torch.ones(1)}
    tensors, state = differences(a, folder(tmp_path / "b", weights=other, momentum=1.25, step=25))
    assert [(each.name, each.why) for each in tensors] == [
        ("model.safetensors: layer.bias", "values"),
        ("model.safetensors: extra", "only in the second"),
        ("optimizer.pt: state.0.step", "values"),
        ("optimizer.pt: state.0.exp_avg", "values"),
    ]
    assert state == ["optimizer.pt: param_groups.0.lr"]


def test_single_files_are_compared_and_nan_equals_itself_only(tmp_path: Path) -> None:
    for name, value in (("a.pt", math.nan), ("b.pt", math.nan), ("c.pt", 1.0)):
        torch.save({"loss": value, "w": torch.tensor([value])}, tmp_path / name)
    assert differences(tmp_path / "a.pt", tmp_path / "b.pt") == ([], [])
    tensors, state = differences(tmp_path / "a.pt", tmp_path / "c.pt")
    assert [(each.name, each.why) for each in tensors] == [("w", "values")] and state == ["loss"]


def test_a_checkpoint_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"w": Evil(tmp_path / "harmed")}, tmp_path / f"{name}.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt cannot be read safely"):
        differences(tmp_path / "a.pt", tmp_path / "b.pt")
    (tmp_path / "old.bin").write_bytes(pickle.dumps(Evil(tmp_path / "harmed")))
    with pytest.raises(CheckpointError):
        differences(tmp_path / "old.bin", tmp_path / "old.bin")
    assert not (tmp_path / "harmed").exists()


def test_a_folder_without_such_files_or_a_torn_file_is_an_error_and_no_difference(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no file of safetensors"):
        differences(tmp_path / "empty", tmp_path / "empty")
    a = folder(tmp_path / "a")
    for name in ("model.safetensors", "optimizer.pt"):
        (a / name).write_bytes((a / name).read_bytes()[:100])
    with pytest.raises(CheckpointError):
        differences(a, folder(tmp_path / "b"))
