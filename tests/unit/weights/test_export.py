"""Weights for other programs: what is written is what was saved, or there is no file."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.format.manifest import Box
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.commit import Incarnation, claim
from slurmtrain.errors import UsageError
from slurmtrain.weights import export as weights_export
from slurmtrain.weights.export import export
from tests.support.checkpoint_files import Piece, text_of, write_files

SHARD = "rank00000.safetensors"


class Mixed(torch.nn.Module):
    """Tensors of every kind that a model has: matrices, a scalar, integers, booleans, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(300, 500)
        self.small = torch.nn.Parameter(torch.randn(7, 5).to(torch.bfloat16))
        self.factor = torch.nn.Parameter(torch.tensor(2.5))
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("precise", torch.randn(3, dtype=torch.float64))


def save(directory: Path, **objects: Any) -> Path:
    checkpointer = Checkpointer(directory, run_id="r1")
    checkpointer.save(20, **objects)
    checkpointer.close()
    return committed(directory)[-1]


def by_ranks(directory: Path, files: list[list[Piece]], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint as several ranks would have written it: every file holds these boxes of these tensors."""
    order = Incarnation(1, "x")
    claim(directory, order)
    temporary = commit.begin(directory, 7, order)
    return commit.commit(temporary, text_of(write_files(temporary, files, tensors)), 7, order)


def cut(tensor: torch.Tensor, name: str, parts: int, dimension: int) -> list[tuple[str, Box, torch.Tensor]]:
    """`tensor` cut along a dimension as FSDP (0) or tensor parallelism (1) does, unevenly if need be."""
    pieces, start = [], 0
    for part in tensor.chunk(parts, dimension):
        begin = [0] * tensor.dim()
        begin[dimension] = start
        pieces.append((name, Box(tuple(begin), tuple(part.shape)), part))
        start += part.shape[dimension]
    return pieces


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A safetensors file, by the library of the format, which refuses holes; the data begins at a multiple of 8."""
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 (it is no dict)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# What is written.


def test_the_bare_module_torch_and_the_safetensors_library_load_it(tmp_path: Path) -> None:
    model = Mixed()
    path = save(tmp_path / "c", model=model, optimizer=torch.optim.AdamW(model.parameters()))
    done = export(path, tmp_path / "out.safetensors")
    tensors, about = read(tmp_path / "out.safetensors")
    same(tensors, model.state_dict())
    assert about == {"format": "pt", "step": "20", "run_id": "r1", "object": "model"}
    assert (done.tensors, done.size) == (len(tensors), (tmp_path / "out.safetensors").stat().st_size)
    (tmp_path / "other").touch()
    assert (tmp_path / "out.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    Mixed().load_state_dict(tensors)


@pytest.mark.parametrize("dimension", [0, 1])
def test_pieces_of_many_ranks_become_whole_tensors(dimension: int, tmp_path: Path) -> None:
    tensors = {
        "model.b": torch.randint(0, 99, (9, 8, 7)),  # the larger element type first, as ranks write them
        "model.a": torch.randn(3000, 3500),  # 42 MB: three blocks
    }
    files: list[list[Piece]] = [[] for _ in range(4)]
    for name, tensor in tensors.items():
        for rank, piece in enumerate(cut(tensor, name, 4, dimension)):
            files[rank].append(piece)
    told: list[int] = []
    export(by_ranks(tmp_path / "c", files, tensors), tmp_path / "out.safetensors", progress=told.append)
    same(
        read(tmp_path / "out.safetensors")[0], {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    )
    assert sum(told) == sum(each.nbytes for each in tensors.values())


def test_floating_point_is_converted_and_values_that_become_infinite_are_refused(tmp_path: Path) -> None:
    model = Mixed()
    with torch.no_grad():
        model.factor.fill_(1e6)
    path = save(tmp_path / "c", model=model)
    export(path, tmp_path / "out.safetensors", dtype="bfloat16")
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    same(read(tmp_path / "out.safetensors")[0], expected)
    with pytest.raises(CheckpointError, match="factor holds values that are too large for float16"):
        export(path, tmp_path / "other.safetensors", dtype="float16")


def test_another_object_can_be_chosen(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    path = save(tmp_path / "c", model=first, model_average=second)
    export(path, tmp_path / "out.safetensors", only="model_average")
    same(read(tmp_path / "out.safetensors")[0], second.state_dict())
    with pytest.raises(UsageError, match="no tensors of an object 'modle'") as error:
        export(path, tmp_path / "other.safetensors", only="modle")
    assert "model" in str(error.value.hint)


# What is not written.


@pytest.mark.parametrize(
    ("name", "harm"),
    [(SHARD, "flipped"), (SHARD, "cut"), (SHARD, "gone"), ("manifest.json", "cut"), ("COMPLETE", "gone")],
)
def test_a_damaged_checkpoint_is_refused_and_leaves_no_file(name: str, harm: str, tmp_path: Path) -> None:
    path = save(tmp_path / "c", model=Mixed())
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "gone":
        (path / name).unlink()
    else:
        (path / name).write_bytes(content if harm == "flipped" else content[:-1])
    (tmp_path / "to").mkdir()
    with pytest.raises(CheckpointError):
        export(path, tmp_path / "to" / "out.safetensors")
    assert list((tmp_path / "to").iterdir()) == []


def test_a_file_of_smaller_types_needs_the_memory_of_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "c", model=torch.nn.Linear(1000, 1000, bias=False))
    monkeypatch.setattr(weights_export, "available_memory", lambda: 3_000_000)
    with pytest.raises(CheckpointError, match=r"has to be in memory: 0\.00 GB"):
        export(path, tmp_path / "out.safetensors", dtype="bfloat16")


def test_it_counts_as_a_reader_while_it_reads(tmp_path: Path) -> None:
    path = save(tmp_path / "c", model=torch.nn.Linear(2, 2))
    seen: list[list[str]] = []
    export(path, tmp_path / "out.safetensors", progress=lambda count: seen.append(os.listdir(path.parent / ".readers")))
    assert seen[0][0].startswith(path.name) and os.listdir(path.parent / ".readers") == []


def test_a_run_begins_with_a_checkpoint_of_the_weights_of_another_program(tmp_path: Path) -> None:
    weights, model = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    path = save(tmp_path / "start", model=weights)
    with closing(Checkpointer(tmp_path / "run", config={"model": {"dim": 4}})) as checkpointer:
        assert checkpointer.restore(path=path, as_start=True, model=model) is not None
    same(dict(model.state_dict()), weights.state_dict())
