"""Where a folder lies, and how fast it takes a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmtrain.system.file_systems import mount_of, write_speed_mb_per_s

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
mds1@o2ib:/work /work lustre rw 0 0
server:/export/home /home nfs4 rw 0 0
server:/export/odd /home/with\\040blank nfs4 rw 0 0
tmpfs /home/me/ram tmpfs rw 0 0
files /mnt/odd fuse.strange rw 0 0
broken
"""


@pytest.mark.parametrize(
    ("folder", "kind", "shared"),
    [
        ("/work/me/runs", "lustre", True),
        ("/home/me", "nfs4", True),
        ("/home/with blank/x", "nfs4", True),
        ("/home/me/ram/x", "tmpfs", False),
        ("/homework", "ext4", False),
        ("/mnt/odd", "fuse.strange", None),
    ],
)
def test_the_innermost_mount_says_whether_other_machines_see_a_folder(
    folder: str, kind: str, shared: bool | None
) -> None:
    found = mount_of(Path(folder), MOUNTS)
    assert found is not None
    assert (found.kind, found.shared) == (kind, shared)


def test_the_speed_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    speed = write_speed_mb_per_s(tmp_path, megabytes=1)
    assert speed is not None
    assert speed > 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_has_no_speed(tmp_path: Path) -> None:
    assert write_speed_mb_per_s(tmp_path / "missing") is None
