"""From the files of a checkpoint into the tensors of any layout: verified first, then read; each byte once per host.

The ranks of a host say which blocks they need and share them out. Each reads its share into the staging buffer, digesting it
in the same pass; when all ranks know that everything is sound, tensors are filled from there. What another rank of the host
has read is taken from the page cache, where it lies by then. No rank ever holds more than its share.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmtrain.checkpoint import blocks, commit
from slurmtrain.checkpoint.blocks import BLOCK_BYTES, DIGEST_BYTES, FileRecord
from slurmtrain.checkpoint.index_file import read_index
from slurmtrain.checkpoint.layout import Box, Index, Source
from slurmtrain.checkpoint.plan import box_of, check_types, dtype_of, file_name, local
from slurmtrain.checkpoint.ranks import Ranks
from slurmtrain.checkpoint.state import parse
from slurmtrain.errors import CheckpointError

SAMPLED_SHARE = 16  # of so many blocks one is looked at

Blocks = dict[str, list[int]]  # numbers of blocks by file


@dataclass(frozen=True)
class Span:
    """Bytes of a file that hold a part of a tensor: whole rows of a box in the file.

    Attributes:
        dtype, rows: type and shape of what the bytes hold.
        out: index into the bytes, so shaped, of what is wanted.
        into: index into the local tensor of where it goes.
    """

    name: str
    file: str
    begin: int
    end: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    out: tuple[slice, ...]
    into: tuple[slice, ...]


def spans_of(name: str, wanted: Box, dtype: torch.dtype, sources: Sequence[Source]) -> list[Span]:
    """The bytes to read to fill the box `wanted` of tensor `name`, which was saved as `dtype`."""
    spans = []
    itemsize = dtype.itemsize
    for source in sources:
        box = source.box
        start = [max(a, b) for a, b in zip(box.start, wanted.start, strict=True)]
        end = [min(a + n, b + m) for a, n, b, m in zip(box.start, box.size, wanted.start, wanted.size, strict=True)]
        if any(first >= last for first, last in zip(start, end, strict=True)):
            continue
        into = tuple(slice(a - b, z - b) for a, z, b in zip(start, end, wanted.start, strict=True))
        if not start:
            spans.append(Span(name, source.file, source.offset, source.offset + itemsize, dtype, (), (), ()))
            continue
        row = itemsize
        for extent in box.size[1:]:
            row *= extent
        first, last = start[0] - box.start[0], end[0] - box.start[0]
        rest = tuple(slice(a - b, z - b) for a, z, b in zip(start[1:], end[1:], box.start[1:], strict=True))
        spans.append(
            Span(
                name,
                source.file,
                source.offset + first * row,
                source.offset + last * row,
                dtype,
                (last - first, *box.size[1:]),
                (slice(0, last - first), *rest),
                into,
            )
        )
    return spans


def blocks_of(ranges: Sequence[tuple[str, int, int]]) -> Blocks:
    """The blocks that byte ranges (file, begin, end) touch."""
    found: dict[str, set[int]] = {}
    for file, begin, end in ranges:
        if begin < end:
            found.setdefault(file, set()).update(range(begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1))
    return {file: sorted(numbers) for file, numbers in found.items()}


def share_out(needs: Sequence[Blocks], rank: int) -> Blocks:
    """Which of the blocks `rank` reads for its host: each goes to one of those that need it, as evenly as can be."""
    wanted: dict[tuple[str, int], list[int]] = {}
    for who, need in enumerate(needs):
        for file, numbers in need.items():
            for number in numbers:
                wanted.setdefault((file, number), []).append(who)
    load = [0] * len(needs)
    own: Blocks = {}
    # What only one rank needs first, so that the rest can level out.
    for (file, number), candidates in sorted(wanted.items(), key=lambda entry: (len(entry[1]), entry[0])):
        chosen = min(candidates, key=lambda one: (load[one], one))
        load[chosen] += 1
        if chosen == rank:
            own.setdefault(file, []).append(number)
    return own


class Files:
    """Open files of a checkpoint, and the blocks of them that this rank has in memory."""

    def __init__(self, path: Path, records: Mapping[str, FileRecord], pool: ThreadPoolExecutor):
        self._path, self._records, self._pool = path, records, pool
        self._descriptors: dict[str, int] = {}
        self._opening = threading.Lock()
        self._held: dict[tuple[str, int], memoryview] = {}

    def close(self) -> None:
        """Close the files; what is in memory stays."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def descriptor(self, file: str) -> int:
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = blocks.open_file(self._path / file)
            return self._descriptors[file]

    def size(self, share: Blocks) -> int:
        """Bytes of these blocks."""
        return sum(self._extent(file, number) for file, numbers in share.items() for number in numbers)

    def _extent(self, file: str, number: int) -> int:
        return min(BLOCK_BYTES, self._records[file].size - number * BLOCK_BYTES)

    def verify(self, share: Blocks, digests: Mapping[str, bytes], into: memoryview | None) -> list[str]:
        """Digest blocks, and keep them in `into` when it is given. Returns a sentence for every file that is damaged."""
        damage: dict[str, str] = {}
        position = 0
        for files in _batches(list(share)):
            position = self._verify(files, share, digests, into, position, damage)
            self.close()
        return [damage[file] for file in sorted(damage)]

    def _verify(
        self,
        files: Sequence[str],
        share: Blocks,
        digests: Mapping[str, bytes],
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
                extent = self._extent(file, number)
                target = into[position : position + extent] if into is not None else None
                position += extent
                work.append((file, descriptor, number, target))

        def check(block: tuple[str, int, int, memoryview | None]) -> None:
            file, descriptor, number, target = block
            expected = digests[file][number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            try:
                if blocks.digest_block(descriptor, number, self._records[file].size, target) != expected:
                    damage[file] = f"{file} is not what was written: its digest differs"
            except OSError as error:
                damage[file] = blocks.cannot_be_read(file, error)
            except EOFError as error:
                damage[file] = f"{file} cannot be read: {error}"
            if target is not None:
                self._held[file, number] = target

        blocks.each(self._pool, check, work)
        return position

    def fill(self, spans: Sequence[Span], tensors: Mapping[str, Tensor]) -> None:
        """Copy what the spans say into the local parts of `tensors`, converting to their dtype."""
        by_file: dict[str, list[Span]] = {}
        for span in spans:
            by_file.setdefault(span.file, []).append(span)
        for files in _batches(list(by_file)):
            some = [span for file in files for span in by_file[file]]
            blocks.each(self._pool, lambda span: self._fill(span, local(tensors[span.name]).detach()), some)
            self.close()

    def _fill(self, span: Span, tensor: Tensor) -> None:
        target = tensor[span.into]
        as_it_is = target.shape == span.rows and target.dtype == span.dtype
        if as_it_is and target.is_contiguous() and target.device.type == "cpu":
            self.read(span.file, span.begin, span.end, _bytes_of(target))
            return
        rows = torch.empty(span.rows, dtype=span.dtype)
        self.read(span.file, span.begin, span.end, _bytes_of(rows))
        target.copy_(rows[span.out])

    def read(self, file: str, begin: int, end: int, target: memoryview) -> None:
        """Bytes of a file, from memory where this rank holds them."""
        position = begin
        while position < end:
            number = position // BLOCK_BYTES
            stop = min(end, (number + 1) * BLOCK_BYTES)
            part = target[position - begin : stop - begin]
            held = self._held.get((file, number))
            if held is not None:
                offset = position - number * BLOCK_BYTES
                part[:] = held[offset : offset + stop - position]
            else:
                blocks.read_into(self.descriptor(file), part, position)
            position = stop


def _batches(files: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(files), blocks.OPEN_FILES):
        yield files[begin : begin + blocks.OPEN_FILES]


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def sampled(share: Blocks, records: Mapping[str, FileRecord]) -> Blocks:
    """A random part of the blocks, the first and the last of every file always among them."""
    chosen = {}
    choice = random.Random()  # the global generator belongs to the training
    for file, numbers in share.items():
        ends = {0, blocks.block_count(records[file].size) - 1}
        chosen[file] = [number for number in numbers if number in ends or choice.randrange(SAMPLED_SHARE) == 0]
    return chosen


def read_tensors(
    path: Path,
    index: Index,
    records: Mapping[str, FileRecord],
    targets: Mapping[str, Tensor],
    own_file: str | None,
    *,
    ranks: Ranks,
    on_this_host: Ranks,
    mode: str,
    buffer: Callable[[int], memoryview],
) -> tuple[list[str], Any]:
    """Verify what all ranks need, and when it is sound, fill `targets`. All ranks call it together.

    Args:
        targets: tensors to fill, by name.
        own_file: the file that holds this rank's own tensors and state, if there is one.
        mode: "full", "sampled" or "off": which of the needed blocks are compared with their digest.
        buffer: gives memory of a size, to hold this rank's share.

    Returns:
        All damage found by any rank, one sentence each, and this rank's own plain state. With damage nothing has been
        touched.
    """

    def plan() -> list[Span]:
        wanted = {name: box_of(name, tensor) for name, tensor in targets.items()}
        facts = {**index.facts, **(index.own_facts(own_file) if own_file is not None else {})}
        return [
            span
            for name, found in index.find(wanted, own_file).items()
            for span in spans_of(name, wanted[name], dtype_of(facts[name].dtype), found)
        ]

    spans = ranks.all_do(plan)
    ranges = [(span.file, span.begin, span.end) for span in spans]
    own_begin, own_bytes = index.own_state(own_file) if own_file is not None else (0, 0)
    if own_file is not None:
        ranges.append((own_file, own_begin, own_begin + own_bytes))

    share = share_out(on_this_host.gather(lambda: blocks_of(ranges)), on_this_host.rank) if mode != "off" else {}
    with blocks.threads() as pool, closing(Files(path, records, pool)) as files:

        def verify() -> list[str]:
            if mode == "full":
                found: list[str] = files.verify(share, index.digests, buffer(files.size(share)))
            else:
                found = files.verify(sampled(share, records), index.digests, None)
            return found

        damage = sorted({sentence for found in ranks.gather(verify) for sentence in found})
        if damage:
            return damage, None

        def read_own() -> Any:
            if own_file is None:
                return {}
            own = bytearray(own_bytes)
            files.read(own_file, own_begin, own_begin + own_bytes, memoryview(own))
            return parse(bytes(own))

        # The first thing that can still fail comes before the first tensor is touched.
        own_state = ranks.all_do(read_own)
        ranks.all_do(lambda: files.fill(spans, targets))
    return [], own_state


def load(path: Path, *, own_of: int | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, whole, in the memory of one process: to look at, or to compute with.

    Args:
        own_of: a rank; what it had for itself instead of what all shared.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    manifest = commit.read_manifest(path)
    index = read_index(path, manifest)
    check_types(index.catalogues)
    own_file = file_name(own_of) if own_of is not None else None
    facts = index.facts if own_file is None else index.own_facts(own_file)
    tensors = {name: torch.empty(fact.shape, dtype=dtype_of(fact.dtype)) for name, fact in facts.items()}
    alone = Ranks(None)
    damage, _ = read_tensors(
        path,
        index,
        manifest.files,
        tensors,
        own_file,
        ranks=alone,
        on_this_host=alone,
        mode="full",
        buffer=lambda size: memoryview(bytearray(size)),
    )
    if damage:
        raise CheckpointError(f"{path} is damaged: {'; '.join(damage)}")
    return tensors
