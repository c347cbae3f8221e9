"""Which checkpoints stay: the newest always, what was asked for, and what somebody reads just now."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import remove
from slurmtrain.checkpoint.store.retention import Keep, Kept, Soundness, in_use, leftovers, reading, surplus

HOUR = 3600.0


def kept(*steps: int) -> list[Kept]:
    return [Kept(step, {}) for step in steps]


def with_loss(**losses: float) -> list[Kept]:
    """with_loss(s10=2.5): the checkpoint of step 10 has this validation loss."""
    return [Kept(int(name[1:]), {"valid_loss": loss}) for name, loss in losses.items()]


# ------------------------------------------------------------------------------------------------------ which ones stay


NULL: dict[str, float] = {"valid_loss": None}  # type: ignore[dict-item]  # what JSON makes of NaN elsewhere
LOSSES = with_loss(s10=2.0, s20=1.5, s30=1.0, s40=1.7, s50=1.8, s60=1.9)
OF_ONE_STEP = [Kept(10, {"valid_loss": 1.0}), Kept(10, {"valid_loss": 1.5}), *with_loss(s20=2.0, s30=9.0, s40=9.0)]
RULES: dict[str, tuple[list[Kept], Keep, list[int]]] = {
    "the newest stay in whatever order they are listed": (kept(30, 10, 40, 20), Keep(last=2), [10, 20]),
    "there are fewer than the last": (kept(10, 20), Keep(last=5), []),
    "every so many steps one stays for good": (kept(50, 100, 150, 200, 250, 300), Keep(last=2, every=100), [50, 150]),
    "a preemption save counts among the last": (kept(100, 200, 237), Keep(last=2), [100]),
    "the best stays": (LOSSES, Keep(last=2, best=1), [10, 20, 40]),
    "the greatest stays": (LOSSES, Keep(last=2, best=1, mode="max"), [20, 30, 40]),
    "of equally good ones the newer": (with_loss(s10=1.0, s20=1.0, s30=3.0, s40=3.0), Keep(best=1), [10]),
    # It may be the best; only what is known to be worse goes.
    "metrics that cannot be read": (
        [Kept(10, None), Kept(20, {"valid_loss": 1.0}), *kept(30, 40, 50)],
        Keep(best=1),
        [30],
    ),
    "another metric alone": ([Kept(10, NULL), Kept(20, {"accuracy": 1.0}), *kept(30, 40)], Keep(best=4), [10, 20]),
    "those of one step go together": (kept(10, 10, 20, 30), Keep(last=2), [10]),
    "those of one step are one of the best": (OF_ONE_STEP, Keep(best=2), []),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_was_asked_for_stays_and_the_rest_goes(rule: str) -> None:
    checkpoints, keep, removed = RULES[rule]
    assert surplus(checkpoints, keep) == removed


@pytest.mark.parametrize(
    ("sound_step", "removed"), [(None, [10, 20]), (45, [10, 20]), (29, [10]), (19, [20]), (5, [10, 20])]
)
def test_the_newest_from_before_a_trouble_stays(sound_step: int | None, removed: list[int]) -> None:
    assert surplus(kept(10, 20, 30, 40), Keep(last=2), soundness=Soundness(sound_step)) == removed


def test_steps_that_nobody_has_judged_yet_stay() -> None:
    """Any of them may turn out to be the newest sound one."""
    assert surplus(kept(3, 4, 5, 6), Keep(last=2), soundness=Soundness(3, 4)) == []
    assert surplus(kept(3, 4, 5, 6, 7), Keep(last=2), soundness=Soundness(4, 6)) == [3, 5]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_diverged_loss_is_never_the_best(mode: str, bad: float) -> None:
    checkpoints = with_loss(s10=bad, s20=1.0, s30=bad, s40=3.0, s50=3.0)
    assert surplus(checkpoints, Keep(best=3, mode=mode)) == [10, 30]


def test_what_is_read_stays() -> None:
    assert surplus(kept(10, 20, 30, 40), Keep(last=2), in_use=[10]) == [20]


@pytest.mark.parametrize("wrong", [{"last": 1}, {"every": -1}, {"best": -2}, {"mode": "least"}])
def test_a_rule_that_cannot_work_is_refused_with_its_value_and_a_hint(wrong: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="cannot be kept by") as caught:
        Keep(**wrong)
    assert all(f"{name}={value!r}" in caught.value.message for name, value in wrong.items()) and caught.value.hint


# -------------------------------------------------------------------------------------------------------------- readers


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint_0000010"
    path.mkdir()
    (path / "shard").write_text("weights")
    return path


def markers(directory: Path) -> list[Path]:
    return sorted((directory / ".readers").iterdir())


def test_a_checkpoint_is_in_use_until_the_last_of_several_readers_is_done(checkpoint: Path) -> None:
    directory, link = checkpoint.parent, checkpoint.parent / "newest"
    link.symlink_to(checkpoint)
    assert in_use(directory, time.time()) == set()
    with reading(checkpoint):
        with pytest.raises(KeyError) as failed, reading(link):
            raise KeyError([marker.name for marker in markers(directory)])  # a reader that fails
        assert len(failed.value.args[0]) == 2
        assert in_use(directory, time.time()) == {"checkpoint_0000010"}
    assert in_use(directory, time.time()) == set() and markers(directory) == []
    with reading(link):
        assert in_use(directory, time.time()) == {"checkpoint_0000010"}


def test_a_reader_that_was_killed_counts_for_a_day(checkpoint: Path) -> None:
    with reading(checkpoint):
        (marker,) = markers(checkpoint.parent)
        left = marker.rename(checkpoint.parent / "left")
    left.rename(marker)
    now = marker.stat().st_mtime
    assert in_use(checkpoint.parent, now + 23.9 * HOUR) == {"checkpoint_0000010"}
    assert in_use(checkpoint.parent, now - 5 * HOUR) == {"checkpoint_0000010"}  # their clock is ahead of ours
    assert in_use(checkpoint.parent, now + 24.1 * HOUR) == set()
    assert markers(checkpoint.parent) == []


def test_reading_goes_on_where_no_marker_can_be_made(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)  # permissions do not stop a test that runs as root
    with reading(checkpoint):
        assert (checkpoint / "shard").read_text() == "weights"
    assert not (checkpoint.parent / ".readers").exists()


# --------------------------------------------------------------------------------------------------- leftovers, removal


def test_only_temporary_directories_that_nobody_writes_to_are_leftovers(tmp_path: Path) -> None:
    names = ["checkpoint_0000010", "checkpoint_0000010.damaged-1", ".readers", "notes.tmp-1", "checkpoint_best.tmp-1"]
    for name in [*names, "checkpoint_0000040.tmp-3"]:
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint_0000040.tmp-3" / "rank00000").touch()
    for name in [*names, "checkpoint_0000040.tmp-3"]:
        os.utime(tmp_path / name, (1.0, 1.0))
    (tmp_path / "checkpoint_0000020.tmp-1").write_text("a file")
    (tmp_path / "checkpoint_0000030.tmp-1").symlink_to(tmp_path / "checkpoint_0000010")
    assert leftovers(tmp_path, now=time.time()) == []  # a file of the last has just been written
    later = leftovers(tmp_path, now=time.time() + 10 * HOUR)
    assert [path.name for path in later] == ["checkpoint_0000040.tmp-3"]
    assert leftovers(tmp_path / "not there", now=time.time()) == []


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_nobody_sees_a_checkpoint_half_removed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(checkpoint, 7)
    assert names_in(checkpoint.parent) == ["checkpoint_0000010.removed-7"]
    monkeypatch.undo()
    # What is left of it is found and removed later.
    (leftover,) = leftovers(checkpoint.parent, now=time.time() + 2 * HOUR)
    remove(leftover, 8)
    assert names_in(checkpoint.parent) == []
