"""The folder of one node that holds the copy of the newest state: private, bounded, and removed when the run has ended.

    <checkpoint.local>/slurmtrain-<uid>/<run>/<node>/checkpoint_0001000/   files, copy.json, manifest, COMPLETE

The name of the node is in the path, because several nodes may see one file system, as those of a sandbox do. Called by
one rank of each node. Memory that files take in /dev/shm counts against the job's, and nobody gives it back when ranks
are killed: so the next run of the same person on this node removes the folders of runs that are dead. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from slurmtrain.checkpoint.errors import NodeFolderError
from slurmtrain.checkpoint.format.directory import COMPLETE, TEMPORARY_NAME, checkpoint_name, committed, remove
from slurmtrain.checkpoint.format.manifest import write_manifest
from slurmtrain.checkpoint.host_memory import available_memory
from slurmtrain.system.files import write_json
from slurmtrain.system.modes import make_own_folder
from slurmtrain.system.process import ProcessMark
from slurmtrain.system.records import read_json

MARK = "copy.json"  # which incarnation made or last restored the copy, and which checkpoint was the newest then
OWNER = "owner.json"
MEMORY = Path("/dev/shm")
SPARE_BYTES = 16 << 20
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
# A run that was killed may be started again in place; after this many seconds without a process of it, it is dead.
DEAD_S = 900.0
# Processes of a run in another container are not seen here; while it is at work, it saves copies more often than this.
UNSEEN_S = 6 * 3600.0


def run_folder(root: Path, directory: Path, run_id: str) -> Path:
    """Return the folder of a run's copies on every node.

    Args:
        root: checkpoint.local.
        directory: the directory of the run's checkpoints, which tells two runs of one name apart.
    """
    digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:12]
    name = f"{run_id}-{digest}" if PLAIN_NAME.fullmatch(run_id) else digest
    return root / f"slurmtrain-{os.geteuid()}" / name


def remove_run(root: Path, directory: Path, run_id: str) -> None:
    """Remove the copies of a run from this machine, whatever node they are of."""
    folder = run_folder(root, directory, run_id)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # those of other runs are in it
        folder.parent.rmdir()


class NodeFolder:
    """The folder of this node.

    Args:
        root: checkpoint.local.
        of_run: see `run_folder`.
        node: name of this node.
        order: that of this incarnation.
    """

    def __init__(self, root: Path, of_run: Path, node: str, order: int):
        self.root, self._of_run, self._order = root, of_run, order
        self.path = of_run / (node if PLAIN_NAME.fullmatch(node) else hashlib.sha256(node.encode()).hexdigest()[:16])

    def open(self) -> None:
        """Make the folder, and remove what saves of earlier incarnations and runs that are dead have left.

        Raises:
            NodeFolderError: it cannot be made, or somebody else has made it.
        """
        if not self.root.is_dir():
            raise NodeFolderError(
                f"{socket.gethostname()} has no folder {self.root} for copies of checkpoints (checkpoint.local)",
                hint="choose a node-local folder, such as /dev/shm or one on a local disk",
            )
        for folder in (self._of_run.parent, self._of_run, self.path):
            _make_private(folder)
        write_json(self.path / OWNER, ProcessMark.own().to_json(), durable=False)
        for path in self.path.iterdir():
            match = TEMPORARY_NAME.fullmatch(path.name)
            if match and int(match.group(1)) < self._order:
                remove(path, self._order)
        now = time.time()
        for run in self._of_run.parent.iterdir():
            if run != self._of_run and run.is_dir() and not run.is_symlink():
                with suppress(OSError):
                    if not any(_may_live(node, now) for node in run.iterdir()):
                        shutil.rmtree(run, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything of the run from this node."""
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in (self._of_run, self._of_run.parent):
            with suppress(OSError):  # those of other nodes, or of other runs, are in it
                folder.rmdir()

    def check_room(self, copies: int, size: int, staging_bytes: int = 0) -> None:
        """Check that files fit here, and into the job's memory if they lie there.

        Args:
            copies, size: number and bytes of the copies that there will be; for more than one, those that are there count.
            staging_bytes: bytes of memory that the ranks of this node will allocate besides.

        Raises:
            NodeFolderError: there is not that much room.
        """
        files = self.path.glob("checkpoint_*/*") if copies > 1 else ()
        wanted = copies * size - sum(file.stat().st_size for file in files) + SPARE_BYTES
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        where, what = f"{self.root} on {socket.gethostname()}", f"{copies} of {size / 1e9:.2f} GB"
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

    def temporary(self, step: int) -> Path:
        """Return where a copy is written."""
        return self.path / f"{checkpoint_name(step)}.tmp-{self._order}"

    def begin(self, step: int) -> None:
        """Make the folder that a copy is written into."""
        path = self.temporary(step)
        shutil.rmtree(path, ignore_errors=True)  # a save of this very incarnation that failed
        path.mkdir(mode=0o700)

    def describe(self, step: int, manifest: bytes, durable: str | None) -> None:
        """Write what the files of a copy are, and that they are complete; it gets its name by `publish`."""
        path = self.temporary(step)
        self.mark(path, durable)
        write_manifest(path, manifest)

    def mark(self, path: Path, durable: object) -> None:
        """Note that this incarnation has made or restored a copy, and the newest checkpoint of the run directory."""
        write_json(path / MARK, {"incarnation": self._order, "durable": durable}, durable=False)

    def publish(self, step: int) -> None:
        """Give a copy its final name. Called when all nodes have all of theirs."""
        revision = 1
        while (final := self.path / checkpoint_name(step, revision)).exists():
            revision += 1
        self.temporary(step).rename(final)

    def find(self, digest: str) -> Path:
        """Return the copy with this digest in its COMPLETE."""
        return next(path for path in committed(self.path) if digest_of(path) == digest)

    def keep_only(self, digest: str | None) -> None:
        """Remove all copies but the one with this digest."""
        for path in committed(self.path):
            if digest is None or digest_of(path) != digest:
                remove(path, self._order)


def digest_of(copy: Path) -> str:
    """Return the digest in the COMPLETE of a copy: two with the same digest are the same."""
    return (copy / COMPLETE).read_text(errors="replace").removesuffix("\n")


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


def _may_live(node: Path, now: float) -> bool:
    """Return whether the run that a node's folder is of may be at work, or about to be started again in place."""
    owner = ProcessMark.from_json(read_json(node / OWNER))
    lives = owner.lives() if owner is not None else False
    return bool(lives) or now - node.stat().st_mtime < (UNSEEN_S if lives is None else DEAD_S)
