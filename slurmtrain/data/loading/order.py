"""The global order of samples: which sample of the data set is the i-th of epoch e, computed and never stored.

Each epoch is a permutation of range(n), and that permutation is a keyed cipher on range(n): nothing has to be shuffled,
kept in memory, sent between ranks or saved with a checkpoint, for any n. This is not cryptography; six rounds of
a good mixer are plenty for an order without visible pattern.

Sources: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002: the generalised Feistel network on
Z_a x Z_b (their third method) with cycle-walking (their second) for the few values of a * b that are not below n.
Mixer: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; constants of D. Stafford's variant 13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


def permute(index: NDArray[np.integer], *, n: int, key: int) -> NDArray[np.int64]:
    """Return where the permutation `key` of range(n) sends `index`.

    Args:
        index: integers [B], each in range(n).
        n: size of the domain, 1 to 2^62.
        key: number of the permutation; only its low 64 bits count.

    Raises:
        ConfigError: n is out of its range.
        IndexError: an index is outside range(n).
    """
    _check_size(n)
    if index.size and (index.min() < 0 or index.max() >= n):
        raise IndexError(f"index {index.min() if index.min() < 0 else index.max()} is outside range({n})")
    keys = np.full(index.shape, key & _MASK, dtype=np.uint64)
    return _permute(index.astype(np.uint64), keys, n).astype(np.int64)


def sample_ids(start: int, count: int, *, n: int, seed: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the data set indices of the global sample numbers start ... start + count - 1, int64 [count].

    Sample number k is sample k % n of epoch k // n; a range may cross any number of epochs.

    Args:
        start: first global sample number, from 0.
        count: number of samples.
        n: samples in the data set.
        seed: determines the order of the whole run; each epoch has its own permutation.
        shuffle: False keeps the data set's own order in every epoch.

    Raises:
        ConfigError: the data set is empty, or larger than 2^62.
    """
    return samples_at(np.arange(start, start + count, dtype=np.int64), n=n, seed=seed, shuffle=shuffle)


def samples_at(numbers: NDArray[np.int64], *, n: int, seed: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the data set indices of the global sample numbers `numbers`, int64 [B], in any order.

    Otherwise as `sample_ids`.
    """
    _check_size(n)
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
        epoch: length of an epoch in samples; None if parts of the data are repeated at different times.
    """

    once: int
    epoch: int | None

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the data set indices of the samples with these numbers in the run, int64 [B] both."""


class EpochOrder:
    """An order of epochs, each of all n samples; see `sample_ids`."""

    def __init__(self, n: int, *, seed: int, shuffle: bool = True):
        _check_size(n)
        self.once = n
        self.epoch: int | None = n
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


def _check_size(n: int) -> None:
    if not 1 <= n <= MAX_SAMPLES:
        raise ConfigError(
            f"a data set of {n} samples cannot be ordered",
            hint="give data with at least one sample" if n < 1 else "give data of at most 2^62 samples",
        )


# Samples of different lengths: a batch has samples of similar length, and every rank gets about as much to do.


Lengths = Callable[[NDArray[np.int64]], NDArray[np.int64]]


class ByLength:
    """An order that sorts the samples of `steps` consecutive steps of another order by length.

    Afterwards, it shuffles these steps.

    Samples of different epochs are not mixed: each epoch still has every sample once.

    Args:
        lengths: returns the length in tokens of the samples with these indices, int64 [B] -> int64 [B].
        global_batch_size: samples of a step.
        steps: number of consecutive steps that are sorted together; 1 leaves each step its own samples.
    """

    def __init__(self, order: Order, lengths: Lengths, *, global_batch_size: int, steps: int, seed: int):
        self._order, self._lengths = order, lengths
        self._batch, self._steps, self._seed = global_batch_size, steps, seed
        self._last: tuple[int, NDArray[np.int64]] | None = None
        self.epoch = order.epoch
        self.once = order.once if order.epoch else order.once // self._window_size * self._window_size

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        windows, offsets = np.divmod(numbers, self._window_size)
        result = np.empty(len(numbers), dtype=np.int64)
        for window in np.unique(windows).tolist():
            inside = windows == window
            result[inside] = self._window(window)[offsets[inside]]
        return result

    @property
    def _window_size(self) -> int:
        return self._batch * self._steps

    def _window(self, number: int) -> NDArray[np.int64]:
        """Return the indices of the samples that are sorted together, int64 [samples]."""
        if self._last is None or self._last[0] != number:
            begin = number * self._window_size
            numbers = np.arange(begin, begin + self._window_size)
            ids, epochs = self._order.at(numbers), numbers // (self.epoch or MAX_SAMPLES)
            steps = ids[np.lexsort((self._lengths(ids), epochs))].reshape(self._steps, self._batch)
            steps = steps[self._shuffled(epochs.reshape(self._steps, self._batch), number)]
            self._last = number, steps.reshape(-1)
        return self._last[1]

    def _shuffled(self, epochs: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Return an order of the steps of a window in which only steps of the same epoch change places."""
        steps = np.arange(self._steps)
        first, last = epochs[:, 0], epochs[:, -1]
        for epoch in np.unique(first):
            own = np.flatnonzero((first == epoch) & (last == epoch))
            if len(own):
                steps[own] = own[permute(np.arange(len(own)), n=len(own), key=self._seed + number)]
        return steps


def balance_ranks(lengths: NDArray[np.int64], ranks: int, micro_batch_size: int) -> NDArray[np.int64]:
    """Return which samples of a step [G] each rank gets in each micro batch, int64 [micro batches, ranks, micro_batch_size].

    The longest samples come first. The samples of one micro batch are of similar length and are given to the ranks in
    turn, so that the ranks' longest rows differ as little as possible.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    return longest_first.reshape(-1, micro_batch_size, ranks).transpose(0, 2, 1)
