"""Seeds and kernels: what makes two computations of the same numbers alike.

Seeds are the same on all ranks for what must be alike, and different per rank for what must differ.
"""

from __future__ import annotations

import os
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


def use_deterministic_kernels() -> None:
    """Let torch use only kernels that give the same bits each time; an operation that has none raises a RuntimeError.

    Call it before the first matrix product on a GPU: cuBLAS reads its variable only then
    (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # compiled kernels are chosen without timing them
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory before it has written it. The stubs of torch do not have the attribute.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
