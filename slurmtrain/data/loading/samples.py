"""The interface of data sets, and how their samples are fetched."""

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

from slurmtrain.data.loading.batches import Batch, collate
from slurmtrain.data.loading.compact_rows import CompactRows, as_batch
from slurmtrain.data.loading.order import mixed
from slurmtrain.data.loading.shared_memory import empty
from slurmtrain.errors import ConfigError


class MapDataset(Protocol):
    """A data set with a length and an i-th sample, which is all that it must offer.

    It may offer the following methods and attributes as well. A subclass that overrides one of the ways to fetch
    samples (`__getitem__`, `get_batch`, `get_batches`) is asked by the one that it overrides, even if its base class
    offers a faster one.

    get_batch(indices: int64 [B]) -> Batch: return these samples as one batch, which is not collated any more. Random
        generators are seeded once for the batch, by the number of its first sample: random choices are repeated after a
        restart only if the micro batch size is the same.
    get_batches(indices: int64 [M, B], *, numbers: int64 [M, B], seed: int, empty) -> Iterable[Batch | CompactRows]: yield
        several batches; `numbers` are the samples' numbers in the run. empty(shape, dtype=) makes tensors that are sent
        without a copy, and that must not be changed once their batch has been yielded. After an error, every batch that
        is missing is asked for by itself.
    lengths(indices: int64 [B]) -> int64 [B]: return the tokens of each sample, if samples differ in length.
    seq_len: tokens of the longest sample.
    will_need(indices: int64 [B]) -> None: announce samples that will be fetched soon; called by the process that fetches
        them, and returns without waiting for them.
    order(seed: int, shuffle: bool) -> Order: return the data set's own order of samples.
    num_bytes: bytes of text that all targets stand for; None when that is not known.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_has_samples(dataset: Any, what: str) -> None:
    """Check that a data set has a length and an i-th sample.

    Args:
        what: name of the data set, for the message.

    Raises:
        ConfigError: `dataset` is a stream, or no data set.
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
    """Return the samples `indices` [B] as one batch.

    It comes from the data set's own `get_batches` or `get_batch`, else from its samples one by one, collated.

    Before each sample fetched by itself, the random generators of Python, numpy and torch are seeded by `seed` and the
    sample's number: its random choices (a crop, a flip) do not depend on ranks or workers, and are repeated after a
    restart. Before `get_batch` they are seeded by the number of its first sample. `get_batches` gets seed and numbers
    as arguments, and seeds its generators itself.

    Args:
        numbers: the samples' numbers in the run, int64 [B]; None: their indices.
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
    """Yield several batches as `fetch` returns them, each only when it is asked for.

    Args:
        indices: the samples' indices in the data set, int64 [M, B].
        numbers: the samples' numbers in the run, int64 [M, B].
        empty: makes a tensor of a shape and a dtype, for data sets that have `get_batches`.
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
    """Yield the batches; if making them together fails, make those that are missing one by one.

    So all batches before the one that causes the error are yielded.
    """
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
    """Return the name of the method to fetch samples by.

    It is the fastest of those that the object or the most derived class defines.

    So a subclass that overrides only `get_batch`, or only `__getitem__`, is asked by the method that it overrides.
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
    """Return the number that seeds the random generators for each sample, from the sample's number in the run [B]."""
    return mixed(numbers.astype(np.uint64) ^ mixed(np.array([seed % 2**64], dtype=np.uint64)))


def _collated(dataset: MapDataset, seed: int, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> Batch:
    keys = _keys(seed, numbers)
    with _random_state_kept():
        return collate([_drawn(dataset, int(index), int(key)) for index, key in zip(indices, keys, strict=True)])


def fingerprint_of(source: Any) -> str:
    """Return an identifier of a data source's content: its own `fingerprint`, else its number of samples."""
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
