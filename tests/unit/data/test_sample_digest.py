from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slurmtrain.data import BatchLoader
from slurmtrain.data.loading import sample_digest
from slurmtrain.data.sources.mixture import MixedSamples
from slurmtrain.errors import SlurmtrainError


class Drawn:
    """Every sample draws from all three generators, as augmentations do."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])
        return {"id": torch.tensor(index), "drawn": drawn}


def run(n: int, plan: list[tuple[int, int, int, int]], batch: int, **changes: Any) -> tuple[str, list[int]]:
    """The hash and the samples of a run in stretches of (steps, ranks, micro batch, workers)."""
    chain, consumed, seen = "data", 0, []
    for steps, ranks, micro, workers in plan:
        loaders = [
            BatchLoader(
                Drawn(n),
                seed=1,
                global_batch_size=batch,
                micro_batch_size=micro,
                dp_rank=rank,
                dp_size=ranks,
                num_workers=workers,
                samples_consumed=consumed,
                **changes,
            )
            for rank in range(ranks)
        ]
        for _ in range(steps):
            shares = [next(loader) for loader in loaders]
            chain = sample_digest.chained(chain, sample_digest.added([share.digest for share in shares]))
            seen += sorted(int(i) for share in shares for micro_batch in share.micro_batches for i in micro_batch["id"])
        consumed = loaders[0].samples_consumed
        for loader in loaders:
            loader.close()
    return chain, seen


@settings(max_examples=25, deadline=None)
@given(data=st.data(), n=st.integers(1, 200), per=st.integers(1, 3))
def test_stopped_and_resumed_with_any_ranks_and_micro_batches_the_hash_and_each_sample_are_the_same(
    data: st.DataObject, n: int, per: int
) -> None:
    batch = 12 * per
    layouts = st.sampled_from([(1, 12), (2, 3), (3, 4), (4, 1), (6, 2), (12, 1)])
    plan = [(steps, *data.draw(layouts), 0) for steps in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))]
    total = sum(stretch[0] for stretch in plan)
    chain, seen = run(n, plan, batch)
    assert (chain, seen) == run(n, [(total, 1, 1, 0)], batch)
    # As many as there were whole epochs, and once more in the one that has begun.
    times = np.bincount(seen, minlength=n)
    assert times.min() == total * batch // n and times.max() == -(-total * batch // n)


@settings(max_examples=8, deadline=None)
@given(data=st.data(), n=st.integers(20, 60))
def test_so_it_is_with_workers(data: st.DataObject, n: int) -> None:
    stretch = st.tuples(st.integers(1, 4), st.sampled_from([(1, 2), (2, 1), (2, 4)]), st.integers(0, 2))
    plan = [
        (steps, *layout, workers) for steps, layout, workers in data.draw(st.lists(stretch, min_size=1, max_size=3))
    ]
    assert run(n, plan, 8) == run(n, [(sum(stretch[0] for stretch in plan), 1, 8, 0)], 8)


def test_another_order_sample_or_data_set_gives_another_hash() -> None:
    plan = [(3, 1, 4, 0)]
    hashes = [
        run(50, plan, 4)[0],
        run(49, plan, 4)[0],
        run(50, plan, 4, shuffle=False)[0],
        run(50, [(4, 1, 4, 0)], 4)[0],
    ]
    assert len(set(hashes)) == 4
    numbers = np.arange(8)
    swapped = numbers[[1, 0, *range(2, 8)]]
    in_order, changed, moved = sample_digest.digests(
        np.stack([numbers, numbers, swapped]), np.stack([numbers, swapped, numbers])
    )
    assert in_order != changed and changed == moved  # the same two pairs
    assert sample_digest.chained("a", (1, 2)) != sample_digest.chained("b", (1, 2))


def test_what_a_sample_draws_depends_on_neither_ranks_nor_workers_nor_restarts() -> None:
    def drawn(steps: int, **changes: Any) -> dict[int, list[float]]:
        arguments: dict[str, Any] = {"seed": 1, "global_batch_size": 4, "micro_batch_size": 2, **changes}
        loader = BatchLoader(Drawn(12), **arguments)
        found = {
            int(index): row.tolist()
            for _ in range(steps)
            for batch in next(loader).micro_batches
            for index, row in zip(batch["id"], batch["drawn"], strict=True)
        }
        loader.close()
        return found

    first, second = drawn(3), drawn(3, samples_consumed=12)
    assert first == drawn(3, num_workers=2, micro_batch_size=4)
    assert second == {**drawn(1, samples_consumed=12), **drawn(2, samples_consumed=16, num_workers=1)}
    assert first.keys() == second.keys() and all(first[index] != second[index] for index in first)  # anew each epoch


def test_what_a_sample_of_a_mixture_draws_is_new_each_epoch_and_another_with_another_seed() -> None:
    mixture = MixedSamples({"left": Drawn(3), "right": Drawn(5)})

    def drawn(seed: int, first: int) -> list[list[float]]:
        loader = BatchLoader(
            mixture, seed=seed, shuffle=False, global_batch_size=8, micro_batch_size=8, samples_consumed=first
        )
        rows: list[list[float]] = next(loader).micro_batches[0]["drawn"].tolist()
        return rows

    first, again, second, other = drawn(1, 0), drawn(1, 0), drawn(1, 8), drawn(2, 0)
    assert first == again
    assert not {tuple(row) for row in first} & {tuple(row) for row in [*second, *other]}


class Dying(Drawn):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        signal.raise_signal(signal.SIGKILL)
        return {}


def test_workers_announce_to_the_data_set_themselves(tmp_path: Path) -> None:
    class Announced(Drawn):
        def will_need(self, indices: Any) -> None:
            with (tmp_path / f"{os.getpid()}").open("a") as file:
                file.write("".join(f"{index}\n" for index in indices.tolist()))

    loader = BatchLoader(
        Announced(10**6), seed=0, shuffle=False, global_batch_size=2, micro_batch_size=2, num_workers=2, ahead=3
    )
    for _ in range(10):
        next(loader)
    loader.close()
    heard = {path.name: [int(line) for line in path.read_text().split()] for path in tmp_path.iterdir()}
    assert len(heard) == 2 and str(os.getpid()) not in heard
    together = sorted(index for indices in heard.values() for index in indices)
    assert together[:26] == list(range(26))  # each once, and three steps of two before it is fetched


def test_a_worker_that_is_killed_is_named_with_what_may_help() -> None:
    loader = BatchLoader(Dying(4), seed=0, global_batch_size=2, micro_batch_size=2, num_workers=1)
    with pytest.raises(SlurmtrainError, match="was killed by SIGKILL") as error:
        next(loader)
    assert "out of memory" in (error.value.hint or "") and error.value.exit_code == 1


def test_the_data_set_hears_early_of_what_comes() -> None:
    class Announced(Drawn):
        def __init__(self) -> None:
            super().__init__(100)
            self.events: list[tuple[str, list[int]]] = []

        def will_need(self, indices: Any) -> None:
            self.events.append(("soon", indices.tolist()))

        def get_batch(self, indices: Any) -> dict[str, Tensor]:
            self.events.append(("now", indices.tolist()))
            return {"id": torch.from_numpy(indices)}

    dataset = Announced()
    loader = BatchLoader(dataset, seed=0, shuffle=False, global_batch_size=2, micro_batch_size=1, ahead=2)
    next(loader)
    next(loader)
    soon, now = "soon", "now"
    first = [(soon, [0, 1, 2, 3, 4, 5]), (now, [0]), (now, [1])]
    assert dataset.events == [*first, (soon, [6, 7]), (now, [2]), (now, [3])]
