"""Data sets: what they offer, and how their samples are fetched."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from slurmtrain.data.batches import Batch, collate
from slurmtrain.data.compact import CompactRows, as_batch
from slurmtrain.data.order import mixed
from slurmtrain.data.slots import empty
from slurmtrain.errors import ConfigError


class MapDataset(Protocol):
    """What a data set must offer. It may offer more, by methods and attributes of these names; a class that changes one way
    to fetch samples of its base class is not asked by another one of that:

    get_batch(indices: int64 [B]) -> Batch: these samples at once; nothing is collated then. Random generators are seeded once
        for all of them, by the number of the first: what it draws comes back after a restart, at the same micro batch size.
    get_batches(indices: int64 [M, B], *, numbers: int64 [M, B], seed: int, empty) -> Iterable[Batch | CompactRows]: several
        batches, with the number of each sample in the run; empty(shape, dtype=) makes tensors that are sent without a copy, and
        are not to be changed any more when their batch is given. After an error, each that is missing is asked
        for by itself.
    lengths(indices: int64 [B]) -> int64 [B]: tokens of each sample, where they differ.
    seq_len: of the longest.
    will_need(indices: int64 [B]) -> None: these come soon; it is called where samples are fetched, and waits for none of them.
    order(seed: int, shuffle: bool) -> Order: an order of its own.
    num_bytes: bytes of text that all its targets stand for, None when that is not known.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_has_samples(dataset: Any, what: str) -> None:
    """Check that a data set has a number of samples, and an i-th one.

    Args:
        what: it is, for the message.

    Raises:
        ConfigError: it is a stream, or no data set.
    """
    kind = type(dataset)
    has_samples = any(hasattr(kind, name) for name in ("__getitem__", "get_batch", "get_batches"))
    if isinstance(dataset, IterableDataset) or not (hasattr(kind, "__len__") and has_samples):
        stream = "a stream" if hasattr(kind, "__iter__") else "no data set"
        raise ConfigError(
            f"{what} ({kind.__module__}.{kind.__name__}) is {stream}: it needs len() and [i], since which samples a step sees "
            "must not depend on ranks, workers and restarts",
            hint="text of any size: `slurmtrain prepare`, then data=prepared; a loop of your own may read streams "
            "(jobs/own_loop.py)",
        )


def fetch(
    dataset: MapDataset,
    indices: NDArray[np.int64],
    *,
    seed: int = 0,
    numbers: NDArray[np.int64] | None = None,
) -> Batch:
    """The samples `indices` [B] as one batch: by the data set's own `get_batch`, else one by one, collated.

    One by one, each finds Python's, numpy's and torch's random generators seeded by `seed` and its number: what it draws (a
    crop, a flip) depends on neither ranks nor workers, and comes back after a restart. `get_batch` finds them seeded by the
    number of its first sample; `get_batches` is told seed and numbers, and sees to it itself.

    Args:
        numbers: int64 [B], of each sample in the run; None: its index.
    """
    numbers = indices if numbers is None else numbers
    return as_batch(next(iter(fetch_batches(dataset, indices[None], numbers[None], seed=seed))))


def fetch_batches(
    dataset: MapDataset,
    indices: NDArray[np.int64],
    numbers: NDArray[np.int64],
    *,
    seed: int,
    empty: Callable[..., Tensor] = empty,
) -> Iterable[Batch | CompactRows]:
    """Several batches as by `fetch`, each when it is asked for.

    Args:
        indices: int64 [M, B].
        numbers: int64 [M, B].
        empty: makes tensors of a shape and a dtype, for data sets that ask for them.
    """
    own: Any = dataset
    method = way(dataset)
    if method == "get_batches":
        return _errors_in_their_turn(functools.partial(own.get_batches, seed=seed, empty=empty), indices, numbers)
    if method == "get_batch":
        return map(functools.partial(_drawn_together, own, seed), indices, numbers)
    return map(functools.partial(_collated, dataset, seed), indices, numbers)


def _errors_in_their_turn(
    get_batches: Callable[..., Iterable[Batch | CompactRows]], indices: NDArray[np.int64], numbers: NDArray[np.int64]
) -> Iterator[Batch | CompactRows]:
    """What is made together fails together: then one by one, so that all batches before the one in question come."""
    done = 0
    try:
        for batch in get_batches(indices, numbers=numbers):
            yield batch
            done += 1
        return
    except Exception:
        if len(indices) == 1:
            raise
    for at in range(done, len(indices)):
        yield from get_batches(indices[at : at + 1], numbers=numbers[at : at + 1])


def way(dataset: MapDataset) -> str:
    """By which method samples are fetched: of those that are defined last, by the object or in its classes, the fastest.

    So that a class that changes only `get_batch`, or only `__getitem__`, of another one is asked by that.
    """
    for names in (getattr(dataset, "__dict__", {}), *map(vars, type(dataset).__mro__)):
        for method in ("get_batches", "get_batch", "__getitem__"):
            if method in names:
                return method
    return "__getitem__"


def _drawn_together(dataset: Any, seed: int, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> Batch:
    with _random_state_kept():
        _seed_generators(int(_keys(seed, numbers[:1]).sum()))
        batch: Batch = dataset.get_batch(indices)
        return batch


def _keys(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return what the random generators are seeded by for each sample, by its number in the run [B]."""
    return mixed(numbers.astype(np.uint64) ^ mixed(np.array([seed % 2**64], dtype=np.uint64)))


def _collated(dataset: MapDataset, seed: int, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> Batch:
    keys = _keys(seed, numbers)
    with _random_state_kept():
        return collate([_drawn(dataset, int(index), int(key)) for index, key in zip(indices, keys, strict=True)])


def fingerprint_of(source: Any) -> str:
    """What stands for the content of a data source: its own `fingerprint`, else how many samples it has."""
    own = getattr(source, "fingerprint", None)
    return str(own) if own is not None else f"{len(source.train)} samples"


def _drawn(dataset: MapDataset, index: int, key: int) -> Any:
    _seed_generators(key)
    return dataset[index]


def _seed_generators(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key % 2**63)  # the CPU's alone; a GPU's stays with the training


@contextmanager
def _random_state_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
