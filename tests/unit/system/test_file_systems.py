"""How fast a folder takes a file."""

from __future__ import annotations

import os
from pathlib import Path

from slurmtrain.system.file_systems import write_speed_mb_per_s


def test_the_speed_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    speed = write_speed_mb_per_s(tmp_path, megabytes=1)
    assert speed is not None
    assert speed > 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_has_no_speed(tmp_path: Path) -> None:
    assert write_speed_mb_per_s(tmp_path / "missing") is None
