"""Save and restore by several ranks: whatever is damaged, missing or killed, all ranks go on from the same sound state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.commit import Incarnation, claim
from slurmtrain.parallel.ddp import apply_ddp
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.system.files import write_new
from tests.support.gloo import GlooRanks
from tests.support.logs import collect_messages


class Rank:
    """A small training state of one rank."""

    def __init__(
        self,
        distributed: DistributedContext | None,
        directory: Path,
        incarnation: int = 1,
        *,
        seed: int = 0,
        **options: Any,
    ):
        self.rank = distributed.environment.rank if distributed else 0
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.model = apply_ddp(model, torch.device("cpu"), distributed.device_group if distributed else None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        torch.manual_seed(100 + 10 * seed + self.rank)  # each rank draws its own masks
        self.said = collect_messages()
        self.checkpointer = Checkpointer(
            directory,
            group=distributed.checkpoint_group if distributed else None,
            incarnation=Incarnation(incarnation, f"life {incarnation}"),
            **options,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(torch.rand(6, 1)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def save(self, step: int) -> Path:
        return self.checkpointer.save(step, **self.objects).result().path

    def restore(self) -> int | None:
        restored = self.checkpointer.restore(**self.objects)
        return restored.step if restored else None

    def weights(self) -> list[float]:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()]).tolist()


# Damage and death. Every kind of it, and every moment, is in the fault matrix (tests/faults); here is what the ranks say.


def save_two(distributed: DistributedContext | None, directory: Path) -> list[float]:
    """Saves step 1 and step 2; returns the weights of step 1."""
    rank = Rank(distributed, directory)
    rank.steps(1)
    rank.save(1)
    weights = rank.weights()
    rank.steps(1)
    rank.save(2)
    return weights


def damage_and_restore(
    distributed: DistributedContext, directory: Path
) -> tuple[int | None, list[float], list[str], str]:
    """The newest is damaged, then all are: what is restored first, and the error of the next life."""
    flip_a_bit(directory / "checkpoint_0000002", distributed)
    rank = Rank(distributed, directory, incarnation=2, seed=5)
    found = rank.restore(), rank.weights(), list(rank.said)
    rank.checkpointer.close()
    flip_a_bit(directory / "checkpoint_0000001", distributed)
    return *found, refused(distributed, directory, incarnation=3)


def flip_a_bit(path: Path, distributed: DistributedContext) -> None:
    dist.barrier(group=distributed.control_group)
    if distributed.environment.rank == 0:
        shard = path / "rank00001.safetensors"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    dist.barrier(group=distributed.control_group)


def refused(distributed: DistributedContext | None, directory: Path, incarnation: int) -> str:
    try:
        return f"restored {Rank(distributed, directory, incarnation=incarnation).restore()}"
    except CheckpointError as error:
        return str(error)


def test_a_damaged_checkpoint_is_set_aside_loudly_and_when_all_are_no_rank_starts_afresh(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    weights, _ = gloo_ranks(2, save_two, directory)
    first, second = gloo_ranks(2, damage_and_restore, directory)
    assert first[:2] == second[:2] == (1, weights)
    assert "checkpoint_0000002 is damaged and was set aside" in first[2][0]
    assert "rank00001.safetensors is not what was written: its digest differs" in first[2][0]
    assert first[2][1].startswith("resuming at step 1 from checkpoint_0000001")
    assert second[2] == []  # one line, from one rank
    assert (directory / "checkpoint_0000002.damaged-1").is_dir()
    for _, _, _, error in (first, second):
        assert "every checkpoint in" in error and "is damaged: checkpoint_0000001" in error
        assert "delete them to start from scratch" in error
    # Nor does the next attempt, which finds nothing but what was set aside.
    assert "damaged" in refused(None, directory, incarnation=4)


def test_a_life_that_is_overtaken_during_its_save_does_not_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Rank(None, tmp_path, incarnation=1)

    def overtaken(path: Path, text: bytes) -> None:
        write_new(path, text)
        if path.name == "COMPLETE":
            claim(tmp_path, Incarnation(2, "life 2"))

    monkeypatch.setattr(commit, "write_new", overtaken)
    old.checkpointer.save(1, **old.objects)
    with pytest.raises(CheckpointError, match=r"incarnation 1 \(life 1\) may not commit"):
        old.checkpointer.save(2, **old.objects)  # one failure is enough
    assert committed(tmp_path) == []


def save_at_my_own_step(distributed: DistributedContext, directory: Path) -> list[Any]:
    rank = Rank(distributed, directory)
    rank.save(1)
    try:
        rank.save(100 + rank.rank)
        error = "saved"
    except CheckpointError as failure:
        error = str(failure)
    return [error, [path.name for path in committed(directory)]]


def test_ranks_at_different_steps_do_not_make_one_checkpoint(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    for error, there in gloo_ranks(2, save_at_my_own_step, tmp_path / "checkpoints"):
        assert "rank 1 saves step 101, but rank 0 saves step 100" in error
        assert there == ["checkpoint_0000001"]


def test_a_step_back_on_purpose_is_not_removed_behind_ones_back(tmp_path: Path) -> None:
    elsewhere = Rank(None, tmp_path / "elsewhere")
    elsewhere.save(100)
    directory = tmp_path / "checkpoints"
    first = Rank(None, directory)
    for step in (900, 1000):
        first.save(step)
    first.checkpointer.close()
    back = Rank(None, directory, incarnation=2)
    back.checkpointer.restore(path=tmp_path / "elsewhere" / "checkpoint_0000100", **back.objects)
    saved = back.save(150)
    back.checkpointer.close()
    assert saved in committed(directory)
