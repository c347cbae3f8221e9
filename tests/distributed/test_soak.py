"""Saving for weeks: what one save leaves behind, thousands would pile up."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import threading
import time
from array import array
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import COMPLETE, MANIFEST, committed
from slurmtrain.checkpoint.save.job import SaveResult
from slurmtrain.checkpoint.store.commit import CLAIMS
from slurmtrain.checkpoint.store.retention import READERS, Keep
from slurmtrain.parallel.ddp import apply_ddp
from slurmtrain.rank.distributed_context import DistributedContext
from tests.support.children import children
from tests.support.descriptors import open_files
from tests.support.gloo import GlooRanks

SAVES, WARM_UP, STEPS_A_SAVE = 220, 100, 2
LOOK_EVERY = 4  # saves
KEEP = Keep(last=3, every=200)
WIDTH = 416  # two matrices with AdamW's moments: 4.2 MB of state


@dataclass(frozen=True)
class Holdings:
    """What a process has of the system: threads by name and number, children, open files by what they are."""

    python_threads: tuple[str, ...]
    threads: int
    children: tuple[int, ...]
    files: tuple[str, ...]

    @classmethod
    def now(cls) -> Holdings:
        names = sorted(thread.name for thread in threading.enumerate())
        threads = len(os.listdir("/proc/self/task"))
        files = sorted(path.partition(":[")[0] for path in open_files())  # a socket's inode says nothing
        return cls(tuple(names), threads, tuple(children(os.getpid())), tuple(files))


@dataclass(frozen=True)
class Soaked:
    """One rank's report.

    Attributes:
        committed: how often each step was.
        blocks: of Python's own allocator that are in use, after every `LOOK_EVERY`th save, its end and a collection.
        overlapped: steps that were done while a save was in flight.
    """

    committed: list[int]
    failed: list[str]
    blocks: list[int]
    overlapped: int
    before: Holdings
    meanwhile: Holdings
    after: Holdings


class Training:
    """A model that learns something, for as long as one likes."""

    def __init__(self, distributed: DistributedContext):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.model = apply_ddp(model, torch.device("cpu"), distributed.device_group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(1 + distributed.environment.rank)

    def step(self) -> None:
        inputs = torch.randn(2, WIDTH)
        (self.model(inputs) - inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def soak(distributed: DistributedContext, directory: Path) -> Soaked:
    training = Training(distributed)
    for _ in range(5):
        training.step()  # torch starts its own threads with the first
    before = Holdings.now()
    gc.freeze()  # collections below look at what the saves have left, not at torch

    # Arrays of plain numbers, at their full size from the start: what this function notes down is not to be measured.
    looks = SAVES // LOOK_EVERY
    blocks, committed = (array("q", bytes(8 * length)) for length in (looks, SAVES))
    failed: list[str] = []
    overlapped = 0

    def note(ending: SaveResult | CheckpointError) -> None:
        if isinstance(ending, SaveResult):
            committed[ending.step - 1] += 1
        else:
            failed.append(ending.message)

    checkpointer = Checkpointer(directory, group=distributed.checkpoint_group, keep=KEEP, on_ending=note)
    for number in range(1, SAVES + 1):
        for _ in range(STEPS_A_SAVE):
            training.step()
            overlapped += checkpointer._writer.is_alive()
        checkpointer.save(number, model=training.model, optimizer=training.optimizer)
        meanwhile = Holdings.now() if number == SAVES else before
        if number % LOOK_EVERY == 0:
            checkpointer.wait()
            gc.collect()
            blocks[number // LOOK_EVERY - 1] = sys.getallocatedblocks()
    checkpointer.close()
    return Soaked(
        committed=list(committed),
        failed=failed,
        blocks=list(blocks),
        overlapped=overlapped,
        before=before,
        meanwhile=meanwhile,
        after=_settled(before),
    )


def _settled(expected: Holdings) -> Holdings:
    """What is held when the threads that were told to end have had the time to."""
    deadline = time.monotonic() + 60
    while (holdings := Holdings.now()) != expected and time.monotonic() < deadline:
        time.sleep(0.02)
    return holdings


def slope(values: list[int]) -> float:
    """Growth from one value to the next: the median over all pairs (Theil-Sen), which single jumps do not move."""
    return statistics.median((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(values), 2))


def steady_growth(values: list[int]) -> float:
    """The least slope of two halves, and from the first third to the last: a leak grows in all of them, a cache or an
    allocator that fills up in one, and what comes and goes (sixty blocks of a save in flight) in none for long."""
    middle, third = len(values) // 2, len(values) // 3
    rise = statistics.median(values[-third:]) - statistics.median(values[:third])
    return min(slope(values[:middle]), slope(values[middle:]), rise / (len(values) - third))


def test_220_saves_in_the_background_of_a_training_leave_nothing_behind(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    for rank in gloo_ranks(2, soak, directory, timeout_s=400):
        assert rank.failed == [] and rank.committed == [1] * SAVES
        assert rank.overlapped > SAVES // 2
        # One object that every save leaves behind would be one block or more.
        assert steady_growth(rank.blocks[WARM_UP // LOOK_EVERY :]) / LOOK_EVERY < 0.5
        assert rank.meanwhile != rank.before  # it would be seen
        assert "checkpoint-writer" in rank.meanwhile.python_threads and rank.meanwhile.children == ()
        assert rank.after == rank.before

    kept = committed(directory)
    assert [int(path.name.rpartition("_")[2]) for path in kept] == [200, SAVES - 2, SAVES - 1, SAVES]
    names = {path.name for path in directory.iterdir()}
    assert names - {path.name for path in kept} <= {CLAIMS, READERS}
    assert list((directory / READERS).glob("*")) == []
    assert len(list((directory / CLAIMS).iterdir())) == 1
    for path in kept:
        files = {*read_manifest(path).files, MANIFEST, COMPLETE}
        assert {file.name for file in path.iterdir()} == files
