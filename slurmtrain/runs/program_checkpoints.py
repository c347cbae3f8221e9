"""The checkpoints of a program of the user's own: which files they are, which are whole, and which is the newest.

Nothing of their format is known but their names (job.checkpoints) and what has to be inside (job.checkpoint_complete).
A file in one of a few formats, of which a kill has left only the beginning, can be told all the same.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

NUMBER = re.compile(r"\d{1,18}")
ASIDE = ".incomplete-"  # begins the names of what was moved aside: no pattern without this dot finds them
JSON_MAX = 64 << 20  # bytes; a larger file is not read
TAIL_BYTES = 1 << 17  # of a zip file, in which its end is
EMPTY = "it is empty"  # the problem of a file or folder with nothing in it
UNREADABLE = "it cannot be read"  # begins the problem of a checkpoint that may be whole


@dataclass(frozen=True)
class ProgramCheckpoint:
    """A file or folder that job.checkpoints names.

    Attributes:
        step: the last number in its name; None: it has none.
        changed: when it was changed last, in unix seconds.
        problem: what is missing or cut in it; None: it is complete.
    """

    path: Path
    step: int | None
    changed: float
    problem: str | None = None

    @property
    def order(self) -> tuple[int, float]:
        return (-1 if self.step is None else self.step, self.changed)


def step_in(name: str) -> int | None:
    """Return the last number in the name of a checkpoint, before its suffix: checkpoint-500, epoch=3-step=1200.ckpt."""
    stem = name if name[:1] == "." else re.sub(r"\.[A-Za-z][A-Za-z0-9]*$", "", name)
    found = NUMBER.findall(stem)
    return int(found[-1]) if found else None


def find_checkpoints(folders: Sequence[Path], pattern: str | None, rule: str | None) -> list[ProgramCheckpoint]:
    """Return the checkpoints of a program, the newest last.

    Args:
        folders: those in which a relative pattern is looked for.
        pattern: job.checkpoints; None: there are none.
        rule: job.checkpoint_complete.
    """
    found: dict[str, ProgramCheckpoint] = {}
    for folder in folders if pattern else ():
        for name in glob.glob(os.path.join(glob.escape(str(folder)), str(pattern)), recursive=True):
            path = Path(name)
            if path.name.startswith(ASIDE):
                continue
            with contextlib.suppress(OSError):  # it is being removed
                changed = os.lstat(path).st_mtime
                with contextlib.suppress(OSError):
                    changed = max(changed, os.stat(path).st_mtime)
                found[str(path)] = ProgramCheckpoint(path, step_in(path.name), changed, problem_of(path, rule))
    # Empty files only mark something, such as checkpoint-500.done.
    real = (
        each for each in found.values() if each.problem != EMPTY or each.path.suffix in _CHECKS or each.path.is_dir()
    )
    return sorted(real, key=lambda each: each.order)


def newest_complete(found: Sequence[ProgramCheckpoint]) -> ProgramCheckpoint | None:
    """Return the newest checkpoint that is complete; None if there is none."""
    return next((each for each in reversed(found) if each.problem is None), None)


def problem_of(path: Path, rule: str | None) -> str | None:
    """Say what is missing or cut in a checkpoint; None if it is complete by job.checkpoint_complete.

    Without that, a folder is complete as soon as something is in it.
    """
    try:
        if not path.is_dir():
            return cut(path)
        required = (rule or "").strip(", \t\n")  # names and patterns, which commas or blanks separate
        if not required:
            return None if any(path.iterdir()) else EMPTY
        for name in re.split(r"[,\s]+", required):
            files = sorted(glob.glob(os.path.join(glob.escape(str(path)), name)))
            if not files:
                os.listdir(path)  # raises where the folder cannot be read, which glob takes for an empty one
                return f"it has no {name}"
            for file in files:
                problem = cut(Path(file))
                if problem is not None:
                    return f"{os.path.relpath(file, path)}: {problem}"
    except FileNotFoundError as error:  # a link that leads nowhere, or it is being removed
        return str(error.strerror)
    except OSError as error:
        return f"{UNREADABLE}: {error.strerror}"
    return None


def cut(path: Path) -> str | None:
    """Say what is wrong with a file that a kill may have cut, as far as its format tells; None if nothing is."""
    size = path.stat().st_size
    if path.is_dir():
        return None
    if size == 0:
        return EMPTY
    check = _CHECKS.get(path.suffix)
    return check(path, size) if check is not None else None


def _cut_json(path: Path, size: int) -> str | None:
    if size > JSON_MAX:
        return None
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return "it is no whole JSON"
    return None


def _cut_zip(path: Path, size: int) -> str | None:
    """Look for the end of a zip file, as torch.save writes them; what is none, such as an older pickle, tells nothing."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return None
        file.seek(max(0, size - TAIL_BYTES))
        file.read()  # raises where the file cannot be read, which is_zipfile takes for none
    try:
        whole = zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # from some versions of Python
        whole = False
    return None if whole else "it is cut"


_CHECKS: dict[str, Callable[[Path, int], str | None]] = {
    ".json": _cut_json,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _cut_zip),
}


def move_aside(path: Path, attempt: int) -> Path:
    """Rename an incomplete checkpoint beside itself, so that the program does not find it, and return its new path.

    Raises:
        OSError: it cannot be renamed.
    """
    for number in range(1000):
        aside = path.with_name(f"{ASIDE}{path.name}-attempt-{attempt}" + (f"-{number}" if number else ""))
        if not os.path.lexists(aside):
            os.rename(path, aside)  # of a link: the link itself
            return aside
    raise FileExistsError(f"{path}: too many were moved aside")
