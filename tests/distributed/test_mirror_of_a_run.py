"""Checkpoints that are copied to an object store come back when the run's own directory is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.store.mirror_upload import MirrorUploader
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.runtime.distributed_context import DistributedContext
from tests.support.gloo import GlooRanks
from tests.support.logs import collect_messages


class Rank:
    def __init__(
        self, distributed: DistributedContext | None, directory: Path, url: str, *, run_id: str = "", seed: int = 1
    ):
        torch.manual_seed(seed)
        self.model = nn.Linear(300, 500)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.said = collect_messages()
        self.checkpointer = Checkpointer(
            directory,
            group=distributed.checkpoint_group if distributed else None,
            run_id=run_id,
            mirror=url,
            keep=Keep(last=2),
        )

    @property
    def uploader(self) -> MirrorUploader:
        uploader = self.checkpointer._saves._mirror_uploader
        assert uploader is not None
        return uploader

    def step_and_save(self, step: int) -> None:
        self.model(torch.ones(2, 300)).square().mean().backward()
        self.optimizer.step()
        self.checkpointer.save(step, model=self.model, optimizer=self.optimizer).result()

    def restore(self) -> int | None:
        restored = self.checkpointer.restore(model=self.model, optimizer=self.optimizer)
        return restored.step if restored else None

    def values(self) -> list[float]:
        moments = self.optimizer.state[self.model.weight]["exp_avg"]
        return [self.model.weight.sum().item(), moments.sum().item()]


def save_wipe_and_restore(distributed: DistributedContext | None, folder: Path) -> tuple[Any, ...]:
    directory, url = folder / "checkpoints", f"file://{folder}/store"
    first = Rank(distributed, directory, url)
    for step in (1, 2, 3):
        first.step_and_save(step)
    first.checkpointer.close()
    if distributed is None or distributed.environment.rank == 0:
        shutil.rmtree(directory)
    if distributed is not None:
        distributed.leave_together()
    second = Rank(distributed, directory, url, seed=2)
    restored = second.restore()
    return restored, second.values() == first.values(), [path.name for path in committed(directory)], second.said


def test_two_ranks_fetch_what_was_wiped(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    answers = gloo_ranks(2, save_wipe_and_restore, tmp_path)
    assert [answer[:3] for answer in answers] == [(3, True, ["checkpoint_0000003"])] * 2
    assert "was fetched from file://" in answers[0][3][0]
    # As many copies stay as checkpoints do; the one that came while another was being copied may have been left out.
    assert 1 <= len(list((tmp_path / "store").glob("*/COMPLETE"))) <= 2


def save_two(folder: Path, run_id: str = "") -> str:
    url = f"file://{folder}/store"
    rank = Rank(None, folder / "checkpoints", url, run_id=run_id)
    for step in (1, 2):
        rank.step_and_save(step)
        rank.checkpointer._saves._thread.wait_idle()
        rank.uploader._thread.wait_idle()
    rank.checkpointer.close()
    shutil.rmtree(folder / "checkpoints")
    return url


def test_a_copy_that_is_damaged_is_set_aside_and_the_older_is_fetched(tmp_path: Path) -> None:
    url = save_two(tmp_path)
    (newest,) = (tmp_path / "store").glob("checkpoint_0000002*")
    shard = newest / "rank00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    rank = Rank(None, tmp_path / "checkpoints", url, seed=2)
    assert rank.restore() == 1
    assert any("checkpoint_0000002 is damaged and was set aside" in line for line in rank.said)
    assert not (newest / "COMPLETE").exists()


def test_copies_of_another_run_are_refused(tmp_path: Path) -> None:
    url = save_two(tmp_path, run_id="one")
    with pytest.raises(CheckpointMismatchError, match="belongs to run one, this is run two"):
        Rank(None, tmp_path / "checkpoints", url, run_id="two").restore()


def test_a_store_that_fails_is_told_and_the_checkpoint_is_committed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(None, tmp_path / "checkpoints", f"file://{tmp_path}/store")

    def refuse(*args: Any, **options: Any) -> None:
        raise CheckpointError("the store says no")

    monkeypatch.setattr(rank.uploader._mirror, "upload", refuse)
    rank.step_and_save(1)
    rank.checkpointer.close()
    assert [path.name for path in committed(tmp_path / "checkpoints")] == ["checkpoint_0000001"]
    assert any("was not copied to" in line and "the store says no" in line for line in rank.said)
