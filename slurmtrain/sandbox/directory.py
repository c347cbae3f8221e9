"""The directory and the ports of a sandbox: a directory nobody else can have prepared, and ports nobody else will be given."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.sandbox.spec import MAX_NODES
from slurmtrain.system.process import ProcessMark

MARKER = "this-is-a-sandbox"  # only a directory with this file in it is ever removed
PLAN, PROCESSES, START = (
    "plan.json",
    "processes.json",
    "start",
)  # `Plan`, `Processes`, and the name of a daemon to start
_BLOCK = MAX_NODES + 2  # slurmctld's, and one for each node
_PORTS = range(17000, 29000 - _BLOCK, _BLOCK)  # all below the ephemeral range, which starts at 32768
_LONGEST_SOCKET = "/spool/n00/n00_4294967295.4294967295.0"  # slurmstepd's, one for each step
_SUN_PATH = 107  # longest path that fits into sockaddr_un beside the final zero


@dataclass(frozen=True)
class Daemon:
    """A program to run in the foreground.

    Attributes:
        ready: the file or local port whose appearance shows that it is ready; None: nothing does.
    """

    name: str
    argv: list[str]
    ready: str | int | None = None

    def is_ready(self) -> bool:
        if isinstance(self.ready, int):
            return not is_free(self.ready)  # no connection: the daemon would log it as an error
        return self.ready is None or os.path.exists(self.ready)


@dataclass(frozen=True)
class Plan:
    """What the supervisor of a sandbox runs: the daemons in the order of their start, and the commands before their end."""

    nodes: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    daemons: list[Daemon] = field(default_factory=list)
    stop_commands: list[list[str]] = field(default_factory=list)


@dataclass
class Cell:
    """A subreaper process with one daemon in it, and the processes that the daemon left behind."""

    name: str
    process: ProcessMark  # the cell itself
    daemon: ProcessMark
    exit_status: int | None = None  # exit status of the daemon, once nothing is left in the cell


@dataclass(frozen=True)
class Processes:
    """The processes below which all others of a sandbox are, as the supervisor has recorded them."""

    supervisor: ProcessMark
    cells: list[Cell]

    @property
    def roots(self) -> list[ProcessMark]:
        return [self.supervisor, *(cell.process for cell in self.cells)]


def recorded(directory: Path) -> Processes | None:
    """Return the supervisor of a sandbox and its cells; None: nothing is on record."""
    try:
        return msgspec.json.decode((directory / PROCESSES).read_bytes(), type=Processes)
    except (OSError, msgspec.MsgspecError):
        return None


def default_directory(name: str) -> Path:
    """Return the default directory of the sandbox called `name`: under this user's directory on the local disk."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", name):
        raise UsageError(
            f"{name!r} cannot be the name of a sandbox.", hint="use up to 40 letters, digits, '.', '_' and '-'"
        )
    return user_directory() / f"sandbox-{name}"


def user_directory() -> Path:
    """Return this user's directory for sandboxes on the local disk."""
    return Path(tempfile.gettempdir()) / f"slurmtrain-{os.getuid()}"


def claim_directory(directory: Path) -> int:
    """Create `directory` for this process alone; of two that try, one succeeds.

    Returns:
        An open file whose lock marks the directory as in use. Processes of the sandbox inherit it, so that the claim
            ends with the last of them and never later.
    """
    if len(str(directory) + _LONGEST_SOCKET) > _SUN_PATH:
        room = _SUN_PATH - len(_LONGEST_SOCKET)
        raise ClusterError(
            f"{directory} is too long a path for a sandbox: it has {len(str(directory))} characters and may have {room},"
            " because sockets are created below it.",
            hint="TMPDIR names the folder of sandboxes; a shorter one is /tmp",
        )
    if directory.parent == user_directory():
        _private_directory(directory.parent)
    _private_directory(directory)
    content = os.listdir(directory)
    if content and MARKER not in content:
        raise ClusterError(
            f"{directory} is not empty (it has {content[0]}).", hint="give a directory that does not exist yet"
        )
    claim = os.open(directory / MARKER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(claim)
        raise ClusterError(
            f"there is a sandbox in {directory} already.",
            hint="take it down first (python -m slurmtrain sandbox down), or choose another --name",
        ) from None
    return claim


def _private_directory(path: Path) -> None:
    """Ensure that a directory is ours and closed to everybody else.

    Munge's socket and slurm.conf lie below it. With them `srun` runs commands as the owner of the sandbox, so nobody
    else may reach either.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ClusterError(f"cannot create {path}: {error.strerror}.", hint="TMPDIR names another place") from error
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise ClusterError(
            f"{path} is not a directory of yours, so a sandbox in it would not be safe.",
            hint="TMPDIR names another place",
        )
    path.chmod(0o700)  # one that was there may have been open


@dataclass(frozen=True)
class Ports:
    """A block of free ports, reserved while some process has `claim` open: a lock, so no claim outlives its owner."""

    first: int
    claim: int


def claim_ports(count: int, *, seed: str) -> Ports:
    """Find `count` ports in a row that are free and that no other sandbox of this user is about to use.

    Args:
        seed: determines where the search begins. Sandboxes of other users cannot see our claims; starting at different
            places keeps two that are started in the same instant apart.
    """
    claims = user_directory() / "ports"
    _private_directory(claims.parent)
    _private_directory(claims)
    offset = zlib.crc32(f"{os.getuid()}:{seed}".encode()) % len(_PORTS)
    for i in range(len(_PORTS)):
        first = _PORTS[(offset + i) % len(_PORTS)]
        claim = os.open(claims / str(first), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(claim)
            continue
        if all(is_free(port) for port in range(first, first + count)):
            return Ports(first, claim)
        os.close(claim)
    where = f"between {_PORTS.start} and {_PORTS.stop}"
    raise ClusterError(f"found no {count} free ports in a row {where}.", hint="take down some sandboxes")


def is_free(port: int) -> bool:
    """Return whether nobody on this machine listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemons: ignore old connections
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
