"""What a data object and its data sets may offer, and the one look at a user's objects.

Any object with these members will do; `inspect_source` and `inspect_dataset` look at it once, and all other code reads
the typed, frozen `SourceSpec` and `DatasetSpec` that they return. A member that is None counts as missing, and whatever
is missing is done without.

A data object (`data._target_`) has `train`, the samples to train on, and may have

    valid             the evaluation set "valid"
    vocab_size        all token ids are below this number
    unigram_entropy   nats per token of `valid` for a model that ignores the context
    description       one line for a person
    fingerprint       identifier of the content: with equal ones, sample i is the same for every i; without it, the number of
                      training samples stands for the content

A data set has `len()` and `[i]`, and may have the following. Arrays of indices and numbers are int64 [B].

    get_batch(indices)          -> these samples as one batch, each name [B, ...], which is not collated any more. Random
                                generators are seeded once for the batch, by the number of its first sample: random choices
                                are repeated after a restart only if the micro batch size is the same
    get_seeded_batch(indices, *, numbers, seed)
                                the same, given the samples' numbers in the run and its seed; it seeds its generators itself
    order(seed, shuffle)        -> the data set's own `Order` of samples
    seq_len                     tokens of the longest sample
    num_bytes                   bytes of text that all targets stand for
    document_mask               samples have `documents`

A subclass that overrides one of the ways to fetch samples (`[i]`, `get_batch`, `get_seeded_batch`) is asked by the one that
it overrides, even if its base class offers a faster one. Errors of these methods reach the caller of the loader as they
are; the step then does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from slurmtrain.data.loading.order import Order
from slurmtrain.errors import ConfigError


class MapDataset(Protocol):
    """A data set with a length and an i-th sample, which is all that it must offer."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample `index`, 0 <= index < len: tensors or numbers by name, which torch collates.

        For a language model these are `inputs` and `targets`, int64 [S], and perhaps `documents`, int32 [S].
        """


class FetchMethod(StrEnum):
    """The ways to fetch samples, the preferred first."""

    GET_SEEDED_BATCH = "get_seeded_batch"
    GET_BATCH = "get_batch"
    GET_ITEM = "__getitem__"


@dataclass(frozen=True)
class DatasetSpec:
    """What a data set offers, see above; None for what it lacks.

    Attributes:
        dataset: the data set itself.
        method: the way to fetch its samples.
    """

    dataset: Any
    method: FetchMethod
    order: Callable[[int, bool], Order] | None = None
    seq_len: int | None = None

    @property
    def num_bytes(self) -> int | None:
        """The data set's own `num_bytes`, read only where it is used: it may be costly to tell."""
        return getattr(self.dataset, "num_bytes", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


@dataclass(frozen=True)
class SourceSpec:
    """What a data object offers, see above; None for what it lacks."""

    train: MapDataset | None
    valid: MapDataset | None
    vocab_size: int | None
    unigram_entropy: float | None
    description: str | None
    own_fingerprint: str | None

    @property
    def fingerprint(self) -> str:
        """The identifier of the content: the object's own, else its number of training samples."""
        samples = 0 if self.train is None else len(self.train)
        return f"{samples} samples" if self.own_fingerprint is None else self.own_fingerprint


def inspect_source(source: Any) -> SourceSpec:
    """Look at a data object."""
    own = getattr(source, "fingerprint", None)
    members = ("train", "valid", "vocab_size", "unigram_entropy", "description")
    given: dict[str, Any] = {name: getattr(source, name, None) for name in members}
    return SourceSpec(**given, own_fingerprint=None if own is None else str(own))


def inspect_dataset(dataset: Any, what: str = "the data set") -> DatasetSpec:
    """Look at a data set; a `DatasetSpec` is returned as it is.

    Args:
        what: name of the data set, for the message.

    Raises:
        ConfigError: `dataset` is a stream, or no data set.
    """
    if isinstance(dataset, DatasetSpec):
        return dataset
    kind = type(dataset)
    has_samples = any(hasattr(kind, method) for method in FetchMethod)
    if isinstance(dataset, IterableDataset) or not (hasattr(kind, "__len__") and has_samples):
        stream = "a stream" if hasattr(kind, "__iter__") else "no data set"
        raise ConfigError(
            f"{what} ({kind.__module__}.{kind.__name__}) is {stream}: it needs len() and [i], since which samples a step sees "
            "must not depend on ranks, workers and restarts",
            hint="text of any size: `slurmtrain prepare`, then data=prepared; a loop of your own may read streams "
            "(jobs/own_loop.py)",
        )
    return DatasetSpec(
        dataset,
        _fetch_method(dataset),
        order=getattr(dataset, "order", None),
        seq_len=getattr(dataset, "seq_len", None),
    )


def inspect_evaluation_set(given: Any, what: str) -> DatasetSpec:
    """Look at an object of `eval.sets`: a data set, or a data object, whose `valid` is used, else its `train`.

    Args:
        what: name of the object, for the message.

    Raises:
        ConfigError: it is neither.
    """
    if any(hasattr(given, method) for method in FetchMethod):
        return inspect_dataset(given, what)
    source = inspect_source(given)
    return inspect_dataset(source.valid or source.train or given, what)


def _fetch_method(dataset: Any) -> FetchMethod:
    """Return the preferred one of those ways to fetch samples that the object or the most derived class defines.

    So a subclass that overrides only `get_batch`, or only `__getitem__`, is asked by the method that it overrides.
    """
    for names in (getattr(dataset, "__dict__", {}), *map(vars, type(dataset).__mro__)):
        for method in FetchMethod:
            if method in names:
                return method
    return FetchMethod.GET_ITEM
