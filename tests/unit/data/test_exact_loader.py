"""slurmtrain.DataLoader: stopped at any batch, it gives the batches that the undisturbed one gives, and reads no others."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
)

import slurmtrain
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.errors import UsageError

SAMPLES = 24


class Noisy(Dataset[torch.Tensor]):
    """Sample i is i and what three generators draw: an augmentation."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads.append(index)
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.random()], dtype=torch.float64)


class Many(Noisy):
    """As datasets of the Hugging Face hub, which read a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


LOADERS: dict[str, dict[str, Any]] = {
    "shuffled": {"batch_size": 5, "shuffle": True},
    "workers": {"batch_size": 5, "shuffle": True, "num_workers": 2},
    "single samples": {"batch_size": None, "shuffle": True},
    "weighted": {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, 2.0] * 12, SAMPLES)},
    "one rank of two": {"batch_size": 4, "sampler": DistributedSampler(Noisy(), num_replicas=2, rank=1)},
    "batches read at once": {"batch_size": 5, "shuffle": True, "dataset": Many()},
}


def epochs(loader: slurmtrain.DataLoader[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    """The batches of a training, which draws random numbers itself, as dropout does."""
    for _ in range(loader.epoch, count):
        for batch in loader:
            torch.rand(3)
            yield batch


@pytest.mark.parametrize("case", LOADERS)
def test_stopped_at_any_batch_it_goes_on_with_the_same_ones(case: str) -> None:
    arguments: dict[str, Any] = {"dataset": Noisy(), **LOADERS[case]}
    torch.manual_seed(3)
    loader: slurmtrain.DataLoader[torch.Tensor] = slurmtrain.DataLoader(**arguments)
    whole = list(epochs(loader, 3))
    drawn = torch.rand(())
    assert len(whole) == loader.step == 3 * len(loader)
    first, second = whole[: len(loader)], whole[len(loader) : 2 * len(loader)]
    assert not all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    for stop in (len(loader), len(loader) + 2):  # the last of an epoch is another matter than one within
        torch.manual_seed(3)
        stopped: slurmtrain.DataLoader[torch.Tensor] = slurmtrain.DataLoader(**arguments)
        batches = epochs(stopped, 3)
        for number in range(stop):
            assert torch.equal(next(batches), whole[number])
        state, random_state = stopped.state_dict(), torch.get_rng_state()
        torch.manual_seed(99)
        resumed: slurmtrain.DataLoader[torch.Tensor] = slurmtrain.DataLoader(**arguments)
        resumed.load_state_dict(state)
        torch.set_rng_state(random_state)
        assert resumed.step == stop
        assert all(torch.equal(one, other) for one, other in zip(epochs(resumed, 3), whole[stop:], strict=True))
        assert torch.equal(torch.rand(()), drawn), "the program's own random numbers have shifted"


def test_the_samples_before_its_place_are_not_read() -> None:
    dataset = Noisy()
    loader = slurmtrain.DataLoader(dataset, batch_size=4, shuffle=True)
    loader.load_state_dict({"epoch": 7, "batch": 5, "seed": 1, "batches": 6})
    ((batch,),) = (list(loader),)
    assert dataset.reads == batch[:, 0].tolist()
    assert loader.step == 8 * 6


def test_the_seed_and_nothing_else_decides_on_the_order() -> None:
    def order(seed: int, workers: int) -> list[float]:
        torch.seed()
        loader = slurmtrain.DataLoader(Noisy(), batch_size=4, shuffle=True, seed=seed, num_workers=workers)
        return torch.cat(list(loader)).flatten().tolist()

    assert order(1, 0) == order(1, 2) != order(2, 0)
    assert sorted(order(1, 0)[::4]) == list(range(SAMPLES))


def test_a_loop_that_leaves_an_epoch_early_goes_on_with_the_next() -> None:
    loader = slurmtrain.DataLoader(Noisy(), batch_size=4, shuffle=True)
    seen = []
    for _ in range(2):
        for batch in loader:
            seen.append(batch)
            break
    assert loader.epoch == 1 and not torch.equal(*seen)


SIGNALLED = """
import multiprocessing, os, signal, torch, slurmtrain
from torch.utils.data import DataLoader, TensorDataset
slurmtrain.init(device="cpu")
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # the earliest moment
for kind in (DataLoader, slurmtrain.DataLoader):
    loader = kind(TensorDataset(torch.arange(12)), batch_size=4, num_workers=2)
    for epoch in range(2):
        for batch in loader:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGTERM)
            print(len(batch[0]), end=" ")
staying = DataLoader(range(12), batch_size=4, num_workers=2, persistent_workers=True)  # they must not hold up the end
print(len(list(staying)), slurmtrain.stop_requested())
"""


def test_after_init_no_signal_of_a_stop_ends_a_data_worker() -> None:
    """As those of Trainer or Lightning, which make their DataLoaders themselves, and workers anew for each epoch."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "4 " * 12 + "3 False\n"), done.stderr


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(UsageError, match="an IterableDataset has none"):
        slurmtrain.DataLoader(Stream())
    with pytest.raises(UsageError, match="has no `generator`"):
        slurmtrain.DataLoader(Noisy(), generator=torch.Generator())
    state = slurmtrain.DataLoader(Noisy(), batch_size=4).state_dict()
    with pytest.raises(CheckpointError, match="had 6 batches in an epoch, and this one has 12"):
        slurmtrain.DataLoader(Noisy(), batch_size=2).load_state_dict(state)
