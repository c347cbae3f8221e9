"""From the global order of samples to each rank's micro batches, with one number as the only state.

A step consumes the global sample numbers n ... n + G - 1, where n is the number of samples consumed so far and G the
global batch size. Within them, micro batch m of data-parallel rank r takes

    n + m * (micro * dp_size) + r * micro  ...  + micro - 1

So which samples a step sees depends on n and G alone, and never on how many ranks, micro batches or workers share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.loading.batches import Batch, RowCounts, fetch, fetch_batch, num_targets, padded, row_counts
from slurmtrain.data.loading.order import EpochOrder, Order, digest
from slurmtrain.data.loading.workers import Workers
from slurmtrain.data.sources.protocol import MapDataset, inspect_dataset
from slurmtrain.errors import ConfigError


class Step(NamedTuple):
    """The work of one rank for one step.

    Attributes:
        micro_batches: the batches, in host memory.
        targets: number of targets that are not ignored, over these micro batches.
        digest: what their samples add to the digest of the step, see `order`.
        rows: what the model computes on in them.
    """

    micro_batches: list[Batch]
    targets: int
    digest: tuple[int, ...]
    rows: RowCounts


class BatchLoader:
    """An endless iterator: each `next()` returns one step's micro batches of this rank.

    Args:
        dataset: the samples; see `MapDataset`.
        seed: determines the order of the run; the same on all ranks.
        shuffle: a new permutation for each epoch; False keeps the data set's order.
        global_batch_size: samples of one step over all ranks, G; micro_batch_size x dp_size divides it.
        micro_batch_size: samples of one forward pass on one rank.
        dp_rank: this rank's index among the ranks that see different data.
        dp_size: number of the ranks that see different data.
        num_workers: processes that read ahead; 0 reads in this process.
        samples_consumed: number of the sample to start with.
        fixed_rows: pad rows to the data set's `seq_len`, if it has one, for models that take one shape only.

    Attributes:
        samples_consumed: number of samples of all steps returned so far, over all ranks, without those read ahead.

    Raises:
        ConfigError: the data set is empty.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        seed: int,
        shuffle: bool = True,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 0,
        samples_consumed: int = 0,
        fixed_rows: bool = False,
    ):
        spec = inspect_dataset(dataset, "the training data")
        if not len(spec):
            raise ConfigError(
                "the training data contain no samples", hint="provide more data, or a shorter data.seq_len"
            )
        self.dataset, self._seed = spec, seed
        self._global, self.micro_batch_size = global_batch_size, micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._num_workers = num_workers
        self.samples_consumed = samples_consumed
        self._row_length = (spec.seq_len or 0) if fixed_rows else 0
        self.order: Order = (
            EpochOrder(len(spec), seed=seed, shuffle=shuffle) if spec.order is None else spec.order(seed, shuffle)
        )
        self._workers: Workers[int, Step] | None = None

    @property
    def accumulation_steps(self) -> int:
        """The number of micro batches per rank and step."""
        return self._global // (self.micro_batch_size * self._dp_size)

    def example(self) -> Batch:
        """Return a micro batch of the next step, without consuming a sample.

        If there are workers, another process reads it: what a data set opens at its first sample (a file, a data base)
        must not be shared by all workers, which this process forks later.
        """
        if not self._num_workers:
            return self._part_of_rank(self.samples_consumed).micro_batches[0]
        reader = Workers(self._part_of_rank, iter([self.samples_consumed]), count=1)
        try:
            return next(reader).micro_batches[0]
        finally:
            reader.close()

    def indices(self, first: int, end: int) -> list[int]:
        """Return the indices in the data set of the samples with the numbers from `first` up to but not `end`."""
        return [int(index) for index in self.order.at(np.arange(first, end))]

    def start(self) -> None:
        """Start the workers, before anything else in this process reads from the data set."""
        if self._workers is None and self._num_workers:
            firsts = itertools.count(self.samples_consumed, self._global)
            self._workers = Workers(self._part_of_rank, firsts, count=self._num_workers)

    def state_dict(self) -> dict[str, int]:
        """Return the whole state of the loader, which is the same on all ranks."""
        return {"samples_consumed": self.samples_consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after `state`, and drop what was read ahead."""
        self.close()
        self.samples_consumed = int(state["samples_consumed"])

    def __next__(self) -> Step:
        """Return this rank's part of the next step.

        An error of the data set passes through; the step then does not count, and the next call tries it again.
        """
        self.start()
        try:
            step = next(self._workers) if self._workers else self._part_of_rank(self.samples_consumed)
        except BaseException:
            self.close()
            raise
        self.samples_consumed += self._global
        return step

    def close(self) -> None:
        """Stop the workers. The loader can be used again afterwards."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def _part_of_rank(self, first: int) -> Step:
        """Read this rank's part of the step whose first sample has the number `first`; in a worker or in this process."""
        shape = -1, self._dp_size, self.micro_batch_size
        numbers: NDArray[np.int64] = np.arange(first, first + self._global).reshape(shape)[:, self._dp_rank]
        indices: NDArray[np.int64] = self.order.at(numbers.reshape(-1)).reshape(numbers.shape)
        batches = [
            padded(fetch_batch(self.dataset, own, own_numbers, seed=self._seed), self._row_length)
            for own_numbers, own in zip(numbers, indices, strict=True)
        ]
        return Step(
            batches,
            sum(map(num_targets, batches)),
            digest(numbers.reshape(-1), indices.reshape(-1)),
            RowCounts(*map(sum, zip(*map(row_counts, batches), strict=True))),
        )


def eval_batches(dataset: MapDataset, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Yield each sample of `dataset` exactly once over all ranks; every rank gets a contiguous share.

    The last batch may be smaller, and ranks may have different numbers of batches, even none: reduce sums and counts
    after the loop, and run no collective inside it.
    """
    spec = inspect_dataset(dataset)
    begin, end = (len(spec) * r // world_size for r in (rank, rank + 1))
    for first in range(begin, end, batch_size):
        yield fetch(spec, np.arange(first, min(first + batch_size, end), dtype=np.int64))
