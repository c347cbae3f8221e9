"""From the files of a checkpoint into the tensors of any layout: verified first, then read; each byte once per host.

The ranks of a host say which blocks they need and share them out. Each reads its share, digesting it in the same pass:
into the staging buffer, except for bytes of tensors that were made for it (an optimiser's state), which are read into
those directly. When all ranks know that everything is sound, the others are filled from the buffer. Blocks that another
rank of the host has read are taken from the page cache. No rank ever holds more than its share.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES, FileRecord
from slurmtrain.checkpoint.format.headers import BoxLocation, Contents, parse_own_state
from slurmtrain.checkpoint.format.manifest import Box, Manifest
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.tensors import box_of, bytes_of, dtype_of, local

SPAN_BYTES = 16 << 20  # the most that is read at once into memory of its own, unless a single row is longer
STRAIGHT_BYTES = 4 << 10  # smaller parts are not worth a read of their own
TOGETHER_BYTES = 2**29  # of tensors that `read_whole` has in memory at a time, unless more are wanted

Blocks = dict[str, list[int]]  # numbers of blocks by file
Need = dict[str, dict[int, int]]  # bytes that are needed of a block, by file and number


@dataclass(frozen=True)
class Span:
    """Bytes of a file that hold a part of a tensor: whole rows of a box in the file.

    Attributes:
        dtype, rows: type and shape of the array that the bytes hold.
        out: index of the wanted part in that array.
        into: index of its place in the local tensor.
    """

    name: str
    file: str
    begin: int
    end: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    out: tuple[slice, ...]
    into: tuple[slice, ...]


class ByteRange(NamedTuple):
    """The bytes `begin` to `end` of a file, and the memory that holds them."""

    begin: int
    end: int
    target: memoryview | None

    @property
    def size(self) -> int:
        return self.end - self.begin

    def between(self, begin: int, end: int) -> ByteRange | None:
        """Return the part of it that lies in these bytes of the file, if any."""
        first, last = max(begin, self.begin), min(end, self.end)
        if first >= last:
            return None
        target = self.target[first - self.begin : last - self.begin] if self.target is not None else None
        return ByteRange(first, last, target)


def spans_of(name: str, wanted: Box, dtype: torch.dtype, sources: Sequence[BoxLocation]) -> list[Span]:
    """Return the bytes to read to fill the box `wanted` of tensor `name`, which was saved as `dtype`."""
    spans = []
    for source in sources:
        box, offset = source.box, source.offset
        overlap = box.intersection(wanted)
        if overlap is None:
            continue
        if not box.start:
            spans.append(Span(name, source.file, offset, offset + dtype.itemsize, dtype, (), (), ()))
            continue
        row = math.prod(box.size[1:]) * dtype.itemsize
        rows, *rest = overlap.within(box)
        at, *others = overlap.within(wanted)
        step = max(1, SPAN_BYTES // row)
        for first in range(0, overlap.size[0], step):
            count = min(step, overlap.size[0] - first)
            begin, into = offset + (rows.start + first) * row, at.start + first
            spans.append(
                Span(
                    name,
                    source.file,
                    begin,
                    begin + count * row,
                    dtype,
                    (count, *box.size[1:]),
                    (slice(0, count), *rest),
                    (slice(into, into + count), *others),
                )
            )
    return spans


def need_of(ranges: Sequence[tuple[str, int, int]]) -> Need:
    """Return how many bytes of each block the byte ranges (file, begin, end) touch."""
    need: Need = {}
    for file, begin, end in ranges:
        numbers = need.setdefault(file, {})
        while begin < end:
            number = begin // BLOCK_BYTES
            stop = min(end, (number + 1) * BLOCK_BYTES)
            numbers[number] = numbers.get(number, 0) + stop - begin
            begin = stop
    return need


def share_out(needs: Sequence[Need], rank: int) -> Blocks:
    """Return the blocks that `rank` reads for its host.

    Each block goes to one of the ranks that need most of it, as evenly as possible.
    """
    wanted: dict[tuple[str, int], dict[int, int]] = {}
    for who, need in enumerate(needs):
        for file, numbers in need.items():
            for number, count in numbers.items():
                wanted.setdefault((file, number), {})[who] = count
    # A few bytes in the midst of another's, such as Adam's counts of steps, are no reason to read the other's block.
    ranked = {
        block: [who for who, count in counts.items() if 2 * count > max(counts.values())]
        for block, counts in wanted.items()
    }
    load = [0] * len(needs)
    own: Blocks = {}
    # Blocks with only one candidate come first, so that the others can even out the load.
    for (file, number), candidates in sorted(ranked.items(), key=lambda entry: (len(entry[1]), entry[0])):
        chosen = min(candidates, key=lambda one: (load[one], one))
        load[chosen] += 1
        if chosen == rank:
            own.setdefault(file, []).append(number)
    return own


class Files:
    """The open files of a checkpoint, and the blocks of them that this rank has in memory."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor):
        self._path, self._pool = path, pool
        self._descriptors: dict[str, int] = {}
        self._opening = threading.Lock()
        self._held: dict[tuple[str, int], list[ByteRange]] = {}
        self._in_place: set[int] = set()  # ids of the spans whose held bytes are where they belong

    def close(self) -> None:
        """Close the files and keep the blocks that are in memory."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def verify(
        self,
        records: Mapping[str, FileRecord],
        share: Blocks,
        straight: Sequence[tuple[Span, memoryview]],
        buffer: Callable[[int], memoryview],
    ) -> list[str]:
        """Read blocks into memory, digesting them in the same pass, and return what is damaged.

        Args:
            straight: bytes that are read directly into their final memory, which may be written before everything is
                verified.
            buffer: returns memory of a size, for the others.
        """
        final: dict[str, list[ByteRange]] = {}
        for span, memory in sorted(straight, key=lambda entry: entry[0].begin):
            final.setdefault(span.file, []).append(ByteRange(span.begin, span.end, memory))
        self._in_place = {id(span) for span, _ in straight}
        held = {
            (file, number): _parts(number, records[file].size, final.get(file, []))
            for file, numbers in share.items()
            for number in numbers
        }
        rest = buffer(sum(part.size for parts in held.values() for part in parts if part.target is None))
        for block, parts in held.items():
            self._held[block] = []
            for part in parts:
                if part.target is None:
                    part, rest = part._replace(target=rest[: part.size]), rest[part.size :]
                self._held[block].append(part)
        return blocks.compare(self._path, records, share, self._pool, into=self._memory_of_block)

    def _memory_of_block(self, file: str, number: int) -> list[memoryview]:
        return [part.target for part in self._held[file, number] if part.target is not None]

    def fill(self, spans: Sequence[Span], tensors: Mapping[str, Tensor]) -> None:
        """Copy the bytes of the spans into the local parts of `tensors`, converting to their dtype."""
        by_file: dict[str, dict[int, list[Span]]] = {}
        for span in spans:
            # Spans that begin in one block are one thread's work: a thousand small ones are not worth a switch each.
            by_file.setdefault(span.file, {}).setdefault(span.begin // BLOCK_BYTES, []).append(span)
        files = list(by_file)
        for begin in range(0, len(files), blocks.OPEN_FILES):
            work = [some for file in files[begin : begin + blocks.OPEN_FILES] for some in by_file[file].values()]
            blocks.each(self._pool, lambda some: self._fill(some, tensors), work)
            self.close()

    def _fill(self, spans: Sequence[Span], tensors: Mapping[str, Tensor]) -> None:
        for span in spans:
            tensor = local(tensors[span.name]).detach()
            target = memory_of(span, tensor)
            if target is not None:
                self.read(span.file, span.begin, span.end, target, in_place=id(span) in self._in_place)
            else:
                rows = _buffer(span.end - span.begin).view(span.dtype).view(span.rows)
                self.read(span.file, span.begin, span.end, bytes_of(rows))
                tensor[span.into].copy_(rows[span.out])

    def read(self, file: str, begin: int, end: int, target: memoryview, *, in_place: bool = False) -> None:
        """Read bytes of a file, from memory if this rank holds them.

        Args:
            in_place: the bytes that this rank holds are in `target` already.
        """
        position = begin
        while position < end:
            number = position // BLOCK_BYTES
            stop = min(end, (number + 1) * BLOCK_BYTES)
            held = self._held.get((file, number))
            if held is None:
                self._read_from_disk(file, target[position - begin : stop - begin], position)
            elif not in_place:
                for whole in held:
                    part = whole.between(position, stop)
                    if part is not None and part.target is not None:
                        target[part.begin - begin : part.end - begin] = part.target
            position = stop

    def _read_from_disk(self, file: str, target: memoryview, position: int) -> None:
        path = self._path / file
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = blocks.patiently(lambda: blocks.open_file(path), path)
        read = partial(blocks.read_into, buffer=target, offset=position)
        blocks.read_patiently(path, self._descriptors[file], read)


_local = threading.local()


def _buffer(size: int) -> Tensor:
    """Return this thread's buffer, which is made once: fresh memory costs a page fault for every page."""
    if not hasattr(_local, "buffer") or len(_local.buffer) < size:
        _local.buffer = torch.empty(max(size, SPAN_BYTES), dtype=torch.uint8, device="cpu")
    buffer: Tensor = _local.buffer[:size]
    return buffer


def _parts(number: int, size: int, straight: Sequence[ByteRange]) -> list[ByteRange]:
    """Return a block of a file of `size` bytes as consecutive parts, each with its final memory in `straight`, or None."""
    position, stop = number * BLOCK_BYTES, min(size, (number + 1) * BLOCK_BYTES)
    parts = []
    for index in range(bisect_right(straight, position, key=lambda part: part.end), len(straight)):
        part = straight[index].between(position, stop)
        if part is None:
            break
        if position < part.begin:
            parts.append(ByteRange(position, part.begin, None))
        parts.append(part)
        position = part.end
    if position < stop or not parts:
        parts.append(ByteRange(position, stop, None))
    return parts


def memory_of(span: Span, tensor: Tensor) -> memoryview | None:
    """Return the memory into which the span's bytes can be read without conversion, if there is any."""
    target = tensor[span.into]
    if target.shape != span.rows or target.dtype != span.dtype or target.device.type != "cpu":
        return None
    as_it_is = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    return bytes_of(target) if as_it_is else None


def read_tensors(
    path: Path,
    contents: Contents,
    records: Mapping[str, FileRecord],
    targets: Mapping[str, Tensor],
    own_file: str | None,
    *,
    live: Collection[str],
    ranks: RankGroup,
    on_this_host: RankGroup,
    buffer: Callable[[int], memoryview],
) -> tuple[list[str], Any]:
    """Verify what all ranks need, and if it is sound, fill `targets`. All ranks call it together.

    Args:
        targets: tensors to fill, by name.
        live: names of the targets that must not be touched before everything is known to be sound.
        own_file: the file with the plain state that this rank has for itself, if there is one.
        buffer: returns memory of a size, to hold this rank's share.

    Returns:
        All damage found by any rank, one sentence each, and this rank's own plain state. If there is damage, no live
            tensor has been touched.
    """

    def plan() -> list[Span]:
        wanted = {name: box_of(name, tensor) for name, tensor in targets.items()}
        return [
            span
            for name, found in contents.find(wanted).items()
            for span in spans_of(name, wanted[name], dtype_of(contents.facts[name].dtype), found)
        ]

    spans = ranks.all_do(plan)
    ranges = [(span.file, span.begin, span.end) for span in spans]
    own_begin, own_end = contents.files[own_file].own_state if own_file is not None else (0, 0)
    if own_file is not None:
        ranges.append((own_file, own_begin, own_end))
    # As pairs, since JSON has no numbers as keys.
    needs = on_this_host.gather(lambda: {file: [*numbers.items()] for file, numbers in need_of(ranges).items()})
    share = share_out([{file: dict(pairs) for file, pairs in need.items()} for need in needs], on_this_host.rank)
    straight = []
    for span in spans:
        if span.name not in live and span.end - span.begin >= STRAIGHT_BYTES:
            memory = memory_of(span, local(targets[span.name]).detach())
            if memory is not None:
                straight.append((span, memory))
    with blocks.threads() as pool, closing(Files(path, pool)) as files:
        found = ranks.gather(lambda: files.verify(records, share, straight, buffer))
        damage = sorted({sentence for each in found for sentence in each})
        if damage:
            return damage, None

        def read_own() -> Any:
            if own_file is None:
                return {}
            own = bytearray(own_end - own_begin)
            files.read(own_file, own_begin, own_end, memoryview(own))
            return parse_own_state(bytes(own))

        # The first thing that can still fail comes before the first tensor is touched.
        own_state = ranks.all_do(read_own)
        ranks.all_do(lambda: files.fill(spans, targets))
    return [], own_state


def read_whole(
    path: Path, contents: Contents, manifest: Manifest, names: Iterable[str], *, together: float = TOGETHER_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a checkpoint by name, whole, in the memory of one process.

    Args:
        together: bytes of tensors that are read at a time: to read each by itself would digest its blocks again, of which
            every rank's file has one for it.

    Raises:
        CheckpointError: the checkpoint is damaged.
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
        damage, _ = read_tensors(
            path,
            contents,
            manifest.files,
            some,
            None,
            live=(),
            ranks=alone,
            on_this_host=alone,
            buffer=lambda size: memoryview(bytearray(size)),
        )
        if damage:
            raise CheckpointError(f"{path} is damaged: {'; '.join(damage)}")
        while some:
            name = next(iter(some))
            yield name, some.pop(name)
