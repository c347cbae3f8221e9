"""How the samples of a data set are fetched."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slurmtrain.data.loading.batches import Batch, WholeBatch, collate, num_targets
from slurmtrain.data.loading.compact_rows import CompactRows, RowGroup
from slurmtrain.data.loading.order import mixed
from slurmtrain.data.sources.protocol import DatasetSpec, FetchMethod, MapDataset, inspect_dataset
from slurmtrain.errors import ConfigError


def fetch(dataset: MapDataset, indices: NDArray[np.int64]) -> Batch:
    """Return the samples `indices` [B] as one batch; their numbers are their indices, and the seed is 0.

    Raises:
        ConfigError: the data set does not give exactly one batch.
    """
    group = next(fetch_batches(inspect_dataset(dataset), indices[None], indices[None], seed=0))
    return group.split()[0].batch()


def fetch_batches(
    spec: DatasetSpec,
    indices: NDArray[np.int64],
    numbers: NDArray[np.int64],
    *,
    seed: int,
) -> Iterator[RowGroup | WholeBatch]:
    """Yield several batches of samples, in the form in which they are sent to a rank.

    They come from the data set's own `get_batches` or `get_batch`, else from its samples one by one, collated. A group of
    batches is made only when it is asked for.

    Before each sample fetched by itself, the random generators of Python, numpy and torch are seeded by `seed` and the
    sample's number: its random choices (a crop, a flip) do not depend on ranks or workers, and are repeated after a
    restart. Before `get_batch` they are seeded by the number of its first sample. `get_batches` gets seed and numbers
    as arguments, and seeds its generators itself.

    Args:
        indices: the samples' indices in the data set, int64 [M, B].
        numbers: the samples' numbers in the run, int64 [M, B].

    Raises:
        ConfigError: the data set does not give M batches; this is raised before the last batch is yielded.
    """
    return _check_count(map(_as_group, _fetch_unchecked(spec, indices, numbers, seed)), len(indices), spec.method)


def count_batches(made: object) -> int:
    """Return how many batches one result of `get_batches` holds."""
    return len(made.num_targets) if isinstance(made, RowGroup) else 1


def _fetch_unchecked(
    spec: DatasetSpec, indices: NDArray[np.int64], numbers: NDArray[np.int64], seed: int
) -> Iterator[Batch | CompactRows | RowGroup]:
    if spec.method is FetchMethod.GET_BATCHES:
        get_batches = functools.partial(spec.dataset.get_batches, seed=seed, empty=torch.empty)
        return _retry_one_by_one(get_batches, indices, numbers)
    fetch_one = _fetch_batch if spec.method is FetchMethod.GET_BATCH else _fetch_and_collate
    return map(functools.partial(fetch_one, spec.dataset, seed), indices, numbers)


def _as_group(made: Batch | CompactRows | RowGroup) -> RowGroup | WholeBatch:
    if isinstance(made, RowGroup):
        return made
    batch = made.batch() if isinstance(made, CompactRows) else made
    return WholeBatch(batch, num_targets(batch))


def _check_count(
    groups: Iterator[RowGroup | WholeBatch], wanted: int, method: FetchMethod
) -> Iterator[RowGroup | WholeBatch]:
    """Yield groups that hold `wanted` batches together.

    With more, batches would be taken for those of other samples; with fewer, the step would be smaller.
    """
    done = 0
    for group in groups:
        done += count_batches(group)
        if done >= wanted:  # another one is looked for before the last one is trained on
            done += sum(map(count_batches, islice(groups, 1)))
        if done > wanted:
            raise ConfigError(
                f"get_batches yielded more batches than requested: at least {done} instead of {wanted}",
                hint="yield one batch for each row of `indices`",
            )
        yield group
    if done < wanted and method is FetchMethod.GET_BATCHES:
        raise ConfigError(
            f"get_batches yielded fewer batches than requested: {done} instead of {wanted}",
            hint="yield one batch for each row of `indices`",
        )
    if done < wanted:
        raise ConfigError("the data set raised StopIteration for a sample", hint="raise another exception there")


def _retry_one_by_one(
    get_batches: Callable[..., Iterable[Batch | CompactRows | RowGroup]],
    indices: NDArray[np.int64],
    numbers: NDArray[np.int64],
) -> Iterator[Batch | CompactRows | RowGroup]:
    """Yield the batches; if making them together fails, make those that are missing one by one.

    So all batches before the one that causes the error are yielded.
    """
    done = 0
    try:
        for made in get_batches(indices, numbers=numbers):
            yield made
            done += count_batches(made)
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
