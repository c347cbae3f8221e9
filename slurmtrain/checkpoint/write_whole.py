"""A checkpoint of tensors that other programs have written: by one process, with one of them in memory at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import FileRecord
from slurmtrain.checkpoint.format.directory import INDEX, file_name
from slurmtrain.checkpoint.format.dtypes import dtype_name
from slurmtrain.checkpoint.format.manifest import FORMAT, Manifest
from slurmtrain.checkpoint.format.tensor_index import Box, Index, TensorFacts
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
            _write_file(temporary / name, plan, read, progress)
            with blocks.threads() as pool:
                record, digests = blocks.digest_file(temporary / name, pool, sync=True)
                index = b"".join(
                    Index(plan.schemas, {name: plan.table(len(OWN_STATE)).pack()}, {name: digests}).chunks()
                )
                index_record, _ = blocks.write(temporary / INDEX, memoryview(index), pool)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error.strerror or error}") from None
        files: dict[str, FileRecord] = {name: record, INDEX: index_record}
        tensors = {key: {"shape": list(fact.shape), "dtype": fact.dtype} for key, fact in plan.schemas[0].items()}
        manifest = Manifest(
            FORMAT, "", STEP, order.order, order.label, 1, torch.__version__, files, tensors, {}, created=time.time()
        )
        return commit.commit(temporary, manifest, order)


def _plan(facts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> SavePlan:
    schema = {name: TensorFacts(shape, dtype_name(dtype), dtype.itemsize) for name, (shape, dtype) in facts.items()}
    # An element type's size divides the next larger one's, so all are aligned. What is empty has no piece.
    names = sorted((name for name, fact in schema.items() if fact.nbytes), key=lambda name: -schema[name].itemsize)

    def placed(data_start: int) -> SavePlan:
        pieces, position = [], data_start
        for name in names:
            box, end = Box.whole(facts[name][0]), position + schema[name].nbytes
            pieces.append(TensorPiece(name, box, (), facts[name][1], position, end))
            position = end
        total = position - data_start
        return SavePlan((), [schema], 0, pieces, data_start, position, total, frozenset({0}))

    return placed(placed(0).room_for_header())


def _write_file(path: Path, plan: SavePlan, read: Callable[[str], Tensor], progress: Callable[[int], None]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, file_mode(path.parent))
    try:
        blocks.write_all(descriptor, memoryview(plan.header(len(OWN_STATE))), 0)
        for piece in plan.pieces:
            tensor = read(piece.name).detach().to("cpu", piece.dtype).contiguous()
            blocks.write_all(descriptor, tensor.reshape(-1).view(torch.uint8).numpy().data, piece.begin)
            progress(piece.end - piece.begin)
        blocks.write_all(descriptor, memoryview(OWN_STATE), plan.data_end)
    finally:
        os.close(descriptor)
