"""Proof of what a run has seen: a hash of the samples of all steps, in their order, whoever has fetched them.

Within a step, every sample adds a number of its own, made of its place in the run and of which sample it is, modulo 2^64, in
two lanes: sums do not depend on who adds them up, so that ranks, workers and micro batches leave no trace (an incremental
hash; Bellare & Micciancio 1997, "A New Paradigm for Collision-free Hashing"). The sums of the steps are chained by BLAKE2b.
It shows mistakes, and is no protection against somebody who looks for collisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.order import mixed

LANES = (0x243F6A8885A308D3, 0x13198A2E03707344)  # pi's first bits
_LANES = np.array(LANES, dtype=np.uint64)[:, None, None]


def digests(numbers: NDArray[np.int64], indices: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """What the samples of some micro batches add to their step: of each, a signed 64-bit number for each lane, to be added
    up modulo 2^64.

    Args:
        numbers: int64 [micro batches, B], of each sample in the run.
        indices: int64 [micro batches, B], which sample of the data set it was.
    """
    places, samples = numbers.astype(np.uint64), indices.astype(np.uint64)
    hashes = mixed(mixed(places ^ _LANES) ^ mixed(samples + _LANES))  # [lanes, micro batches, B]
    lanes: list[list[int]] = hashes.sum(axis=2).astype(np.int64).tolist()
    return list(zip(*lanes, strict=True))


def added(digests: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sum of digests, modulo 2^64, as signed numbers."""
    return tuple((sum(lane) + 2**63) % 2**64 - 2**63 for lane in zip(*digests, strict=True))


def chained(before: str, sums: Sequence[int]) -> str:
    """The hash after another step, 32 hexadecimal digits.

    Args:
        before: the hash so far; at first, what names the data.
        sums: of the digests of all the step's samples.
    """
    step = b"".join((value % 2**64).to_bytes(8, "little") for value in sums)
    return hashlib.blake2b(before.encode() + step, digest_size=16).hexdigest()
