"""Batches: named tensors with the samples along the first axis, and how samples of different lengths are put into one batch.

    inputs, targets   int64 [B, S]   for language models; targets that the loss ignores are -100
    documents         int32 [B, S]   optional: which document of its row a token belongs to, 0, 1, 2, ... along the row

A data set for another kind of model may use any names and shapes that its model takes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from slurmtrain.data.loading.order import mixed
from slurmtrain.data.sources.protocol import DatasetSpec, FetchMethod, MapDataset, inspect_dataset
from slurmtrain.errors import ConfigError
from slurmtrain.planner.flops import attended_pairs, dense_pairs

Batch = dict[str, Tensor]

IGNORED_TARGET = -100  # the target that torch's cross_entropy leaves out


def collate(samples: Sequence[Any]) -> Batch:
    """Return samples as one batch, as torch's `default_collate` does.

    Rows [S] of different lengths are first padded to the longest.
    """
    first = samples[0]
    if isinstance(first, Mapping) and "targets" in first and len({_length(sample) for sample in samples}) > 1:
        return concatenate([default_collate([sample]) for sample in samples])
    collated: Batch = default_collate(list(samples))
    return collated


def padded(batch: Batch, length: int) -> Batch:
    """Return `batch` with rows of `length` tokens; the padding has no targets and is a document of its own."""
    before = tokens_per_row(batch)
    if not 0 < before < length:
        return batch

    def longer(name: str, values: Tensor) -> Tensor:
        if values.ndim < 2 or values.shape[1] != before:
            return values
        added = values.new_zeros((len(values), length - before, *values.shape[2:]))
        if name == "documents":
            added = added + values[:, -1:] + 1
        return torch.cat([values, torch.full_like(added, IGNORED_TARGET) if name == "targets" else added], dim=1)

    return {name: longer(name, values) for name, values in batch.items()}


def filled(batch: Batch, rows: int) -> Batch:
    """Return `batch` with `rows` samples; the samples that are added have no targets."""
    missing = rows - len(batch["targets"])
    if missing <= 0:
        return batch
    more = {name: values[:1].expand(missing, *values.shape[1:]) for name, values in batch.items()}
    return {name: torch.cat([values, blank(more)[name]]) for name, values in batch.items()}


def merge_batches(parts: Sequence[tuple[NDArray[np.int64], Batch]]) -> Batch:
    """Return several batches as one.

    Args:
        parts: for each batch, the rows of the result that its samples take, int64 [B of the part], and the batch.
    """
    order = torch.from_numpy(np.argsort(np.concatenate([rows for rows, _ in parts])))
    return {name: values[order] for name, values in concatenate([batch for _, batch in parts]).items()}


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the rows of several, which may differ in length and of which only some may have `documents`."""
    if len(batches) == 1:
        return batches[0]
    names = {name for batch in batches for name in batch}
    longest = max(map(tokens_per_row, batches))
    complete = [padded(with_documents(batch, names), longest) for batch in batches]
    return {name: torch.cat([batch[name] for batch in complete]) for name in complete[0]}


def blank(batch: Batch) -> Batch:
    """Return a batch of the same shape without any targets, so that it adds nothing to the loss or to a metric."""
    return {**batch, "targets": torch.full_like(batch["targets"], IGNORED_TARGET)}


def check_for_model(batch: Any) -> None:
    """Check that a model can be called with `batch`.

    Raises:
        ConfigError: the batch has no inputs or targets, or one of its values is no tensor.
    """
    names = set(batch) if isinstance(batch, Mapping) else set()
    if not {"inputs", "targets"} <= names:
        found = f"a dict of {', '.join(map(repr, sorted(names)))}" if names else f"a {type(batch).__name__}"
        raise ConfigError(
            f"the data loader collates samples to {found}, without 'inputs' and 'targets'",
            hint='[i] of the data set returns {"inputs": ..., "targets": ...}',
        )
    for name, values in batch.items():
        if not isinstance(values, Tensor):
            raise ConfigError(
                f"{name!r} of the data's samples is a {type(values).__name__}; a model is called with tensors by name",
                hint="remove it from what [i] returns, or use tensors: {'inputs': ..., 'targets': ..., 'NAME': tensor}",
            )


def num_targets(batch: Batch) -> int:
    """Return how many targets of `batch` are not ignored; 0 for a batch without `targets`."""
    targets = batch.get("targets") if isinstance(batch, Mapping) else None
    # Data sets of one's own loop may give what they like.
    return int((targets != IGNORED_TARGET).sum()) if isinstance(targets, Tensor) else 0


def tokens_per_row(batch: Batch) -> int:
    """Return the length of the batch's rows in tokens; 0 for a batch without rows of tokens."""
    targets = batch.get("targets") if isinstance(batch, Mapping) else None
    return targets.shape[1] if isinstance(targets, Tensor) and targets.ndim == 2 else 0


def with_documents(batch: Batch, names: set[str]) -> Batch:
    """Add `documents` to a batch that lacks them, if `names` has them: each of its rows is then one document."""
    if "documents" not in names or "documents" in batch:
        return batch
    return {**batch, "documents": torch.zeros_like(batch["targets"], dtype=torch.int32)}


def _length(sample: Mapping[str, Any]) -> int:
    targets = sample["targets"]
    return len(targets) if isinstance(targets, Tensor) and targets.ndim == 1 else -1


# What a model computes on in a batch: its tokens, padding among them, and the pairs of tokens that attend.


class RowCounts(NamedTuple):
    """The counts of some rows of tokens.

    Attributes:
        tokens: number of tokens, with padding and with those whose targets are ignored.
        dense_pairs: pairs of query and key if every token attends to all tokens of its row.
        attended_pairs: pairs that attend: each token to itself and to those of its document before it.
    """

    tokens: int = 0
    dense_pairs: int = 0
    attended_pairs: int = 0


def row_counts(batch: Batch) -> RowCounts:
    """Return the counts of a batch's rows; 0 for a batch without rows of tokens."""
    length = tokens_per_row(batch)
    if not length:
        return RowCounts()
    rows, documents = len(batch["targets"]), batch.get("documents")
    attended = _within_documents(documents) if isinstance(documents, Tensor) else rows * attended_pairs([length])
    return RowCounts(rows * length, dense_pairs(rows, length), attended)


def _within_documents(documents: Tensor) -> int:
    """Return the pairs within the documents of rows [B, S] that are numbered along each row."""
    numbers = documents.numpy(force=True)
    starts = np.ones(numbers.shape, dtype=bool)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=starts[:, 1:])
    lengths = np.diff(np.flatnonzero(starts), append=numbers.size)
    return int((lengths * (lengths + 1) // 2).sum())


# How the samples of a data set are fetched.


def fetch(dataset: MapDataset, indices: NDArray[np.int64]) -> Batch:
    """Return the samples `indices` [B] as one batch; their numbers are their indices, and the seed is 0."""
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
    """
    dataset = spec.dataset
    if spec.method is FetchMethod.GET_SEEDED_BATCH:
        seeded: Batch = dataset.get_seeded_batch(indices, numbers=numbers, seed=seed)
        return seeded
    keys = mixed(numbers.astype(np.uint64) ^ mixed(np.array([seed % 2**64], dtype=np.uint64)))
    with preserved_random_state():
        if spec.method is FetchMethod.GET_ITEM:
            samples = []
            for index, key in zip(indices.tolist(), keys.tolist(), strict=True):
                seed_generators(key)
                samples.append(dataset[index])
            return collate(samples)
        seed_generators(int(keys[:1].sum()))
        batch: Batch = dataset.get_batch(indices)
        return batch


def seed_generators(key: int) -> None:
    """Seed Python's, numpy's and torch's generator; a GPU's stays with the training."""
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key % 2**63)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave these generators as they were before."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
