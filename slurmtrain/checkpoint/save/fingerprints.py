"""Cheap digests of tensors, computed on their device: do replicas still agree, and was a tensor changed while it was copied?

They are made to tell two computations apart, not to withstand an attack: files on a disk are digested by `blocks`. None
of them is kept.

Ranks do not send each other all of their fingerprints, which would be hundreds of megabytes for rank 0 of thousands. Each sends
one digest for each of its bundles: all that it compares with the same other ranks. Only of bundles that differ, and only from
one rank of each kind, are the fingerprints asked for, to name the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slurmtrain.checkpoint.format.tensor_index import Box, Ints, share

WORD_BYTES = 8
# A save compares one of this many parts of a large tensor in host memory, and each save another one: reading all of it
# would take as long as the copy. A GPU reads a hundred times as fast as it copies to the host, and compares all.
TURNS_ON_CPU = 8
WHOLE, BUFFER = -1, -2  # instead of the number of a part
BUNDLES_ASKED, STATES_ASKED = 8, 8  # to name what differs; it is no use to name more


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's 8-byte words modulo 2**64 (int64 [], on its device).

    Words of integers are weighted by position.

    Integers are weighted because two tensors often hold the same ones in another order: a permutation of the samples.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    whole = data.numel() // WORD_BYTES * WORD_BYTES
    words = data[:whole].view(torch.int64)
    if not tensor.is_floating_point():
        words = words * (2 * torch.arange(words.numel(), device=words.device) + 1)
    total = words.sum()
    if whole < data.numel():
        last = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=data.device)
        last[: data.numel() - whole] = data[whole:]
        total = total + 3 * last.view(torch.int64)[0]
    return total


@dataclass(frozen=True)
class Replica:
    """A tensor of which other ranks hold the same part.

    Attributes:
        name: name of the tensor.
        first: the lowest of these ranks, which distinguishes one group of replicas of a tensor from another.
        group: a digest of which ranks these are; see `group_number`.
        index, holders: this rank's index among these ranks, and their number.
        box: the part of the global tensor.
        itemsize: bytes of an element.
        buffer: the tensor is a module's buffer: a difference between ranks is reported and is no error.
    """

    name: str
    first: int
    group: int
    index: int
    holders: int
    box: Box
    itemsize: int
    buffer: bool

    def compared(self, turn: int, turns: int) -> Iterator[tuple[int, tuple[slice, ...]]]:
        """Yield the parts that this rank fingerprints at a save: a number that identifies the part, and its index.

        If a tensor is divided among its holders, each compares the part that it writes with that of one of the others,
        each save with another one. So the cost does not depend on the number of ranks.

        Args:
            turn: number of saves before.
            turns: number of pieces of a part; each save takes another one.
        """
        whole = (slice(None),) * len(self.box.size)
        if self.buffer:
            yield BUFFER, whole
            return
        partner = (self.index + 1 + turn % (self.holders - 1)) % self.holders
        shares = [share(self.box, self.itemsize, self.name, index, self.holders) for index in (self.index, partner)]
        if any(part is None or part == self.box for part in shares):  # small: one rank writes it, all compare it
            yield WHOLE, whole
            return
        for index, part in zip((self.index, partner), shares, strict=True):
            assert part is not None
            start = [first - origin for first, origin in zip(part.start, self.box.start, strict=True)]
            rows, piece = part.size[0], turn // (self.holders - 1) % turns
            first, last = (rows * piece // turns, rows * (piece + 1) // turns) if rows >= turns else (0, rows)
            rest = (slice(a, a + n) for a, n in zip(start[1:], part.size[1:], strict=True))
            yield index, (slice(start[0] + first, start[0] + last), *rest)


@dataclass(frozen=True)
class Differing:
    """A tensor that is not the same on all ranks that hold it, with the groups of ranks that agree with each other."""

    name: str
    ranks: tuple[tuple[int, ...], ...]
    buffer: bool

    def __str__(self) -> str:
        return f"{self.name} is another one on {' than on '.join(_ranks(group) for group in self.ranks)}"


def _ranks(group: Sequence[int]) -> str:
    shown = ", ".join(map(str, group[:8])) + (", ..." if len(group) > 8 else "")
    return f"rank{'s' if len(group) > 1 else ''} {shown}"


Key = tuple[str, int, int]  # name, `Replica.first`, number of the part


def group_number(ranks: Sequence[int]) -> int:
    """Return a number (int64) for the group of these ranks."""
    return _number(np.array(ranks, dtype="<i8").tobytes())


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


Bundles = dict[tuple[int, int], dict[str, int]]  # fingerprints by name, by group and number of the part


def bundles_of(values: Mapping[Key, int], replicas: Iterable[Replica]) -> Bundles:
    """Return one rank's fingerprints, those together that it compares with the same other ranks."""
    groups = {(replica.name, replica.first): replica.group for replica in replicas}
    found: Bundles = {}
    for (name, first, part), value in values.items():
        found.setdefault((groups[name, first], part), {})[name] = value
    return found


def digests_of(bundles: Bundles) -> Ints:
    """Return int64 [bundles, 3]: group, part, and a digest of all fingerprints."""
    rows = [
        (group, part, _number(json.dumps(sorted(values.items())).encode())) for (group, part), values in bundles.items()
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True)
class Bundle:
    """What some ranks should hold alike and do not.

    Attributes:
        ranks: those together that agree with each other, the lowest first.
    """

    group: int
    part: int
    ranks: tuple[tuple[int, ...], ...]

    @property
    def asked(self) -> list[int]:
        """Ranks that say which tensors differ: one for each state, of the first few."""
        return [alike[0] for alike in self.ranks[:STATES_ASKED]]


def find_differing(everyone: Sequence[Ints]) -> list[Bundle]:
    """Return the bundles that differ between ranks: of parameters first.

    Args:
        everyone: of every rank its `digests_of`.
    """
    ranks = np.repeat(np.arange(len(everyone)), [len(rows) for rows in everyone])
    rows = np.concatenate([np.empty((0, 3), dtype=np.int64), *everyone])
    order = np.lexsort((ranks, rows[:, 2], rows[:, 1], rows[:, 0]))
    rows, ranks = rows[order], ranks[order]
    same = (rows[1:, :2] == rows[:-1, :2]).all(axis=1)
    differing = np.unique(rows[1:][same & (rows[1:, 2] != rows[:-1, 2]), :2], axis=0)
    found = []
    for group, part in differing.tolist():
        places = np.flatnonzero((rows[:, 0] == group) & (rows[:, 1] == part))
        alike: dict[int, list[int]] = {}
        for digest, rank in zip(rows[places, 2].tolist(), ranks[places].tolist(), strict=True):
            alike.setdefault(digest, []).append(rank)
        found.append(Bundle(group, part, tuple(sorted(map(tuple, alike.values())))))
    return sorted(found, key=lambda bundle: (bundle.part == BUFFER, bundle.part, bundle.ranks))


def name_differing(bundle: Bundle, answers: Sequence[Mapping[str, int]]) -> list[Differing]:
    """Return the tensors that differ within a bundle.

    Args:
        answers: the fingerprints of each of the ranks that were `asked`.
    """
    found = []
    for name in dict.fromkeys(name for values in answers for name in values):
        alike: dict[int, list[int]] = {}
        for values, ranks in zip(answers, bundle.ranks, strict=False):
            if name in values:
                alike.setdefault(values[name], []).extend(ranks)
        if len(alike) > 1:
            groups = sorted(tuple(sorted(ranks)) for ranks in alike.values())
            found.append(Differing(name, tuple(groups), buffer=bundle.part == BUFFER))
    return found
