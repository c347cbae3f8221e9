"""What W&B has written in its offline mode, read back with its own record type.

A .wandb file is a log in the format of LevelDB (blocks of 32 KiB; each part with checksum, length and kind) after 7 bytes that
tell W&B's version of it: https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<IHB")  # checksum, length, kind
BLOCK = 1 << 15
FIRST = 7
WHOLE, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """The whole records of a file."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), FIRST, b""
    assert data[:4] == b":W&B"
    while position + HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left
            continue
        checksum, length, kind = HEADER.unpack_from(data, position)
        part = data[position + HEADER.size : position + HEADER.size + length]
        if len(part) < length:
            return
        assert zlib.crc32(bytes([kind]) + part) == checksum
        parts += part
        position += HEADER.size + length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def files(run_dir: Path) -> list[Path]:
    """The files that `wandb sync RUN/wandb/offline-run-*` sends, in its order."""
    return sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's history, over all its files."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for file in files(run_dir)
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def runs(run_dir: Path) -> list[Any]:
    """What each file says of its run: id, project, tags, config."""
    return [
        record.run for file in files(run_dir) for record in records(file) if record.WhichOneof("record_type") == "run"
    ]
