"""From the files of a checkpoint into the tensors of any layout: verified first, then read; each byte once per host.

Where the pieces of all tensors lie, the safetensors headers of the ranks' files say, and nothing else does. A header names
every box in its file; shape and type of the whole tensors are in the manifest, as is the digest of every header, so that it
can be read without the rest of the block. Anybody may have written a checkpoint whose digests fit: so boxes have to lie in
their tensors and in their file, and to be as many elements as the tensors have.

The ranks of a host say which blocks they need and share them out. Each reads its share, digesting it in the same pass:
into the staging buffer, except for bytes of tensors that were made for it (an optimiser's state), which are read into
those directly. When all ranks know that everything is sound, the others are filled from the buffer. Blocks that another
rank of the host has read are taken from the page cache. No rank ever holds more than its share.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import threading
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import sub
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import DamagedError
from slurmtrain.checkpoint.format.blocks import (
    BLOCK_BYTES,
    cannot_be_read,
    check_block,
    each,
    open_file,
    patiently,
    read_into,
)
from slurmtrain.checkpoint.format.directory import OWN_STATE, file_name, own_name
from slurmtrain.checkpoint.format.manifest import DTYPE_BYTES, Box, FileRecord, Manifest, TensorFacts
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.tensors import box_of, bytes_of, dtype_of, local

SPAN_BYTES = 16 << 20  # the most that is read at once into memory of its own, unless a single row is longer
STRAIGHT_BYTES = 4 << 10  # smaller parts are not worth a read of their own
TOGETHER_BYTES = 2**29  # of tensors that `read_whole` has in memory at a time, unless more are wanted
HEADER_BYTES = 100_000_000  # the format's own limit

# A row for each box, since 1,024 ranks with 3,000 tensors each have three million of them: the rank whose file it is in, the
# number of its tensor in the manifest, its first byte in the file and how many they are, and along each dimension first index
# and end, which are 0 and 1 where it has no such dimension. The JSON of what rank R has for itself is a tensor of bytes, the
# R-th behind those of the manifest.
Table = npt.NDArray[np.int64]
_TENSOR, _BYTES, _EDGES = 1, 3, 4
_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


# What is where.


@dataclass(frozen=True)
class Contents:
    """What is in all files of a checkpoint.

    Attributes:
        facts: of its tensors, and of the JSON of each rank (`own_name(rank, "")`), in the order of their numbers.
    """

    facts: Mapping[str, TensorFacts]
    table: Table


def read_contents(path: Path, manifest: Manifest, ranks: RankGroup | None = None) -> Contents:
    """Return what is in all files of the checkpoint `path`. All ranks call it together, and each reads some of the headers.

    Raises:
        DamagedError: see `read_headers`; or the files lack elements of a tensor, or have some twice.
    """
    ranks = ranks or RankGroup(None)
    some = sorted(manifest.files)[ranks.rank :: ranks.size]
    tables = [
        np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.int64).reshape(-1, columns)
        for columns, text in ranks.all_do(partial(read_headers, path, manifest, some), list)
    ]
    table = np.concatenate(tables)
    elements = (table[:, _EDGES + 1 :: 2] - table[:, _EDGES::2]).prod(axis=1)
    held = np.zeros(len(manifest.tensors) + len(manifest.files), dtype=np.int64)
    np.add.at(held, table[:, _TENSOR], elements)
    counts = held.tolist()
    for (name, facts), count in zip(manifest.tensors.items(), counts, strict=False):
        wanted = math.prod(facts.shape)
        if count != wanted:
            what = f"its files have {count} of {wanted} elements of {name[:100]}"
            raise DamagedError(f"{path} is damaged: {what}")
    own = counts[len(manifest.tensors) :]
    own_facts = {own_name(rank, ""): TensorFacts((size,), "uint8") for rank, size in enumerate(own)}
    if own_facts.keys() & manifest.tensors.keys():
        raise DamagedError(f"{path} is damaged: a tensor has the name of a rank's own state")
    return Contents({**manifest.tensors, **own_facts}, table)


def read_headers(path: Path, manifest: Manifest, names: Sequence[str]) -> tuple[int, str]:
    """Return what is in these files of the checkpoint `path`: the columns of the table, and its bytes as text.

    Raises:
        DamagedError: a file is missing or cut off, or a header is not what was written. UnreadableError: see
            `patiently`.
    """
    files = {name: number for number, name in enumerate(sorted(manifest.files))}
    tensors = {name: number for number, name in enumerate(manifest.tensors)}
    dimensions = max((len(facts.shape) for facts in manifest.tensors.values()), default=0) or 1
    shapes = np.ones((len(tensors), dimensions), dtype=np.int64)
    for row, facts in enumerate(manifest.tensors.values()):
        shapes[row, : len(facts.shape)] = facts.shape
    whole = [[edge for extent in shape for edge in (0, extent)] for shape in shapes.tolist()]
    itemsizes = np.array([DTYPE_BYTES[facts.dtype] for facts in manifest.tensors.values()], dtype=np.int64)

    def read(name: str) -> Table:
        try:
            header, size = patiently(partial(_read_header, path / name), path / name)
            if hashlib.sha256(header).hexdigest() != manifest.headers.get(name):
                raise ValueError("its digest differs")
            entries = json.loads(header[8:])
            entries.pop("__metadata__", None)
            rows, position = [], 0
            for key, entry in entries.items():
                begin, end = entry["data_offsets"]
                if begin != position or type(end) is not int or end < begin:
                    raise ValueError(f"{key[:100]} does not follow what is before it")
                position = end
                if key == OWN_STATE:
                    number, edges = len(tensors) + files[name], [0, end - begin]
                elif key in tensors:
                    number, edges = tensors[key], whole[tensors[key]]
                else:  # see `piece_name`
                    tensor, _, text = key.removesuffix("]").rpartition("[")
                    if tensor not in tensors:
                        raise ValueError(f"{key[:100]} is no part of a tensor of the manifest")
                    number, edges = tensors[tensor], _edges(text)
                    if len(edges) != 2 * len(manifest.tensors[tensor].shape):
                        raise ValueError(f"{key[:100]} has another number of dimensions")
                padding = [0, 1] * (dimensions - len(edges) // 2)
                rows.append([files[name], number, len(header) + begin, end - begin, *edges, *padding])
            if len(header) + position != size:
                raise ValueError(f"it describes {len(header) + position} of {size} bytes")
            table = np.array(rows, dtype=np.int64).reshape(-1, _EDGES + 2 * dimensions)
            of_tensors = table[table[:, _TENSOR] < len(tensors)]
            numbers, firsts, ends = of_tensors[:, _TENSOR], of_tensors[:, _EDGES::2], of_tensors[:, _EDGES + 1 :: 2]
            if not ((firsts >= 0) & (firsts < ends) & (ends <= shapes[numbers])).all():
                raise ValueError("a piece lies outside of its tensor")
            if not ((ends - firsts).prod(axis=1) * itemsizes[numbers] == of_tensors[:, _BYTES]).all():
                raise ValueError("a piece has more or fewer bytes than its elements")
            return table
        except OSError as error:
            raise DamagedError(f"{path} is damaged: {cannot_be_read(name, error)}") from None
        except _WRONG as error:
            why = f"the header of {name} is not what was written: {error}"
            raise DamagedError(f"{path} is damaged: {why}") from None

    empty = np.empty((0, _EDGES + 2 * dimensions), dtype=np.int64)
    table = np.concatenate([empty, *each(read, names)])
    return table.shape[1], base64.b64encode(zlib.compress(table.tobytes(), level=1)).decode()


def _read_header(file: Path) -> tuple[bytes, int]:
    """Return the header of a safetensors file, with its length in front, and the size of the file."""
    with os.fdopen(open_file(file), "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        prefix = opened.read(8)
        length = int.from_bytes(prefix, "little")
        if not 0 < length <= min(HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes does not fit into its {size}")
        return prefix + opened.read(length), size


@lru_cache(maxsize=4096)
def _edges(text: str) -> list[int]:
    """Return the numbers in "0:8, 64:128"; most tensors of a rank are cut in the same few ways."""
    return [int(edge) for part in text.split(", ") for edge in part.split(":")]


def parse_own_state(path: Path, text: bytes) -> dict[str, Any]:
    """Return a rank's own plain state, which is in the checkpoint `path`, from its JSON. Raises DamagedError if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: a rank's own state cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path} is damaged: a rank's own state cannot be read: it is not an object")
    return found


# Which bytes go where.


@dataclass(frozen=True)
class Span:
    """Bytes of a file that hold a part of a tensor: whole rows of a box in the file.

    Attributes:
        dtype, rows: type and shape of the array that the bytes hold.
        out: index of the wanted part in that array.
        place: where that part goes, in the local tensor.
        memory: that of `place`, if the bytes can be read into it as they are.
        live: `place` must not be touched before everything is verified.
        straight: the bytes are read into `memory` while they are verified.
    """

    file: str
    begin: int
    end: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    out: tuple[slice, ...]
    place: Tensor
    memory: memoryview | None
    live: bool
    straight: bool


def spans_of(
    contents: Contents, wanted: Mapping[str, Box], parts: Mapping[str, Tensor], live: Collection[str] = ()
) -> list[Span]:
    """Return the bytes to read to fill the wanted box of each tensor.

    Args:
        parts: the local tensors that are these boxes.
        live: names of those that must not be touched before everything is verified.
    """
    names, table = list(contents.facts), contents.table
    dimensions = (table.shape[1] - _EDGES) // 2
    edges = np.zeros((len(names), 2 * dimensions), dtype=np.int64)  # what is not wanted overlaps with nothing
    for row, name in enumerate(names):
        if name in wanted:
            box = wanted[name]
            edges[row, 1::2] = 1
            edges[row, : 2 * len(box.size) : 2] = box.start
            edges[row, 1 : 2 * len(box.size) : 2] = np.add(box.start, box.size)
    of_table = table[:, _TENSOR]
    overlaps = np.ones(len(table), dtype=bool)
    for first in range(0, 2 * dimensions, 2):  # not all at once: that would be as large as the table
        begins = np.maximum(table[:, _EDGES + first], edges[of_table, first])
        overlaps &= begins < np.minimum(table[:, _EDGES + first + 1], edges[of_table, first + 1])
    spans = []
    for file, tensor, offset, _, *ends in table[overlaps].tolist():
        name = names[tensor]
        fact, want, part = contents.facts[name], wanted[name], parts[name]
        if not fact.shape:  # a number is a row of one
            want, part = Box((0,), (1,)), part.view(1)
        starts = ends[: 2 * len(want.size) : 2]
        box = Box(tuple(starts), tuple(map(sub, ends[1 : 2 * len(want.size) : 2], starts)))
        overlap = box.intersection(want)
        assert overlap is not None
        dtype = dtype_of(fact.dtype)
        row = math.prod(box.size[1:]) * dtype.itemsize
        rows, *rest = overlap.within(box)
        at, *others = overlap.within(want)
        step = max(1, SPAN_BYTES // row)
        for first in range(0, overlap.size[0], step):
            count = min(step, overlap.size[0] - first)
            shape, begin = (count, *box.size[1:]), offset + (rows.start + first) * row
            place = part[(slice(at.start + first, at.start + first + count), *others)]
            memory = None
            if place.shape == shape and place.dtype == dtype and place.device.type == "cpu" and place.is_contiguous():
                memory = bytes_of(place) if not place.is_conj() and not place.is_neg() else None
            end, out, is_live = begin + count * row, (slice(0, count), *rest), name in live
            straight = memory is not None and not is_live and end - begin >= STRAIGHT_BYTES
            spans.append(Span(file_name(file), begin, end, dtype, shape, out, place, memory, is_live, straight))
    return spans


# Reading.

# Blocks that this rank has in memory, by file and number: their parts, each with its first byte in the file, its end, and the
# memory that holds it.
Held = dict[tuple[str, int], list[tuple[int, int, memoryview]]]


def share_out(spans: Iterable[Span], on_this_host: RankGroup) -> list[tuple[str, int]]:
    """Return the blocks, by file and number, that this rank reads for its host. All ranks of the host call it together.

    Each block goes to one of the ranks that need most of it, as evenly as possible.
    """
    need: dict[str, dict[int, int]] = {}  # bytes of each block that the spans touch
    for span in spans:
        numbers = need.setdefault(span.file, {})
        for number in range(span.begin // BLOCK_BYTES, -(-span.end // BLOCK_BYTES)):
            begin, end = max(span.begin, number * BLOCK_BYTES), min(span.end, (number + 1) * BLOCK_BYTES)
            numbers[number] = numbers.get(number, 0) + end - begin
    needs = on_this_host.all_do(lambda: {file: [*numbers.items()] for file, numbers in need.items()}, list)
    wanted: dict[tuple[str, int], dict[int, int]] = {}
    for who, counted in enumerate(needs):
        for file, pairs in counted.items():
            for number, count in pairs:
                wanted.setdefault((file, number), {})[who] = count
    # A few bytes in the midst of another's, such as Adam's counts of steps, are no reason to read the other's block.
    ranked = {
        block: [who for who, count in counts.items() if 2 * count > max(counts.values())]
        for block, counts in wanted.items()
    }
    load = [0] * len(needs)
    own: list[tuple[str, int]] = []
    # Blocks with only one candidate come first, so that the others can even out the load.
    for block, candidates in sorted(ranked.items(), key=lambda entry: (len(entry[1]), entry[0])):
        chosen = min(candidates, key=lambda one: (load[one], one))
        load[chosen] += 1
        if chosen == on_this_host.rank:
            own.append(block)
    return sorted(own)


def verify(
    path: Path,
    records: Mapping[str, FileRecord],
    share: Iterable[tuple[str, int]],
    spans: Iterable[Span],
    buffer: Callable[[int], memoryview],
) -> Held:
    """Read blocks into memory, digesting them in the same pass: bytes of straight spans to where they belong.

    Args:
        buffer: returns memory of a size, for the other bytes.

    Raises:
        DamagedError: some are not what was written.
    """
    straight: dict[str, list[tuple[int, int, memoryview]]] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        if span.straight and span.memory is not None:
            straight.setdefault(span.file, []).append((span.begin, span.end, span.memory))
    # The blocks as parts one after another, in which None stands for the buffer, until it is known how much of it is needed.
    cut: dict[tuple[str, int], list[tuple[int, int, memoryview | None]]] = {}
    for file, number in share:
        position, stop = number * BLOCK_BYTES, min(records[file].size, (number + 1) * BLOCK_BYTES)
        parts = cut[file, number] = []
        direct = straight.get(file, [])
        for index in range(bisect_right(direct, position, key=lambda part: part[1]), len(direct)):
            begin, end, target = direct[index]
            first, last = max(begin, position), min(end, stop)
            if first >= last:
                break
            if position < first:
                parts.append((position, first, None))
            parts.append((first, last, target[first - begin : last - begin]))
            position = last
        if position < stop or not parts:
            parts.append((position, stop, None))
    rest = buffer(sum(end - begin for parts in cut.values() for begin, end, memory in parts if memory is None))
    held: Held = {}
    for block, parts in cut.items():
        held[block] = []
        for begin, end, memory in parts:
            if memory is None:
                memory, rest = rest[: end - begin], rest[end - begin :]
            held[block].append((begin, end, memory))

    def check(block: tuple[str, int]) -> str | None:
        file, number = block
        return check_block(path / file, records[file], number, [memory for _, _, memory in held[block]])

    damage = dict.fromkeys(filter(None, each(check, held)))
    if damage:
        raise DamagedError(f"{path} is damaged: {'; '.join(damage)}")
    return held


def fill(path: Path, held: Held, spans: Iterable[Span]) -> None:
    """Copy the bytes of the spans to their places, converting to the dtype there: from memory, and else from the file."""
    # Spans that begin in one block are one thread's work: a thousand small ones are not worth a switch each.
    work: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        work.setdefault((span.file, span.begin // BLOCK_BYTES), []).append(span)

    def fill_some(some: Sequence[Span]) -> None:
        """Fill the places of spans that are of one file."""
        with os.fdopen(open_file(path / some[0].file), "rb", buffering=0) as file:
            for span in some:
                target = span.memory
                if target is None:
                    rows = _buffer(span.end - span.begin).view(span.dtype).view(span.rows)
                    target = bytes_of(rows)
                for number in range(span.begin // BLOCK_BYTES, -(-span.end // BLOCK_BYTES)):
                    first, last = max(span.begin, number * BLOCK_BYTES), min(span.end, (number + 1) * BLOCK_BYTES)
                    parts = held.get((span.file, number))
                    if parts is None:
                        read_into(file.fileno(), target[first - span.begin : last - span.begin], first)
                        continue
                    for begin, end, memory in () if span.straight else parts:  # what is straight is there already
                        a, b = max(first, begin), min(last, end)
                        if a < b:
                            target[a - span.begin : b - span.begin] = memory[a - begin : b - begin]
                if span.memory is None:
                    span.place.copy_(rows[span.out])

    each(lambda some: patiently(partial(fill_some, some), path / some[0].file), work.values())


_local = threading.local()


def _buffer(size: int) -> Tensor:
    """Return this thread's buffer, which is made once: fresh memory costs a page fault for every page."""
    if not hasattr(_local, "buffer") or len(_local.buffer) < size:
        _local.buffer = torch.empty(max(size, SPAN_BYTES), dtype=torch.uint8, device="cpu")
    buffer: Tensor = _local.buffer[:size]
    return buffer


def read_tensors(
    path: Path,
    contents: Contents,
    manifest: Manifest,
    targets: Mapping[str, Tensor],
    *,
    live: Collection[str] = (),
    ranks: RankGroup,
    on_this_host: RankGroup,
    buffer: Callable[[int], memoryview],
) -> dict[str, Any]:
    """Verify what all ranks need, and if it is sound, fill `targets`. All ranks call it together.

    Args:
        targets: tensors to fill, by name.
        live: names of the targets that must not be touched before everything is known to be sound.
        buffer: returns memory of a size, to hold this rank's share.

    Returns:
        This rank's own plain state, if the JSON of it is among the targets.

    Raises:
        DamagedError: on every rank: any rank has found damage. No live tensor has been touched then.
    """
    parts = {name: local(each).detach() for name, each in targets.items()}
    spans = ranks.all_do(
        lambda: spans_of(contents, {name: box_of(name, each) for name, each in targets.items()}, parts, live)
    )
    share = share_out(spans, on_this_host)
    held = ranks.all_do(lambda: verify(path, manifest.files, share, spans, buffer))

    def fill_others() -> dict[str, Any]:
        fill(path, held, [span for span in spans if not span.live])
        own = targets.get(own_name(ranks.rank, ""))
        return parse_own_state(path, bytes(bytes_of(own))) if own is not None else {}

    # All that can still fail comes before the first live tensor is touched.
    own_state = ranks.all_do(fill_others)
    ranks.all_do(lambda: fill(path, held, [span for span in spans if span.live]))
    return own_state


def read_whole(
    path: Path, contents: Contents, manifest: Manifest, names: Iterable[str], *, together: float = TOGETHER_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a checkpoint by name, whole, in the memory of one process.

    Args:
        together: bytes of tensors that are read at a time: to read each by itself would digest its blocks again, of which
            every rank's file has one for it.

    Raises:
        DamagedError: the checkpoint is damaged.
    """
    alone, waiting = RankGroup(None), deque(names)
    while waiting:
        some: dict[str, Tensor] = {}
        size = 0
        while waiting and size < together:
            name = waiting.popleft()
            fact = contents.facts[name]
            some[name] = torch.empty(fact.shape, dtype=dtype_of(fact.dtype), device="cpu")
            size += some[name].nbytes
        buffer = lambda size: memoryview(bytearray(size))  # noqa: E731
        read_tensors(path, contents, manifest, some, ranks=alone, on_this_host=alone, buffer=buffer)
        while some:
            name = next(iter(some))
            yield name, some.pop(name)
