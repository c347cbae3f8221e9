from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from slurmtrain.data.sources.mixture import Mixture
from slurmtrain.data.sources.protocol import (
    FetchMethod,
    SourceSpec,
    inspect_dataset,
    inspect_evaluation_set,
    inspect_source,
)
from slurmtrain.data.sources.text import ByteWindows
from slurmtrain.errors import ConfigError


class Batched:
    """A data set that has no `[i]`."""

    def __len__(self) -> int:
        return 3

    def get_batch(self, indices: Any) -> Any:
        return {"ids": indices}


class Windows(ByteWindows):
    """The `[i]` of a user's own, where the base class has faster ways."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class Wrapper:
    """Passes on all that it does not have, the faster ways of what it wraps too."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return {"mine": index}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Source:
    """A data object of these members."""

    def __init__(self, **members: Any):
        self.__dict__.update(members)


TEXT = np.zeros(9, dtype=np.uint8)


def test_a_data_set_is_asked_by_the_way_that_the_most_derived_class_defines() -> None:
    plain = ByteWindows(TEXT, 4)
    datasets = (plain, Windows(TEXT, 4), Batched(), Wrapper(plain))
    seeded, batch, item = FetchMethod.GET_SEEDED_BATCH, FetchMethod.GET_BATCH, FetchMethod.GET_ITEM
    methods = (batch, item, batch, item)
    assert tuple(inspect_dataset(dataset).method for dataset in datasets) == methods
    assert inspect_dataset(Mixture({"plain": Source(train=plain)}).train).method == seeded
    assert inspect_dataset(datasets[0]).seq_len == 4 and inspect_dataset(datasets[0]).num_bytes == 8


def test_an_object_that_has_only_train_is_a_data_object_and_a_member_that_is_none_counts_as_missing() -> None:
    nothing = SourceSpec([1, 2], None, None, None, None, None)
    assert inspect_source(Source(train=[1, 2])) == nothing and nothing.fingerprint == "2 samples"
    members = ("valid", "vocab_size", "unigram_entropy", "description", "fingerprint")
    assert inspect_source(Source(train=[1, 2], **dict.fromkeys(members))) == nothing
    named = inspect_source(Source(train=[1], valid=[2], fingerprint=7))
    assert named.valid == [2] and named.fingerprint == "7"


@pytest.mark.parametrize(
    ("given", "found"),
    [(rows := Batched(), rows), (Source(train=[1], valid=rows), rows), (Source(train=rows, valid=None), rows)],
)
def test_an_evaluation_set_is_a_data_set_or_that_of_a_data_object(given: Any, found: Any) -> None:
    assert inspect_evaluation_set(given, "eval.sets.more").dataset is found


@pytest.mark.parametrize(("given", "kind"), [(Stream(), "a stream"), (Source(), "no data set")])
def test_what_is_no_data_set_is_refused_by_name(given: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"eval\.sets\.more \(.*\) is {kind}: it needs len\(\) and \[i\]"):
        inspect_evaluation_set(given, "eval.sets.more")
