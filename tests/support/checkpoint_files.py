"""The files of a checkpoint as several ranks would have written them, by the format's description alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.boxes import Box, TensorFacts
from slurmtrain.checkpoint.format.dtypes import dtype_name
from slurmtrain.checkpoint.format.manifest import FORMAT, Manifest

Piece = tuple[str, Box, Tensor]


def header_of(pieces: Sequence[Piece]) -> bytes:
    """A safetensors header of these pieces, every one of them called by its box, and of no state of the rank's own."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "own": "{}"}}
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


def write_files(folder: Path, files: Sequence[Sequence[Piece]], tensors: Mapping[str, Tensor]) -> Manifest:
    """Write a file for every rank, with these boxes of these tensors, and return the manifest."""
    records, headers = {}, {}
    with blocks.threads() as pool:
        for rank, pieces in enumerate(files):
            name, header = f"rank{rank:05d}.safetensors", header_of(pieces)
            parts = (part.contiguous().flatten().view(torch.uint8).numpy().tobytes() for _, _, part in pieces)
            (folder / name).write_bytes(header + b"".join(parts) + b"{}")
            records[name] = blocks.digest_file(folder / name, pool)
            headers[name] = hashlib.sha256(header).hexdigest()
    return Manifest(
        format=FORMAT,
        run_id="r1",
        step=7,
        incarnation=1,
        incarnation_label="x",
        world_size=len(files),
        torch_version=torch.__version__,
        files=records,
        headers=headers,
        tensors={name: TensorFacts(tuple(each.shape), dtype_name(each.dtype)) for name, each in tensors.items()},
        state={},
    )


def part_of(tensor: Tensor, box: Box) -> Tensor:
    found = tensor[box.within(Box.whole(tensor.shape))]
    assert found.numel() == math.prod(box.size)
    return found
