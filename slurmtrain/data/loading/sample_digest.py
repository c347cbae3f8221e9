"""A digest of the samples that a run has seen, in the order of the steps, independent of which process fetched them.

Within a step, every sample adds a number, a hash of its position in the run and of its index, modulo 2^64, in two
lanes. A sum does not depend on the order of its terms, so ranks, workers and micro batches leave no trace (an
incremental hash; Bellare & Micciancio 1997, "A New Paradigm for Collision-free Hashing"). The sums of the steps are
chained by BLAKE2b. The digest reveals mistakes; it is no protection against somebody who searches for collisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.loading.order import mixed

LANES = (0x243F6A8885A308D3, 0x13198A2E03707344)  # pi's first bits
_LANES = np.array(LANES, dtype=np.uint64)[:, None]


def digest(numbers: NDArray[np.int64], indices: NDArray[np.int64]) -> tuple[int, ...]:
    """Return what a rank's samples add to the digest of their step: a signed 64-bit number per lane.

    The numbers of all ranks are to be added up modulo 2^64.

    Args:
        numbers: the samples' numbers in the run, int64 [B].
        indices: the samples' indices in the data set, int64 [B].
    """
    places, samples = numbers.astype(np.uint64), indices.astype(np.uint64)
    hashes = mixed(mixed(places ^ _LANES) ^ mixed(samples + _LANES))  # [lanes, B]
    return tuple(hashes.sum(axis=1).astype(np.int64).tolist())


def chained(before: str, sums: Sequence[int]) -> str:
    """Return the digest after another step, 32 hexadecimal digits.

    Args:
        before: the digest so far; at the first step, the name of the data.
        sums: the sum of the digests of all the step's samples, a number per lane.
    """
    step = b"".join((value % 2**64).to_bytes(8, "little") for value in sums)
    return hashlib.blake2b(before.encode() + step, digest_size=16).hexdigest()
