"""From the files of a checkpoint into the tensors of any layout: verified first, then read; each byte once per host.

The ranks of a host say which blocks they need and share them out. Each reads its share, digesting it in the same pass:
into the staging buffer, except for bytes of tensors that were made for it (an optimiser's state), which are read into
those directly. When all ranks know that everything is sound, the others are filled from the buffer. Blocks that another
rank of the host has read are taken from the page cache. No rank ever holds more than its share.
"""

from __future__ import annotations

import os
import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES, FileRecord
from slurmtrain.checkpoint.format.boxes import Box
from slurmtrain.checkpoint.format.directory import file_name
from slurmtrain.checkpoint.format.dtypes import dtype_of
from slurmtrain.checkpoint.format.headers import BoxLocation, Contents, read_contents
from slurmtrain.checkpoint.format.manifest import Manifest, read_manifest
from slurmtrain.checkpoint.local_tensors import box_of, local
from slurmtrain.checkpoint.plain_values import parse
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.choices import Verify

SAMPLED_SHARE = 16  # one block in this many is compared
STRAIGHT_BYTES = 4 << 10  # smaller parts are not worth a read of their own

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


@dataclass(frozen=True)
class ByteRange:
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


def spans_of(name: str, wanted: Box, dtype: torch.dtype, sources: Sequence[BoxLocation]) -> list[Span]:
    """Return the bytes to read to fill the box `wanted` of tensor `name`, which was saved as `dtype`."""
    spans = []
    itemsize = dtype.itemsize
    for source in sources:
        box = source.box
        overlap = box.intersection(wanted)
        if overlap is None:
            continue
        if not box.start:
            spans.append(Span(name, source.file, source.offset, source.offset + itemsize, dtype, (), (), ()))
            continue
        row = itemsize
        for extent in box.size[1:]:
            row *= extent
        rows, *rest = overlap.within(box)
        spans.append(
            Span(
                name,
                source.file,
                source.offset + rows.start * row,
                source.offset + rows.stop * row,
                dtype,
                (overlap.size[0], *box.size[1:]),
                (slice(0, overlap.size[0]), *rest),
                overlap.within(wanted),
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
    """The open files of a checkpoint, and the blocks of them that this rank has in memory.

    Args:
        straight: bytes that are read directly into their final memory, which may be written before everything is
            verified.
    """

    def __init__(
        self,
        path: Path,
        records: Mapping[str, FileRecord],
        pool: ThreadPoolExecutor,
        straight: Iterable[tuple[Span, memoryview]] = (),
    ):
        self._path, self._records, self._pool = path, records, pool
        self._descriptors: dict[str, int] = {}
        self._opening = threading.Lock()
        self._straight: dict[str, list[ByteRange]] = {}
        self._in_place: set[tuple[str, str, int]] = set()
        for span, memory in sorted(straight, key=lambda entry: entry[0].begin):
            parts = self._straight.setdefault(span.file, [])
            parts.append(ByteRange(span.begin, span.end, memory))
            self._in_place.add((span.name, span.file, span.begin))
        self._held: dict[tuple[str, int], list[ByteRange]] = {}

    def close(self) -> None:
        """Close the files and keep the blocks that are in memory."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def descriptor(self, file: str) -> int:
        with self._opening:
            if file not in self._descriptors:
                path = self._path / file
                self._descriptors[file] = blocks.patiently(lambda: blocks.open_file(path), path)
            return self._descriptors[file]

    def buffer_bytes(self, share: Blocks) -> int:
        """Return the bytes of these blocks that are not read directly into their final memory."""
        return sum(
            part.end - part.begin
            for file, numbers in share.items()
            for number in numbers
            for part in self._parts(file, number)
            if part.target is None
        )

    def _parts(self, file: str, number: int) -> list[ByteRange]:
        """Return a block as consecutive parts, each with its final memory, or None."""
        position, stop = number * BLOCK_BYTES, min(self._records[file].size, (number + 1) * BLOCK_BYTES)
        straight = self._straight.get(file, [])
        parts = []
        for number in range(bisect_right(straight, position, key=lambda part: part.end), len(straight)):
            part = straight[number].between(position, stop)
            if part is None:
                break
            if position < part.begin:
                parts.append(ByteRange(position, part.begin, None))
            parts.append(part)
            position = part.end
        if position < stop or not parts:
            parts.append(ByteRange(position, stop, None))
        return parts

    def verify(self, share: Blocks, into: memoryview | None) -> list[str]:
        """Digest blocks, and if `into` is given, keep them: in their final memory if they have one, else there.

        Returns:
            A sentence for every file that is damaged.
        """
        damage: dict[str, str] = {}
        position = 0
        for files in _batches(list(share)):
            position = self._verify(files, share, into, position, damage)
            self.close()
        return [damage[file] for file in sorted(damage)]

    def _verify(
        self,
        files: Sequence[str],
        share: Blocks,
        into: memoryview | None,
        position: int,
        damage: dict[str, str],
    ) -> int:
        work = []
        for file in files:
            try:
                descriptor = self.descriptor(file)
            except OSError as error:
                damage[file] = blocks.cannot_be_read(file, error)
                continue
            for number in share[file]:
                parts = []
                for part in self._parts(file, number) if into is not None else ():
                    if part.target is None and into is not None:
                        length = part.end - part.begin
                        part = replace(part, target=into[position : position + length])
                        position += length
                    parts.append(part)
                work.append((file, descriptor, number, parts))

        def check(block: tuple[str, int, int, list[ByteRange]]) -> None:
            file, descriptor, number, parts = block
            record = self._records[file]
            targets = [part.target for part in parts if part.target is not None] if into is not None else None
            try:
                found = blocks.digest_patiently(self._path / file, descriptor, number, record.size, targets)
                if found != record.digest(number):
                    damage[file] = f"{file} is not what was written: its digest differs"
            except OSError as error:
                damage[file] = blocks.cannot_be_read(file, error)
            except EOFError as error:
                damage[file] = f"{file} cannot be read: {error}"
            if into is not None:
                self._held[file, number] = parts

        blocks.each(self._pool, check, work)
        return position

    def fill(self, spans: Sequence[Span], tensors: Mapping[str, Tensor]) -> None:
        """Copy the bytes of the spans into the local parts of `tensors`, converting to their dtype."""
        by_file: dict[str, dict[int, list[Span]]] = {}
        for span in spans:
            # Spans that begin in one block are one thread's work: a thousand small ones are not worth a switch each.
            by_file.setdefault(span.file, {}).setdefault(span.begin // BLOCK_BYTES, []).append(span)
        for files in _batches(list(by_file)):
            work = [some for file in files for some in by_file[file].values()]
            blocks.each(self._pool, lambda some: self._fill(some, tensors), work)
            self.close()

    def _fill(self, spans: Sequence[Span], tensors: Mapping[str, Tensor]) -> None:
        for span in spans:
            self._fill_one(span, local(tensors[span.name]).detach())

    def _fill_one(self, span: Span, tensor: Tensor) -> None:
        target = memory_of(span, tensor)
        if target is not None:
            in_place = (span.name, span.file, span.begin) in self._in_place
            self.read(span.file, span.begin, span.end, target, in_place=in_place)
            return
        rows = torch.empty(span.rows, dtype=span.dtype, device="cpu")
        self.read(span.file, span.begin, span.end, bytes_of(rows))
        _copy(rows[span.out], tensor[span.into], span.name)

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
                self._read_into(file, target[position - begin : stop - begin], position)
            elif not in_place:
                for whole in held:
                    part = whole.between(position, stop)
                    if part is not None and part.target is not None:
                        target[part.begin - begin : part.end - begin] = part.target
            position = stop

    def _read_into(self, file: str, target: memoryview, position: int) -> None:
        path = self._path / file

        def read_anew() -> None:
            descriptor = blocks.open_file(path)
            try:
                blocks.read_into(descriptor, target, position)
            finally:
                os.close(descriptor)

        try:
            blocks.read_into(self.descriptor(file), target, position)
        except OSError:
            blocks.patiently(read_anew, path)


def _batches(files: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(files), blocks.OPEN_FILES):
        yield files[begin : begin + blocks.OPEN_FILES]


def memory_of(span: Span, tensor: Tensor) -> memoryview | None:
    """Return the memory into which the span's bytes can be read without conversion, if there is any."""
    target = tensor[span.into]
    if target.shape != span.rows or target.dtype != span.dtype or target.device.type != "cpu":
        return None
    as_it_is = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    return bytes_of(target) if as_it_is else None


def _copy(values: Tensor, target: Tensor, name: str) -> None:
    """Copy values into a part of the tensor `name`, which shows elements several times if it is expanded.

    Raises:
        CheckpointMismatchError: such an element would have several values.
    """
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, first = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            if not _same_bits(values, first.expand_as(values)):
                raise CheckpointMismatchError(
                    f"{name} is expanded along dimension {dim} and so holds one value there, and the checkpoint several",
                    hint="make it with .contiguous() or .clone() after .expand()",
                )
            values = first
    target.copy_(values)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def sampled(share: Blocks, records: Mapping[str, FileRecord]) -> Blocks:
    """Return a random part of the blocks, always with the first and the last of every file."""
    chosen = {}
    choice = random.Random()  # the global generator belongs to the training
    for file, numbers in share.items():
        ends = {0, blocks.block_count(records[file].size) - 1}
        chosen[file] = [number for number in numbers if number in ends or choice.randrange(SAMPLED_SHARE) == 0]
    return chosen


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
    mode: str,
    buffer: Callable[[int], memoryview],
    fetch: Callable[[Collection[str]], list[str]] | None = None,
) -> tuple[list[str], Any]:
    """Verify what all ranks need, and if it is sound, fill `targets`. All ranks call it together.

    Args:
        targets: tensors to fill, by name.
        live: names of the targets that must not be touched before everything is known to be sound.
        own_file: the file that holds this rank's own tensors and state, if there is one.
        mode: "full", "sampled" or "off": which of the needed blocks are compared with their digest.
        buffer: returns memory of a size, to hold this rank's share.
        fetch: brings the files that this rank needs, of which this host may not have all, and returns why it cannot; called
            by all ranks together.

    Returns:
        All damage found by any rank, one sentence each, and this rank's own plain state. If there is damage, no live
            tensor has been touched.
    """

    def plan() -> list[Span]:
        wanted = {name: box_of(name, tensor) for name, tensor in targets.items()}
        facts = {**contents.facts, **(contents.files[own_file].own_facts if own_file is not None else {})}
        return [
            span
            for name, found in contents.find(wanted, own_file).items()
            for span in spans_of(name, wanted[name], dtype_of(facts[name].dtype), found)
        ]

    spans = ranks.all_do(plan)
    ranges = [(span.file, span.begin, span.end) for span in spans]
    own_begin, own_end = contents.files[own_file].own_state if own_file is not None else (0, 0)
    if own_file is not None:
        ranges.append((own_file, own_begin, own_end))

    damage = fetch({file for file, _, _ in ranges}) if fetch is not None else []
    if damage:
        return damage, None
    share: Blocks = {}
    if mode != Verify.OFF:
        # As pairs, since JSON has no numbers as keys.
        needs = on_this_host.gather(lambda: {file: [*numbers.items()] for file, numbers in need_of(ranges).items()})
        of_ranks = [{file: dict(pairs) for file, pairs in need.items()} for need in needs]
        share = share_out(of_ranks, on_this_host.rank)
    straight = []
    for span in spans if mode == Verify.FULL else ():
        if span.name not in live and span.end - span.begin >= STRAIGHT_BYTES:
            memory = memory_of(span, local(targets[span.name]).detach())
            if memory is not None:
                straight.append((span, memory))
    with blocks.threads() as pool, closing(Files(path, records, pool, straight)) as files:

        def verify() -> list[str]:
            if mode == Verify.FULL:
                found: list[str] = files.verify(share, buffer(files.buffer_bytes(share)))
            else:
                found = files.verify(sampled(share, records), None)
            return found

        damage = sorted({sentence for found in ranks.gather(verify) for sentence in found})
        if damage:
            return damage, None

        def read_own() -> Any:
            if own_file is None:
                return {}
            own = bytearray(own_end - own_begin)
            files.read(own_file, own_begin, own_end, memoryview(own))
            return parse(bytes(own))

        # The first thing that can still fail comes before the first tensor is touched.
        own_state = ranks.all_do(read_own)
        ranks.all_do(lambda: files.fill(spans, targets))
    return [], own_state


def read_whole(
    path: Path, contents: Contents, manifest: Manifest, names: Iterable[str], own_file: str | None = None
) -> dict[str, Tensor]:
    """Return tensors of a checkpoint, whole, in the memory of one process.

    Args:
        own_file: the file of a rank whose own tensors to return instead of those that all ranks share.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    facts = contents.facts if own_file is None else contents.files[own_file].own_facts
    tensors = {name: torch.empty(facts[name].shape, dtype=dtype_of(facts[name].dtype), device="cpu") for name in names}
    alone = RankGroup(None)
    damage, _ = read_tensors(
        path,
        contents,
        manifest.files,
        tensors,
        own_file,
        live=(),
        ranks=alone,
        on_this_host=alone,
        mode="full",
        buffer=lambda size: memoryview(bytearray(size)),
    )
    if damage:
        raise CheckpointError(f"{path} is damaged: {'; '.join(damage)}")
    return tensors


def load(path: Path, *, own_of: int | None = None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, whole, in the memory of one process: to look at, or to compute with.

    Args:
        own_of: a rank whose own tensors to return instead of those that all ranks share.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    contents = read_contents(path, manifest)
    own_file = file_name(own_of) if own_of is not None else None
    names = contents.facts if own_file is None else contents.files[own_file].own
    return read_whole(path, contents, manifest, names, own_file)
