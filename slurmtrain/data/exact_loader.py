"""`slurmtrain.DataLoader`: torch's DataLoader for a loop of the user's own, which goes on at the batch where it was stopped.

A plain DataLoader cannot: its order is drawn from the global generator, where `iter(loader)` draws a seed, too, so that a
restart within an epoch shifts every later draw, such as dropout's; and its workers' generators begin anew. Here the
generators are seeded for each epoch's order and for each batch, and put back afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils import data

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.data.loading.batches import preserved_random_state, seed_generators
from slurmtrain.data.loading.workers import ignoring_stop_signals
from slurmtrain.errors import UsageError

T = TypeVar("T")
Seed = tuple[int, ...]


class _Place(NamedTuple):
    """What of a dataset is read under which seed: an index, or the indices of a batch."""

    seed: Seed
    index: Any


class DataLoader(data.DataLoader[T]):
    """torch's DataLoader of a dataset with indices. As an object of a Checkpointer it goes on where it was.

    The order of the samples, and what reading a batch draws at random (augmentation), depend on `seed`, the epoch, the rank
    and the batch alone: neither the number of workers nor a restart changes them, and the program's own random numbers are
    left alone. To go on within an epoch, no sample before that place is read. A sampler with `set_epoch`, such as
    DistributedSampler, is told the epoch. The workers ignore the signals of a preemption.

    Args:
        dataset: with `__getitem__` and `__len__`.
        seed: of the order and of what is drawn for a batch.
        arguments: those of torch's DataLoader, except `generator`.

    Attributes:
        epoch: the current epoch, from 0; `for epoch in range(loader.epoch, epochs)` goes on with it.
        batch: how many of its batches the loop has been given.
        step: how many batches it has been given in all full epochs before, and in this one.

    Raises:
        UsageError: the dataset is an IterableDataset, or a generator was given.
    """

    def __init__(
        self,
        dataset: data.Dataset[T],
        *args: Any,
        seed: int = 0,
        **arguments: Any,
    ):
        if isinstance(dataset, data.IterableDataset):
            raise UsageError(
                "slurmtrain.DataLoader goes to its place by index, and an IterableDataset has none.",
                hint="torchdata's StatefulDataLoader can be saved as an object of the Checkpointer instead",
            )
        if "generator" in arguments:
            raise UsageError("slurmtrain.DataLoader has no `generator`.", hint="pass seed=NUMBER instead")
        # Its own generator: otherwise torch draws a number from the global one at the start of each epoch.
        super().__init__(_Seeded(dataset), *args, **{**arguments, "generator": torch.Generator()})
        self.seed, self.epoch, self.batch = seed, 0, 0
        self._goes_on = False  # the next `iter` continues the epoch
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        # Past the __setattr__ of torch's, which refuses it because an iterator that exists would not see it.
        object.__setattr__(self, name, _Order(self, getattr(self, name), self.sampler))

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        if self.batch and not self._goes_on:  # the loop has left the last epoch early
            self.epoch, self.batch = self.epoch + 1, 0
        self._goes_on = False
        for batch in super().__iter__():
            self.batch += 1
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    _get_iterator = ignoring_stop_signals(data.DataLoader._get_iterator)

    @property
    def step(self) -> int:
        return self.epoch * len(self) + self.batch

    def state_dict(self) -> dict[str, int]:
        """Return the place after the batch that was given last."""
        return {"epoch": self.epoch, "batch": self.batch, "seed": self.seed, "batches": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next loop over this loader go on at that place.

        Raises:
            CheckpointError: an epoch had another number of batches: another dataset, batch size or number of ranks.
        """
        if state["batches"] != len(self):
            raise CheckpointError(
                f"the checkpoint's DataLoader had {state['batches']} batches in an epoch, and this one has {len(self)}",
                hint="the same data, batch size and number of ranks have the same place; leave the loader out to begin anew",
            )
        self.seed, self.epoch, self.batch, self._goes_on = state["seed"], state["epoch"], state["batch"], True


class _Order:
    """The batches of an epoch that are left, each with the seed under which it is read; in place of a (batch) sampler."""

    def __init__(self, loader: DataLoader[Any], batches: Any = None, sampler: Any = None, **of_others: Any):
        if batches is None:  # Lightning makes another of the same class
            raise UsageError(
                "slurmtrain.DataLoader cannot be given another sampler, as Lightning does on several ranks and in predict().",
                hint="pass sampler=DistributedSampler(dataset, trainer.world_size, trainer.global_rank) to it; to predict, "
                "use torch's DataLoader",
            )
        # Workers that stay belong to the loader, and leave with it: nothing of it may keep it.
        self._loader, self._batches, self._sampler = weakref.ref(loader), batches, sampler

    def __iter__(self) -> Iterator[_Place]:
        loader = self._loader()
        assert loader is not None, "it is being iterated over"
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        seed = (loader.seed, rank, loader.epoch)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(loader.epoch)
        with seeded(seed, loader.generator):
            order = list(self._batches)
        for number in range(loader.batch, len(order)):
            yield _Place((*seed, number), order[number])

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class _Seeded(data.Dataset[T]):
    """A dataset, read under the seed that `_Order` gives along with the indices."""

    def __init__(self, dataset: data.Dataset[T]):
        self.dataset = dataset

    def __getitem__(self, place: Any) -> T:
        if not isinstance(place, _Place):  # somebody looks into the loader's dataset
            return self.dataset[place]
        with seeded(place.seed):
            return self.dataset[place.index]

    def __getitems__(self, place: _Place) -> list[T]:
        with seeded(place.seed):
            if many := getattr(self.dataset, "__getitems__", None):
                return list(many(place.index))
            return [self.dataset[index] for index in place.index]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled in a worker
            raise AttributeError(name)
        return getattr(self.dataset, name)


@contextlib.contextmanager
def seeded(seed: Seed, *generators: torch.Generator) -> Iterator[None]:
    """Seed Python's, torch's (on the CPU) and numpy's generators, and `generators`; afterwards all but these are as before."""
    number = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=8).digest(), "big")
    with preserved_random_state():
        seed_generators(number)
        for generator in generators:
            generator.manual_seed(number)
        yield
