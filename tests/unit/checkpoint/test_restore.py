"""Who reads which block of a checkpoint, and into which memory."""

from __future__ import annotations

import hashlib
import random
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES
from slurmtrain.checkpoint.restore import reader
from slurmtrain.checkpoint.restore.reader import Files, Need, Span, need_of, share_out
from slurmtrain.errors import CheckpointError

SMALL_BLOCK = 1000


def test_the_need_of_a_block_is_what_lies_in_it() -> None:
    need = need_of(
        [
            ("a", 10, 20),
            ("a", 100, 100),
            ("a", BLOCK_BYTES - 1, BLOCK_BYTES + 2),
            ("b", 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 5),
        ]
    )
    assert need == {"a": {0: 11, 1: 2}, "b": {2: 5}}


needs = st.lists(
    st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.dictionaries(st.integers(0, 9), st.integers(1, BLOCK_BYTES), min_size=1),
        max_size=2,
    ),
    min_size=1,
    max_size=6,
)


@given(needs)
def test_each_block_is_read_once_by_one_that_needs_much_of_it(needs: list[Need]) -> None:
    wanted = {(file, number) for need in needs for file, numbers in need.items() for number in numbers}
    read = []
    for rank, need in enumerate(needs):
        for file, numbers in share_out(needs, rank).items():
            for number in numbers:
                most = max(other.get(file, {}).get(number, 0) for other in needs)
                assert 2 * need[file][number] > most
                read.append((file, number))
    assert sorted(read) == sorted(wanted)


@given(st.integers(1, 8), st.integers(1, 40))
def test_replicas_share_evenly(ranks: int, count: int) -> None:
    need = {"a": dict.fromkeys(range(count), BLOCK_BYTES)}
    shares = [len(share_out([need] * ranks, rank).get("a", [])) for rank in range(ranks)]
    assert max(shares) - min(shares) <= 1 and sum(shares) == count


def test_a_few_bytes_in_anothers_file_are_no_reason_to_read_its_blocks() -> None:
    """Adam's counts of steps lie in the file of one rank, among what only that rank needs."""
    mine = {"a": dict.fromkeys(range(4), BLOCK_BYTES), "b": {2: 4}}
    theirs = {"b": dict.fromkeys(range(4), BLOCK_BYTES), "a": dict.fromkeys(range(4), 4)}
    assert share_out([mine, theirs], 0) == {"a": [0, 1, 2, 3]}
    assert share_out([mine, theirs], 1) == {"b": [0, 1, 2, 3]}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", SMALL_BLOCK)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(30))
def test_straight_or_by_the_buffer_every_byte_arrives(tmp_path: Path, seed: int) -> None:
    """Random ranges of a file, some with a place of their own, some wanted twice: as from a plain read."""
    choice = random.Random(seed)
    data = choice.randbytes(choice.randrange(1, 6000))
    (tmp_path / "file").write_bytes(data)
    cuts = sorted(choice.sample(range(len(data) + 1), min(len(data) + 1, 8)))
    spans, straight, tensors = [], [], {}
    for number, (begin, end) in enumerate(pairwise(cuts)):
        name = str(number)
        tensors[name] = torch.zeros(end - begin, dtype=torch.uint8)
        whole = (slice(0, end - begin),)
        span = Span(name, "file", begin, end, torch.uint8, (end - begin,), whole, whole)
        spans.append(span)
        if choice.random() < 0.6:
            straight.append((span, reader._bytes_of(tensors[name])))
            if choice.random() < 0.3:  # an index that gives the same bytes to two tensors
                tensors[name + "'"] = torch.zeros(end - begin, dtype=torch.uint8)
                twin = Span(name + "'", "file", begin, end, torch.uint8, (end - begin,), whole, whole)
                spans.append(twin)
                straight.append((twin, reader._bytes_of(tensors[twin.name])))
    held = {"file": [number for number in range(blocks.block_count(len(data))) if choice.random() < 0.7]}
    digests = {
        "file": b"".join(
            hashlib.sha256(data[at : at + SMALL_BLOCK]).digest() for at in range(0, len(data), SMALL_BLOCK)
        )
    }
    record = blocks.FileRecord(len(data), "")
    with blocks.threads() as pool, closing(Files(tmp_path, {"file": record}, pool, straight)) as files:
        size = files.buffer_bytes(held)
        assert size <= sum(min(SMALL_BLOCK, len(data) - number * SMALL_BLOCK) for number in held["file"])
        assert files.verify(held, digests, memoryview(bytearray(size))) == []
        files.fill(spans, tensors)
    for span in spans:
        assert bytes(tensors[span.name].tolist()) == data[span.begin : span.end]


def test_moments_are_read_straight_into_their_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer holds the parameters, which are live, and not the optimiser's state, which is twice as much."""
    model, optimizer = trained()
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        checkpointer.wait()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    asked = []
    buffer_bytes = Files.buffer_bytes

    def noted(files: Files, share: dict[str, list[int]]) -> int:
        asked.append(buffer_bytes(files, share))
        return asked[-1]

    monkeypatch.setattr(Files, "buffer_bytes", noted)
    fresh, fresh_optimizer = trained(steps=0)
    with closing(Checkpointer(tmp_path)) as checkpointer:
        assert checkpointer.restore(model=fresh, optimizer=fresh_optimizer)
    assert parameters < asked[0] < 1.5 * parameters
    for before, after in zip(optimizer.state.values(), fresh_optimizer.state.values(), strict=True):
        assert all(torch.equal(before[field], after[field]) for field in before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_with_damage_anywhere_nothing_live_is_touched(tmp_path: Path) -> None:
    model, optimizer = trained()
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        checkpointer.wait()
    shard = next(tmp_path.glob("checkpoint_*/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-2000] ^= 1
    shard.write_bytes(data)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]
    with closing(Checkpointer(tmp_path)) as checkpointer, pytest.raises(CheckpointError, match="its digest differs"):
        checkpointer.restore(path=shard.parent, model=model, optimizer=optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for old, state in zip(moments, optimizer.state.values(), strict=True):
        assert all(torch.equal(old[name], value) for name, value in state.items())


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    return model, optimizer
