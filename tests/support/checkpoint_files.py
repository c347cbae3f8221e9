"""The files of a checkpoint as several ranks would have written them, by the format's description alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES
from slurmtrain.checkpoint.format.manifest import FORMAT, Box, FileRecord, Manifest, TensorFacts
from slurmtrain.checkpoint.store.commit import Incarnation
from slurmtrain.checkpoint.tensors import dtype_name

Piece = tuple[str, Box, Tensor]
ONLY = Incarnation(1, "x")


def header_of(pieces: Sequence[Piece]) -> bytes:
    """A safetensors header of these pieces, every one of them called by its box, and of no state of the rank's own."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, box, part in pieces:
        called = ", ".join(f"{a}:{a + n}" for a, n in zip(box.start, box.size, strict=True))
        shape, end = list(part.shape), position + part.numel() * part.itemsize
        entries[f"{name}[{called}]" if box.size else name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [position, end],
        }
        position = end
    entries["own/"] = {"dtype": "U8", "shape": [2], "data_offsets": [position, position + 2]}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def record_of(file: Path) -> FileRecord:
    """The size and digests of a file, block by block."""
    data = file.read_bytes()
    parts = (data[begin : begin + BLOCK_BYTES] for begin in range(0, max(1, len(data)), BLOCK_BYTES))
    return FileRecord(len(data), "".join(hashlib.sha256(part).hexdigest() for part in parts))


def write_files(folder: Path, files: Sequence[Sequence[Piece]], tensors: Mapping[str, Tensor]) -> Manifest:
    """Write a file for every rank, with these boxes of these tensors, and return the manifest."""
    records, headers = {}, {}
    for rank, pieces in enumerate(files):
        name, header = f"rank{rank:05d}.safetensors", header_of(pieces)
        parts = (part.contiguous().flatten().view(torch.uint8).numpy().tobytes() for _, _, part in pieces)
        (folder / name).write_bytes(header + b"".join(parts) + b"{}")
        records[name] = record_of(folder / name)
        headers[name] = hashlib.sha256(header).hexdigest()
    facts = {name: TensorFacts(tuple(each.shape), dtype_name(each.dtype)) for name, each in tensors.items()}
    return manifest_of(7, records, world_size=len(files), headers=headers, tensors=facts)


def manifest_of(step: int, files: Mapping[str, FileRecord], incarnation: Incarnation = ONLY, **more: Any) -> Manifest:
    """A manifest with these files, of no tensors and no state unless they are given."""
    named = {
        "run_id": "run",
        "world_size": 1,
        "torch_version": torch.__version__,
        "headers": {},
        "tensors": {},
        "state": {},
    }
    order, label = incarnation.order, incarnation.label
    return Manifest(
        **{**named, **more}, format=FORMAT, step=step, incarnation=order, incarnation_label=label, files=dict(files)
    )


def part_of(tensor: Tensor, box: Box) -> Tensor:
    found = tensor[box.within(Box.whole(tensor.shape))]
    assert found.numel() == math.prod(box.size)
    return found


def text_of(manifest: Manifest) -> bytes:
    """The contents of manifest.json."""
    return json.dumps(vars(manifest), default=vars).encode()
