"""Checkpoints of other programs, compared tensor by tensor without running any of their code."""

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
from tests.support.pickles import Evil

WEIGHTS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.zeros(2, dtype=torch.bfloat16)}


def folder(path: Path, *, weights: dict[str, Any] | None = None, step: int = 20, momentum: float = 1.0) -> Path:
    path.mkdir()
    save_file(weights or WEIGHTS, path / "model.safetensors")
    state = {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.full((3,), momentum)}}}
    torch.save({**state, "param_groups": [{"lr": 0.1 / step, "params": [0]}]}, path / "optimizer.pt")
    return path


def test_two_folders_of_the_same_bits_do_not_differ(tmp_path: Path) -> None:
    assert differences(folder(tmp_path / "a"), folder(tmp_path / "b")) == ([], [])


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
    assert tensors[-1].relative == pytest.approx(0.2) and tensors[0].relative == 1.0
    assert state == ["optimizer.pt: param_groups.0.lr"]


def test_single_files_are_compared_and_nan_equals_itself_only(tmp_path: Path) -> None:
    for name, value in (("a.pt", math.nan), ("b.pt", math.nan), ("c.pt", 1.0)):
        torch.save({"loss": value, "w": torch.tensor([value])}, tmp_path / name)
    assert differences(tmp_path / "a.pt", tmp_path / "b.pt") == ([], [])
    tensors, state = differences(tmp_path / "a.pt", tmp_path / "c.pt")
    assert [(each.name, each.relative) for each in tensors] == [("w", math.inf)] and state == ["loss"]


def test_a_checkpoint_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"w": Evil(tmp_path / "harmed")}, tmp_path / f"{name}.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt is not read with weights_only"):
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
