"""The plan of which rank writes which piece of which tensor.

The ranks agree on it once, and again only when a tensor was added, removed or sharded differently.

Every rank describes its tensors. Ranks that hold the same box of a tensor (data parallel replicas) split it
among themselves, so each writes, and copies, its part only. Which ranks these are follows from the descriptions and from
the meshes of DTensors alone: nothing else is sent, and all ranks come to the same plan.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import OWN, own_name
from slurmtrain.checkpoint.format.manifest import DTYPE_BYTES, Box, TensorFacts, piece_name, share
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.tensors import SAFETENSORS_NAMES, box_of, dtype_name, is_dtensor

if TYPE_CHECKING:
    from slurmtrain.checkpoint.state import FlatState

PAGE_BYTES = 4096
OWN_ENTRY_BYTES = 200  # more than the length of a header and the entry of a rank's own JSON take in it

# What groups of ranks hold alike: a difference of tensors is an error, that of plain state is reported.
TENSORS, PLAIN = "tensors", "plain"

Layout = tuple[Any, ...]  # for a DTensor: (ranks of the mesh, nested as its axes are; "S" or "R" for every axis)


def replicas(rank: int, layouts: Sequence[Layout]) -> list[int]:
    """Return the ranks that hold the same box as `rank`, which is in the mesh of one of the `layouts`; itself included."""
    own = next(mesh for mesh, _ in layouts if (np.array(mesh) == rank).any())
    coordinates = np.argwhere(np.array(own) == rank)[0]
    found: set[int] = set()
    for mesh, axes in layouts:
        ranks = np.array(mesh)
        if ranks.shape == np.array(own).shape:
            place = tuple(slice(None) if axis == "R" else int(at) for axis, at in zip(axes, coordinates, strict=True))
            found.update(int(number) for number in np.ravel(ranks[place]))
    return sorted(found | {rank})


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor that this rank writes.

    Attributes:
        box: the part of the global tensor.
        within: index that takes it out of this rank's local tensor.
        begin, end: bytes of the data, which follows the header.
    """

    name: str
    box: Box
    within: tuple[slice, ...]
    dtype: torch.dtype
    begin: int
    end: int


@dataclass(frozen=True)
class SavePlan:
    """Everything that this rank writes, and what is known of the other ranks.

    Attributes:
        signature: identifies this rank's tensors; the plan is valid as long as no rank's signature changes.
        facts: all tensors of all ranks, in the same order on all.
        number: number of this rank's description among the distinct ones; ranks that hold the same tensors share one.
        pieces: in the order of the file, larger element types first, so that each is aligned.
        header: that of the file, in the safetensors format, so that other programs can read it, too; without the entry of
            the rank's own JSON, whose length changes.
        data_start: the first byte after the header: whole pages, with room for any length of that JSON.
        data_end: the last byte of the tensors; the rank's own JSON follows.
        total_bytes: bytes of all ranks' tensors.
        group_leaders: the lowest rank of each group of ranks that have the same description; it alone hands in their
            state that is no tensor.
        compared: tensors that other ranks hold, too, and that are compared with theirs: by name, key and size of the group.
    """

    signature: tuple[Any, ...]
    facts: Mapping[str, TensorFacts]
    number: int
    pieces: Sequence[TensorPiece]
    header: Mapping[str, Any]
    data_start: int
    data_end: int
    total_bytes: int
    group_leaders: frozenset[int]
    compared: Mapping[str, tuple[str, int]]


def make_plan(flat: FlatState, ranks: RankGroup, known: SavePlan | None) -> SavePlan:
    """Make the plan for the tensors of `flat`, by all ranks together, or return `known` if it is still valid on all of them.

    Raises:
        CheckpointError: on every rank: `flat` has an error; or a tensor cannot be saved, or differs in shape or type on another
            rank.
    """
    signature = tuple(
        (name, tensor.shape, tensor.dtype, (tensor.placements, tensor.device_mesh) if is_dtensor(tensor) else None)
        for name, tensor in flat.tensors.items()
    )
    changed = flat.error is not None or known is None or known.signature != signature
    if not any(ranks.sums([changed])):
        assert known is not None
        return known
    text = ranks.all_do(lambda: _describe(flat, ranks.rank))
    members: dict[str, list[int]] = {}
    for rank, digest in enumerate(ranks.all_do(lambda: hashlib.sha256(text.encode()).hexdigest(), list)):
        members.setdefault(digest, []).append(rank)
    # Mostly there is one description, at most a few (pipeline stages): its lowest rank broadcasts each.
    texts = [ranks.broadcast(text, source=owners[0]) for owners in members.values()]
    number = next(index for index, owners in enumerate(members.values()) if ranks.rank in owners)
    described = list(zip(texts, members.values(), strict=True))
    plan = ranks.all_do(lambda: _make(flat, number, described, ranks, signature))
    # All ranks together have to write as many elements of every tensor as it has.
    written = dict.fromkeys(plan.facts, 0)
    for piece in plan.pieces:
        written[piece.name] += math.prod(piece.box.size)
    counts = zip(plan.facts.items(), ranks.sums([*written.values()]), strict=True)
    wrong = [(name, found, whole) for (name, fact), found in counts if found != (whole := math.prod(fact.shape))]
    if wrong:
        name, found, whole = wrong[0]
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        raise CheckpointError(f"{found} of {whole} elements of {name} would be written{more}")
    return plan


def _describe(flat: FlatState, rank: int) -> str:
    """Return this rank's tensors and their layouts, as text that is the same on ranks that hold the same.

    What they have for themselves has no number of a rank there.
    """
    if flat.error is not None:
        raise flat.error
    layouts: list[Layout] = []
    # Of layouts, by mesh and placements: comparing meshes of thousands of ranks for every tensor takes long.
    numbers: dict[tuple[int, Any], int] = {}
    entries = []
    for name, tensor in sorted(flat.tensors.items()):
        box_of(name, tensor)
        if dtype_name(tensor.dtype) not in DTYPE_BYTES:
            raise CheckpointError(f"{name} is {dtype_name(tensor.dtype)}, which a checkpoint cannot hold")
        number = None
        if is_dtensor(tensor):
            known = (id(tensor.device_mesh), tensor.placements)
            if known not in numbers:
                axes = "".join("R" if placement.is_replicate() else "S" for placement in tensor.placements)
                layout = (tensor.device_mesh.mesh.tolist(), axes)
                if layout not in layouts:
                    layouts.append(layout)
                numbers[known] = layouts.index(layout)
            number = numbers[known]
        called = OWN + name.removeprefix(own_name(rank, "")) if name.startswith(OWN) else name
        entries.append([called, list(tensor.shape), dtype_name(tensor.dtype), number])
    return json.dumps([layouts, entries], separators=(",", ":"))


def _make(
    flat: FlatState,
    number: int,
    texts: Sequence[tuple[str, Sequence[int]]],
    ranks: RankGroup,
    signature: tuple[Any, ...],
) -> SavePlan:
    """Make a plan from the descriptions of all ranks.

    Buffers are no exact replicas: they are not compared, and the first rank that has one writes it.

    Args:
        texts: every different description, and the ranks that gave it.
    """
    facts: dict[str, TensorFacts] = {}
    holders: dict[str, list[int]] = {}
    different: list[Layout] = []
    layouts: dict[str, list[int]] = {}  # places among the `different` ones
    for text, members in texts:
        meshes, entries = json.loads(text)
        different += [found for mesh in meshes if (found := tuple(mesh)) not in different]
        places = [different.index(tuple(mesh)) for mesh in meshes]
        for name, shape, dtype, layout in entries:
            fact = TensorFacts(tuple(shape), dtype)
            if name.startswith(OWN):
                facts.update({own_name(member, name.removeprefix(OWN)): fact for member in members})
            elif facts.setdefault(name, fact) != fact:
                raise CheckpointError(
                    f"{name} is {fact.dtype} {list(fact.shape)} on one rank and "
                    f"{facts[name].dtype} {list(facts[name].shape)} on another",
                    hint="pass objects that differ between ranks in per_rank=",
                )
            holders.setdefault(name, []).extend(members)
            if layout is not None and places[layout] not in layouts.setdefault(name, []):
                layouts[name].append(places[layout])

    groups: dict[tuple[int, ...], list[int]] = {}  # what ranks hold the same, by layouts
    written: list[tuple[str, Box, Box]] = []
    compared: dict[str, tuple[str, int]] = {}
    for name, tensor in flat.tensors.items():
        box = box_of(name, tensor)
        group, own = [ranks.rank], ranks.rank
        if is_dtensor(tensor) and not name.startswith(OWN):
            known = tuple(layouts[name])
            if known not in groups:
                groups[known] = replicas(ranks.global_rank, [different[place] for place in known])
            group, own = groups[known], ranks.global_rank
        elif not name.startswith(OWN):
            group = sorted(holders[name])
        index = group.index(own)
        if len(group) > 1 and 0 not in box.size and name not in flat.buffers:
            compared[name] = f"{TENSORS} {hashlib.sha256(json.dumps(group).encode()).hexdigest()[:16]}", len(group)
        part: Box | None = box
        if name not in flat.buffers:
            part = share(box, tensor.itemsize, name, index, len(group))
        elif index > 0:
            part = None
        if part is not None and 0 not in part.size:
            written.append((name, box, part))
            if (called := piece_name(name, part, tensor.shape)) != name and called in holders:
                raise CheckpointError(f"a part of {name} has the name of another tensor, {called}")
    # An element type's size divides the next larger one's: nothing has to be skipped for alignment.
    written.sort(key=lambda entry: -flat.tensors[entry[0]].itemsize)

    pieces, position = [], 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, box, part in written:
        dtype = flat.tensors[name].dtype
        end = position + math.prod(part.size) * dtype.itemsize
        pieces.append(TensorPiece(name, part, part.within(box), dtype, position, end))
        its_name = SAFETENSORS_NAMES.get(dtype)
        header[piece_name(name, part, facts[name].shape)] = {
            "dtype": its_name or "U8",
            "shape": list(part.size) if its_name else [end - position],
            "data_offsets": [position, end],
        }
        position = end
    longest = len(json.dumps(header, separators=(",", ":"))) + OWN_ENTRY_BYTES
    data_start = -(-longest // PAGE_BYTES) * PAGE_BYTES
    return SavePlan(
        signature,
        facts,
        number,
        pieces,
        header,
        data_start,
        data_end=data_start + position,
        total_bytes=sum(fact.nbytes for fact in facts.values()),
        group_leaders=frozenset(members[0] for _, members in texts),
        compared=compared,
    )
