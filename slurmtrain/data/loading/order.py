"""The global order of samples: which sample of the data set is the i-th of epoch e, computed and never stored.

Each epoch is a permutation of range(n), and that permutation is a keyed cipher on range(n): nothing has to be shuffled,
kept in memory, sent between ranks or saved with a checkpoint, for any n. This is not cryptography; six rounds of
a good mixer are plenty for an order without visible pattern.

Sources: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002: the generalised Feistel network on
Z_a x Z_b (their third method) with cycle-walking (their second) for the few values of a * b that are not below n.
Mixer: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; constants of D. Stafford's variant 13).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slurmtrain.errors import ConfigError

ROUNDS = 6
MAX_SAMPLES = 2**62  # the sides of the Feistel square stay below 2^31 + 1, so no sum in it leaves 64 bits
_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2^64 / golden ratio, made odd
_MASK = 2**64 - 1
# These are arrays since numpy's operations on them are several times as fast as on scalars.
_SHIFT_30, _SHIFT_27, _SHIFT_31 = (np.array(shift, dtype=np.uint64) for shift in (30, 27, 31))
_FACTOR_1, _FACTOR_2 = (np.array(factor, dtype=np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def samples_at(numbers: NDArray[np.int64], *, n: int, seed: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the data set indices of the global sample numbers `numbers`, int64 [B], in any order.

    Sample number k is sample k % n of epoch k // n.

    Args:
        n: samples in the data set, from 1 to MAX_SAMPLES.
        seed: determines the order of the whole run; each epoch has its own permutation.
        shuffle: False keeps the data set's own order in every epoch.
    """
    epochs, indices = np.divmod(numbers, np.int64(n))
    if not shuffle:
        return indices
    seed_key = mixed(np.array([(seed + _GAMMA) & _MASK], dtype=np.uint64))
    epoch_keys = mixed(seed_key ^ epochs.astype(np.uint64))
    return _permute(indices.astype(np.uint64), epoch_keys, n).astype(np.int64)


class Order(Protocol):
    """The order in which a run sees the samples of a data set.

    Attributes:
        once: number of samples at the beginning of the run among which none is repeated.
    """

    once: int

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the data set indices of the samples with these numbers in the run, int64 [B] both."""


class EpochOrder:
    """An order of epochs, each of all n samples; see `samples_at`."""

    def __init__(self, n: int, *, seed: int, shuffle: bool = True):
        if not 1 <= n <= MAX_SAMPLES:
            raise ConfigError(f"a data set of {n} samples cannot be ordered", hint="give data with 1 to 2^62 samples")
        self.once = n
        self._seed, self._shuffle = seed, shuffle

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return samples_at(numbers, n=self.once, seed=self._seed, shuffle=self._shuffle)


def _permute(values: NDArray[np.uint64], keys: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    side_a = math.isqrt(n - 1) + 1  # a * b is n or little more: at most about 2 sqrt(n) values lie outside
    side_b = -(-n // side_a)
    values = _feistel(values, keys, side_a, side_b)
    # Cycle-walking: the permutation is applied to a value outside of range(n) until it is inside. Each cycle of the
    # larger permutation is thereby shortened to its values below n, so the result is a permutation of range(n).
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], keys[outside], side_a, side_b)
        outside = outside[values[outside] >= n]
    return values


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], side_a: int, side_b: int) -> NDArray[np.uint64]:
    a, b = np.uint64(side_a), np.uint64(side_b)
    right, left = np.divmod(values, a)  # left in Z_a, right in Z_b
    for number in range(ROUNDS):
        round_keys = mixed(keys + np.uint64((number + 1) * _GAMMA & _MASK))
        if number % 2 == 0:
            left = (left + mixed(round_keys ^ right) % a) % a
        else:
            right = (right + mixed(round_keys ^ left) % b) % b
    return right * a + left


def mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finaliser of each number.

    It is a bijection of 64 bits in which each output bit depends on all input bits.
    """
    bits = (bits ^ (bits >> _SHIFT_30)) * _FACTOR_1
    bits = (bits ^ (bits >> _SHIFT_27)) * _FACTOR_2
    return bits ^ (bits >> _SHIFT_31)


# The digest of the samples that a run has seen, in the order of the steps, independent of which process fetched them.
#
# Within a step, every sample adds a number, a hash of its position in the run and of its index, modulo 2^64, in two
# lanes. A sum does not depend on the order of its terms, so ranks, workers and micro batches leave no trace (an
# incremental hash; Bellare & Micciancio 1997, "A New Paradigm for Collision-free Hashing"). The sums of the steps are
# chained by BLAKE2b. The digest reveals mistakes; it is no protection against somebody who searches for collisions.

_LANES = np.array([[0x243F6A8885A308D3], [0x13198A2E03707344]], dtype=np.uint64)  # pi's first bits


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
