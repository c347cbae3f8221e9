"""Folders that other trainers have written: what a disk has lost of them is found."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from slurmtrain.integrations import commit as commit_room
from slurmtrain.integrations.commit import commit, damage_of, keep_newest, note_files, set_aside


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    temporary = tmp_path / ".step_1.tmp-1"
    (temporary / "engine").mkdir(parents=True)
    torch.save({"weights": torch.ones(100)}, temporary / "engine" / "states.pt")
    (temporary / "engine" / "words").write_text("of a format that nobody knows")
    note_files(temporary)
    commit(temporary, tmp_path / "step_1")
    return tmp_path / "step_1"


def test_a_whole_folder_is_whole(saved: Path) -> None:
    assert damage_of(saved) is None and damage_of(saved, thorough=True) is None


def test_what_is_missing_cut_or_of_another_content_is_named(saved: Path) -> None:
    words, states = saved / "engine" / "words", saved / "engine" / "states.pt"
    os.truncate(words, 7)
    assert damage_of(saved) == "engine/words has 7 of 29 bytes"
    words.unlink()
    assert damage_of(saved) == "engine/words is missing"
    words.write_text("of a format that nobody knows")
    content = bytearray(states.read_bytes())
    content[content.index(torch.ones(100).numpy().tobytes()) + 8] ^= 1
    states.write_bytes(content)
    assert damage_of(saved) is None
    assert "is damaged" in (damage_of(saved, thorough=True) or "")


def test_a_folder_of_an_earlier_version_is_judged_by_the_formats_of_its_files(saved: Path) -> None:
    (saved / "files.json").unlink()
    assert damage_of(saved, thorough=True) is None
    os.truncate(saved / "engine" / "states.pt", 300)
    assert damage_of(saved) == "engine/states.pt: it is cut"


def test_an_error_that_may_pass_is_no_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(path: Path) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(commit_room, "_size", stale)
    with pytest.raises(OSError, match="Stale"):
        damage_of(saved)


def test_a_damaged_one_that_is_set_aside_makes_room_for_the_sound_one_of_its_name(saved: Path) -> None:
    set_aside(saved)
    sound = saved.with_name(".step_1.tmp-2")
    sound.mkdir()
    commit(sound, saved)
    keep_newest(saved.parent, "step_*", 1)
    assert {path.name for path in saved.parent.iterdir()} == {"step_1", ".step_1.damaged-1"}
    assert not any(saved.iterdir())
