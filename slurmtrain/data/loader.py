"""From the global order of samples to each rank's micro batches, with one number as the only state.

A step consumes the global sample numbers n ... n + G - 1, where n is the number of samples consumed so far and G the
global batch size. Within them, micro batch m of data-parallel rank r takes

    n + m * (micro * dp_size) + r * micro  ...  + micro - 1

or, when samples differ in length, as many of them, dealt out so that all ranks have as much to do (`lengths.dealt`). So which
samples a step sees depends on n and G alone, and never on how many ranks, micro batches or workers share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.data import proof
from slurmtrain.data.batches import Batch, num_targets, padded, tokens_per_row
from slurmtrain.data.compact import CompactRows
from slurmtrain.data.lengths import ByLength, dealt
from slurmtrain.data.order import Epochs, Order
from slurmtrain.data.samples import MapDataset, check_has_samples, fetch, fetch_batches
from slurmtrain.data.slots import empty
from slurmtrain.data.workers import Workers
from slurmtrain.data.workers import ignore_stop_signals as ignore_stop_signals
from slurmtrain.errors import ConfigError

SAMPLES_AT_ONCE = 4096  # of which a rank computes at a time which they are


@dataclass(frozen=True)
class RowLength:
    """How long the rows of a batch are, when samples differ in length.

    Attributes:
        multiple: filled up to a multiple of this many tokens.
        fixed: all as long as the data set's `seq_len`, for what takes one shape only.
    """

    multiple: int = 1
    fixed: bool = False


class Step(NamedTuple):
    """What one rank has to do for a step.

    Attributes:
        micro_batches: where they are computed on.
        targets: those that are not ignored, over these micro batches.
        digest: what their samples add to the proof of the step, see `proof`.
    """

    micro_batches: list[Batch]
    targets: int
    digest: tuple[int, ...]


class BatchLoader:
    """An endless iterator: each `next()` is one step's micro batches of this rank.

    Args:
        dataset: the samples; see `MapDataset`.
        seed: names the order of the run; the same on all ranks.
        shuffle: a new permutation for each epoch; False keeps the data set's order.
        global_batch_size: samples of one step over all ranks, G.
        micro_batch_size: samples of one forward pass on one rank.
        dp_rank: this rank's place among those that see different data.
        dp_size: how many those are.
        num_workers: processes that read ahead; 0 reads in this process.
        samples_consumed: where to start.
        ahead: steps that are read ahead by workers, and announced to the file system.
        sorted_steps: for samples of different length: so many steps share theirs, sorted by length.
        row_length: for samples of different length.
        device: where the micro batches go.

    Raises:
        ConfigError: an empty data set, one that does not say how long its rows may be, or batch sizes that do not divide.
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
        check_has_samples(dataset, "the training data")
        if not len(dataset):
            raise ConfigError("the training data holds no samples", hint="give more data, or a shorter data.seq_len")
        self.dataset, self._seed = dataset, seed
        self._global, self.micro_batch_size = global_batch_size, micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._num_workers, self._ahead = num_workers, ahead
        self._samples_consumed = samples_consumed
        self._lengths = getattr(dataset, "lengths", None)
        if (
            row_length is not None
            and row_length.fixed
            and self._lengths is not None
            and not hasattr(dataset, "seq_len")
        ):
            raise ConfigError(
                "samples differ in length, but pipelines and compiled models take rows of one length only",
                hint="give the data set an attribute seq_len, the length of its longest sample",
            )
        self.order = self._order(shuffle, sorted_steps)
        self._fetch = _Fetch(dataset, seed, row_length or RowLength())
        self._gpu = _Gpu(device) if device is not None and device.type == "cuda" else None
        self._fetched: Iterator[_Fetched] | None = None

    @property
    def accumulation_steps(self) -> int:
        """Micro batches per rank and step."""
        return self._global // (self.micro_batch_size * self._dp_size)

    @property
    def samples_consumed(self) -> int:
        """Samples of all steps handed out so far, over all ranks. What workers have read ahead does not count."""
        return self._samples_consumed

    def example(self) -> Batch:
        """Return a micro batch of the kind that comes; none of those that do.

        With workers it is another process that reads it: what a data set opens at its first sample (a file, a data base)
        must not be shared by all workers, which this process forks later.
        """
        first = np.zeros((1, self.micro_batch_size), dtype=np.int64)
        only = _Samples(first, first)
        if self._num_workers == 0:
            return self._finished(next(self._fetch(only)).batch)
        jobs = iter([only])
        reader = self._workers(lambda count: next(jobs, _NOTHING), count=1, ahead=1)
        try:
            return self._finished(next(reader).batch)
        finally:
            reader.close()

    def start(self) -> None:
        """Start the workers, before anything else in this process reads from the data set."""
        if self._fetched is None and self._num_workers:
            self._fetched = self._start()

    def state_dict(self) -> dict[str, int]:
        """The whole state, the same on all ranks."""
        return {"samples_consumed": self._samples_consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after `state`; what was read ahead is dropped."""
        self.close()
        self._samples_consumed = int(state["samples_consumed"])

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Step:
        """What this rank has to do for the next step.

        An error of the data set passes through; the step then does not count, and the next call tries it again.
        """
        try:
            if self._fetched is None:
                self._fetched = self._start()
            step = list(islice(self._fetched, self.accumulation_steps))
        except BaseException:
            self.close()
            raise
        self._samples_consumed += self._global
        return Step(
            [self._finished(micro.batch if self._gpu is None else self._gpu.receive(micro.batch)) for micro in step],
            sum(micro.targets for micro in step),
            proof.added([micro.digest for micro in step]),
        )

    def close(self) -> None:
        """Stop the workers. The loader can be used again afterwards."""
        fetched, self._fetched = self._fetched, None
        if isinstance(fetched, Workers):
            fetched.close()

    def _finished(self, batch: Batch | CompactRows) -> Batch:
        return self._fetch.filled_up(batch.batch()) if isinstance(batch, CompactRows) else batch

    def _order(self, shuffle: bool, sorted_steps: int) -> Order:
        own = getattr(self.dataset, "order", None)
        order: Order = (
            own(self._seed, shuffle) if own is not None else Epochs(len(self.dataset), seed=self._seed, shuffle=shuffle)
        )
        if self._lengths is None or not shuffle:
            return order
        return ByLength(order, self._lengths, global_batch_size=self._global, steps=sorted_steps, seed=self._seed)

    def _start(self) -> Iterator[_Fetched]:
        hears = hasattr(self.dataset, "will_need")
        coming = _Coming(self._blocks(), self._ahead * self.accumulation_steps if hears else 0)
        if self._num_workers == 0:
            steps = iter(lambda: coming.take(self.accumulation_steps), None)
            return chain.from_iterable(map(self._fetch, steps))
        ahead = max(2, -(-self._ahead * self.accumulation_steps // self._num_workers))
        return self._workers(coming.take, count=self._num_workers, ahead=ahead)

    def _workers(self, take: Callable[[int], _Samples], *, count: int, ahead: int) -> Workers[_Samples, _Fetched]:
        pin_memory = self._gpu is not None
        return Workers(self._fetch, take, count=count, ahead=ahead, seed=self._seed, pin_memory=pin_memory)

    def _blocks(self) -> Iterator[_Samples]:
        """This rank's micro batches from here on, without end, some whole steps at a time."""
        start = self._samples_consumed
        while True:
            numbers, indices = self._steps(start) if self._lengths is None else self._dealt_step(start)
            yield _Samples(numbers, indices)
            start += self._global * (len(numbers) // self.accumulation_steps)

    def _steps(self, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers and indices of this rank's samples of some steps, int64 [micro batches, micro]: numpy takes hardly longer
        for many."""
        shape = -1, self._dp_size, self.micro_batch_size
        places = np.arange(self._global).reshape(shape)[:, self._dp_rank]
        steps = max(1, SAMPLES_AT_ONCE // places.size)
        numbers = (start + self._global * np.arange(steps)[:, None, None] + places).reshape(-1, self.micro_batch_size)
        return numbers, self.order.at(numbers.reshape(-1)).reshape(numbers.shape)

    def _dealt_step(self, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same for one step of samples that differ in length."""
        numbers = np.arange(start, start + self._global)
        if isinstance(self.order, ByLength):
            indices, lengths = self.order.with_lengths(numbers)
        else:
            assert self._lengths is not None
            indices = self.order.at(numbers)
            lengths = self._lengths(indices)
        places = dealt(lengths, self._dp_size, self.micro_batch_size)[:, self._dp_rank]
        return numbers[places], indices[places]


def eval_batches(dataset: MapDataset, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Each sample of `dataset` exactly once over all ranks, in this rank's contiguous share.

    The last batch may be smaller, and ranks may have different numbers of batches, even none: reduce sums and counts
    after the loop, and run no collective inside it.
    """
    begin, end = (len(dataset) * r // world_size for r in (rank, rank + 1))
    for first in range(begin, end, batch_size):
        yield fetch(dataset, np.arange(first, min(first + batch_size, end), dtype=np.int64))


@dataclass(frozen=True)
class _Samples:
    """Of some micro batches.

    Attributes:
        numbers: of the samples in the run, int64 [micro batches, micro].
        indices: which of the data set they are, int64 [micro batches, micro].
        soon: which of it come some micro batches later, int64 of any number; None: nobody wants to know.
    """

    numbers: NDArray[np.int64]
    indices: NDArray[np.int64]
    soon: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def followed_by(self, more: _Samples) -> _Samples:
        return _Samples(np.concatenate([self.numbers, more.numbers]), np.concatenate([self.indices, more.indices]))

    def parted(self, at: int) -> tuple[_Samples, _Samples]:
        """Those before micro batch `at`, and those from there on."""
        return _Samples(self.numbers[:at], self.indices[:at]), _Samples(self.numbers[at:], self.indices[at:])


_NOTHING = _Samples(np.empty((0, 0), dtype=np.int64), np.empty((0, 0), dtype=np.int64))


class _Coming:
    """Micro batches that are not fetched yet.

    Args:
        blocks: all of them, in their order.
        ahead: so many micro batches before they are taken, they come soon.
    """

    def __init__(self, blocks: Iterator[_Samples], ahead: int):
        self._blocks, self._ahead = blocks, ahead
        self._waiting, self._announced = next(blocks), 0

    def take(self, count: int) -> _Samples:
        """The next ones."""
        until = count + self._ahead
        while len(self._waiting) < until:
            self._waiting = self._waiting.followed_by(next(self._blocks))
        soon = self._waiting.indices[self._announced : until].reshape(-1)
        taken, self._waiting = self._waiting.parted(count)
        self._announced = self._ahead
        return replace(taken, soon=soon) if self._ahead else taken


class _Fetched(NamedTuple):
    batch: Batch | CompactRows
    targets: int
    digest: tuple[int, ...]


class _Fetch:
    """From samples to their batches, in whichever process."""

    def __init__(self, dataset: MapDataset, seed: int, row_length: RowLength):
        self._dataset: Any = dataset
        self._seed, self._row_length = seed, row_length
        self._seq_len: int = getattr(dataset, "seq_len", 0)

    def __call__(self, samples: _Samples, empty: Callable[..., Tensor] = empty) -> Iterator[_Fetched]:
        if samples.soon is not None:  # told where samples are fetched: to find out where they lie may take a while
            self._dataset.will_need(samples.soon)
        batches = fetch_batches(self._dataset, samples.indices, samples.numbers, seed=self._seed, empty=empty)
        digests = iter(proof.digests(samples.numbers, samples.indices))
        for batch in batches:
            if isinstance(batch, CompactRows):  # filled up where it is used
                yield _Fetched(batch, batch.num_targets, next(digests))
            else:
                rows = self.filled_up(batch)
                yield _Fetched(rows, num_targets(rows), next(digests))
        if next(digests, None):  # or the step would be a smaller one
            raise ConfigError("the data set has raised StopIteration for a sample", hint="raise another error there")

    def filled_up(self, batch: Batch) -> Batch:
        """With rows as long as they have to be."""
        length, multiple = tokens_per_row(batch), self._row_length.multiple
        return padded(batch, self._seq_len if self._row_length.fixed else -(-length // multiple) * multiple)


class _Gpu:
    """Copies batches from page-locked memory to a GPU, beside what it computes."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def receive(self, batch: Batch | CompactRows) -> Batch | CompactRows:
        if isinstance(batch, CompactRows):
            return CompactRows(**self._copied(batch._asdict()))
        return self._copied(batch) if isinstance(batch, Mapping) else batch

    def _copied(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors among the values on the GPU, and the others as they are."""
        return {**values, **self._tensors({name: one for name, one in values.items() if isinstance(one, Tensor)})}

    def _tensors(self, batch: Batch) -> Batch:
        # The host runs ahead of the GPU, so these copies are queued while it computes earlier micro batches.
        with torch.cuda.stream(self._stream):
            pinned = {name: values if values.is_pinned() else values.pin_memory() for name, values in batch.items()}
            copied = {name: values.to(self._device, non_blocking=True) for name, values in pinned.items()}
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for values in copied.values():
            values.record_stream(computing)
        return copied


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
