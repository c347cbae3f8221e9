"""The bytes of a checkpoint come back whatever their number, one changed bit is found, and no error of the disk is lost."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import re
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.restore import reader
from tests.support.descriptors import open_below

BLOCK, PIECE = 4096, 1000  # a piece does not divide the block
HEADER = 4096


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(blocks, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(blocks, "_local", threading.local())  # the buffers of this thread have the other size


def model_of(*sizes: int, seed: int | None = 0) -> nn.Module:
    """A module with a buffer of each size in bytes; all zeros without a seed."""
    model, choice = nn.Module(), random.Random(seed)
    for number, size in enumerate(sizes):
        data = bytearray(size) if seed is None else bytearray(choice.randbytes(size))
        model.register_buffer(f"b{number}", torch.tensor(data, dtype=torch.uint8))
    return model


def save(directory: Path, model: nn.Module, step: int = 1) -> Path:
    """Save, and return the file with the tensors."""
    with closing(Checkpointer(directory)) as checkpointer:
        saved = checkpointer.save(step, model=model).result(60)
    (shard,) = saved.path.glob("rank*")
    return shard


def restore(directory: Path, model: nn.Module, **options: Any) -> None:
    with closing(Checkpointer(directory)) as checkpointer:
        assert checkpointer.restore(model=model, **options)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    assert [name for name, value in one.state_dict().items() if not torch.equal(value, other.state_dict()[name])] == []


def check_round_trip(directory: Path, *sizes: int) -> Path:
    model, fresh = model_of(*sizes), model_of(*sizes, seed=None)
    shard = save(directory, model)
    restore(directory, fresh)
    assert_equal(fresh, model)
    return shard


def check_digest(shard: Path, block: int) -> None:
    """As the format says it: the SHA-256 of every block, and of the header."""
    data = shard.read_bytes()
    digests = "".join(hashlib.sha256(data[at : at + block]).hexdigest() for at in range(0, len(data), block))
    manifest = read_manifest(shard.parent)
    record = manifest.files[shard.name]
    assert (record.size, record.digests) == (len(data), digests)
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    assert manifest.headers[shard.name] == hashlib.sha256(header).hexdigest()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK])
def test_tensors_of_odd_sizes_come_back(tmp_path: Path, size: int) -> None:
    check_digest(check_round_trip(tmp_path, size), BLOCK)


@pytest.mark.usefixtures("small_blocks")
def test_one_changed_bit_is_found_wherever_it_is_and_nothing_live_is_touched(tmp_path: Path) -> None:
    shard = save(tmp_path, model_of(2 * BLOCK + 77, 5))
    data = shard.read_bytes()
    for at in (HEADER, HEADER + BLOCK - 1, HEADER + BLOCK, HEADER + 2 * BLOCK + 76, len(data) - 1):
        shard.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        live = model_of(2 * BLOCK + 77, 5, seed=1)
        with pytest.raises(CheckpointError, match=f"{shard.name} is not what was written: its digest differs"):
            restore(tmp_path, live, path=shard.parent)
        assert_equal(live, model_of(2 * BLOCK + 77, 5, seed=1))
    assert open_below(tmp_path) == []


def test_a_header_that_names_two_tensors_the_other_way_round_is_damage(tmp_path: Path) -> None:
    """Their size is the same, and so nothing else tells it."""
    shard = save(tmp_path, model_of(700, 700))
    data = shard.read_bytes()
    data = re.sub(rb"model.b([01])", lambda name: b"model.b%d" % (1 - int(name[1])), data, count=2)
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"the header of {shard.name} is not what was written"):
        restore(tmp_path, model_of(700, 700), path=shard.parent)


@pytest.mark.usefixtures("small_blocks")
def test_a_disk_that_does_a_part_of_it_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite: Callable[..., int] = os.pwrite
    preadv: Callable[..., int] = os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:700], offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:700]], offset))
    check_round_trip(tmp_path, 2 * BLOCK + 77)


@pytest.mark.usefixtures("small_blocks")
def test_after_a_failed_save_no_thread_writes_into_somebody_else_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor is given to whatever file is opened next."""
    failed, gone_on = threading.Event(), threading.Event()
    pwrite, close = os.pwrite, os.close
    others: list[io.FileIO] = []

    def slow_and_failing(descriptor: int, data: memoryview, offset: int) -> int:
        if offset == 0:
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        failed.wait()
        gone_on.wait(0.5)  # as long as the file is open, nobody sets it
        return pwrite(descriptor, data, offset)

    def close_and_open_another(descriptor: int) -> None:
        close(descriptor)
        if failed.is_set():
            others.append((tmp_path / f"log-{len(others)}").open("wb", buffering=0))
            gone_on.set()

    monkeypatch.setattr(os, "pwrite", slow_and_failing)
    monkeypatch.setattr(os, "close", close_and_open_another)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, model_of(3 * BLOCK))
    monkeypatch.undo()
    assert others and [Path(other.name).read_bytes() for other in others] == [b""] * len(others)
    for other in others:
        other.close()
