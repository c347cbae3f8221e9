"""Samples of different lengths: batch samples of similar length together, and give every rank about as much to do.

Which samples a step sees remains a function of the seed and the step alone. A batch of mixed lengths wastes its
padding, and all ranks wait for the one with the longest batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.loading.order import MAX_SAMPLES, Order, permute

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
        self._lock = threading.Lock()  # batches are cut in a thread, and their samples named in another
        self.epoch = order.epoch
        self.once = order.once if order.epoch else order.once // self._window_size * self._window_size

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        indices: NDArray[np.int64] = self.with_lengths(numbers)[0]
        return indices

    def with_lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices that `at` returns and the samples' lengths, int64 [2, B].

        Both are returned together since looking a length up may mean reading the sample from a file.
        """
        windows, offsets = np.divmod(numbers, self._window_size)
        result = np.empty((2, len(numbers)), dtype=np.int64)
        with self._lock:
            for window in np.unique(windows).tolist():
                inside = windows == window
                result[:, inside] = self._window(window)[:, offsets[inside]]
        return result

    @property
    def _window_size(self) -> int:
        return self._batch * self._steps

    def _window(self, number: int) -> NDArray[np.int64]:
        """Return the indices and lengths of the samples that are sorted together, int64 [2, samples]."""
        if self._last is None or self._last[0] != number:
            begin = number * self._window_size
            numbers = np.arange(begin, begin + self._window_size)
            ids, epochs = self._order.at(numbers), numbers // (self.epoch or MAX_SAMPLES)
            both = np.stack([ids, self._lengths(ids)])
            steps = both[:, np.lexsort((both[1], epochs))].reshape(2, self._steps, self._batch)
            steps = steps[:, self._shuffled(epochs.reshape(self._steps, self._batch), number)]
            self._last = number, steps.reshape(2, -1)
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
