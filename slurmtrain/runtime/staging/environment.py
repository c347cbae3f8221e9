"""The ranks' Python environment as one archive, which a node reads in one piece instead of as tens of thousands of files.

An archive is named by a digest of the names, sizes and times of the environment's files, and by the sha256 of its own
content. So an environment that has changed since gets another archive, and a name never stands for two contents. What
Python has compiled is packed, too, but does not count as a change: each import of a module may add to it. Two jobs may pack
one environment at the same time; that makes two archives at most, each whole and each used by whoever has named it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import ConfigError
from slurmtrain.runtime.staging.copying import COMPILED
from slurmtrain.system.files import replace_file, temporary_beside
from slurmtrain.system.modes import make_own_folder

log = logging.getLogger(__name__)

KEPT_DAYS = 14  # an archive that no job has used for so long is removed when another one is made
UNFINISHED_S = 3600  # who packs an archive writes all the time: one untouched for so long is that of a killed job
QUESTION = "import os, sys; print(sys.prefix); print(os.path.abspath(sys.executable))"
ASK_S = 300
# Folders at the top of conda's base environment: downloaded packages, and whole other environments. No rank imports from them.
OF_CONDA_ALONE = frozenset({"pkgs", "envs", "conda-bld"})


@dataclass(frozen=True)
class PythonEnvironment:
    """An environment.

    Attributes:
        prefix: its folder.
        python: path of its interpreter in that folder.
    """

    prefix: Path
    python: str


def find_environment(python: Sequence[str]) -> PythonEnvironment:
    """Return the environment of an interpreter, which is asked.

    Raises:
        ConfigError: it has none that could be copied.
    """
    try:
        answer = subprocess.run([*python, "-c", QUESTION], capture_output=True, text=True, timeout=ASK_S, check=True)
        prefix, executable = answer.stdout.splitlines()[:2]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"cluster.stage.environment: {' '.join(python)} cannot be asked for its folder: {error}"
        ) from None
    own = (Path(prefix) / "pyvenv.cfg").is_file() or (Path(prefix) / "conda-meta").is_dir()
    if not own or not Path(executable).is_relative_to(prefix):
        raise ConfigError(
            f"cluster.stage.environment: {executable} is the interpreter of no virtual or conda environment",
            hint="name one by cluster.venv, cluster.conda_env or cluster.python",
        )
    return PythonEnvironment(Path(prefix), os.path.relpath(executable, prefix))


def archive_of(environment: PythonEnvironment, folder: Path) -> Path:
    """Return the archive of an environment, made now if there is none yet of what it is today.

    Args:
        folder: the folder of archives that all nodes see; only this user may write there, since code of it is run.

    Raises:
        ConfigError: the folder is open to others, or a part of the environment cannot be read.
        OSError: the folder cannot be read or written.
    """
    _own_folder(folder)
    key = key_of(environment.prefix)
    if (found := _archive_with(key, folder)) is not None:
        return found
    began = time.monotonic()
    remove_unfinished(folder)
    temporary = temporary_beside(folder / key, ".tar")
    try:
        digest = pack(environment.prefix, temporary)
        # Nodes of a job that was faster read its archive by now; over NFS they could not go on with a file that is replaced.
        if (found := _archive_with(key, folder)) is not None:
            return found
        archive = folder / f"{key}-{digest}.tar"
        try:
            os.link(temporary, archive)
        except FileExistsError:  # another job has made it in this very moment: the same bytes, which may be read by now
            pass
        except OSError:  # a file system without links
            temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)
    size_gb, seconds = archive.stat().st_size / 1e9, time.monotonic() - began
    log.info("packed %s (%.1f GB) in %.0f s, once: %s", environment.prefix, size_gb, seconds, archive)
    remove_unused(folder, archive)
    return archive


def digest_of(archive: Path) -> str:
    """Return the sha256 that an archive has by its name."""
    return archive.stem.rpartition("-")[2]


def key_of(prefix: Path) -> str:
    """Return a digest of the names, sizes, modes and times of an environment's files, but those that Python compiles."""
    digest = hashlib.sha256(f"{prefix}\0".encode())
    for folder, folders, names in _walk(prefix):
        folders[:] = [name for name in folders if name != COMPILED]
        for name in sorted([*names, *folders]):
            path = os.path.join(folder, name)
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode):
                continue
            link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
            line = f"{path}\0{found.st_size}\0{found.st_mode}\0{found.st_mtime_ns}\0{link}\n"
            digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def pack(prefix: Path, archive: Path) -> str:
    """Write an environment into a tar archive, the same bytes each time, and return their sha256."""
    with archive.open("xb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as packed:
            for folder, folders, names in _walk(prefix):
                links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
                for name in sorted([*names, *links]):
                    try:
                        _add(packed, prefix, os.path.join(folder, name))
                    except FileNotFoundError:
                        if os.path.basename(folder) != COMPILED:  # there, who imports replaces files at any time
                            raise
        file.flush()
        os.fsync(file.fileno())
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _walk(prefix: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk through an environment, as os.walk does, in the order of names, without what only conda itself uses.

    Raises:
        ConfigError: a folder cannot be read: without it, an archive would lack packages for all jobs that use it.
    """

    def stop(error: OSError) -> None:
        if os.path.basename(str(error.filename)) == COMPILED and isinstance(error, FileNotFoundError):
            return  # removed by somebody who cleans up
        raise ConfigError(
            f"cluster.stage.environment: {error.filename} cannot be read: {error.strerror}",
            hint="let yourself read it, or remove it: an environment is copied as a whole",
        )

    for folder, folders, names in os.walk(prefix, onerror=stop):
        folders[:] = sorted(each for each in folders if not _is_left_out(prefix, os.path.join(folder, each)))
        yield folder, folders, names


def _is_left_out(prefix: Path, path: str) -> bool:
    """Return whether a path of an environment is, or is in, what only conda itself uses."""
    first, *_ = Path(path).relative_to(prefix).parts or ("",)
    return first in OF_CONDA_ALONE and (prefix / "conda-meta").is_dir()


def point_to(prefix: Path, target: Path) -> None:
    """Let the scripts of a copy in `target` start the interpreter of the copy; they name that of `prefix`."""
    before, after = f"{prefix}/".encode(), f"{target}/".encode()
    for script in list((target / "bin").iterdir()):
        if script.is_symlink() or not script.is_file():
            continue
        with script.open("rb") as file:
            if file.read(2) != b"#!":
                continue
        content = script.read_bytes()
        first, newline, rest = content.partition(b"\n")
        second, newline_2, rest = rest.partition(b"\n")
        # A path that is too long for "#!" is in the second line, after "#!/bin/sh".
        changed = b"".join((first.replace(before, after), newline, second.replace(before, after), newline_2, rest))
        if changed != content:  # replaced, not written to: those of a read-only environment cannot be written to
            replace_file(script, changed, mode=stat.S_IMODE(script.stat().st_mode), durable=False)


def remove_unused(folder: Path, kept: Path) -> None:
    """Remove archives that no job has used for KEPT_DAYS days."""
    for path in folder.glob("[!.]*.tar"):
        if path != kept:
            _remove_if_older(path, KEPT_DAYS * 86400)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed jobs have left of archives: each may fill as much of a quota as the one that is packed next."""
    for path in folder.glob(".*.tar"):
        _remove_if_older(path, UNFINISHED_S)


def _remove_if_older(path: Path, seconds: float) -> None:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > seconds:
            path.unlink()


def _archive_with(key: str, folder: Path) -> Path | None:
    """Return the archive of a key, which then counts as used today; None if there is none."""
    found = min(folder.glob(f"{key}-*.tar"), default=None)
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(found)
    return found


def _own_folder(folder: Path) -> None:
    if not make_own_folder(folder, closed=0o022):
        raise ConfigError(
            f"{folder} is to hold archives whose code is run, and it is not a folder that only you can write to",
            hint="remove it",
        )


def _add(packed: tarfile.TarFile, prefix: Path, path: str) -> None:
    """Add a file or a link. A file is opened first: its name may soon be another's, which has another size."""
    name = os.path.relpath(path, prefix)
    if stat.S_ISREG(os.lstat(path).st_mode):
        with open(path, "rb") as content:
            member = packed.gettarinfo(path, name, content)
            _make_anonymous(member, prefix, path)
            packed.addfile(member, content if member.isreg() else None)
        return
    member = packed.gettarinfo(path, name)
    if member is not None:  # not a socket
        _make_anonymous(member, prefix, path)
        packed.addfile(member)


def _make_anonymous(member: tarfile.TarInfo, prefix: Path, path: str) -> None:
    """Take out what differs between two archives of one environment, and let links lead to the right place in a copy."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.islnk():  # a second name of a file that is packed already
        return
    if member.issym():
        member.linkname = _link_in_copies(member.linkname, prefix, path)


def _link_in_copies(link: str, prefix: Path, path: str) -> str:
    """Return where a link leads in any copy of an environment: within it to the copy's own file, else to the original."""
    folder = os.path.dirname(path)
    leads_to = os.path.normpath(os.path.join(folder, link))
    if Path(leads_to).is_relative_to(prefix):
        if _is_left_out(prefix, leads_to):  # conda links to downloads where it can give files no second names
            return os.path.realpath(path)
        return os.path.relpath(leads_to, folder) if os.path.isabs(link) else link
    real = os.path.realpath(path)
    own = os.path.realpath(prefix)
    if Path(real).is_relative_to(own) and not _is_left_out(Path(own), real):  # by another name of the environment
        return os.path.relpath(real, os.path.realpath(folder))
    return link if os.path.isabs(link) else real
