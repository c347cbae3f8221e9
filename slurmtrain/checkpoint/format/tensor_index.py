"""The place of every piece of every tensor: boxes, the table of a rank's file, and the index of all files.

A tensor is saved as boxes (axis-aligned parts of its global shape), each written by one rank into one place of one
file. A rank describes its file in a `FileTable`; rank 0 checks that the boxes of all tables tile every tensor exactly
(`coverage`) and writes them into one file, `index.bin`, from which a reader with any other layout finds its bytes.

Tables are numpy arrays, not objects: 4,096 ranks with 1,000 tensors each are four million boxes. Imports no torch, and
knows nothing of storage.

index.bin: uint64 length of the header, the header (JSON: the schemas, as "catalogues", and, for every file, where its
table and its digests lie), then per file the zlib-compressed table and the 32-byte digests of its blocks. Little-endian.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmtrain.checkpoint.errors import CheckpointError

Ints = npt.NDArray[np.int64]

# Smaller tensors are written whole by one of the ranks that hold them; larger ones are split among all of these.
SPLIT_BYTES = 1 << 20
EVEN = 8  # rows per rank from which on one row more or less does not matter
MAX_DIMENSIONS = 64  # greatest number of dimensions of a tensor
# Bytes per element by torch's names, for readers that do not import torch.
DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float4_e2m1fn_x2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    "complex128": 16,
}


@dataclass(frozen=True)
class Box:
    """A part of a tensor: first index and extent along every dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def intersection(self, other: Box) -> Box | None:
        """Return the part that both boxes have; None: there is none."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(end - first for first, end in zip(start, ends, strict=True))
        return Box(start, size) if all(extent > 0 for extent in size) else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the index of this box in an array that holds `other`."""
        return tuple(
            slice(first - origin, first - origin + extent)
            for first, extent, origin in zip(self.start, self.size, other.start, strict=True)
        )


@dataclass(frozen=True)
class TensorFacts:
    """The facts of a tensor that all ranks have to agree on: global shape, dtype ("float32") and bytes of one element.

    Attributes:
        own: each rank has its own tensor of this name (random states), which is not part of a global tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    own: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


TensorSchema = Mapping[str, TensorFacts]  # the tensors of a rank, by name, with shape and type


def piece_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return the name of a box of a tensor in a safetensors header: the tensor's name, and which part of it."""
    if box == Box.whole(shape):
        return name
    return name + "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(box.start, box.size, strict=True)) + "]"


def share(box: Box, itemsize: int, key: str, index: int, holders: int) -> Box | None:
    """Return the part of `box` that the `index`-th of the `holders` ranks that hold it writes; None: nothing.

    Large boxes are cut along the first dimension that is long enough to give even parts, so that every rank writes, and
    has to copy, the same number of bytes. Each smaller box is written by one rank, chosen by a checksum of the name:
    the same on all ranks.
    """
    if holders == 1:
        return box
    if box.numel * itemsize >= SPLIT_BYTES:
        even = [dimension for dimension, extent in enumerate(box.size) if extent >= EVEN * holders]
        dimension = even[0] if even else max(range(len(box.size)), key=lambda one: box.size[one], default=0)
        extent = box.size[dimension] if box.size else 1
        if extent >= holders:
            first, last = extent * index // holders, extent * (index + 1) // holders
            start, size = list(box.start), list(box.size)
            start[dimension] += first
            size[dimension] = last - first
            return Box(tuple(start), tuple(size))
    return box if zlib.crc32(key.encode()) % holders == index else None


@dataclass(frozen=True, eq=False)
class FileTable:
    """The contents of one rank's file: boxes of tensors of its schema, one after another, without gaps.

    Attributes:
        schema: number of the schema that `tensors` refers to.
        data_start: bytes before the first box.
        tensors: int64 [pieces], position in the schema.
        boxes: int64 [pieces, 2, dimensions], start and size, padded with start 0 and size 1.
        own_bytes: length of the JSON that follows the last box.
    """

    schema: int
    data_start: int
    tensors: Ints
    boxes: Ints
    own_bytes: int = 0

    def offsets(self, itemsizes: Ints) -> Ints:
        """Return the byte at which each box begins, and where the last one ends, int64 [pieces + 1].

        Args:
            itemsizes: bytes of an element of each tensor of the schema.
        """
        nbytes = self.boxes[:, 1].prod(axis=1) * itemsizes[self.tensors]
        return np.concatenate([[self.data_start], self.data_start + np.cumsum(nbytes)]).astype(np.int64)

    def pack(self) -> bytes:
        pieces, _, dimensions = self.boxes.shape
        head = np.array([self.schema, self.data_start, pieces, dimensions, self.own_bytes], dtype="<i8")
        numbers = np.concatenate([head, self.tensors, self.boxes.reshape(-1)]).astype("<i8")
        return zlib.compress(numbers.tobytes(), level=1)

    @classmethod
    def unpack(cls, data: bytes, limit: int = 0) -> FileTable:
        """Return the table that `pack` has packed.

        Args:
            data: the packed table.
            limit: greatest number of bytes that it may unpack to; 0: any number.
        """
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(data, limit)
        if not unpacker.eof:
            raise ValueError("a table is cut short, or longer than it can be")
        numbers = np.frombuffer(content, dtype="<i8")
        schema, data_start, pieces, dimensions, own_bytes = (int(number) for number in numbers[:5])
        tensors, boxes = numbers[5 : 5 + pieces], numbers[5 + pieces :]
        return cls(schema, data_start, tensors, boxes.reshape(pieces, 2, dimensions), own_bytes)


def table_of(
    pieces: Sequence[tuple[str, Box]], schema: TensorSchema, *, number: int, data_start: int, own_bytes: int
) -> FileTable:
    """Return the table of a file with these pieces in this order."""
    position = {key: index for index, key in enumerate(schema)}
    dimensions = max((len(box.size) for _, box in pieces), default=0) or 1
    boxes = np.zeros((len(pieces), 2, dimensions), dtype=np.int64)
    boxes[:, 1] = 1
    for row, (_, box) in enumerate(pieces):
        boxes[row, 0, : len(box.start)] = box.start
        boxes[row, 1, : len(box.size)] = box.size
    tensors = np.array([position[key] for key, _ in pieces], dtype=np.int64)
    return FileTable(number, data_start, tensors, boxes, own_bytes)


# Coverage.


def merged_schemas(schemas: Sequence[TensorSchema]) -> tuple[dict[str, TensorFacts], list[Ints]]:
    """Return all shared tensors, and for every schema the number of each of its tensors among them (-1: a rank's own)."""
    facts: dict[str, TensorFacts] = {}
    for schema in schemas:
        for key, fact in schema.items():
            if not fact.own and facts.setdefault(key, fact) != fact:
                raise CheckpointError(
                    f"{key} is {fact.dtype} {list(fact.shape)} on one rank and "
                    f"{facts[key].dtype} {list(facts[key].shape)} on another",
                    hint="pass objects that differ between ranks in per_rank=",
                )
    number = {key: index for index, key in enumerate(facts)}
    positions = [
        np.array([-1 if fact.own else number[key] for key, fact in schema.items()], dtype=np.int64)
        for schema in schemas
    ]
    return facts, positions


def padded(values: Ints, dimensions: int, fill: int) -> Ints:
    """Return `values` [n, any] with so many columns: further ones have the value `fill`, and those beyond are left out."""
    missing = dimensions - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)), constant_values=fill) if missing > 0 else values[:, :dimensions]


@dataclass(frozen=True)
class BoxLocation:
    """The place of the bytes of one box: the file, and the byte at which they begin."""

    file: str
    offset: int
    box: Box


@dataclass(frozen=True)
class Index:
    """The contents of index.bin, as written or read.

    Attributes:
        schemas: the distinct schemas; ranks that hold the same tensors share one.
        tables: `FileTable.pack()` by file name.
        digests: SHA-256 of every block by file name, one after another.
    """

    schemas: Sequence[TensorSchema]
    tables: Mapping[str, bytes]
    digests: Mapping[str, bytes] = field(repr=False)

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the file in pieces: at 4,096 ranks it has more than a hundred megabytes."""
        segments, position = {}, 0
        for name, table in self.tables.items():
            segments[name] = [position, len(table), len(self.digests[name])]
            position += len(table) + len(self.digests[name])
        header = json.dumps(
            {"catalogues": [encode_schema(schema) for schema in self.schemas], "files": segments}
        ).encode()
        yield struct.pack("<Q", len(header)) + header
        for name, table in self.tables.items():
            yield table
            yield self.digests[name]

    @classmethod
    def parse(cls, data: bytes, sizes: Mapping[str, int]) -> Index:
        """Read an index, and check everything in it: digests reveal damage, not whether its writer meant well.

        Args:
            sizes: bytes of the files of the checkpoint.

        Raises:
            CheckpointError: it is no index, or it describes contents that the files cannot have.
        """
        try:
            (length,) = struct.unpack_from("<Q", data)
            header = json.loads(data[8 : 8 + length])
            schemas = [decode_schema(values) for values in header["catalogues"]]
            tables, digests = {}, {}
            for name, (position, table, digest) in header["files"].items():
                begin = 8 + length + position
                _demand(name in sizes, f"{name[:100]!r} is not a file of the checkpoint")
                _demand(all(_is_count(number) for number in (position, table, digest)), "a segment is nowhere")
                _demand(begin + table + digest <= len(data), "it is cut short")
                tables[name] = data[begin : begin + table]
                digests[name] = data[begin + table : begin + table + digest]
            _check_schemas(schemas, sum(sizes.values()))
            shapes = [shapes_of(schema) for schema in schemas]
            itemsizes = [_itemsizes(schema) for schema in schemas]
            for name, packed in tables.items():
                _check_table(packed, shapes, itemsizes, sizes[name])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"index.bin cannot be read: {error}") from None
        except (struct.error, zlib.error) as error:
            raise CheckpointError(f"index.bin cannot be read: {error}") from None
        return cls(schemas, tables, digests)

    @cached_property
    def facts(self) -> dict[str, TensorFacts]:
        return merged_schemas(self.schemas)[0]

    def own_facts(self, file: str) -> dict[str, TensorFacts]:
        """Return the own tensors of the rank that wrote `file`."""
        schema = self.schemas[FileTable.unpack(self.tables[file]).schema]
        return {key: fact for key, fact in schema.items() if fact.own}

    def own_state(self, file: str) -> tuple[int, int]:
        """Return first byte and length of the JSON of the rank's own plain state in `file`."""
        table = FileTable.unpack(self.tables[file])
        itemsizes = _itemsizes(self.schemas[table.schema])
        return int(table.offsets(itemsizes)[-1]), table.own_bytes

    def pieces(self, file: str) -> dict[str, tuple[int, int]]:
        """Return first and last byte of every box in `file`, by its name in the safetensors header."""
        table = FileTable.unpack(self.tables[file])
        schema = self.schemas[table.schema]
        names, offsets = list(schema), table.offsets(_itemsizes(schema)).tolist()
        found = {}
        for row, number in enumerate(table.tensors.tolist()):
            name = names[number]
            start, size = (values[: len(schema[name].shape)] for values in table.boxes[row].tolist())
            box = Box(tuple(start), tuple(size))
            found[piece_name(name, box, schema[name].shape)] = (offsets[row], offsets[row + 1])
        return found

    def find(self, wanted: Mapping[str, Box], own_file: str | None = None) -> dict[str, list[BoxLocation]]:
        """Return all boxes that overlap with the wanted box of each tensor.

        Args:
            wanted: boxes by name. Names of own tensors are looked up in `own_file` alone.
        """
        found: dict[str, list[BoxLocation]] = {key: [] for key in wanted}
        lookups = [_Lookup(schema, wanted) for schema in self.schemas]
        for file, packed in self.tables.items():
            table = FileTable.unpack(packed)
            lookup = lookups[table.schema]
            rows = lookup.overlapping(table, own=file == own_file)
            offsets = table.offsets(lookup.itemsizes)
            for row in rows:
                key = lookup.names[table.tensors[row]]
                start, size = table.boxes[row].tolist()
                dimensions = len(wanted[key].size)
                box = Box(tuple(start[:dimensions]), tuple(size[:dimensions]))
                found[key].append(BoxLocation(file, int(offsets[row]), box))
        return found


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _check_schemas(schemas: Sequence[TensorSchema], size: int) -> None:
    """Raise ValueError if a tensor is not valid, or larger than all files together."""
    for schema in schemas:
        for key, fact in schema.items():
            _demand(isinstance(key, str) and isinstance(fact.dtype, str), "a tensor has no name or type")
            _demand(len(fact.shape) <= MAX_DIMENSIONS and all(map(_is_count, fact.shape)), f"{key} has no shape")
            _demand(
                _is_count(fact.itemsize) and 1 <= fact.itemsize <= 16, f"{key} has elements of {fact.itemsize} bytes"
            )
            _demand(fact.nbytes <= size, f"{key} is larger than the checkpoint")


def shapes_of(schema: TensorSchema) -> Ints:
    """Return the shapes of the schema's tensors, int64 [tensors, dimensions], padded with 1."""
    dimensions = max((len(fact.shape) for fact in schema.values()), default=0) or 1
    shapes = np.ones((len(schema), dimensions), dtype=np.int64)
    for row, fact in enumerate(schema.values()):
        shapes[row, : len(fact.shape)] = fact.shape
    return shapes


def _check_table(packed: bytes, shapes: Sequence[Ints], itemsizes: Sequence[Ints], size: int) -> None:
    """Raise ValueError if a table describes other bytes than those of its file, or pieces that are outside their tensor.

    Args:
        shapes, itemsizes: shapes and bytes of an element of the tensors of every schema.
        size: bytes of the file.
    """
    # A rank writes at most one box of each tensor.
    table = FileTable.unpack(packed, limit=max(8 * (5 + len(each) * (1 + 2 * each.shape[1])) for each in shapes))
    _demand(0 <= table.schema < len(shapes), "a table belongs to no schema")
    tensors, dimensions = shapes[table.schema].shape
    _demand(1 <= table.boxes.shape[2] <= dimensions, "a table has no dimensions")
    _demand(bool(((table.tensors >= 0) & (table.tensors < tensors)).all()), "a piece belongs to no tensor")
    starts, sizes = padded(table.boxes[:, 0], dimensions, 0), padded(table.boxes[:, 1], dimensions, 1)
    room = shapes[table.schema][table.tensors]
    inside = (starts >= 0) & (sizes >= 1) & (sizes <= room) & (starts <= room - sizes)
    _demand(bool(inside.all()), "a piece lies outside of its tensor")
    _demand(_is_count(table.data_start) and _is_count(table.own_bytes), "a table begins nowhere")
    nbytes = sizes.prod(axis=1) * itemsizes[table.schema][table.tensors]
    end = table.data_start + table.own_bytes + float(nbytes.sum(dtype=np.float64))
    _demand(end <= size, "a piece lies outside of its file")


class _Lookup:
    """The wanted boxes by position in one schema."""

    def __init__(self, schema: TensorSchema, wanted: Mapping[str, Box]):
        self.names = list(schema)
        self.itemsizes = _itemsizes(schema)
        self._own = np.array([fact.own for fact in schema.values()], dtype=bool)
        self._wanted = np.array([key in wanted for key in self.names], dtype=bool)
        dimensions = max((len(fact.shape) for fact in schema.values()), default=0) or 1
        self._starts = np.zeros((len(self.names), dimensions), dtype=np.int64)
        self._ends = np.ones((len(self.names), dimensions), dtype=np.int64)
        for row, key in enumerate(self.names):
            if key in wanted:
                box = wanted[key]
                self._starts[row, : len(box.start)] = box.start
                self._ends[row, : len(box.start)] = np.array(box.start) + box.size

    def overlapping(self, table: FileTable, *, own: bool) -> Ints:
        """Return the rows of `table` that overlap with wanted boxes."""
        tensors = table.tensors
        starts, sizes = table.boxes[:, 0], table.boxes[:, 1]
        dimensions = starts.shape[1]
        overlap = np.maximum(starts, self._starts[tensors][:, :dimensions]) < np.minimum(
            starts + sizes, self._ends[tensors][:, :dimensions]
        )
        mask = self._wanted[tensors] & overlap.all(axis=1)
        if not own:
            mask &= ~self._own[tensors]
        return np.flatnonzero(mask)


def _itemsizes(schema: TensorSchema) -> Ints:
    return np.array([fact.itemsize for fact in schema.values()], dtype=np.int64)


def encode_schema(schema: TensorSchema) -> list[list[Any]]:
    """Return a schema as JSON values."""
    return [[key, list(fact.shape), fact.dtype, fact.itemsize, int(fact.own)] for key, fact in schema.items()]


def decode_schema(values: Sequence[Sequence[Any]]) -> dict[str, TensorFacts]:
    """Return the schema that `encode_schema` has encoded. Raise ValueError if it names a tensor twice."""
    found = {key: TensorFacts(tuple(shape), dtype, itemsize, bool(own)) for key, shape, dtype, itemsize, own in values}
    if len(found) != len(values):
        raise ValueError("a tensor has two entries")
    return found
