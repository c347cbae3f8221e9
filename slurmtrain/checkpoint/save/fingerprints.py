"""Cheap digests of tensors, computed on their device: do replicas still agree, and was a tensor changed while it was copied?

They are made to tell two computations apart, not to withstand an attack: files on a disk are digested by `blocks`. None
of them is kept.

Ranks do not send each other all of their fingerprints, which would be hundreds of megabytes for rank 0 of thousands. Each
sends one digest for each group of ranks with which it holds the same. Only of a group that differs, and only from two of
its ranks, are the fingerprints asked for, to name the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORD_BYTES = 8
# Of a tensor in host memory that is larger, each save compares another one of so many parts for each rank that holds it:
# reading all of it would take longer than the copy of what this rank writes. A GPU reads a hundred times as fast as it
# copies to the host, and compares all.
LARGE_BYTES, PARTS_PER_RANK = 1 << 20, 4

# What groups of ranks hold alike: a difference of tensors is an error, those of buffers and of plain state are reported.
TENSORS, BUFFERS, PLAIN = "tensors", "buffers", "plain"

Fingerprints = dict[str, dict[str, int]]  # by the key of a group (see `group_key`), by name


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


def compared_part(tensor: Tensor, number: int, holders: int) -> Tensor:
    """Return the part of a tensor that is compared at the save of this number.

    Args:
        holders: number of ranks that hold the tensor.
    """
    if tensor.is_cuda or tensor.nbytes < LARGE_BYTES:
        return tensor
    rows = tensor.shape[0]
    parts = min(rows, PARTS_PER_RANK * holders)
    part = number % parts
    return tensor[rows * part // parts : rows * (part + 1) // parts]


def group_key(kind: str, members: Any) -> str:
    """Return a key for what the ranks `members` (or whatever identifies them) hold alike, one of the kinds above."""
    return f"{kind} {_digest(members)}"


def digests_of(fingerprints: Fingerprints) -> dict[str, str]:
    """Return one digest for each group."""
    return {key: _digest(sorted(values.items())) for key, values in fingerprints.items()}


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


class Differing(NamedTuple):
    """What some ranks should hold alike and do not.

    Attributes:
        key: that of their group.
        states: the ranks that agree with each other, the lowest first.
    """

    key: str
    states: list[list[int]]

    @property
    def asked(self) -> list[int]:
        """The two ranks that say what differs."""
        return [state[0] for state in self.states[:2]]

    def names(self, values: Sequence[Mapping[str, int]]) -> list[str]:
        """Return what differs, in words, from the fingerprints of the two ranks that were asked."""
        state = "the state of " if self.key.startswith(PLAIN) else ""
        who = " and ".join(_ranks(each) for each in self.states)
        return [
            f"{state}{name} differs between {who}"
            for name in {**values[0], **values[1]}
            if values[0].get(name) != values[1].get(name)
        ]


def _ranks(group: Sequence[int]) -> str:
    shown = ", ".join(map(str, group[:8])) + (", ..." if len(group) > 8 else "")
    return f"rank{'s' if len(group) > 1 else ''} {shown}"


def find_differing(everyone: Sequence[Mapping[str, str]]) -> list[Differing]:
    """Return the groups that differ, those of tensors first.

    Args:
        everyone: of every rank its `digests_of`.
    """
    states: dict[str, dict[str, list[int]]] = {}
    for rank, digests in enumerate(everyone):
        for key, digest in digests.items():
            states.setdefault(key, {}).setdefault(digest, []).append(rank)
    found = [Differing(key, list(alike.values())) for key, alike in states.items() if len(alike) > 1]
    return sorted(found, key=lambda each: (not each.key.startswith(TENSORS), each.key))
