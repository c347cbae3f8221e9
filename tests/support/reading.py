"""What lies in a checkpoint, for tests that compare two of them."""

from __future__ import annotations

from pathlib import Path

import torch

from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.restore.reader import read_contents, read_whole


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name, whole."""
    manifest = read_manifest(path)
    contents = read_contents(path, manifest)
    return dict(read_whole(path, contents, manifest, manifest.tensors))


def checkpoint_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint: weights, optimiser, random state of each rank."""
    return load(committed(directory)[-1])
