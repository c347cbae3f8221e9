"""Files: written in one step, whose they are, and who may read what a run writes.

Who may read: its owner alone, or also the group of a team's folder. Such a folder has the setgid bit, and its group may read
it (mode 2770 or 2750). What is made below inherits group and bit from the kernel, and its mode from here. So a run that was
private when it was made stays so, and of a shared one everything can be read, the files of later attempts, too. A umask of 077
keeps all of it private. Nobody but the owner may write what a run is started from, whatever the umask: its script, config and
code would be run as the owner. What a program of the user's own makes follows the umask, as elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pwd
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slurmtrain.system.redaction import redacted

# What link(2) fails with where the file system has no hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL)
OF_A_TEAM = stat.S_ISGID | stat.S_IRGRP | stat.S_IXGRP
TEAM_FOLDER = 0o750  # the mode of a folder in a team's


def disk_usage(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder. Links are not followed."""
    if path.is_symlink():
        return os.lstat(path).st_size
    total = os.lstat(path).st_size if path.is_file() else 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # it goes away just now
                continue
    return total


def write_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> None:
    """Write an object as JSON by `write_text`, without secrets."""
    write_text(path, json.dumps(redacted(value), indent=1) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file by `replace_file` with one that holds this text."""
    replace_file(path, text.encode(), durable=durable)


def replace_file(
    path: Path, content: bytes | Iterable[bytes], *, mode: int | None = None, durable: bool = True
) -> None:
    """Replace a file atomically: a reader sees the old or the new one, never half of it; other links keep the old one.

    If it cannot be written, the old one stays, and nothing is left beside it.

    Args:
        mode: mode of the file before the umask; None: that of a run's files, see `file_mode`.
        durable: wait until it is on the disk; not for thousands of files that can be made again. That its name is on
            the disk, too, takes `fsync_directory`.
    """
    temporary = temporary_beside(path)
    try:
        write_new(temporary, content, mode=mode, durable=durable)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_where_named(path: Path, content: bytes) -> None:
    """Write a file to where a person says, by `replace_file`; the umask decides who reads it.

    What is no file of its own, such as /dev/stdout, /dev/null or a pipe, is written into: a rename would put a file in its
    place. A link stays one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as stream:
            stream.write(content)
    else:
        replace_file(Path(os.path.realpath(path)), content, mode=0o666)


def temporary_beside(path: Path, suffix: str = "") -> Path:
    """Return a hidden name in the same folder that no other process on any host uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}{suffix}")


def write_new(path: Path, content: bytes | Iterable[bytes], *, mode: int | None = None, durable: bool = True) -> None:
    """Create a small file, and wait until its content is on the disk.

    Creation is atomic on local disks, Lustre and NFS from version 3 on (open(2), O_EXCL); the content comes later.

    Args:
        mode, durable: as in `replace_file`.

    Raises:
        FileExistsError: there is one.
    """
    mode = file_mode(path.parent) if mode is None else mode
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def link_or_copy(source: Path, target: Path) -> None:
    """Make a second name for a file, or where the file system has no links, a copy of it. Symbolic links are not followed.

    Raises:
        FileExistsError: something has that name.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from None
        shutil.copy2(source, target, follow_symlinks=False)


def fsync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refresh(directory: Path) -> None:
    """Make an NFS client ask the server for the entries of `directory` again, by changing the directory."""
    probe = directory / f".probe-{secrets.token_hex(16)}"
    probe.touch(mode=0o600)
    probe.unlink()


# Who may read and write it.


def folder_mode(parent: Path) -> int:
    """Return the mode with which to make a folder in `parent`, before the umask: 0750 in a team's folder, else 0700."""
    try:
        of_a_team = os.stat(parent).st_mode & OF_A_TEAM == OF_A_TEAM
    except OSError:
        of_a_team = False
    return TEAM_FOLDER if of_a_team else 0o700


def file_mode(parent: Path) -> int:
    """Return the mode with which to make a file in `parent`, before the umask: 0640 in a team's folder, else 0600."""
    return folder_mode(parent) & 0o666


def make_own_folder(path: Path, *, closed: int) -> bool:
    """Make a folder that only this user may enter, and return whether the one that is there now is this user's own.

    In a folder such as /tmp anybody may have made one of that name before, or a link.

    Args:
        closed: bits of the mode that must not be set, as 0o022: nobody else may write there.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & closed


def forbid_others_to_write(folder: Path) -> None:
    """Take the right to write from all but the owner, of a folder and all below it. Links are not followed."""
    for path, _, names in os.walk(folder):
        for each in (path, *(os.path.join(path, name) for name in names)):
            found = os.lstat(each)
            if found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode):
                os.chmod(each, stat.S_IMODE(found.st_mode) & ~0o022)


def inherit_group(folder: Path) -> None:
    """Give what was copied into a team's folder its group and setgid bit, as what is made there has them from the kernel.

    A copied folder has the mode of the original, without that bit, and so what is made in it afterwards would be of the
    user's own group. What the original lets nobody else read stays so.
    """
    if folder_mode(folder) != TEAM_FOLDER:
        return
    group = os.stat(folder).st_gid
    for path, _, names in os.walk(folder):
        for each in (path, *(os.path.join(path, name) for name in names)):
            if os.lstat(each).st_gid != group:
                os.chown(each, -1, group, follow_symlinks=False)
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & stat.S_IRGRP and not mode & stat.S_ISGID:
            os.chmod(path, mode | stat.S_ISGID)


# Whose it is, and who this process is.


def is_mine(path: Path) -> bool:
    """Return whether this user owns the file at `path` itself, even if it is a link; False if there is nothing."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def why_distrusted(path: str | Path, known: dict[str, str | None] | None = None) -> str | None:
    """Say why somebody else may have written a file; return None when only this user and root can have.

    This concerns the file, all folders above it and the targets of links: a user who may rename a folder may put
    another there. A sticky folder, as /tmp is, keeps others from renaming what is not theirs.

    Args:
        known: earlier results, by path, for a caller that looks at many files of the same folders.
    """
    return _why_distrusted(os.path.realpath(path), {} if known is None else known)


def _why_distrusted(real: str, known: dict[str, str | None]) -> str | None:
    if real not in known:
        above = os.path.dirname(real)
        known[real] = _why_distrusted_itself(real) or (_why_distrusted(above, known) if above != real else None)
    return known[real]


def _why_distrusted_itself(real: str) -> str | None:
    try:
        found = os.lstat(real)
    except OSError as error:
        return f"{real} cannot be looked at ({error.strerror})"
    if found.st_uid not in (os.geteuid(), 0):
        return f"{real} belongs to {user_in_words(found.st_uid)}"
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if others_may_write(found) and not sticky:
        return f"{real} can be changed by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def only_mine(path: Path) -> bool:
    """Return whether a file and its folder belong to this user, are no links, and nobody else may write into either.

    Then this user has written it, even if others may rename the folders above, as in a team's folder.
    """
    try:
        file, folder = os.lstat(path), os.lstat(path.parent)
    except OSError:
        return False
    kinds = stat.S_ISREG(file.st_mode) and stat.S_ISDIR(folder.st_mode)
    return kinds and all(each.st_uid == os.geteuid() and not others_may_write(each) for each in (file, folder))


def others_may_write(found: os.stat_result) -> bool:
    """Return whether mode and group let somebody else write.

    A group with the user's own number counts as theirs alone.
    """
    own_group = found.st_gid == os.geteuid()
    return bool(found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not own_group))


@functools.cache
def name_of(uid: int) -> str | None:
    """Return the name of a user; None where there is none, as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def user_in_words(uid: int) -> str:
    """Return a user as a message names them: "user jane", or "user 1004" where there is no name."""
    return f"user {name_of(uid) or uid}"


def own_user() -> str:
    """Return the name of this process's user, or its number where it has no name: SLURM's commands take both.

    By the user id: LOGNAME and USER of a shell may name another (`sudo -u`, `su`).
    """
    return name_of(os.getuid()) or str(os.getuid())
