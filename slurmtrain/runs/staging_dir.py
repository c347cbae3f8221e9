"""Folders while they are being made: hidden, under a name that identifies their maker.

So those of makers that were killed can be removed.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import time
from pathlib import Path

from slurmtrain.runs.create import folder_of
from slurmtrain.runs.run_dir import PREPARING
from slurmtrain.system.process_mark import ProcessMark

LEFT_AFTER_S = 86400.0  # seconds after which a maker that cannot be seen from here counts as dead
MAKER = re.compile(r"\.by-\w+-(?P<pid>\d+)-(?P<born>\d+)(?:\.(?P<namespace>\d+))?-(?P<host>.+)$")


def folder(runs: Path, name: str) -> Path:
    """Return a hidden path for something that will be, or has been, `name`."""
    me = ProcessMark.own()
    namespace = re.sub(r"\D", "", me.namespace or "")
    maker = f"{me.pid}-{me.born}{f'.{namespace}' if namespace else ''}-{me.host}"
    return folder_of(runs, PREPARING) / f"{name}.by-{secrets.token_hex(3)}-{maker}"


def remove_left_over(runs: Path) -> None:
    """Remove what shells that were killed have left."""
    for path in folder_of(runs, PREPARING).iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just become what it was to be
            if _is_left(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_left(path: Path) -> bool:
    maker = _maker_of(path.name)
    lives = maker.lives() if maker is not None else None
    return time.time() - path.lstat().st_mtime > LEFT_AFTER_S if lives is None else not lives


def _maker_of(name: str) -> ProcessMark | None:
    found = MAKER.search(name)
    if found is None:
        return None
    namespace = f"pid:[{found['namespace']}]" if found["namespace"] else None
    return ProcessMark(found["host"], int(found["pid"]), found["born"], namespace)
