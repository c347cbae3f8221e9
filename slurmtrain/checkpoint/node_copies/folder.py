"""The folder of one node that holds its part of the newest copies: private, bounded, and removed when the run has ended.

    <checkpoint.local>/slurmtrain-<uid>/<run>/<node>/checkpoint_0001000/   files, index, manifest, lineage, COMPLETE

The name of the node is in the path, because several nodes may see one file system, as those of a sandbox do. Called by
one rank of each node. Memory that files take in /dev/shm counts against the job's, and nobody gives it back when ranks
are killed: so the next run of the same person on this node removes the folders of runs that are dead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.checkpoint.format.directory import (
    COMPLETE,
    INDEX,
    TEMPORARY_NAME,
    checkpoint_name,
    committed,
    remove,
)
from slurmtrain.checkpoint.format.index_file import read_index
from slurmtrain.checkpoint.format.manifest import Manifest, parse_manifest, read_manifest_bytes, write_manifest
from slurmtrain.checkpoint.node_copies.lineage import Mark
from slurmtrain.errors import CheckpointError, NodeFolderError
from slurmtrain.system.file_systems import IN_MEMORY
from slurmtrain.system.files import link_or_copy, read_json, write_json, write_synced
from slurmtrain.system.modes import make_own_folder
from slurmtrain.system.process import ProcessMark

MARK = "lineage.json"
OWNER = "owner.json"
RESTORING = "restoring"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
# A run that was killed may be started again in place; after this many seconds without a process of it, it is dead.
DEAD_S = 900.0
# Processes of a run in another container are not seen here; while it is at work, it saves copies more often than this.
UNSEEN_S = 6 * 3600.0


@dataclass(frozen=True)
class NodeCopy:
    """What a node holds of one copy.

    Attributes:
        digest: that in COMPLETE: two copies with one digest are the same.
        manifest_text: bytes of manifest.json, which have that digest.
        index: bytes of index.bin, or None if they are not what the manifest says.
        names: files of ranks that are here and have the right size.
    """

    path: Path
    step: int
    digest: str
    manifest_text: bytes
    index: bytes | None
    mark: Mark
    names: tuple[str, ...]


def run_folder(root: Path, directory: Path, run_id: str) -> Path:
    """Return the folder of a run's copies on every node.

    Args:
        root: checkpoint.local.
        directory: the directory of the run's checkpoints, which tells two runs of one name apart.
    """
    digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:12]
    name = f"{run_id}-{digest}" if PLAIN_NAME.fullmatch(run_id) else digest
    return root / f"slurmtrain-{os.geteuid()}" / name


class NodeFolder:
    """The folder of this node.

    Args:
        root: checkpoint.local.
        run_folder: see `run_folder`.
        node: name of this node.
        order: that of this incarnation.
    """

    def __init__(self, root: Path, run_folder: Path, node: str, order: int):
        self.root, self._run_folder, self._order = root, run_folder, order
        self.path = run_folder / (
            node if PLAIN_NAME.fullmatch(node) else hashlib.sha256(node.encode()).hexdigest()[:16]
        )

    # Making and removing the folder.

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
        for folder in (self._run_folder.parent, self._run_folder, self.path):
            _make_private(folder)
        write_json(self.path / OWNER, ProcessMark.own().to_json(), durable=False)
        for path in self.path.iterdir():
            match = TEMPORARY_NAME.fullmatch(path.name)
            if match and int(match.group(1)) < self._order:
                remove(path, self._order)
        shutil.rmtree(self.path / RESTORING, ignore_errors=True)
        self._remove_dead_runs(time.time())

    def _remove_dead_runs(self, now: float) -> None:
        for run in self._run_folder.parent.iterdir():
            if run == self._run_folder or run.is_symlink() or not run.is_dir():
                continue
            with suppress(OSError):
                if not any(_may_live(node, now) for node in run.iterdir()):
                    shutil.rmtree(run, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything of the run from this node."""
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in (self._run_folder, self._run_folder.parent):
            with suppress(OSError):  # those of other nodes, or of other runs, are in it
                folder.rmdir()

    # Space.

    @property
    def in_memory(self) -> bool:
        """Whether what is written here takes memory of the job."""
        return file_system_of(self.path) in IN_MEMORY

    def free_bytes(self) -> int:
        """Return how many bytes can be written here, without what copies take already."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def held_bytes(self) -> int:
        """Return how many bytes the copies take."""
        return sum(
            entry.stat().st_size
            for path in self.path.glob("checkpoint_*")
            for entry in path.iterdir()
            if entry.is_file()
        )

    # Writing.

    def temporary(self, step: int) -> Path:
        """Return where a copy is written."""
        return self.path / f"{checkpoint_name(step)}.tmp-{self._order}"

    def begin(self, step: int) -> None:
        """Make the folder that a copy is written into."""
        path = self.temporary(step)
        shutil.rmtree(path, ignore_errors=True)  # a save of this very incarnation that failed
        path.mkdir(mode=0o700)

    def describe(self, step: int, manifest: bytes, index: bytes, mark: Mark) -> None:
        """Write what the files of a copy are, and that they are complete; it gets its name by `publish`."""
        path = self.temporary(step)
        write_synced(path / INDEX, index)
        write_synced(path / MARK, mark.to_bytes())
        write_manifest(path, manifest)

    def publish(self, step: int) -> Path:
        """Give a copy its final name. Called when all nodes have all of theirs."""
        revision = 1
        while (final := self.path / checkpoint_name(step, revision)).exists():
            revision += 1
        self.temporary(step).rename(final)
        return final

    def give_up(self, step: int) -> None:
        """Remove what was written of a copy that failed."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def keep_only(self, digest: str | None) -> None:
        """Remove all copies but the one with this digest."""
        for path in committed(self.path):
            if digest is None or _complete(path) != digest:
                remove(path, self._order)

    # Reading.

    def copies(self) -> list[NodeCopy]:
        """Return the copies whose manifest and lineage can be read, newest first."""
        found = []
        for path in reversed(committed(self.path)):
            with suppress(CheckpointError, OSError, ValueError, KeyError, TypeError):
                found.append(_read(path))
        return found

    def assemble(self, copy: NodeCopy | None, manifest: Manifest, index: bytes, leave_out: Collection[str]) -> Path:
        """Make a folder in which all files of a checkpoint are: those that are here, and empty ones to be filled.

        Args:
            copy: what this node holds of it.
            leave_out: files that are here and damaged.
        """
        path = restoring_path(self.path, manifest.step)
        shutil.rmtree(path.parent, ignore_errors=True)
        path.mkdir(mode=0o700, parents=True)
        here = set(copy.names) - set(leave_out) if copy is not None else set()
        for name, record in manifest.files.items():
            if name == INDEX:
                write_synced(path / name, index)
            elif name in here and copy is not None:
                link_or_copy(copy.path / name, path / name)
            else:
                with (path / name).open("xb") as file:
                    file.truncate(record.size)  # a hole, which takes no space
        return path

    def end_restoring(self) -> None:
        """Remove the folder that `assemble` has made."""
        shutil.rmtree(self.path / RESTORING, ignore_errors=True)


def restoring_path(folder: Path, step: int) -> Path:
    """Return the folder of a node in which a checkpoint is assembled to be read."""
    return folder / RESTORING / checkpoint_name(step)


def remove_run(root: Path, directory: Path, run_id: str) -> None:
    """Remove the copies of a run from this machine, whatever node they are of."""
    folder = run_folder(root, directory, run_id)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # those of other runs are in it
        folder.parent.rmdir()


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """Return the type of the file system of `path`, such as "tmpfs"; "" if it cannot be found out.

    Args:
        mounts: contents of /proc/self/mountinfo (proc(5)); None: read it.
    """
    try:
        lines = (Path("/proc/self/mountinfo").read_text() if mounts is None else mounts).splitlines()
    except OSError:
        return ""
    found, kind = "", ""
    real = os.path.realpath(path)
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found) and after:  # the last one mounted there hides the others
            found, kind = point, after.split()[0]
    return kind


def _read(path: Path) -> NodeCopy:
    text, digest = read_manifest_bytes(path, late_s=0)
    manifest = parse_manifest(path, text, digest)
    values = json.loads((path / MARK).read_bytes())
    mark = Mark(str(values["token"]), values["durable"])
    index: bytes | None = None
    with suppress(CheckpointError, OSError):
        read_index(path, manifest)
        index = (path / INDEX).read_bytes()
    names = tuple(name for name, size in manifest.sizes.items() if name != INDEX and _size(path / name) == size)
    return NodeCopy(path, manifest.step, digest, text, index, mark, names)


def _complete(path: Path) -> str | None:
    try:
        return (path / COMPLETE).read_text().removesuffix("\n")
    except (OSError, ValueError):
        return None


def _size(path: Path) -> int | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


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
    if lives:
        return True
    return now - node.stat().st_mtime < (UNSEEN_S if lives is None else DEAD_S)
