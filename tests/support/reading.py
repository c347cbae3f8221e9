"""What lies in a checkpoint, for tests that compare two of them."""

from __future__ import annotations

from pathlib import Path

import torch

from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.restore.reader import load


def checkpoint_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint: weights, optimiser, random state of each rank."""
    return load(committed(directory)[-1])
