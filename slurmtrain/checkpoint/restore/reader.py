"""From the files of a checkpoint into the tensors of any layout: verified first, then read; each byte once per host.

The ranks of a host say which blocks they need and share them out. Each reads its share, digesting it in the same pass:
into the staging buffer, except for bytes of tensors that were made for it (an optimiser's state), which are read into
those directly. When all ranks know that everything is sound, the others are filled from the buffer. Blocks that another
rank of the host has read are taken from the page cache. No rank ever holds more than its share.
"""

from __future__ import annotations

import base64
import math
import os
import threading
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import DamagedError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES, FileRecord
from slurmtrain.checkpoint.format.directory import own_name
from slurmtrain.checkpoint.format.headers import Contents, parse_own_state, read_headers
from slurmtrain.checkpoint.format.manifest import Box, Manifest
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.tensors import box_of, bytes_of, dtype_of, local

SPAN_BYTES = 16 << 20  # the most that is read at once into memory of its own, unless a single row is longer
STRAIGHT_BYTES = 4 << 10  # smaller parts are not worth a read of their own
TOGETHER_BYTES = 2**29  # of tensors that `read_whole` has in memory at a time, unless more are wanted

Blocks = dict[str, list[int]]  # numbers of blocks by file
Need = dict[str, list[tuple[int, int]]]  # blocks by file: number, and bytes that are needed of it


def read_contents(path: Path, manifest: Manifest, ranks: RankGroup | None = None) -> Contents:
    """Return what is in all files of the checkpoint `path`. All ranks call it together, and each reads some of the headers.

    Raises:
        DamagedError: see `read_headers` and `Contents.whole`.
    """
    ranks = ranks or RankGroup(None)
    some = sorted(manifest.files)[ranks.rank :: ranks.size]

    def read() -> list[Any]:
        table = read_headers(path, manifest, some)
        return [table.shape[1], base64.b64encode(zlib.compress(table.tobytes(), level=1)).decode()]

    tables = [
        np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.int64).reshape(-1, columns)
        for columns, text in ranks.all_do(read, list)
    ]
    return Contents.whole(path, manifest, np.concatenate(tables))


@dataclass
class Span:
    """Bytes of a file that hold a part of a tensor: whole rows of a box in the file.

    Attributes:
        dtype, rows: type and shape of the array that the bytes hold.
        out: index of the wanted part in that array.
        into: index of its place in the local tensor.
        straight: the memory of that place, if the bytes may be read into it before everything is verified.
    """

    name: str
    file: str
    begin: int
    end: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    out: tuple[slice, ...]
    into: tuple[slice, ...]
    straight: memoryview | None = None

    def memory(self, tensor: Tensor) -> memoryview | None:
        """Return the memory of a local tensor into which the bytes can be read without conversion, if there is any."""
        target = tensor[self.into]
        if target.shape != self.rows or target.dtype != self.dtype or target.device.type != "cpu":
            return None
        as_it_is = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        return bytes_of(target) if as_it_is else None


class ByteRange(NamedTuple):
    """The bytes `begin` to `end` of a file, and the memory that holds them."""

    begin: int
    end: int
    target: memoryview | None

    def between(self, begin: int, end: int) -> ByteRange | None:
        """Return the part of it that lies in these bytes of the file, if any."""
        first, last = max(begin, self.begin), min(end, self.end)
        if first >= last:
            return None
        target = self.target[first - self.begin : last - self.begin] if self.target is not None else None
        return ByteRange(first, last, target)


def spans_of(contents: Contents, wanted: Mapping[str, Box]) -> list[Span]:
    """Return the bytes to read to fill the wanted box of each tensor."""
    spans = []
    for name, file, offset, box in contents.find(wanted):
        dtype = dtype_of(contents.facts[name].dtype)
        if not box.start:
            spans.append(Span(name, file, offset, offset + dtype.itemsize, dtype, (), (), ()))
            continue
        overlap = box.intersection(wanted[name])
        assert overlap is not None
        row = math.prod(box.size[1:]) * dtype.itemsize
        rows, *rest = overlap.within(box)
        at, *others = overlap.within(wanted[name])
        step = max(1, SPAN_BYTES // row)
        for first in range(0, overlap.size[0], step):
            count = min(step, overlap.size[0] - first)
            begin, into = offset + (rows.start + first) * row, at.start + first
            shape, out = (count, *box.size[1:]), (slice(0, count), *rest)
            spans.append(
                Span(name, file, begin, begin + count * row, dtype, shape, out, (slice(into, into + count), *others))
            )
    return spans


def need_of(spans: Sequence[Span]) -> Need:
    """Return how many bytes of each block the spans touch."""
    need: dict[str, dict[int, int]] = {}
    for span in spans:
        numbers = need.setdefault(span.file, {})
        for number in range(span.begin // BLOCK_BYTES, -(-span.end // BLOCK_BYTES)):
            begin, end = max(span.begin, number * BLOCK_BYTES), min(span.end, (number + 1) * BLOCK_BYTES)
            numbers[number] = numbers.get(number, 0) + end - begin
    return {file: [*numbers.items()] for file, numbers in need.items()}


def share_out(needs: Sequence[Need], rank: int) -> Blocks:
    """Return the blocks that `rank` reads for its host.

    Each block goes to one of the ranks that need most of it, as evenly as possible.
    """
    wanted: dict[tuple[str, int], dict[int, int]] = {}
    for who, need in enumerate(needs):
        for file, numbers in need.items():
            for number, count in numbers:
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


@dataclass
class Files:
    """The files of the checkpoint `path`, and the blocks of them that this rank has in memory: by file and number."""

    path: Path
    pool: ThreadPoolExecutor
    held: dict[tuple[str, int], list[ByteRange]] = field(default_factory=dict)

    def verify(
        self,
        records: Mapping[str, FileRecord],
        share: Blocks,
        spans: Sequence[Span],
        buffer: Callable[[int], memoryview],
    ) -> None:
        """Read blocks into memory, digesting them in the same pass.

        Args:
            buffer: returns memory of a size, for the bytes that are in no span's `straight`.

        Raises:
            DamagedError: some are not what was written.
        """
        final: dict[str, list[ByteRange]] = {}
        for span in sorted(spans, key=lambda span: span.begin):
            if span.straight is not None:
                final.setdefault(span.file, []).append(ByteRange(span.begin, span.end, span.straight))
        self.held = {
            (file, number): _parts(number, records[file].size, final.get(file, []))
            for file, numbers in share.items()
            for number in numbers
        }
        loose = [(part.end - part.begin) * (part.target is None) for parts in self.held.values() for part in parts]
        rest = buffer(sum(loose))
        into: dict[tuple[str, int], list[memoryview]] = {}
        for block, parts in self.held.items():
            into[block] = []
            for place, (begin, end, target) in enumerate(parts):
                if target is None:
                    target, rest = rest[: end - begin], rest[end - begin :]
                    parts[place] = ByteRange(begin, end, target)
                into[block].append(target)
        damage = blocks.compare(self.path, records, share, self.pool, into=lambda file, number: into[file, number])
        if damage:
            raise DamagedError(f"{self.path} is damaged: {'; '.join(damage)}")

    def fill(self, spans: Iterable[Span], tensors: Mapping[str, Tensor]) -> None:
        """Copy the bytes of the spans into the local parts of `tensors`, converting to their dtype."""
        # Spans that begin in one block are one thread's work: a thousand small ones are not worth a switch each.
        work: dict[tuple[str, int], list[Span]] = {}
        for span in spans:
            work.setdefault((span.file, span.begin // BLOCK_BYTES), []).append(span)
        blocks.each(
            self.pool,
            lambda some: blocks.patiently(partial(self._fill, some, tensors), self.path / some[0].file),
            work.values(),
        )

    def _fill(self, spans: Sequence[Span], tensors: Mapping[str, Tensor]) -> None:
        """Fill what the spans, which are of one file, belong to."""
        with os.fdopen(blocks.open_file(self.path / spans[0].file), "rb", buffering=0) as file:
            for span in spans:
                tensor = local(tensors[span.name]).detach()
                target = span.straight if span.straight is not None else span.memory(tensor)
                if target is not None:
                    self._read(file.fileno(), span, target)
                else:
                    rows = _buffer(span.end - span.begin).view(span.dtype).view(span.rows)
                    self._read(file.fileno(), span, bytes_of(rows))
                    tensor[span.into].copy_(rows[span.out])

    def _read(self, descriptor: int, span: Span, target: memoryview) -> None:
        """Read the bytes of a span into `target`: from memory, if this rank holds them, and else from the file."""
        for number in range(span.begin // BLOCK_BYTES, -(-span.end // BLOCK_BYTES)):
            begin, end = max(span.begin, number * BLOCK_BYTES), min(span.end, (number + 1) * BLOCK_BYTES)
            held = self.held.get((span.file, number))
            if held is None:
                blocks.read_into(descriptor, target[begin - span.begin : end - span.begin], begin)
            elif span.straight is None:  # else they are there already
                for whole in held:
                    part = whole.between(begin, end)
                    if part is not None and part.target is not None:
                        target[part.begin - span.begin : part.end - span.begin] = part.target


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
    spans = ranks.all_do(lambda: spans_of(contents, {name: box_of(name, each) for name, each in targets.items()}))
    share = share_out(on_this_host.all_do(lambda: need_of(spans), list), on_this_host.rank)
    for span in spans:
        if span.name not in live and span.end - span.begin >= STRAIGHT_BYTES:
            span.straight = span.memory(local(targets[span.name]).detach())
    with blocks.threads() as pool:
        files = Files(path, pool)
        ranks.all_do(lambda: files.verify(manifest.files, share, spans, buffer))

        def fill_others() -> dict[str, Any]:
            files.fill([span for span in spans if span.name not in live], targets)
            own = targets.get(own_name(ranks.rank, ""))
            return parse_own_state(path, bytes(bytes_of(own))) if own is not None else {}

        # All that can still fail comes before the first live tensor is touched.
        own_state = ranks.all_do(fill_others)
        ranks.all_do(lambda: files.fill([span for span in spans if span.name in live], targets))
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
