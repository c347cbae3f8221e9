"""What each rank has for itself, brought together on all ranks."""

from __future__ import annotations

import io
from typing import Any

import torch

from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.runtime.distributed_context import DistributedContext


def gather_states(distributed: DistributedContext, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state of every rank, in the order of ranks. All ranks call it together.

    Args:
        own: this rank's: tensors, numbers, texts, and lists, tuples and dicts of them. What comes from other ranks is read
            without running code.
    """
    written = io.BytesIO()
    torch.save(own, written)
    everyones = RankGroup(distributed.control_group).gather(written.getvalue)
    return [torch.load(io.BytesIO(state), weights_only=True) for state in everyones]
