"""Where a folder lies: its file system's kind, whether other nodes may see it, and roughly how fast it takes a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Kinds that several machines mount at the same time, as /proc/self/mounts names them.
SHARED_KINDS = frozenset(
    {
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cephfs", "wekafs", "panfs", "pvfs2", "orangefs", "afs"),
        *("cifs", "smb3", "9p", "glusterfs", "moosefs", "daos", "virtiofs", "quobyte", "vast", "gfs2", "ocfs2"),
    }
)
LOCAL_KINDS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "ramfs", "f2fs", "squashfs"}
)
IN_MEMORY = frozenset({"tmpfs", "ramfs"})  # what lies there takes memory, that of the job which has written it
WRITTEN_MB = 8  # small enough for a login node's shared disk, large enough to be more than one round trip
_MOST_S = 2.0


@dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Attributes:
        kind: as in /proc/self/mounts: "lustre", "nfs4", "ext4", "fuse.sshfs".
        source: the server or device.
    """

    point: str
    kind: str
    source: str = ""

    @property
    def shared(self) -> bool | None:
        """Whether several machines can have mounted it; None: not known of this kind."""
        kind = self.kind.removeprefix("fuse.").removeprefix("fuseblk")
        if kind in SHARED_KINDS:
            return True
        return False if kind in LOCAL_KINDS else None


def mount_of(folder: Path, mounts: str) -> Mount | None:
    """Return what a folder lies on.

    Args:
        folder: an absolute path.
        mounts: the text of /proc/self/mounts, in which blanks of a path are written as octal numbers.
    """
    best: Mount | None = None
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = words[1].encode().decode("unicode_escape", errors="replace") if "\\" in words[1] else words[1]
        inside = folder == Path(point) or Path(point) in folder.parents
        # The later of two on one point covers the earlier.
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(point, words[2], words[0])
    return best


def mount_here(folder: Path) -> Mount | None:
    """Return what a folder of this machine lies on, or None if the kernel does not say."""
    try:
        return mount_of(folder.resolve(), Path("/proc/self/mounts").read_text(errors="replace"))
    except OSError:
        return None


def write_speed_mb_per_s(folder: Path, *, megabytes: int = WRITTEN_MB) -> float | None:
    """Write a file of some megabytes into a folder, wait until it is on the disk, remove it, and return MB per second.

    That is one process's rate on this machine at this moment, and rough. It stops after two seconds with what is written by
    then. None: the folder cannot be written.
    """
    block = os.urandom(1 << 20)  # some file systems compress
    try:
        descriptor, name = tempfile.mkstemp(prefix=".slurmtrain-probe-", dir=folder)
    except OSError:
        return None
    written = 0
    try:
        began = time.perf_counter()
        while written < megabytes and time.perf_counter() - began < _MOST_S:
            if os.write(descriptor, block) != len(block):
                return None
            written += 1
        os.fsync(descriptor)
        return written * len(block) / 1e6 / max(time.perf_counter() - began, 1e-9)
    except OSError:  # a full disk, a quota
        return None
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name)
