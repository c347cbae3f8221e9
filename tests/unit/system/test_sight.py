"""What the login node can say of a path: there, missing, or a matter of the nodes; and how fast it takes a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmtrain.system.file_systems import write_speed_mb_per_s
from slurmtrain.system.sight import Seen, Sight, look, sight_of_gap, unwritable


@pytest.mark.parametrize(
    ("place", "empty", "sight"),
    [
        ("/", False, Sight.UNKNOWN),  # /scratch/data where this machine has no /scratch
        ("/scratch", True, Sight.UNKNOWN),  # not mounted here
        ("/scratch", False, Sight.MISSING),
        ("/scratch/me", True, Sight.MISSING),
        ("/tmp", False, Sight.UNKNOWN),
        ("/dev/shm", False, Sight.UNKNOWN),
        ("/mnt", False, Sight.UNKNOWN),
        ("/mnt/lustre", False, Sight.MISSING),
        ("/opt/cuda", False, Sight.UNKNOWN),  # installed on the nodes
        ("/home/me", False, Sight.MISSING),
    ],
)
def test_a_gap_in_a_shared_folder_is_certain_and_one_above_it_is_not(place: str, empty: bool, sight: Sight) -> None:
    assert sight_of_gap(Path(place), empty=empty) == sight


def test_a_path_is_looked_at_as_deep_as_this_machine_sees(tmp_path: Path) -> None:
    (tmp_path / "data" / "texts").mkdir(parents=True)
    (tmp_path / "data" / "texts" / "a.txt").touch()
    data = tmp_path / "data"
    assert look(data / "texts").sight == Sight.THERE
    assert look(data / "te*" / "*.txt").sight == look(data / "**" / "*.txt").sight == Sight.THERE
    assert look(data / "*.json") == Seen(Sight.MISSING, data, "*.json")
    assert look(data / "nothing" / "**" / "*.txt") == Seen(Sight.MISSING, data, "nothing")
    assert look(data / "x" / "y") == Seen(Sight.MISSING, data, "x")
    assert look(data / "texts" / "a.txt" / "y") == Seen(Sight.MISSING, data / "texts" / "a.txt", "y")
    assert look(data / "x" / "y", [f"{data}/x/"]).sight == look(data / "x", [str(data / "x")]).sight == Sight.OF_NODES
    assert look(data / "xy", [str(data / "x")]).sight == Sight.MISSING
    (data / "[1].txt").touch()
    assert look(data / "[1].txt").sight == Sight.THERE


def test_a_link_is_as_far_as_what_it_points_to(tmp_path: Path) -> None:
    os.symlink("/only/on/nodes", tmp_path / "scratch")
    os.symlink(tmp_path / "gone", tmp_path / "broken")
    os.symlink("loop", tmp_path / "loop")
    assert look(tmp_path / "scratch" / "data").sight == Sight.UNKNOWN
    assert look(tmp_path / "broken" / "data").sight == Sight.MISSING
    assert look(tmp_path / "loop").sight == Sight.MISSING


def test_a_folder_that_cannot_be_written_is_known_by_the_first_one_above_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert unwritable(tmp_path / "a" / "b") is None
    assert unwritable(tmp_path / "file" / "b") == f"{tmp_path / 'file'} is no folder"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # which root may always
    assert unwritable(tmp_path / "a" / "b") == f"you may not write in {tmp_path}"


def test_the_speed_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    speed = write_speed_mb_per_s(tmp_path, megabytes=1)
    assert speed is not None
    assert speed > 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_has_no_speed(tmp_path: Path) -> None:
    assert write_speed_mb_per_s(tmp_path / "missing") is None
