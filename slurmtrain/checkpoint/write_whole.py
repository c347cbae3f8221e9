"""A checkpoint of tensors that other programs have written: by one process, with one of them in memory at a time."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.boxes import Box, TensorFacts
from slurmtrain.checkpoint.format.directory import file_name
from slurmtrain.checkpoint.format.dtypes import dtype_name
from slurmtrain.checkpoint.format.manifest import FORMAT, Manifest
from slurmtrain.checkpoint.save.plan import SavePlan, TensorPiece
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.fencing import claim
from slurmtrain.system.modes import file_mode

OWN_STATE = b"{}"  # there is no rank whose state it would be
STEP = 0  # nothing was trained here


def write_checkpoint(
    directory: Path,
    facts: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], Tensor],
    *,
    label: str = "import",
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Commit a checkpoint of these tensors in `directory`, and return its path.

    It is bound to no config, and has no optimiser.

    Args:
        facts: shape and element type of each tensor by its name in the checkpoint, as in "model.blocks.0....".
        read: returns a tensor by that name.
        progress: called with the bytes of each tensor.

    Raises:
        CheckpointError: it cannot be written, or `read` fails; nothing is committed then.
    """
    order = claim(directory, None, label=label)
    plan = _plan(facts)
    temporary = commit.begin(directory, STEP, order, size=plan.data_end)
    with commit.removed_on_failure(temporary, on_this_rank=True):
        try:
            name = file_name(0)
            header = plan.header(len(OWN_STATE))
            _write_file(temporary / name, plan, header, read, progress)
            with blocks.threads() as pool:
                record = blocks.digest_file(temporary / name, pool, sync=True)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error.strerror or error}") from None
        manifest = Manifest(
            format=FORMAT,
            run_id="",
            step=STEP,
            incarnation=order.order,
            incarnation_label=order.label,
            world_size=1,
            torch_version=torch.__version__,
            files={name: record},
            headers={name: hashlib.sha256(header).hexdigest()},
            tensors=plan.facts,
            state={},
            created=time.time(),
        )
        return commit.commit(temporary, manifest, order)


def _plan(facts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> SavePlan:
    tensors = {name: TensorFacts(shape, dtype_name(dtype)) for name, (shape, dtype) in facts.items()}
    # An element type's size divides the next larger one's, so all are aligned. What is empty has no piece.
    names = sorted((name for name, each in tensors.items() if each.nbytes), key=lambda name: -tensors[name].itemsize)

    def placed(data_start: int) -> SavePlan:
        pieces, position = [], data_start
        for name in names:
            box, end = Box.whole(facts[name][0]), position + tensors[name].nbytes
            pieces.append(TensorPiece(name, box, (), facts[name][1], position, end))
            position = end
        total = position - data_start
        return SavePlan((), tensors, {}, 0, pieces, data_start, position, total, frozenset({0}))

    return placed(placed(0).room_for_header())


def _write_file(
    path: Path, plan: SavePlan, header: bytes, read: Callable[[str], Tensor], progress: Callable[[int], None]
) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, file_mode(path.parent))
    try:
        blocks.write_all(descriptor, memoryview(header), 0)
        for piece in plan.pieces:
            tensor = read(piece.name).detach().to("cpu", piece.dtype).contiguous()
            blocks.write_all(descriptor, tensor.reshape(-1).view(torch.uint8).numpy().data, piece.begin)
            progress(piece.end - piece.begin)
        blocks.write_all(descriptor, memoryview(OWN_STATE), plan.data_end)
    finally:
        os.close(descriptor)
