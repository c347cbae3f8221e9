"""From the global order of samples to each rank's micro batches, with one number as the only state.

A step consumes the global sample numbers n ... n + G - 1, where n is the number of samples consumed so far and G the
global batch size. Within them, micro batch m of data-parallel rank r takes

    n + m * (micro * dp_size) + r * micro  ...  + micro - 1

so which samples a step sees depends on n and G alone, and never on how many ranks, micro batches or workers share it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.process
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from slurmtrain.data.order import sample_ids
from slurmtrain.errors import ConfigError

Batch = dict[str, Tensor]

CLOSE_GRACE_S = 2.0  # what a worker gets to leave by itself before it is killed
# SLURM sends these to every process of a job step, and so to the workers; only the ranks are to act on them.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class MapDataset(Protocol):
    """What a data set must offer. With `get_batch(indices: int64 [B]) -> batch` as well, nothing is collated."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class BatchLoader:
    """An endless iterator: each `next()` is one step's list of this rank's micro batches.

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

    Raises:
        ConfigError: an empty data set, or batch sizes that do not divide.
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
    ):
        _check_batch_sizes(global_batch_size, micro_batch_size, dp_size)
        if not len(dataset):
            raise ConfigError("the training data holds no samples", hint="give more data, or a shorter data.seq_len")
        self.dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._global, self.micro_batch_size = global_batch_size, micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._num_workers = num_workers
        self._samples_consumed = samples_consumed
        self._batches: Iterator[Batch] | None = None
        self._workers: list[multiprocessing.process.BaseProcess] = []

    @property
    def accumulation_steps(self) -> int:
        """Micro batches per rank and step."""
        return self._global // (self.micro_batch_size * self._dp_size)

    @property
    def samples_consumed(self) -> int:
        """Samples of all steps handed out so far, over all ranks. What workers have read ahead does not count."""
        return self._samples_consumed

    def state_dict(self) -> dict[str, int]:
        """The whole state, the same on all ranks."""
        return {"samples_consumed": self._samples_consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after `state`; what was read ahead is dropped."""
        self.close()
        self._samples_consumed = int(state["samples_consumed"])

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> list[Batch]:
        """The micro batches of the next step.

        An error of the data set passes through; the step then does not count, and the next call tries it again.
        """
        try:
            if self._batches is None:
                self._batches = self._start()
            step = [next(self._batches) for _ in range(self.accumulation_steps)]
        except BaseException:
            self.close()
            raise
        self._samples_consumed += self._global
        return step

    def close(self) -> None:
        """Stop the workers. Takes about `CLOSE_GRACE_S` at most; the loader can be used again afterwards."""
        batches, workers = self._batches, self._workers
        self._batches, self._workers = None, []
        if not workers:
            return
        atexit.unregister(self.close)
        killer = threading.Timer(CLOSE_GRACE_S, _kill, [workers])
        killer.daemon = True
        killer.start()
        try:
            # torch raises here when a worker had to be killed, which is no news to us.
            with contextlib.suppress(RuntimeError):
                if batches is not None:  # None when not all workers could be started
                    batches._shutdown_workers()  # type: ignore[attr-defined]
        finally:
            killer.cancel()
            _kill(workers)
            for worker in workers:
                worker.join(CLOSE_GRACE_S)

    def _start(self) -> Iterator[Batch]:
        ids = self._micro_batch_ids(self._samples_consumed)
        if self._num_workers == 0:
            return (fetch(self.dataset, indices) for indices in ids)
        loader: DataLoader[Batch] = DataLoader(
            _BatchDataset(self.dataset),
            batch_size=None,  # an "index" is a whole micro batch's array of them
            sampler=ids,
            num_workers=self._num_workers,
            collate_fn=_as_is,
            worker_init_fn=ignore_stop_signals,
            multiprocessing_context="fork",
            # Without one of its own, starting workers would draw from the global generator, which then differs
            # between runs with and without workers, and from that of a resumed run.
            generator=torch.Generator().manual_seed(self._seed % 2**63),
        )
        # A worker that ignores SIGTERM outlives multiprocessing's own cleaning up, which waits for it for ever.
        # Exit functions run last in, first out, so this one comes before that.
        atexit.register(self.close)
        before = set(multiprocessing.active_children())
        # Blocked across the fork, so that no signal meets a worker before it has learnt to ignore them. Those that
        # arrive for this process meanwhile are delivered afterwards.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            batches: Iterator[Batch] = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            self._workers = [worker for worker in multiprocessing.active_children() if worker not in before]
        return batches

    def _micro_batch_ids(self, start: int) -> Iterator[NDArray[np.int64]]:
        """Data set indices [micro] of this rank's micro batches, from global sample number `start` on, without end."""
        n, stride = len(self.dataset), self.micro_batch_size * self._dp_size
        first = start + self._dp_rank * self.micro_batch_size
        while True:
            yield sample_ids(first, self.micro_batch_size, n=n, seed=self._seed, shuffle=self._shuffle)
            first += stride


def eval_batches(dataset: MapDataset, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Each sample of `dataset` exactly once over all ranks, in this rank's contiguous share.

    The last batch may be smaller, and ranks may have different numbers of batches, even none: reduce sums and counts
    after the loop, and run no collective inside it.
    """
    begin, end = (len(dataset) * r // world_size for r in (rank, rank + 1))
    for first in range(begin, end, batch_size):
        yield fetch(dataset, np.arange(first, min(first + batch_size, end), dtype=np.int64))


def fetch(dataset: MapDataset, indices: NDArray[np.int64]) -> Batch:
    """The samples `indices` [B] as one batch: by the data set's own `get_batch`, else collated by torch."""
    get_batch = getattr(dataset, "get_batch", None)
    if get_batch is not None:
        batch: Batch = get_batch(indices)
        return batch
    collated: Batch = default_collate([dataset[int(index)] for index in indices])
    return collated


def ignore_stop_signals(worker_id: int) -> None:
    """What each worker does first: leave the stop signals to the ranks."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


class _BatchDataset(Dataset[Batch]):
    """A data set whose index is an array of them."""

    def __init__(self, dataset: MapDataset):
        self._dataset = dataset

    def __getitem__(self, indices: NDArray[np.int64]) -> Batch:
        return fetch(self._dataset, indices)


def _as_is(batch: Any) -> Any:
    return batch


def _kill(workers: Iterable[multiprocessing.process.BaseProcess]) -> None:
    for worker in workers:
        worker.kill()  # nothing happens to one that has left already


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
