"""Read the small files of runs, which somebody else may have put there, and append to one's own.

Folders of runs are shared. A file in them may be a link to another file, a pipe that nobody writes to, a device, a
terabyte of zeros, or JSON of any shape. So a file is opened without following a link and without waiting, must be a
regular one, and is read up to a limit; the types of its values are checked before they are used. Any error is an
`UnreadableRecordError` with one sentence, so that one bad run does not break the list of all. One of the storage, which
may pass, is an `UnavailableRecordError`, which is an OSError, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeGuard, TypeVar

import msgspec

from slurmtrain.errors import UnavailableRecordError, UnreadableRecordError
from slurmtrain.system.files import file_mode

RECORD_BYTES = 4 << 20  # limit for run.json, attempt.json and the like: a job of 10,000 nodes takes 200 KB
EVENTS_BYTES = 64 << 20
METRICS_BYTES = 512 << 20  # half a million logged steps
TAIL_BYTES = 65536  # of a run's metrics, in which its present values are
DEEPEST = 100  # levels of a YAML file: who goes through its values does so by recursion
_READ_AT_ONCE = 1 << 20
LOCK_PAUSE_S = 0.02  # between looks whether a lock is free
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
STALE_TRIES = 3  # of a file that is replaced again and again while it is read
LATEST = 253402300800.0  # the year 10000 in unix seconds: no calendar goes further
_LARGEST = 2**53  # limit for a count: beyond it a float, and so many readers of JSON, round it
_JOB_ID = r"[0-9]{1,18}([_+][0-9]{1,18})?"

T = TypeVar("T")

# The types of values in records, for `typed`.
Number = Annotated[float, msgspec.Meta(gt=-LATEST, lt=LATEST)]  # many are times; NaN is none
Count = Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=LATEST)]  # in unix seconds
# Of SLURM, or the name of an object of Kubernetes.
JobId = Annotated[str, msgspec.Meta(pattern=rf"^({_JOB_ID}|[a-z][a-z0-9-]{{0,62}})\Z")]


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        UnreadableRecordError: it is a link, a pipe, a device or a folder, or this user may not read it.
    """
    try:
        descriptor = os.open(path, _TO_READ)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableRecordError(f"{path} is not a regular file")
    return descriptor


def _unreadable(path: Path, error: OSError) -> UnreadableRecordError:
    if error.errno == errno.ELOOP:
        return UnreadableRecordError(f"{path} is a link, and links in a run are not followed")
    if error.errno == errno.ENXIO:
        return UnreadableRecordError(f"{path} is not a regular file")
    return UnavailableRecordError(f"{path} cannot be read: {error.strerror}", error)


def read_text(path: Path, *, at_most: int = RECORD_BYTES) -> str:
    """Read a file as text; bytes that are not UTF-8 become U+FFFD. Raises as `read_bytes`."""
    return read_bytes(path, at_most=at_most).decode(errors="replace")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None when it is missing or torn.

    Raises:
        UnreadableRecordError: it is not a regular file, too large, or cannot be read.
    """
    try:
        value = parse(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return value if isinstance(value, dict) else None


def read_tail(path: Path, size: int) -> bytes:
    """Read the last `size` bytes of a file, which may begin in the middle of a line; return nothing if there is no file.

    Raises:
        UnreadableRecordError: it is not a regular file, or cannot be read.
    """
    try:
        return read_bytes(path, at_most=size, whole=False)
    except (FileNotFoundError, NotADirectoryError):
        return b""


def read_bytes(path: Path, *, at_most: int = RECORD_BYTES, whole: bool = True) -> bytes:
    """Read a file; if another one takes its name just then, the new one.

    NFS calls what was opened before that stale (ESTALE): its server has removed it, although it is open here.

    Args:
        whole: refuse a file that has more than `at_most` bytes; False: read its last ones.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        UnreadableRecordError: it is not a regular file, cannot be read, or has more bytes than it may.
    """
    for tries_left in reversed(range(STALE_TRIES)):
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            if whole and size > at_most:
                raise UnreadableRecordError(f"{path} has {size} bytes, and {at_most} is the most that is read of it")
            begin, data = max(0, size - at_most), b""
            while more := os.pread(descriptor, size - begin - len(data), begin + len(data)):
                data += more
            return data
        except OSError as error:
            if error.errno != errno.ESTALE or not tries_left:
                raise _unreadable(path, error) from None
        finally:
            os.close(descriptor)
    raise AssertionError("unreachable")


def pieces(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Yield a file from byte `begin` to its end, in pieces of at most 1 MiB; nothing if there is no file.

    Raises:
        UnreadableRecordError: it is not a regular file, or cannot be read.
    """
    try:
        descriptor = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        try:
            file.seek(begin)
            while piece := file.read(_READ_AT_ONCE):
                yield piece
        except OSError as error:
            raise _unreadable(path, error) from None


def parse(data: bytes) -> Any:
    """Parse JSON; return None for text that is no JSON, is not UTF-8, or is nested deeper than Python can follow."""
    try:
        return msgspec.json.decode(data)  # in a sixth of the time, but it takes no NaN and no half of a surrogate pair
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def parse_yaml(data: bytes) -> Any:
    """Parse YAML without aliases, which `submit` does not write: a few lines of them expand to more than fits anywhere.

    Raises:
        ValueError: it is no such YAML, is not UTF-8, or has more than `DEEPEST` levels; with a sentence in one line.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # by libyaml, in a tenth of the time
    try:
        text = data.decode()
        if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, loader)):
            raise yaml.YAMLError("an alias")
        found = yaml.load(text, loader)
        if not _is_shallow(found, DEEPEST):
            raise RecursionError
        return found
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _is_shallow(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inside)


def open_to_append(path: Path) -> int:
    """Open a file of this user for appending and reading, create it if need be, and return its descriptor.

    Raises:
        PermissionError: it is not a regular file of this user.
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    refused = PermissionError(errno.EPERM, "it is not a regular file of yours", str(path))
    try:
        descriptor = os.open(path, flags, file_mode(path.parent))
    except OSError as error:
        raise (refused if error.errno in (errno.ELOOP, errno.EISDIR) else error) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise refused
    return descriptor


def append_line(path: Path, line: str, *, lock_s: float = 0.0) -> None:
    """Append a line to a file of this user, on a new line even if a kill or a full disk has torn the last one.

    Lines of several writers on one host stay whole. Those of several hosts do, too, while the lock is held: a network
    file system may otherwise write two of them to the same place (open(2), O_APPEND).

    Args:
        lock_s: seconds to wait for the lock on the file, as in `locked`, before the line is appended without it; 0: none
            is taken, as by a caller that holds it.

    Raises:
        OSError: as `open_to_append`; or not all of it could be written, and the next line begins after what was.
    """
    descriptor = open_to_append(path)
    try:
        _lock(descriptor, lock_s)
        size = os.fstat(descriptor).st_size  # by now others may have added to it
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        rest = ("\n" if torn else "").encode() + line.encode()
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, *, at_most_s: float) -> Iterator[None]:
    """Hold a lock on a file of this user, which is created if need be; other hosts see it, since NFS has flock(2), too.

    The lock ends with the process that holds it. The caller continues without it if the file system has none, or if another
    writer, such as a process that was suspended, still holds it after `at_most_s` seconds.

    Raises:
        OSError: as `open_to_append`.
    """
    descriptor = open_to_append(path)
    try:
        _lock(descriptor, at_most_s)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, at_most_s: float) -> None:
    """Take the lock on an open file, or continue without it after `at_most_s` seconds, or where there are no locks."""
    give_up = time.monotonic() + at_most_s
    with contextlib.suppress(OSError):
        while time.monotonic() < give_up:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(random.uniform(0.5, 1.5) * LOCK_PAUSE_S)  # writers on many hosts do not ask at the same moment


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number; true and false are none."""
    if type(value) is float:  # nearly always, and this is asked of every value of every line
        return abs(value) < 1e300
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_scalar(value: object) -> TypeGuard[float]:
    """Return whether a value is a number, NaN and the infinities included."""
    return isinstance(value, float) or is_count(value)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number that any program can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def is_time(value: object) -> TypeGuard[float]:
    """Return whether a value is a time in unix seconds that a calendar has."""
    if type(value) is float:
        return 0 <= value < LATEST
    return is_number(value) and 0 <= value < LATEST


def is_job_id(text: str) -> bool:
    """Return whether a text can be the id of a job, or of a task of an array."""
    return re.fullmatch(_JOB_ID, text) is not None


def typed(kind: type[T], values: object, path: Path) -> T:
    """Return values of JSON as a record of this kind; fields that it does not have are left out.

    Raises:
        UnreadableRecordError: a value is of another type or out of range, or a field that has no default is missing.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        words = (str(path), place.strip(".`"), what[:1].lower() + what[1:])
        raise UnreadableRecordError(": ".join(filter(None, words))) from None
    except UnicodeEncodeError:
        raise UnreadableRecordError(f"{path}: half of a surrogate pair, which no text has") from None


def typed_or_none(kind: type[T], values: object) -> T | None:
    """Return values of JSON as a record of this kind; None if they are none."""
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return None


def records_with(name: str, log: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines that have a value of this name, newest first.

    Other lines are not parsed, nor are records not asked for.
    """
    found = len(log)
    while (found := log.rfind(f'"{name}":'.encode(), 0, found)) >= 0:
        begin, end = log.rfind(b"\n", 0, found) + 1, log.find(b"\n", found)
        # The first line may be cut, and the last not written to its end: both are left out.
        record = parse(log[begin : end if end >= 0 else None])
        if isinstance(record, dict) and name in record:
            yield record


def finite(value: object) -> float | None:
    """Return the value as a float when it is a finite number, else None."""
    if type(value) is float:
        return value if abs(value) < 1e300 else None
    return float(value) if is_count(value) else None


def printable(text: str) -> str:
    """Return the text without control characters, so that the content of a file cannot control a terminal.

    Line ends stay.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
