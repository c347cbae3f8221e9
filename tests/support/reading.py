"""What lies in a checkpoint, for tests that compare two of them."""

from __future__ import annotations

from pathlib import Path

import torch

from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.checkpoint.restore.reader import load


def checkpoint_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint: weights, optimiser, random state of each rank."""
    newest = committed(directory)[-1]
    own = {
        f"rank {rank}: {name}": tensor
        for rank in range(read_manifest(newest).world_size)
        for name, tensor in load(newest, own_of=rank).items()
    }
    return {**load(newest), **own}
