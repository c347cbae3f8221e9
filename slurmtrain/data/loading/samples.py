"""How the samples of a data set are fetched."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slurmtrain.data.loading.batches import Batch, WholeBatch, collate, num_targets
from slurmtrain.data.loading.compact_rows import RowGroup
from slurmtrain.data.loading.order import mixed
from slurmtrain.data.sources.protocol import DatasetSpec, FetchMethod, MapDataset, inspect_dataset


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
    group = next(fetch_batches(inspect_dataset(dataset), indices[None], numbers[None], seed=seed))
    return group.split()[0].batch()


def fetch_batches(
    spec: DatasetSpec,
    indices: NDArray[np.int64],
    numbers: NDArray[np.int64],
    *,
    seed: int,
) -> Iterator[RowGroup | WholeBatch]:
    """Yield several batches of the samples that `fetch` returns, in the form in which they are sent to a rank.

    A group of batches is made only when it is asked for.

    Args:
        indices: the samples' indices in the data set, int64 [M, B].
        numbers: the samples' numbers in the run, int64 [M, B].
    """
    if spec.method is FetchMethod.GET_BATCHES:
        get_batches = functools.partial(spec.dataset.get_batches, seed=seed, empty=torch.empty)
        return map(_as_group, _retry_one_by_one(get_batches, indices, numbers))
    fetch_one = _fetch_batch if spec.method is FetchMethod.GET_BATCH else _fetch_and_collate
    return map(_as_group, map(functools.partial(fetch_one, spec.dataset, seed), indices, numbers))


def _as_group(made: Batch | RowGroup) -> RowGroup | WholeBatch:
    return made if isinstance(made, RowGroup) else WholeBatch(made, num_targets(made))


def _retry_one_by_one(
    get_batches: Callable[..., Iterable[Batch | RowGroup]], indices: NDArray[np.int64], numbers: NDArray[np.int64]
) -> Iterator[Batch | RowGroup]:
    """Yield the batches; if making them together fails, make those that are missing one by one.

    So all batches before the one that causes the error are yielded.
    """
    done = 0
    try:
        for made in get_batches(indices, numbers=numbers):
            yield made
            done += len(made.num_targets) if isinstance(made, RowGroup) else 1
        return
    except Exception:
        if len(indices) == 1:
            raise
    for at in range(done, len(indices)):
        yield from get_batches(indices[at : at + 1], numbers=numbers[at : at + 1])


def _fetch_batch(dataset: Any, seed: int, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> Batch:
    with _preserved_random_state():
        _seed_generators(int(_seeds_of(seed, numbers[:1]).sum()))
        batch: Batch = dataset.get_batch(indices)
        return batch


def _seeds_of(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the number that seeds the random generators for each sample, from the sample's number in the run [B]."""
    return mixed(numbers.astype(np.uint64) ^ mixed(np.array([seed % 2**64], dtype=np.uint64)))


def _fetch_and_collate(dataset: MapDataset, seed: int, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> Batch:
    keys = _seeds_of(seed, numbers)
    with _preserved_random_state():
        return collate([_fetch_seeded(dataset, int(index), int(key)) for index, key in zip(indices, keys, strict=True)])


def _fetch_seeded(dataset: MapDataset, index: int, key: int) -> Any:
    _seed_generators(key)
    return dataset[index]


def _seed_generators(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key % 2**63)  # the CPU's alone; a GPU's stays with the training


@contextmanager
def _preserved_random_state() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
