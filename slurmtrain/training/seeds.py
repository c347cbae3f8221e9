"""Seeds: the same on all ranks for what must be alike, different per rank for what must differ."""

from __future__ import annotations

import random
import sys

import torch


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python's and torch's generators (and numpy's, when it is loaded) for `rank`.

    The model is built under rank 0's seed on every rank, so that all start alike; dropout then draws from the rank's own.
    """
    own = (seed + 1_000_003 * rank) % 2**63
    random.seed(own)
    torch.manual_seed(own)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own % 2**32)
