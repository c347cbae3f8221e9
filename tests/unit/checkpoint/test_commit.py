"""The commit protocol on plain files: whatever dies when, what a reader sees is whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.commit import Incarnation, claim
from tests.support.checkpoint_files import manifest_of, record_of, text_of

FIRST, SECOND = Incarnation(1, "job 7, restart 0"), Incarnation(2, "job 7, restart 1")
SHARD = "rank00000.safetensors"


def save(directory: Path, step: int, incarnation: Incarnation = FIRST, content: str = "weights") -> Path:
    return finish(commit.begin(directory, step, incarnation), step, incarnation, content)


def finish(temporary: Path, step: int, incarnation: Incarnation, content: str = "weights") -> Path:
    (temporary / SHARD).write_text(content)
    manifest = manifest_of(step, {SHARD: record_of(temporary / SHARD)}, incarnation, state={"step": step})
    return commit.commit(temporary, text_of(manifest), step, incarnation)


def steps(directory: Path) -> list[int]:
    return [step_of(path) for path in committed(directory)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    claim(tmp_path, FIRST)
    return tmp_path


def test_checkpoints_are_ordered_by_step_beyond_seven_digits(directory: Path) -> None:
    for step in (9_999_999, 10_000_000, 5):
        save(directory, step)
    assert steps(directory) == [5, 9_999_999, 10_000_000]


def test_the_same_step_by_an_older_incarnation_is_not_replaced_but_followed(directory: Path) -> None:
    old = save(directory, 2, FIRST, "old")
    claim(directory, SECOND)
    path = save(directory, 2, SECOND, "new")
    assert (old / SHARD).read_text() == "old"
    assert (path / SHARD).read_text() == "new"
    assert [found.name for found in committed(directory)] == ["checkpoint_0000002", "checkpoint_0000002.2"]
    save(directory, 3, SECOND)
    assert steps(directory) == [2, 2, 3]


def test_what_older_incarnations_left_behind_is_removed_by_the_next(directory: Path) -> None:
    half = commit.begin(directory, 4, FIRST)
    (half / SHARD).write_text("half")
    removed = directory / "checkpoint_0000002.removed-1"
    removed.mkdir()
    save(directory, 3)
    claim(directory, SECOND)
    assert sorted(found.name for found in directory.glob("checkpoint_*")) == ["checkpoint_0000003"]


def test_after_a_save_a_power_cut_loses_no_byte_and_no_name_of_the_checkpoint_and_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, int | set[str]] = {}
    fsync = os.fsync

    def state(path: int | Path) -> int | set[str]:
        status = os.stat(path)
        return set(os.listdir(path)) if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns

    def record(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = state(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model=nn.Linear(3, 3)).result()
    checkpointer.close()  # until then files come and go, by which it looks for what others have written
    paths = [tmp_path, *tmp_path.rglob("*")]
    assert {path.name for path in paths} >= {"00000001", "COMPLETE", "manifest.json", "rank00000.safetensors"}
    assert [path for path in paths if synced.get(path.stat().st_ino) != state(path)] == []


def test_two_jobs_with_the_same_number_do_not_share_a_directory(directory: Path) -> None:
    assert claim(directory, FIRST) == FIRST  # the same life may come twice
    with pytest.raises(
        CheckpointError, match=r"is in use by job 7, restart 0, which has the same number \(1\) as this one, job 8"
    ):
        claim(directory, Incarnation(1, "job 8, restart 0"))
