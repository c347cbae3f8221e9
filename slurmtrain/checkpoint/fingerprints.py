"""Cheap digests of tensors, computed on their device: do replicas still agree, and was a tensor changed while it was copied?

They are made to tell two computations apart, not to withstand an attack: files on a disk are digested by `blocks`. None
of them is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slurmtrain.checkpoint.layout import Box, Catalogue, Ints, share

WORD_BYTES = 8
# A save compares one of this many parts of a large tensor in host memory, and each save another one: reading all of it
# would take as long as the copy. A GPU reads a hundred times as fast as it copies to the host, and compares all.
TURNS_ON_CPU = 8
WHOLE, BUFFER = -1, -2  # instead of the number of a part


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
        index, holders: this rank's index among these ranks, and their number.
        box: the part of the global tensor.
        itemsize: bytes of an element.
        buffer: the tensor is a module's buffer: a difference between ranks is reported and is no error.
    """

    name: str
    first: int
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
        mine = [share(self.box, self.itemsize, self.name, index, self.holders) for index in (self.index, partner)]
        if any(part is None or part == self.box for part in mine):  # small: one rank writes it, all compare it
            yield WHOLE, whole
            return
        for index, part in zip((self.index, partner), mine, strict=True):
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


def pack(values: Mapping[Key, int], catalogue: Catalogue) -> Ints:
    """Return one rank's fingerprints as int64 [n, 4]: position of the name in its catalogue, first rank, part, value."""
    position = {name: number for number, name in enumerate(catalogue)}
    rows = [(position[name], first, part, value) for (name, first, part), value in values.items()]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def find_differing(everyone: Sequence[tuple[int, Ints]], catalogues: Sequence[Catalogue]) -> list[Differing]:
    """Return the tensors whose replicas differ, each once.

    Args:
        everyone: for every rank, the number of its catalogue and its `pack`.
    """
    names = list({name: None for catalogue in catalogues for name in catalogue})
    number = {name: index for index, name in enumerate(names)}
    positions = [np.array([number[name] for name in catalogue], dtype=np.int64) for catalogue in catalogues]
    # The key of a comparison, in one number: 16 million tensors, a million ranks, as many parts.
    keys = [(positions[own][rows[:, 0]] << 40) | (rows[:, 1] << 20) | (rows[:, 2] - BUFFER) for own, rows in everyone]
    ranks = np.repeat(np.arange(len(everyone)), [len(rows) for _, rows in everyone])
    key = np.concatenate([np.empty(0, dtype=np.int64), *keys])
    value = np.concatenate([np.empty(0, dtype=np.int64), *(rows[:, 3] for _, rows in everyone)])
    order = np.argsort(key)
    key, value, ranks = key[order], value[order], ranks[order]
    found: dict[str, Differing] = {}
    for at in np.flatnonzero((key[1:] == key[:-1]) & (value[1:] != value[:-1])).tolist():
        name = names[key[at] >> 40]
        if name not in found:
            alike = slice(*np.searchsorted(key, [key[at], key[at] + 1]))
            groups = [tuple(sorted(ranks[alike][value[alike] == one].tolist())) for one in np.unique(value[alike])]
            found[name] = Differing(name, tuple(sorted(groups)), buffer=bool(key[at] & 0xFFFFF == 0))
    return list(found.values())
