"""Files in blocks: what was written is what is digested, whatever the size, and no thread's error is lost."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import FileRecord
from tests.support.descriptors import open_below

SMALL_BLOCK, SMALL_PIECE = 4096, 1000  # a piece does not divide the block


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """More threads than this machine may have cores."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(blocks, "PIECE_BYTES", SMALL_PIECE)
    monkeypatch.setattr(blocks, "_local", threading.local())  # the buffers of this thread have the other size


def contents_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def digests_of(data: bytes, block: int) -> bytes:
    """As the module says it: SHA-256 of every block, of an empty file that of nothing."""
    return b"".join(hashlib.sha256(data[at : at + block]).digest() for at in range(0, max(1, len(data)), block))


def record_of(data: bytes, block: int = SMALL_BLOCK) -> FileRecord:
    return FileRecord(len(data), hashlib.sha256(digests_of(data, block)).hexdigest())


def odd_sizes(block: int) -> list[int]:
    return [0, 1, block - 1, block, block + 1, 3 * block - 1, 3 * block]


def check_round_trip(path: Path, data: bytes, block: int, pool: ThreadPoolExecutor) -> None:
    record, digests = blocks.write(path, memoryview(data), pool)
    assert path.read_bytes() == data
    assert (record, digests) == (record_of(data, block), digests_of(data, block))
    assert path.stat().st_mode & 0o777 == 0o600
    assert blocks.digest_file(path, pool) == blocks.digest_file(path, pool, sync=True) == (record, digests)
    for from_disk in (False, True):
        assert blocks.find_damage(path.parent, [(path.name, record)], from_disk=from_disk) == []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for number in range(blocks.block_count(len(data))):
            part = data[number * block : (number + 1) * block]
            into = memoryview(bytearray(len(part)))
            cut = len(part) // 3
            parts = [into[:cut], into[cut:]]
            assert blocks.digest_block(descriptor, number, len(data), parts) == digests[32 * number : 32 * number + 32]
            assert into == part
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", odd_sizes(SMALL_BLOCK))
def test_files_of_odd_sizes_come_back(tmp_path: Path, pool: ThreadPoolExecutor, size: int) -> None:
    check_round_trip(tmp_path / "file", contents_of(size), SMALL_BLOCK, pool)


def test_files_of_real_blocks_come_back(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    assert blocks.BLOCK_BYTES == 16 << 20  # a part of the format
    check_round_trip(tmp_path / "file", contents_of(blocks.BLOCK_BYTES + 1), 16 << 20, pool)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", odd_sizes(SMALL_BLOCK)[1:])
def test_one_changed_bit_is_found_wherever_it_is(tmp_path: Path, pool: ThreadPoolExecutor, size: int) -> None:
    data = contents_of(size)
    record, _ = blocks.write(tmp_path / "file", memoryview(data), pool)
    for at in {0, size // 2, size - 1, min(size - 1, SMALL_BLOCK)}:
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / "file").write_bytes(changed)
        for from_disk in (False, True):
            assert blocks.find_damage(tmp_path, [("file", record)], from_disk=from_disk) == [
                "file is not what was written: its digest differs"
            ]
        assert blocks.find_damage(tmp_path, [("file", record)], contents=False) == []


@pytest.mark.usefixtures("small_blocks")
def test_every_file_that_is_damaged_is_named_once(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    records = {}
    for name, size in {"sound": 9000, "cut": 9000, "grown": 10, "gone": 10, "changed": 9000, "empty": 0}.items():
        records[name], _ = blocks.write(tmp_path / name, memoryview(contents_of(size)), pool)
    os.truncate(tmp_path / "cut", 8999)
    (tmp_path / "grown").write_bytes(bytes(11))
    (tmp_path / "gone").unlink()
    (tmp_path / "changed").write_bytes(bytes(9000))
    sizes = ["cut has 8999 bytes instead of 9000", "grown has 11 bytes instead of 10"]
    missing = "gone cannot be read: No such file or directory"
    found = blocks.find_damage(tmp_path, records.items(), contents=False)
    assert sorted(found) == sorted([*sizes, missing])
    found = blocks.find_damage(tmp_path, records.items())
    assert sorted(found) == sorted([*sizes, missing, "changed is not what was written: its digest differs"])


@pytest.mark.usefixtures("small_blocks")
def test_progress_adds_up_to_what_is_read(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    sizes = {"a": 0, "b": SMALL_BLOCK + 1, "c": 5}
    records = {
        name: blocks.write(tmp_path / name, memoryview(contents_of(size)), pool)[0] for name, size in sizes.items()
    }
    told: list[int] = []
    assert blocks.find_damage(tmp_path, records.items(), progress=told.append) == []
    assert sum(told) == sum(sizes.values())


# -------------------------------------------------------------------------------------------------------------- errors


class Disk:
    """Stands in for pwrite and preadv: fails the n-th call, or does less than it was asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail: int | None = None, at_most: int | None = None):
        self.calls, self._fail, self._at_most = 0, fail, at_most
        self._lock = threading.Lock()
        self._pwrite, self._preadv = os.pwrite, os.preadv
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "preadv", self.preadv)

    def _count(self) -> None:
        with self._lock:
            self.calls += 1
            if self.calls == self._fail:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self._count()
        return self._pwrite(descriptor, data[: self._at_most], offset)

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self._count()
        return self._preadv(descriptor, [buffers[0][: self._at_most]], offset)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("number", range(1, 7))
def test_a_write_that_fails_in_any_thread_is_raised(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    data = contents_of(6 * SMALL_BLOCK)
    with monkeypatch.context() as patch:
        disk = Disk(patch, fail=number)
        with pytest.raises(OSError, match="Input/output error"):
            blocks.write(tmp_path / "file", memoryview(data), pool)
        assert disk.calls >= number


@pytest.mark.usefixtures("small_blocks")
def test_a_read_that_fails_once_is_asked_again(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {name: blocks.write(tmp_path / name, memoryview(contents_of(9000)), pool)[0] for name in ("a", "b")}
    for number in (1, 7, 20):  # 2 files of 9,000 bytes in pieces of at most 1,000
        with monkeypatch.context() as patch:
            Disk(patch, fail=number)
            assert blocks.find_damage(tmp_path, records.items()) == []


@pytest.mark.usefixtures("small_blocks")
def test_a_disk_that_does_a_part_of_it_is_asked_again(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, at_most=700)
    check_round_trip(tmp_path / "file", contents_of(2 * SMALL_BLOCK + 77), SMALL_BLOCK, pool)


@pytest.mark.usefixtures("small_blocks")
def test_a_file_that_ends_too_early_is_told(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    (tmp_path / "file").write_bytes(bytes(5000))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(EOFError, match="it ends at byte 5000"):
            blocks.read_into(descriptor, memoryview(bytearray(10)), 4995)
        with pytest.raises(EOFError, match="it ends at byte 5000"):
            blocks.digest_block(descriptor, 1, 5001)
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("small_blocks")
def test_a_file_cut_while_it_is_read_is_damage(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = blocks.write(tmp_path / "file", memoryview(contents_of(9000)), pool)
    digest_block = blocks.digest_block

    def cut_first(*arguments: Any) -> bytes:
        os.truncate(tmp_path / "file", 100)
        return digest_block(*arguments)

    monkeypatch.setattr(blocks, "digest_block", cut_first)
    (sentence,) = blocks.find_damage(tmp_path, [("file", record)])
    assert sentence.startswith("file cannot be read: it ends at byte ")


def test_what_is_there_is_never_written_over(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        blocks.write(tmp_path / "file", memoryview(b"new"), pool)
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.usefixtures("small_blocks")
def test_the_check_before_each_block_ends_the_writing(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    asked = itertools.count()

    def check() -> None:
        if next(asked) == 2:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        blocks.write(tmp_path / "file", memoryview(contents_of(50 * SMALL_BLOCK)), pool, check=check)
    assert (tmp_path / "file").stat().st_size < 50 * SMALL_BLOCK


@pytest.mark.usefixtures("small_blocks")
def test_after_a_failed_write_no_thread_writes_into_somebody_else_s_file(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor is given to whatever file is opened next."""
    failed, pwrite = threading.Event(), os.pwrite

    def slow_and_failing(descriptor: int, data: memoryview, offset: int) -> int:
        if offset == 0:
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        failed.wait()
        gone_on.wait(0.5)  # as long as `write` has not returned, nobody sets it
        return pwrite(descriptor, data, offset)

    gone_on = threading.Event()
    monkeypatch.setattr(os, "pwrite", slow_and_failing)
    with pytest.raises(OSError, match="No space left"):
        blocks.write(tmp_path / "file", memoryview(contents_of(3 * SMALL_BLOCK)), pool)
    with open(tmp_path / "metrics.jsonl", "wb", buffering=0) as other:
        other.write(b"{}\n")
        gone_on.set()
        pool.shutdown(wait=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"{}\n"


@pytest.mark.usefixtures("small_blocks")
def test_no_descriptor_stays_open(tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    record, _ = blocks.write(tmp_path / "file", memoryview(contents_of(9000)), pool)
    blocks.find_damage(tmp_path, [("file", record), ("gone", record), ("file", FileRecord(1, ""))])
    with monkeypatch.context() as patch:
        Disk(patch, fail=2)
        with pytest.raises(OSError):
            blocks.write(tmp_path / "other", memoryview(contents_of(9000)), pool)
    assert open_below(tmp_path) == []


def test_the_numbers_that_others_count_on() -> None:
    assert [blocks.block_count(size) for size in odd_sizes(16 << 20)] == [1, 1, 1, 1, 2, 3, 3]
    assert blocks.root(b"") == hashlib.sha256(b"").hexdigest()
    with blocks.threads() as pool:
        assert 1 <= pool._max_workers <= blocks.THREADS
