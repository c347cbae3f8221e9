"""A checkpoint of tensors that other programs have written: by one process, with one of them in memory at a time."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.boxes import TensorFacts
from slurmtrain.checkpoint.format.directory import OWN_STATE, file_name
from slurmtrain.checkpoint.format.headers import read_header
from slurmtrain.checkpoint.format.manifest import FORMAT, Manifest
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.commit import claim
from slurmtrain.checkpoint.tensors import SAFETENSORS_NAMES, dtype_name
from slurmtrain.system.modes import file_mode
from slurmtrain.weights.export import Entry, write_safetensors

NO_STATE = b"{}"  # there is no rank whose state it would be
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
    tensors = {name: TensorFacts(shape, dtype_name(dtype)) for name, (shape, dtype) in facts.items()}
    # What is empty has no piece.
    entries = [_entry(name, *facts[name]) for name, each in tensors.items() if each.nbytes]
    own = Entry(OWN_STATE, (len(NO_STATE),), torch.uint8, torch.uint8)

    def read_all() -> Iterator[tuple[Entry, Tensor]]:
        for entry in entries:
            yield entry, read(entry.name).detach().to("cpu", facts[entry.name][1]).resolve_conj().resolve_neg()
            progress(entry.nbytes)
        yield own, torch.frombuffer(bytearray(NO_STATE), dtype=torch.uint8)

    order = claim(directory, None, label=label)
    temporary = commit.begin(directory, STEP, order, size=sum(each.nbytes for each in tensors.values()))
    with commit.removed_on_failure(temporary, on_this_rank=True):
        try:
            name = file_name(0)
            about = {"format": "pt"}
            write_safetensors({temporary / name: [*entries, own]}, about, read_all(), mode=file_mode(temporary))
            with blocks.threads() as pool:
                record = blocks.digest_file(temporary / name, pool, sync=True)
            header, _ = read_header(temporary / name)
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
            tensors=tensors,
            state={},
            created=time.time(),
        )
        return commit.commit(temporary, manifest, order)


def _entry(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Entry:
    """Return where a tensor goes in the file: as bytes if the format has no name for its type, which the manifest has."""
    if dtype in SAFETENSORS_NAMES:
        return Entry(name, shape, dtype, dtype)
    return Entry(name, (math.prod(shape) * dtype.itemsize,), torch.uint8, torch.uint8)
