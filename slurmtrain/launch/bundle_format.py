"""The parts of a bundle: the names of its files, their list with its digest, and which paths may be in it."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.system.records import printable

FORMAT = 1
MANIFEST, CONFIG, ENVIRONMENT, LOCK = "bundle.json", "config.yaml", "environment.json", "requirements.txt"
PATCH = "changes.patch"
MOST_BYTES = 2 << 30  # of all files of a bundle


@dataclass(frozen=True)
class Member:
    """A file of a bundle: its path below the bundle's folder, its content, and whether it can be executed."""

    name: str
    content: bytes
    executable: bool = False

    @property
    def mode(self) -> int:
        """The permissions that it gets."""
        return 0o755 if self.executable else 0o644


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the list of a bundle with a digest of itself, by which a damaged one is found."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "digest": hashlib.sha256(text.encode()).hexdigest()}


def is_inside(name: str) -> bool:
    """Return whether a path stays within the folder that it is relative to."""
    parts = name.split("/")
    return bool(name) and not name.startswith("/") and "\0" not in name and not {"..", "", "."} & set(parts)


def leads_inside(name: str, target: str, links: Mapping[str, str]) -> bool:
    """Return whether a link stays within the folder that its name is relative to, whatever other links there are."""
    below_a_link = any(name.startswith(f"{other}/") for other in links)
    plain = os.path.normpath(target) == target.rstrip("/")  # after a link, `..` is not where it seems to be
    return plain and not below_a_link and is_inside(os.path.normpath(os.path.join(os.path.dirname(name), target)))


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file of the code, by its path or its name alone, matches one of these patterns."""
    plain = [pattern.removeprefix("code/") for pattern in patterns]
    return any(fnmatch.fnmatchcase(name, each) or fnmatch.fnmatchcase(Path(name).name, each) for each in plain)


def some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first few of these in a line, and how many there are besides."""
    return printable(separator.join(names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
