"""Copies of the newest checkpoint's files in a folder of each node, from which a restart on the same nodes reads in seconds.

    <checkpoint.local>/slurmtrain-<uid>/<run>/<digest of the manifest>/rank00003.safetensors

After a commit every rank writes its file once more, from the same memory. A restore chooses its checkpoint as it always
does. Of that one, a node reads the files that it has copies of, and the others through links to the checkpoint. Contents
are verified as those of any checkpoint, and where they are damaged, the checkpoint itself is read. So nothing depends on a
copy: it needs no commit, and a node that was replaced has none.

Memory that files take in /dev/shm counts against the job's, and nobody gives it back when ranks are killed: so the next
run of the same person on this node removes the folders of runs that are dead. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from slurmtrain.checkpoint.errors import NodeFolderError
from slurmtrain.system.files import make_own_folder, write_json
from slurmtrain.system.process import ProcessMark
from slurmtrain.system.records import read_json

OWNER = "owner.json"
MEMORY = Path("/dev/shm")
SPARE_BYTES = PIECE_BYTES = 16 << 20
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
# A run that was killed may be started again in place; after this many seconds without a process of it, it is dead.
DEAD_S = 900.0
# Processes of a run in another container are not seen here; while it is at work, it saves more often than this.
UNSEEN_S = 6 * 3600.0


class NodeFolder:
    """The folder of a run on this node, which all ranks of the node use.

    Args:
        root: checkpoint.local.
        directory: the directory of the run's checkpoints, which tells two runs of one name apart.
    """

    def __init__(self, root: Path, directory: Path, run_id: str):
        digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:12]
        name = f"{run_id}-{digest}" if PLAIN_NAME.fullmatch(run_id) else digest
        self.root, self.path = root, root / f"slurmtrain-{os.geteuid()}" / name

    def open(self) -> None:
        """Make the folder, and remove those of runs that are dead.

        Raises:
            NodeFolderError: it cannot be made, or somebody else has made it.
        """
        if not self.root.is_dir():
            raise NodeFolderError(
                f"{socket.gethostname()} has no folder {self.root} for copies of checkpoints (checkpoint.local)",
                hint="choose a node-local folder, such as /dev/shm or one on a local disk",
            )
        for folder in (self.path.parent, self.path):
            _make_private(folder)
        write_json(self.path / OWNER, ProcessMark.own().to_json(), durable=False)
        now = time.time()
        for run in self.path.parent.iterdir():
            with suppress(OSError):
                if run != self.path and not run.is_symlink() and not _may_live(run, now):
                    shutil.rmtree(run, ignore_errors=True)

    def check_room(self, size: int, sharers: int, staging_bytes: int = 0) -> None:
        """Check that copies fit here, and into the job's memory if they lie there, beside those that are there already.

        Args:
            size, sharers: bytes of one rank's file, and number of ranks on this node.
            staging_bytes: bytes of memory that the ranks of this node will allocate besides.

        Raises:
            NodeFolderError: there is not that much room.
        """
        from slurmtrain.checkpoint.save.staging import available_memory  # with torch, which a supervisor loads none of

        there = 0
        for file in self.path.glob("*/*"):
            with suppress(OSError):  # another rank of this node has just removed or renamed it
                there += file.lstat().st_size
        wanted = sharers * size - there + SPARE_BYTES
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        where, what = f"{self.root} on {socket.gethostname()}", f"{sharers} of {size / 1e9:.2f} GB"
        hint = "smaller parts on more nodes, another folder (checkpoint.local), or none: checkpoint.local=null"
        if wanted > free:
            raise NodeFolderError(f"{where} has {free / 1e9:.2f} GB left for copies of checkpoints: {what}", hint=hint)
        in_memory = MEMORY.is_dir() and self.path.stat().st_dev == MEMORY.stat().st_dev
        left = available_memory() if in_memory else None
        if left is not None and wanted + staging_bytes > left:
            raise NodeFolderError(
                f"{where} is memory of this job, which has {left / 1e9:.2f} GB left, and copies of checkpoints take {what}",
                hint=f"request more memory (cluster.mem_per_node_gb); {hint}",
            )

    def write(
        self, digest: str, name: str, data: memoryview, sharers: int, leaving: Callable[[], bool] = lambda: False
    ) -> None:
        """Copy a rank's file of the checkpoint whose manifest has this digest. Copies of others make room for it first.

        Args:
            leaving: looked at between pieces: a stop does not wait for the rest.

        Raises:
            NodeFolderError: there is no room for it. OSError: it cannot be written.
        """
        if not self.path.is_dir():  # removed by an epilog, or by systemd's RemoveIPC
            self.open()
        for old in self.path.iterdir():
            if old.is_dir() and old.name != digest:
                shutil.rmtree(old, ignore_errors=True)
        self.check_room(len(data), sharers)
        folder = self.path / digest
        folder.mkdir(mode=0o700, exist_ok=True)
        temporary = folder / f"{name}.tmp"
        with temporary.open("wb") as file:
            for begin in range(0, len(data), PIECE_BYTES):
                if leaving():
                    return
                file.write(data[begin : begin + PIECE_BYTES])
        temporary.rename(folder / name)

    def view(self, checkpoint: Path, digest: str, names: Collection[str]) -> Path | None:
        """Return a folder with all files of a checkpoint: copies, and links to the others; None if there is no copy.

        Args:
            digest: that of the checkpoint's manifest.
            names: of its files.
        """
        folder = self.path / digest
        lacking = [name for name in names if (folder / name).is_symlink() or not (folder / name).is_file()]
        if len(lacking) == len(names):
            return None
        try:
            for name in lacking:
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to(checkpoint.absolute() / name)
        except OSError:  # no reason to end: other nodes would wait for this one
            return None
        return folder

    def remove(self) -> None:
        """Remove everything of the run from this machine."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # those of other runs are in it
            self.path.parent.rmdir()


def _make_private(path: Path) -> None:
    """Make a folder that nobody else may enter.

    Anybody can make a folder of this name in /dev/shm before, and would then read the weights.
    """
    try:
        private = make_own_folder(path, closed=0o077)
    except OSError as error:
        raise NodeFolderError(
            f"{path} for copies of checkpoints (checkpoint.local) cannot be made on {socket.gethostname()}: "
            f"{error.strerror or error}",
            hint="choose a node-local folder that you can write to, such as /dev/shm",
        ) from None
    if not private:
        raise NodeFolderError(
            f"{path} on {socket.gethostname()} is not your own folder with mode 0700",
            hint="remove it, or choose another folder with checkpoint.local",
        )


def _may_live(run: Path, now: float) -> bool:
    """Return whether the run that a folder is of may be at work, or about to be started again in place."""
    owner = ProcessMark.from_json(read_json(run / OWNER))
    lives = owner.lives() if owner is not None else False
    return bool(lives) or now - run.stat().st_mtime < (UNSEEN_S if lives is None else DEAD_S)
