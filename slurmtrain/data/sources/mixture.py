"""A mixture of data sources, each with its share of the samples."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.loading.batches import Batch, fetch_batch, merge_batches, with_documents
from slurmtrain.data.loading.order import MAX_SAMPLES, EpochOrder, Order, samples_at
from slurmtrain.data.sources.config_check import shares_of
from slurmtrain.data.sources.protocol import MapDataset, SourceSpec, inspect_dataset, inspect_source
from slurmtrain.errors import ConfigError


class Mixture:
    """Several data sources as one.

    Args:
        sources: the data sources by name.
        weights: shares of the samples by name, of any sum; a source whose share is more samples than it has is
            repeated, shuffled anew. None: all samples of all sources, each once an epoch.

    Attributes:
        train: the samples of all sources, one source after the other; their `order` mixes them.
        valid: the held-out samples of all sources; None when there are none.
        fingerprint: digest of the names, the weights and the sources' own fingerprints.

    Raises:
        ConfigError: there are no sources, the weights are not positive numbers for exactly these sources, or the
            vocabularies differ.
    """

    def __init__(self, sources: Mapping[str, Any], weights: Mapping[str, float] | None = None):
        shares = shares_of(list(sources), weights)
        specs = {name: inspect_source(source) for name, source in sources.items()}
        self.train = MixedSamples({name: spec.train for name, spec in specs.items()}, shares)
        held_out = {name: spec.valid for name, spec in specs.items() if spec.valid is not None}
        self.valid = MixedSamples(held_out) if held_out else None
        self.vocab_size = _common_vocab_size(specs)
        parts = [f"{name} {weights and weights[name]} {spec.fingerprint}\n" for name, spec in specs.items()]
        self.fingerprint = hashlib.sha256("".join(parts).encode()).hexdigest()
        self.description = "; ".join(f"{name}: {spec.description or 'no description'}" for name, spec in specs.items())


class MixedSamples:
    """The samples of several data sets, one data set after another.

    Args:
        parts: the data sets by name. With `weights`, a part's name determines how its samples are shuffled; its
            position does not matter.
        weights: shares of the samples, adding up to one.
    """

    def __init__(self, parts: Mapping[str, MapDataset | None], weights: Sequence[Fraction] | None = None):
        self._names, self._weights = list(parts), weights
        self._parts = [inspect_dataset(part, f"data.sources.{name}") for name, part in parts.items()]
        self._sizes = [len(part) for part in self._parts]
        self._ends = np.cumsum(self._sizes)
        self._starts = self._ends - self._sizes
        # A part without one has rows of any length; those that are not longer can still be padded to this.
        self.seq_len = max((part.seq_len for part in self._parts if part.seq_len), default=None)
        of_bytes = [part.num_bytes for part in self._parts]
        self.num_bytes = None if None in of_bytes else sum(filter(None, of_bytes))
        self.document_mask = any(getattr(part.dataset, "document_mask", False) for part in self._parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][int(index - self._starts[part])]

    def get_batch(self, indices: NDArray[np.int64]) -> Batch:
        """Return the samples `indices` [B] as one batch."""
        return self.get_seeded_batch(indices, numbers=indices, seed=0)

    def get_seeded_batch(self, indices: NDArray[np.int64], *, numbers: NDArray[np.int64], seed: int) -> Batch:
        """Return the samples `indices` [B] as one batch, see `protocol`; those of one part are fetched together."""
        parts, fetched = np.searchsorted(self._ends, indices, side="right"), []
        for part in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == part)
            own = indices[rows] - self._starts[part]
            fetched.append((rows, fetch_batch(self._parts[part], own, numbers[rows], seed=seed)))
        # Every batch has the same names, whichever parts it has.
        return with_documents(merge_batches(fetched), {"documents"} if self.document_mask else set())

    def order(self, seed: int, shuffle: bool) -> Order:
        """Return an order of all samples once an epoch or, with weights, one that mixes the parts.

        With weights, every stretch of the run has each part's share of the samples.
        """
        if self._weights is None:
            return EpochOrder(len(self), seed=seed, shuffle=shuffle)
        empty = [name for name, size in zip(self._names, self._sizes, strict=True) if not size]
        if empty:
            raise ConfigError(f"data.sources.{empty[0]} holds no samples", hint="leave it out, or give it data")
        seeds = [(seed + _key(name)) % 2**64 for name in self._names]
        return MixtureOrder(self._sizes, self._weights, seeds, shuffle=shuffle)


class MixtureOrder:
    """An order that mixes the parts of a data set by weights, computed for any sample without a table and without its history.

    The parts are the leaves of a binary tree. At a node whose left side has the share p of its samples, sample k goes
    left if floor((k+1) p + 1/2) > floor(k p + 1/2) (a Sturmian sequence), and is that side's sample number floor(k p +
    1/2). So in any stretch of the run, a part has its share of the samples, give or take one per level of the tree.

    Args:
        sizes: number of samples of each part.
        weights: the parts' shares, adding up to one; multiples of 2^-30 or of 1/n for a smaller n.
        seeds: seed by which each part is shuffled.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[Fraction], seeds: Sequence[int], *, shuffle: bool = True
    ):
        whole = lcm(*(weight.denominator for weight in weights))
        self._sums = [0]
        for weight in weights:
            self._sums.append(self._sums[-1] + int(weight * whole))
        self._sizes, self._seeds, self._shuffle = list(sizes), list(seeds), shuffle
        self._starts = np.cumsum([0, *sizes])
        # The longest run that needs at most as many samples of each part as it has.
        self.once = min(
            bisect_right(range(MAX_SAMPLES), size, key=partial(self._count, part)) - 1
            for part, size in enumerate(sizes)
        )

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        result = np.empty(len(numbers), dtype=np.int64)
        pending = [(0, len(self._sizes), np.arange(len(numbers)), numbers)]
        while pending:
            low, high, places, own = pending.pop()
            if not len(places):
                continue
            if high - low == 1:
                n, seed = self._sizes[low], self._seeds[low]
                result[places] = self._starts[low] + samples_at(own, n=n, seed=seed, shuffle=self._shuffle)
                continue
            middle, share, whole = self._node(low, high)
            lefts = _count_left(own, share, whole)
            goes_left = _count_left(own + 1, share, whole) > lefts
            pending += [
                (low, middle, places[goes_left], lefts[goes_left]),
                (middle, high, places[~goes_left], (own - lefts)[~goes_left]),
            ]
        return result

    def _node(self, low: int, high: int) -> tuple[int, int, int]:
        """Return where the parts low ... high - 1 are halved, and the left side's share of the node's samples.

        The share is a fraction: (middle, numerator, denominator).
        """
        middle = (low + high) // 2
        share, whole = self._sums[middle] - self._sums[low], self._sums[high] - self._sums[low]
        divisor = gcd(share, whole)
        return middle, share // divisor, whole // divisor

    def _count(self, part: int, samples: int) -> int:
        """Return how many of the first `samples` samples of the run are of a part."""
        low, high = 0, len(self._sizes)
        while high - low > 1:
            middle, share, whole = self._node(low, high)
            left = (samples * share + whole // 2) // whole
            samples, low, high = (left, low, middle) if part < middle else (samples - left, middle, high)
        return samples


def _count_left(numbers: NDArray[np.int64], share: int, whole: int) -> NDArray[np.int64]:
    """Return floor(k share/whole + 1/2) for each k, without leaving 64 bits."""
    rounds, rest = np.divmod(numbers, whole)
    lefts: NDArray[np.int64] = rounds * share + (rest * share + whole // 2) // whole
    return lefts


def _common_vocab_size(sources: Mapping[str, SourceSpec]) -> int | None:
    values = {name: source.vocab_size for name, source in sources.items() if source.vocab_size is not None}
    if len(set(values.values())) > 1:
        raise ConfigError(
            f"the sources of data=mixture differ in vocab_size: {', '.join(f'{key} {value}' for key, value in values.items())}",
            hint="prepare them with the same tokenizer",
        )
    return next(iter(values.values()), None)


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
