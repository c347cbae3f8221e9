"""From the global order of samples to each rank's micro batches, with one number as the only state.

A step consumes the global sample numbers n ... n + G - 1, where n is the number of samples consumed so far and G the
global batch size. Within them, micro batch m of data-parallel rank r takes

    n + m * (micro * dp_size) + r * micro  ...  + micro - 1

or, when samples differ in length, as many of them, chosen so that all ranks have about as much to do (`order.balance_ranks`).
So which samples a step sees depends on n and G alone, and never on how many ranks, micro batches or workers share it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.data.loading import sample_digest
from slurmtrain.data.loading.batches import (
    NO_ROWS,
    Batch,
    RowCounts,
    fetch,
    fetch_batch,
    num_targets,
    padded,
    row_counts,
    tokens_per_row,
)
from slurmtrain.data.loading.order import ByLength, EpochOrder, Order, balance_ranks
from slurmtrain.data.loading.workers import Workers
from slurmtrain.data.sources.protocol import DatasetSpec, MapDataset, inspect_dataset
from slurmtrain.errors import ConfigError

SAMPLES_AT_ONCE = 4096  # number of samples whose indices a rank computes in one go


@dataclass(frozen=True)
class RowLength:
    """The rule for how long the rows of a batch are, when samples differ in length.

    Attributes:
        multiple: rows are padded to a multiple of this many tokens.
        fixed: rows are padded to the data set's `seq_len`, for models that take one shape only.
    """

    multiple: int = 1
    fixed: bool = False


class Step(NamedTuple):
    """The work of one rank for one step.

    Attributes:
        micro_batches: the batches, on the device that computes.
        targets: number of targets that are not ignored, over these micro batches.
        digest: what their samples add to the digest of the step, see `sample_digest`.
        rows: what the model computes on in them.
    """

    micro_batches: list[Batch]
    targets: int
    digest: tuple[int, ...]
    rows: RowCounts = NO_ROWS


class BatchLoader:
    """An endless iterator: each `next()` returns one step's micro batches of this rank.

    Args:
        dataset: the samples; see `MapDataset`.
        seed: determines the order of the run; the same on all ranks.
        shuffle: a new permutation for each epoch; False keeps the data set's order.
        global_batch_size: samples of one step over all ranks, G.
        micro_batch_size: samples of one forward pass on one rank.
        dp_rank: this rank's index among the ranks that see different data.
        dp_size: number of the ranks that see different data.
        num_workers: processes that read ahead; 0 reads in this process.
        samples_consumed: number of the sample to start with.
        ahead: number of steps that workers read ahead and announce to the file system.
        sorted_steps: for samples of different lengths: number of consecutive steps whose samples are sorted together.
        row_length: for samples of different lengths: how long rows are padded to be.
        device: the device that the micro batches are moved to.

    Raises:
        ConfigError: the data set is empty or does not say how long its rows may be, or the batch sizes do not divide.
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
        ahead: int = 2,
        sorted_steps: int = 1,
        row_length: RowLength | None = None,
        device: torch.device | None = None,
    ):
        _check_batch_sizes(global_batch_size, micro_batch_size, dp_size)
        spec = inspect_dataset(dataset, "the training data")
        if not len(spec):
            raise ConfigError(
                "the training data contain no samples", hint="provide more data, or a shorter data.seq_len"
            )
        self.dataset, self._seed = spec, seed
        self._global, self.micro_batch_size = global_batch_size, micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._num_workers, self._ahead = num_workers, ahead
        self._samples_consumed = samples_consumed
        if row_length is not None and row_length.fixed and spec.lengths is not None and spec.seq_len is None:
            raise ConfigError(
                "samples differ in length, but pipelines and compiled models need rows of equal length",
                hint="give the data set an attribute seq_len, the length of its longest sample",
            )
        self.order = self._order(shuffle, sorted_steps)
        self._fetch = _Fetch(spec, seed, row_length or RowLength())
        self._gpu = _Gpu(device) if device is not None and device.type == "cuda" else None
        self._running: Workers[_Samples, _MicroBatch] | None = None
        self._micro_batches: Iterator[_MicroBatch] | None = None

    @property
    def accumulation_steps(self) -> int:
        """The number of micro batches per rank and step."""
        return self._global // (self.micro_batch_size * self._dp_size)

    @property
    def samples_consumed(self) -> int:
        """The number of samples of all steps returned so far, over all ranks, without those that workers have read ahead."""
        return self._samples_consumed

    def example(self) -> Batch:
        """Return a micro batch of the kind that training gets, without consuming a sample.

        If there are workers, another process reads it: what a data set opens at its first sample (a file, a data base)
        must not be shared by all workers, which this process forks later.
        """
        first = np.zeros(self.micro_batch_size, dtype=np.int64)
        only = _Samples(first, first)
        if self._num_workers == 0:
            return self._fetch(only).batch
        reader = self._workers(iter([only]), count=1)
        try:
            return next(reader).batch
        finally:
            reader.close()

    def indices(self, first: int, end: int) -> list[int]:
        """Return the indices in the data set of the samples with the numbers from `first` up to but not `end`."""
        indices: list[int] = self.order.at(np.arange(first, end)).tolist()
        return indices

    def start(self) -> None:
        """Start the workers, before anything else in this process reads from the data set."""
        if self._micro_batches is None and self._num_workers:
            self._micro_batches = self._start()

    def state_dict(self) -> dict[str, int]:
        """Return the whole state of the loader, which is the same on all ranks."""
        return {"samples_consumed": self._samples_consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after `state`, and drop what was read ahead."""
        self.close()
        self._samples_consumed = int(state["samples_consumed"])

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Step:
        """Return this rank's micro batches of the next step.

        An error of the data set passes through; the step then does not count, and the next call tries it again.
        """
        try:
            if self._micro_batches is None:
                self._micro_batches = self._start()
            step = list(islice(self._micro_batches, self.accumulation_steps))
        except BaseException:
            self.close()
            raise
        if len(step) < self.accumulation_steps:
            self.close()
            raise ConfigError("the data set raised StopIteration", hint="raise another exception there")
        result = Step(
            [micro.batch if self._gpu is None else self._gpu.receive(micro.batch) for micro in step],
            sum(micro.targets for micro in step),
            sample_digest.added([micro.digest for micro in step]),
            RowCounts(*map(sum, zip(*(micro.rows for micro in step), strict=True))),
        )
        self._samples_consumed += self._global
        return result

    def close(self) -> None:
        """Stop the workers. The loader can be used again afterwards."""
        running, self._running, self._micro_batches = self._running, None, None
        if running is not None:
            running.close()

    def _order(self, shuffle: bool, sorted_steps: int) -> Order:
        own, lengths = self.dataset.order, self.dataset.lengths
        order: Order = (
            own(self._seed, shuffle)
            if own is not None
            else EpochOrder(len(self.dataset), seed=self._seed, shuffle=shuffle)
        )
        if lengths is None or not shuffle:
            return order
        return ByLength(order, lengths, global_batch_size=self._global, steps=sorted_steps, seed=self._seed)

    def _start(self) -> Iterator[_MicroBatch]:
        samples = self._samples()
        if self.dataset.will_need is not None:
            samples = _announced(samples, self._ahead * self.accumulation_steps)
        if self._num_workers == 0:
            fetched = map(self._fetch, samples)
            return fetched if self._gpu is None else map(self._gpu.pinned, fetched)
        self._running = self._workers(samples, count=self._num_workers)
        return self._running

    def _workers(self, samples: Iterator[_Samples], *, count: int) -> Workers[_Samples, _MicroBatch]:
        ahead = self._ahead * self.accumulation_steps
        received = None if self._gpu is None else self._gpu.pinned
        return Workers(self._fetch, samples, count=count, ahead=ahead, seed=self._seed, received=received)

    def _samples(self) -> Iterator[_Samples]:
        """Yield the samples of this rank's micro batches from the next step on, without end."""
        start = self._samples_consumed
        while True:
            numbers, indices = self._steps(start) if self.dataset.lengths is None else self._balanced_step(start)
            yield from map(_Samples, numbers, indices)
            start += self._global * (len(numbers) // self.accumulation_steps)

    def _steps(self, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return numbers and indices of this rank's samples of several steps, each int64 [micro batches, micro].

        Several steps are computed in one go since numpy takes hardly longer for them than for one.
        """
        shape = -1, self._dp_size, self.micro_batch_size
        places = np.arange(self._global).reshape(shape)[:, self._dp_rank]
        steps = max(1, SAMPLES_AT_ONCE // places.size)
        numbers = (start + self._global * np.arange(steps)[:, None, None] + places).reshape(-1, self.micro_batch_size)
        return numbers, self.order.at(numbers.reshape(-1)).reshape(numbers.shape)

    def _balanced_step(self, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return numbers and indices of this rank's samples of one step, if samples differ in length.

        Both are int64 [micro batches, micro].
        """
        numbers = np.arange(start, start + self._global)
        if isinstance(self.order, ByLength):
            indices, lengths = self.order.with_lengths(numbers)
        else:
            assert self.dataset.lengths is not None
            indices = self.order.at(numbers)
            lengths = self.dataset.lengths(indices)
        places = balance_ranks(lengths, self._dp_size, self.micro_batch_size)[:, self._dp_rank]
        return numbers[places], indices[places]


def eval_batches(dataset: MapDataset, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Yield each sample of `dataset` exactly once over all ranks; every rank gets a contiguous share.

    The last batch may be smaller, and ranks may have different numbers of batches, even none: reduce sums and counts
    after the loop, and run no collective inside it.
    """
    spec = inspect_dataset(dataset)
    begin, end = (len(spec) * r // world_size for r in (rank, rank + 1))
    for first in range(begin, end, batch_size):
        yield fetch(spec, np.arange(first, min(first + batch_size, end), dtype=np.int64))


class _Samples(NamedTuple):
    """The samples of a micro batch.

    Attributes:
        numbers: the samples' numbers in the run, int64 [micro].
        indices: the samples' indices in the data set, int64 [micro].
        upcoming: indices of samples that come some micro batches later, int64 of any number; None: they are not announced.
    """

    numbers: NDArray[np.int64]
    indices: NDArray[np.int64]
    upcoming: NDArray[np.int64] | None = None


def _announced(samples: Iterator[_Samples], ahead: int) -> Iterator[_Samples]:
    """Yield `samples`, each with those that come `ahead` micro batches later; the first one with all until then."""
    waiting = deque(islice(samples, ahead))
    upcoming = [each.indices for each in waiting]
    for each in samples:
        waiting.append(each)
        yield waiting.popleft()._replace(upcoming=np.concatenate([*upcoming, each.indices]))
        upcoming = []


class _MicroBatch(NamedTuple):
    """A micro batch as it was fetched.

    Attributes:
        batch: what the model is called with; data sets of one's own loop may give other things than a dict of tensors.
        targets, digest, rows: as in `Step`.
    """

    batch: Batch
    targets: int
    digest: tuple[int, ...]
    rows: RowCounts


class _Fetch:
    """The function that fetches a micro batch, in a worker or in this process."""

    def __init__(self, dataset: DatasetSpec, seed: int, row_length: RowLength):
        self._dataset, self._seed, self._row_length = dataset, seed, row_length

    def __call__(self, samples: _Samples) -> _MicroBatch:
        if samples.upcoming is not None:  # told where samples are fetched: to find out where they lie may take a while
            assert self._dataset.will_need is not None
            self._dataset.will_need(samples.upcoming)
        batch = fetch_batch(self._dataset, samples.indices, samples.numbers, seed=self._seed)
        batch = padded(batch, self._length_for(tokens_per_row(batch)))
        digest = sample_digest.digest(samples.numbers, samples.indices)
        return _MicroBatch(batch, num_targets(batch), digest, row_counts(batch))

    def _length_for(self, tokens: int) -> int:
        """Return the length to pad rows of so many tokens to."""
        multiple = self._row_length.multiple
        return (self._dataset.seq_len or 0) if self._row_length.fixed else -(-tokens // multiple) * multiple


class _Gpu:
    """A copier of batches from page-locked memory to a GPU, on a stream of its own beside the computation."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def pinned(self, micro: _MicroBatch) -> _MicroBatch:
        """Return the micro batch with its tensors in page-locked memory; in any thread."""
        if not isinstance(micro.batch, Mapping):
            return micro
        with torch.cuda.device(self._device):
            batch = {
                name: value.pin_memory() if isinstance(value, Tensor) and value.device.type == "cpu" else value
                for name, value in micro.batch.items()
            }
        return micro._replace(batch=batch)

    def receive(self, batch: Any) -> Any:
        """Return the batch with its tensors on the GPU and all other values as they are."""
        if not isinstance(batch, Mapping):
            return batch
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        # The host runs ahead of the GPU, so these copies are queued while it computes earlier micro batches.
        with torch.cuda.stream(self._stream):
            copied = {name: value.to(self._device, non_blocking=True) for name, value in tensors.items()}
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for value in copied.values():
            value.record_stream(computing)
        return {**batch, **copied}


def _check_batch_sizes(global_batch_size: int, micro_batch_size: int, dp_size: int) -> None:
    if micro_batch_size < 1 or global_batch_size < 1:
        raise ConfigError(
            f"train.global_batch_size = {global_batch_size}, train.micro_batch_size = {micro_batch_size}",
            hint="both must be at least 1",
        )
    together = micro_batch_size * dp_size
    if global_batch_size % together:
        above = -(-global_batch_size // together) * together
        near = f"{above - together} or {above}" if above > together else str(above)
        raise ConfigError(
            f"train.global_batch_size = {global_batch_size} cannot be divided into micro batches of "
            f"{micro_batch_size} on {dp_size} data-parallel ranks",
            hint=f"set train.global_batch_size to {near}, or another train.micro_batch_size",
        )
