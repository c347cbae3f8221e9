"""How the samples of a data set are fetched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slurmtrain.data.loading.batches import Batch, collate
from slurmtrain.data.loading.order import mixed
from slurmtrain.data.sources.protocol import DatasetSpec, FetchMethod, MapDataset, inspect_dataset
from slurmtrain.errors import ConfigError


def fetch(dataset: MapDataset, indices: NDArray[np.int64]) -> Batch:
    """Return the samples `indices` [B] as one batch; their numbers are their indices, and the seed is 0.

    Raises:
        ConfigError: a sample raises StopIteration.
    """
    return fetch_batch(inspect_dataset(dataset), indices, indices, seed=0)


def fetch_batch(spec: DatasetSpec, indices: NDArray[np.int64], numbers: NDArray[np.int64], *, seed: int) -> Batch:
    """Return samples as one batch.

    It comes from the data set's own `get_batch`, else from its samples one by one, collated.

    Before each sample fetched by itself, the random generators of Python, numpy and torch are seeded by `seed` and the
    sample's number: its random choices (a crop, a flip) do not depend on ranks or workers, and are repeated after a
    restart. Before `get_batch` they are seeded by the number of its first sample. `get_seeded_batch` gets seed and
    numbers as arguments, and seeds its generators itself.

    Args:
        indices: the samples' indices in the data set, int64 [B].
        numbers: the samples' numbers in the run, int64 [B].

    Raises:
        ConfigError: a sample raises StopIteration, which would be taken for the end of the run.
    """
    dataset = spec.dataset
    try:
        if spec.method is FetchMethod.GET_SEEDED_BATCH:
            seeded: Batch = dataset.get_seeded_batch(indices, numbers=numbers, seed=seed)
            return seeded
        keys = _seeds_of(seed, numbers)
        with _preserved_random_state():
            if spec.method is FetchMethod.GET_ITEM:
                return collate([_fetch_seeded(dataset, int(i), int(key)) for i, key in zip(indices, keys, strict=True)])
            _seed_generators(int(keys[:1].sum()))
            batch: Batch = dataset.get_batch(indices)
            return batch
    except StopIteration:
        raise ConfigError(
            "the data set raised StopIteration for a sample", hint="raise another exception there"
        ) from None


def _seeds_of(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the number that seeds the random generators for each sample, from the sample's number in the run [B]."""
    return mixed(numbers.astype(np.uint64) ^ mixed(np.array([seed % 2**64], dtype=np.uint64)))


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
