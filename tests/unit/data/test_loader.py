from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slurmtrain.data.loading.loader import BatchLoader
from slurmtrain.data.loading.order import EpochOrder, chained, digest
from slurmtrain.data.loading.workers import Workers
from slurmtrain.data.sources.mixture import MixedSamples
from slurmtrain.errors import ConfigError, SlurmtrainError
from tests.support.gloo import wait_until


class Numbers:
    """Sample i is the number i; no `get_batch`, so torch collates."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"id": torch.tensor(index)}


class Opened:
    """Sample i is the i-th number of a file that is opened when the first sample is read, as many data sets do it."""

    def __init__(self, path: Path):
        self.path, self._file = path, -1

    def __len__(self) -> int:
        return self.path.stat().st_size // 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.open()
        os.lseek(self._file, index * 8, os.SEEK_SET)
        time.sleep(0.0002)  # where another process that shares the position would move it
        return {"id": torch.tensor(index), "number": torch.tensor(int.from_bytes(os.read(self._file, 8), "little"))}

    def open(self) -> None:
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDONLY)

    @property
    def is_open(self) -> bool:
        return self._file >= 0


@pytest.fixture
def numbers_file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    np.arange(1000, dtype="<i8").tofile(path)
    return path


class Broken(Numbers):
    def __init__(self, n: int, error: Exception):
        super().__init__(n)
        self._error = error

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise self._error


class Noisy(Numbers):
    """Gives some noise with each sample, and draws that of a batch together."""

    def get_batch(self, indices: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        noise = torch.rand(len(indices), 3) + random.random() + torch.from_numpy(np.random.rand(len(indices), 3))
        return {"id": torch.from_numpy(indices), "noise": noise}


@contextmanager
def loader(dataset: Any, **changes: Any) -> Iterator[BatchLoader]:
    arguments = {"seed": 1, "global_batch_size": 8, "micro_batch_size": 2, **changes}
    batches = BatchLoader(dataset, **arguments)
    try:
        yield batches
    finally:
        batches.close()


def ids(step: list[dict[str, Tensor]]) -> list[int]:
    return torch.cat([batch["id"] for batch in step]).tolist()


def run_steps(n: int, steps: int, **changes: Any) -> list[list[int]]:
    with loader(Numbers(n), **changes) as batches:
        return [ids(next(batches).micro_batches) for _ in range(steps)]


def test_micro_batch_m_of_rank_r_is_where_the_documentation_says() -> None:
    step = run_steps(100, 2, dp_rank=1, dp_size=2, shuffle=False)[1]
    assert step == [10, 11, 14, 15]  # of 8 ... 15: micro batch 0 takes 8 9 | 10 11, micro batch 1 takes 12 13 | 14 15


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_a_state_drops_what_was_read_ahead(workers: int) -> None:
    whole = run_steps(30, 10)
    with loader(Numbers(30), num_workers=workers) as batches:
        next(batches)
        batches.load_state_dict({"samples_consumed": 40})
        assert ids(next(batches).micro_batches) == whole[5]


@pytest.mark.parametrize("opened_before", [False, True])
def test_workers_give_each_sample_its_own_data_from_a_file_that_is_opened_at_the_first_one(
    opened_before: bool, numbers_file: Path
) -> None:
    dataset = Opened(numbers_file)
    if opened_before:  # where it is made, for its length, or for an evaluation of a part of it
        dataset.open()
    with loader(dataset, num_workers=2) as batches:
        example = batches.example()
        assert example["number"].tolist() == example["id"].tolist() == batches.indices(0, 2)
        batches.start()
        assert dataset.is_open == opened_before, "nothing is read by this process before its workers are there"
        for _ in range(60):
            for batch in next(batches).micro_batches:
                assert batch["number"].tolist() == batch["id"].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_get_batch_draws_comes_back_after_a_restart_and_is_new_in_each_batch(workers: int) -> None:
    with loader(Noisy(20)) as batches:
        undisturbed = [batch for _ in range(5) for batch in next(batches).micro_batches]
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(7)  # as after a restart, where a worker's own state is that of its start
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    with loader(Noisy(20), samples_consumed=16, num_workers=workers) as batches:
        resumed = [batch for _ in range(3) for batch in next(batches).micro_batches]
    # The training's own draws are left alone.
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before
    assert [batch["noise"].tolist() for batch in resumed] == [batch["noise"].tolist() for batch in undisturbed[8:]]
    assert len({float(value) for batch in undisturbed for value in batch["noise"].flatten()}) == 5 * 8 * 3


def test_workers_survive_the_signals_of_a_preemption() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    with loader(Numbers(1000), num_workers=2) as batches:
        seen = [ids(next(batches).micro_batches)]
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        for worker in workers:
            assert worker.pid
            os.kill(worker.pid, signal.SIGUSR2)
            os.kill(worker.pid, signal.SIGTERM)
        seen += [ids(next(batches).micro_batches) for _ in range(9)]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before, "the rank's own signals are as they were"
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)] == handlers
        assert all(worker.is_alive() for worker in workers)
        assert multiprocessing.active_children() == workers
    assert seen == run_steps(1000, 10)


def test_close_kills_workers_that_are_stuck() -> None:
    reading = multiprocessing.Semaphore(0)

    class Stuck(Numbers):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            reading.release()
            time.sleep(600)
            return {}

    with loader(Stuck(1000), num_workers=2) as batches:
        batches.start()
        assert all(reading.acquire(timeout=60) for _ in range(2))
        batches.close()
        batches.close()  # again is no harm
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [KeyError("image"), ConfigError("shard 7 is torn", hint="prepare it again")])
def test_an_error_of_the_data_set_reaches_the_caller_and_the_step_does_not_count(
    error: Exception, workers: int
) -> None:
    with loader(Broken(100, error), num_workers=workers) as batches:
        with pytest.raises(type(error), match=r"image|shard 7 is torn") as raised:
            next(batches)
        assert getattr(raised.value, "hint", None) == getattr(error, "hint", None)
        assert batches.samples_consumed == 0
        assert multiprocessing.active_children() == []


class Ragged(Numbers):
    """Rows of as many tokens as their number says."""

    seq_len = 9

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: torch.full((index + 1,), index) for name in ("inputs", "targets")} | {"number": index}


@pytest.mark.parametrize(("fixed_rows", "widths"), [(False, [2, 4, 6, 8]), (True, [9] * 4)])
def test_rows_are_padded_as_the_model_needs_them(fixed_rows: bool, widths: list[int]) -> None:
    with loader(Ragged(8), num_workers=1, shuffle=False, fixed_rows=fixed_rows) as batches:
        step = next(batches)
    assert [batch["inputs"].shape[1] for batch in step.micro_batches] == widths
    assert step.targets == sum(range(1, 9)) and step.rows.tokens == 2 * sum(widths)
    assert step.micro_batches[0]["targets"].tolist() == [
        [length - 1] * length + [-100] * (widths[0] - length) for length in (1, 2)
    ]
    assert step.micro_batches[0]["number"].tolist() == [0, 1]


def test_a_data_set_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        BatchLoader(Numbers(0), seed=0, global_batch_size=1, micro_batch_size=1)


def workers_on(work: Callable[[Any], Any], jobs: Iterable[Any], *, count: int = 1) -> Workers[Any, Any]:
    return Workers(work, iter(jobs), count=count)


class PickyError(SlurmtrainError):
    """Cannot be made again from what it says."""

    def __init__(self, file: str, line: int):
        super().__init__(f"{file}, line {line}")


class Unopened:
    """Cannot be made again where its file is not."""

    def __reduce__(self) -> Any:
        return open, ("/nowhere",)


def test_what_cannot_be_sent_is_an_error_in_its_turn() -> None:
    def work(number: int) -> Any:
        if number == 7:
            return lambda: number
        if number == 15:
            raise PickyError("f", number)
        return Unopened() if number == 23 else torch.tensor(number)

    for first, last, sentence in ((0, 7, "[Pp]ickle"), (8, 15, "PickyError: f, line 15"), (16, 23, "No such file")):
        results = workers_on(work, range(first, 40))
        assert [int(next(results)) for _ in range(first, last)] == list(range(first, last))
        with pytest.raises(Exception, match=sentence):
            next(results)
        results.close()


def test_memory_that_a_data_set_uses_again_is_sent_as_it_was() -> None:
    buffer = np.zeros(1000)

    def work(number: int) -> Any:
        buffer[:] = number
        return number if number % 3 else torch.from_numpy(buffer)

    results = workers_on(work, range(300))
    found = [next(results) for _ in range(300)]
    assert [int(result if i % 3 else result.unique()) for i, result in enumerate(found)] == list(range(300))
    results.close()


class Drawn(Numbers):
    """Every sample draws from all three generators, as augmentations do."""

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
            chain = chained(chain, [sum(lane) for lane in zip(*(share.digest for share in shares), strict=True)])
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
    order = EpochOrder(n, seed=1)
    steps = (sorted(order.at(np.arange(batch * step, batch * (step + 1))).tolist()) for step in range(total))
    assert seen == list(itertools.chain.from_iterable(steps))
    # As many as there were whole epochs, and once more in the one that has begun.
    times = np.bincount(seen, minlength=n)
    assert times.min() == total * batch // n and times.max() == -(-total * batch // n)


def test_another_order_sample_or_data_set_gives_another_hash() -> None:
    plan, longer = [(3, 1, 4, 0)], [(4, 1, 4, 0)]
    assert (
        len({run(50, plan, 4)[0], run(49, plan, 4)[0], run(50, plan, 4, shuffle=False)[0], run(50, longer, 4)[0]}) == 4
    )
    numbers = np.arange(8)
    swapped = numbers[[1, 0, *range(2, 8)]]
    changed = digest(numbers, swapped)
    assert digest(numbers, numbers) != changed == digest(swapped, numbers)  # the same pairs
    assert chained("a", (1, 2)) != chained("b", (1, 2))


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

    def drawn(seed: int, first: int) -> set[tuple[float, ...]]:
        loader = BatchLoader(mixture, seed=seed, global_batch_size=8, micro_batch_size=8, samples_consumed=first)
        return {tuple(row) for row in next(loader).micro_batches[0]["drawn"].tolist()}

    assert drawn(1, 0) == drawn(1, 0) and not drawn(1, 0) & (drawn(1, 8) | drawn(2, 0))


def test_a_worker_that_is_killed_in_the_middle_of_a_message_is_named_with_what_may_help() -> None:
    results = workers_on(lambda number: torch.full((1_000_000,), number), range(100))  # more than fits a pipe
    (worker,) = multiprocessing.active_children()
    threads = Path(f"/proc/{worker.pid}/task")
    wait_until(
        lambda: any("pipe_write" in each.read_text() for each in threads.glob("*/wchan")), "a worker with a full pipe"
    )
    worker.kill()
    with pytest.raises(SlurmtrainError, match=rf"\(pid {worker.pid}\) was killed by SIGKILL") as error:
        [next(results) for _ in range(100)]
    assert "out of memory?" in str(error.value.hint) and error.value.exit_code == 1
    results.close()
    assert multiprocessing.active_children() == []
