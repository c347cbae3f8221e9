"""Write files in one step, and read small JSON objects."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from slurmtrain.system import records
from slurmtrain.system.modes import file_mode
from slurmtrain.system.redaction import redacted


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


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None when it is missing or torn.

    Raises:
        UnreadableRecord: it is not a regular file, too large, or cannot be read.
    """
    try:
        value = records.parse(records.read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> None:
    """Write an object as JSON by `write_text`, without secrets."""
    write_text(path, json.dumps(redacted(value), indent=1) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file atomically: a reader sees the old or the new one, never half of it; other links keep the old one.

    Args:
        durable: wait until it is on the disk; not for thousands of files that can be made again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode(path.parent))
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
