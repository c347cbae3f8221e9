"""Where the pieces of all tensors lie: the safetensors headers of the ranks' files say it, and nothing else does.

A header names every box in its file; shape and type of the whole tensors are in the manifest, as is the digest of every
header, so that it can be read without the rest of the block. Anybody may have written a checkpoint whose digests fit: so
boxes have to lie in their tensors and in their file, and to be as many elements as the tensors have. Imports no torch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.directory import OWN_STATE
from slurmtrain.checkpoint.format.manifest import Box, Manifest, TensorFacts

Ints = npt.NDArray[np.int64]

HEADER_BYTES = 100_000_000  # the format's own limit
_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


def read_header(file: Path) -> tuple[bytes, int]:
    """Return the header of a safetensors file, with its length in front, and the size of the file.

    Raises:
        ValueError: it is too short to be one.
    """
    with os.fdopen(blocks.open_file(file), "rb") as opened:
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


@dataclass(frozen=True)
class BoxLocation:
    """The place of the bytes of one box: the file, and the byte at which they begin."""

    file: str
    offset: int
    box: Box


@dataclass(frozen=True)
class FileContents:
    """What is in one rank's file. Boxes are arrays, not objects: 1,024 ranks with 3,000 tensors each have three million.

    Attributes:
        tensors: int64 [pieces], position of the tensor in the manifest.
        begins: int64 [pieces], first byte in the file.
        edges: int64 [pieces, dimensions, 2], first index and end of the box; (0, 1) along dimensions that it has not.
        own_state: first and last byte of the JSON of its plain state.
    """

    tensors: Ints
    begins: Ints
    edges: Ints
    own_state: tuple[int, int]

    def to_json(self) -> list[Any]:
        """Return it as values that ranks can send."""
        numbers = np.concatenate([self.tensors, self.begins, self.edges.reshape(-1)])
        table = base64.b64encode(zlib.compress(numbers.tobytes(), level=1)).decode()
        return [len(self.tensors), self.edges.shape[1], table, self.own_state]

    @classmethod
    def from_json(cls, values: list[Any]) -> FileContents:
        pieces, dimensions, table, own_state = values
        numbers = np.frombuffer(zlib.decompress(base64.b64decode(table)), dtype=np.int64)
        return cls(
            numbers[:pieces],
            numbers[pieces : 2 * pieces],
            numbers[2 * pieces :].reshape(pieces, dimensions, 2),
            (own_state[0], own_state[1]),
        )


class HeaderReader:
    """Reads headers of one checkpoint."""

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._digests, self._facts = path, manifest.headers, manifest.tensors
        self._dimensions = max((len(facts.shape) for facts in manifest.tensors.values()), default=0) or 1
        self._numbers = {name: number for number, name in enumerate(manifest.tensors)}
        self._shapes = np.ones((len(manifest.tensors), self._dimensions), dtype=np.int64)
        for row, facts in enumerate(manifest.tensors.values()):
            self._shapes[row, : len(facts.shape)] = facts.shape
        self._whole = [[edge for extent in shape for edge in (0, extent)] for shape in self._shapes.tolist()]
        self._itemsizes = np.array([facts.itemsize for facts in manifest.tensors.values()], dtype=np.int64)

    def read(self, names: Sequence[str]) -> dict[str, FileContents]:
        """Return what is in these files.

        Raises:
            CheckpointError: a header is damaged. UnreadableError: see `blocks.patiently`.
        """
        with blocks.threads() as pool:
            return dict(zip(names, blocks.each(pool, self._read, names), strict=True))

    def _read(self, name: str) -> FileContents:
        file = self._path / name
        try:
            header, size = blocks.patiently(partial(read_header, file), file)
            if hashlib.sha256(header).hexdigest() != self._digests.get(name):
                raise ValueError("its digest differs")
            return self._parse(json.loads(header[8:]), len(header), size)
        except OSError as error:
            raise CheckpointError(f"{self._path} is damaged: {blocks.cannot_be_read(name, error)}") from None
        except _WRONG as error:
            why = f"the header of {name} is not what was written: {error}"
            raise CheckpointError(f"{self._path} is damaged: {why}") from None

    def _parse(self, header: Any, start: int, size: int) -> FileContents:
        header.pop("__metadata__", None)
        own_state = (0, 0)
        tensors: list[int] = []
        places: list[tuple[int, int]] = []  # first byte, and how many
        edges: list[list[int]] = []
        position = 0
        for key, entry in header.items():
            begin, end = entry["data_offsets"]
            if begin != position or type(end) is not int or end < begin:
                raise ValueError(f"{key[:100]} does not follow what is before it")
            position = end
            if key == OWN_STATE:
                own_state = (start + begin, start + end)
            else:
                number, box = self._box(key)
                tensors.append(number)
                places.append((start + begin, end - begin))
                edges.append(box)
        if start + position != size:
            raise ValueError(f"it describes {start + position} of {size} bytes")
        numbers = np.array(tensors, dtype=np.int64)
        spots = np.array(places, dtype=np.int64).reshape(-1, 2)
        boxes = np.array(edges, dtype=np.int64).reshape(-1, self._dimensions, 2)
        inside = (boxes[..., 0] >= 0) & (boxes[..., 0] < boxes[..., 1]) & (boxes[..., 1] <= self._shapes[numbers])
        if not inside.all():
            raise ValueError("a piece lies outside of its tensor")
        if not (_elements(boxes) * self._itemsizes[numbers] == spots[:, 1]).all():
            raise ValueError("a piece has more or fewer bytes than its elements")
        return FileContents(numbers, np.ascontiguousarray(spots[:, 0]), boxes, own_state)

    def _box(self, key: str) -> tuple[int, list[int]]:
        """Return the number of the tensor of which `key` names a box, and the box's edges (see `manifest.piece_name`)."""
        number = self._numbers.get(key)
        if number is not None:
            return number, self._whole[number]
        name, _, text = key.removesuffix("]").rpartition("[")
        if name not in self._numbers:
            raise ValueError(f"{key[:100]} is no part of a tensor of the manifest")
        edges = _edges(text)
        if len(edges) != 2 * len(self._facts[name].shape):
            raise ValueError(f"{key[:100]} has another number of dimensions")
        return self._numbers[name], edges + [0, 1] * (self._dimensions - len(edges) // 2)


def _elements(edges: Ints) -> Ints:
    found: Ints = (edges[..., 1] - edges[..., 0]).prod(axis=1)
    return found


@dataclass(frozen=True)
class Contents:
    """What is in all files of a checkpoint, and the facts of its tensors."""

    facts: Mapping[str, TensorFacts]
    files: Mapping[str, FileContents]

    def check_whole(self, path: Path) -> None:
        """Check that the files hold as many elements of every tensor as it has.

        Raises:
            CheckpointError: the checkpoint `path` lacks some, or has some twice.
        """
        held = np.zeros(len(self.facts), dtype=np.int64)
        for file in self.files.values():
            np.add.at(held, file.tensors, _elements(file.edges))
        for (name, facts), count in zip(self.facts.items(), held.tolist(), strict=True):
            if count != Box.whole(facts.shape).numel:
                raise CheckpointError(
                    f"{path} is damaged: its files have {count} of {Box.whole(facts.shape).numel} elements of {name[:100]}"
                )

    def find(self, wanted: Mapping[str, Box]) -> dict[str, list[BoxLocation]]:
        """Return all boxes that overlap with the wanted box of each tensor."""
        found: dict[str, list[BoxLocation]] = {name: [] for name in wanted}
        names = list(self.facts)
        dimensions = next((file.edges.shape[1] for file in self.files.values()), 1)
        of_wanted = np.zeros((len(names), dimensions, 2), dtype=np.int64)  # what is not wanted overlaps with nothing
        for row, name in enumerate(names):
            if name in wanted:
                box = wanted[name]
                of_wanted[row, :, 1] = 1
                of_wanted[row, : len(box.size), 0] = box.start
                of_wanted[row, : len(box.size), 1] = np.add(box.start, box.size)
        for file, held in self.files.items():
            theirs = of_wanted[held.tensors]
            first, end = np.maximum(held.edges[..., 0], theirs[..., 0]), np.minimum(held.edges[..., 1], theirs[..., 1])
            rows = np.flatnonzero((first < end).all(axis=1))
            numbers, begins, edges = (values[rows] for values in (held.tensors, held.begins, held.edges))
            starts, sizes = edges[..., 0], edges[..., 1] - edges[..., 0]
            columns = (values.tolist() for values in (numbers, begins, starts, sizes))
            for number, begin, start, size in zip(*columns, strict=True):
                name = names[number]
                used = len(wanted[name].size)
                found[name].append(BoxLocation(file, begin, Box(tuple(start[:used]), tuple(size[:used]))))
        return found


def read_contents(path: Path, manifest: Manifest) -> Contents:
    """Return what is in all files of the checkpoint `path`.

    Raises:
        CheckpointError: it is damaged: a file is missing or has another size, a header is not what was written, or elements
            of a tensor are missing. UnreadableError: see `blocks.patiently`.
    """
    damage = blocks.find_damage(path, manifest.files, contents=False)
    if damage:
        raise CheckpointError(f"{path} is damaged: {'; '.join(damage)}")
    contents = Contents(manifest.tensors, HeaderReader(path, manifest).read(sorted(manifest.files)))
    contents.check_whole(path)
    return contents


def damage_of(path: Path, error: CheckpointError) -> str:
    """Return what is wrong with the checkpoint `path` by an error of these functions, without its path."""
    return error.message.removeprefix(f"{path} is damaged: ").removeprefix(f"{path}: ")


def read_own_state(file: Path, held: FileContents) -> dict[str, Any]:
    """Return the plain state that a rank has for itself in `file`. Raises CheckpointError if it is no JSON object."""

    def read() -> bytes:
        with file.open("rb") as opened:
            opened.seek(held.own_state[0])
            return opened.read(held.own_state[1] - held.own_state[0])

    try:
        text = blocks.patiently(read, file)
    except OSError as error:
        raise CheckpointError(f"{file.parent} is damaged: {blocks.cannot_be_read(file.name, error)}") from None
    try:
        return parse_own_state(text)
    except CheckpointError as error:
        raise CheckpointError(f"{file.parent} is damaged: {file.name}: {error.message}") from None


def parse_own_state(text: bytes) -> dict[str, Any]:
    """Return a rank's own plain state from its JSON. Raises CheckpointError if it is no JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"a rank's own state cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError("a rank's own state cannot be read: it is not an object")
    return found
