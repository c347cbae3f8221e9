"""Copies in an object store: they come back when the run's own directory is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from slurmtrain.checkpoint.errors import CheckpointMismatchError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.rank.distributed_context import DistributedContext
from tests.distributed.test_checkpoint import Rank
from tests.support.gloo import GlooRanks


def mirrored(distributed: DistributedContext | None, folder: Path, incarnation: int = 1, **options: Any) -> Rank:
    options |= {"mirror": f"file://{folder}/store", "keep": Keep(last=2)}
    return Rank(distributed, folder / "checkpoints", incarnation, seed=incarnation, **options)


def save_wipe_and_restore(distributed: DistributedContext, folder: Path) -> tuple[Any, ...]:
    first = mirrored(distributed, folder)
    for step in (1, 2, 3):
        first.steps(1)
        first.save(step)
    first.checkpointer.close()
    if distributed.environment.rank == 0:
        shutil.rmtree(folder / "checkpoints")
    distributed.leave_together()
    second = mirrored(distributed, folder, 2)
    restored, there = second.restore(), [path.name for path in committed(folder / "checkpoints")]
    return restored, second.weights() == first.weights(), there, second.said


def test_two_ranks_fetch_what_was_wiped(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    answers = gloo_ranks(2, save_wipe_and_restore, tmp_path)
    assert [answer[:3] for answer in answers] == [(3, True, ["checkpoint_0000003"])] * 2
    assert "was fetched from file://" in answers[0][3][0]
    # As many copies stay as checkpoints do; the one that came while another was being copied may have been left out.
    assert 1 <= len(list((tmp_path / "store").glob("*/COMPLETE"))) <= 2


def save_two_and_wipe(folder: Path, run_id: str = "") -> None:
    for number in (1, 2):  # of two lives, since the end of each waits for its copy
        rank = mirrored(None, folder, number, run_id=run_id)
        rank.restore()
        rank.save(number)
        rank.checkpointer.close()
    shutil.rmtree(folder / "checkpoints")


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_of_a_copy_that_is_damaged_the_older_is_fetched(tmp_path: Path, damage: str) -> None:
    save_two_and_wipe(tmp_path)
    (newest,) = (tmp_path / "store").glob("checkpoint_0000002*")
    content = bytearray((newest / "rank00000.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "rank00000.safetensors").write_bytes(content if damage == "flipped" else content[:-1])
    rank = mirrored(None, tmp_path, 3)
    assert rank.restore() == 1
    assert any("checkpoint_0000002 is damaged and was set aside" in line for line in rank.said)


def test_a_run_does_not_begin_anew_beside_copies_that_cannot_be_fetched(tmp_path: Path) -> None:
    save_two_and_wipe(tmp_path)
    for manifest in (tmp_path / "store").glob("*/manifest.json"):
        manifest.write_bytes(b"{}")
    with pytest.raises(CheckpointMismatchError, match=r"every copy in file://.* is damaged: .*manifest\.json"):
        mirrored(None, tmp_path, 3).restore()


def test_copies_of_another_run_are_refused(tmp_path: Path) -> None:
    save_two_and_wipe(tmp_path, run_id="one")
    with pytest.raises(CheckpointMismatchError, match="belongs to run one, this is run two"):
        mirrored(None, tmp_path, 3, run_id="two").restore()


def test_a_store_that_fails_is_told_and_the_checkpoint_is_committed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise KeyError("the store says no")  # what its package alone knows

    monkeypatch.setattr(LocalFileSystem, "put_file", refuse)
    rank = mirrored(None, tmp_path)
    rank.save(1)
    rank.checkpointer.close()
    assert [path.name for path in committed(tmp_path / "checkpoints")] == ["checkpoint_0000001"]
    assert any("was not copied to" in line and "the store says no" in line for line in rank.said)
