"""Saves in the background: one after another, of the state at the call, and no failure goes unnoticed."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError, NonFiniteError
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.save import staging
from slurmtrain.checkpoint.save.job import PendingSave, SaveResult
from slurmtrain.checkpoint.save.plan import make_plan
from slurmtrain.checkpoint.save.staging import Staging, fingerprint
from slurmtrain.checkpoint.state import FlatState
from slurmtrain.checkpoint.store.commit import Incarnation
from slurmtrain.checkpoint.store.retention import Keep, hold
from slurmtrain.checkpoint.tensors import bytes_are_finite
from slurmtrain.errors import EXIT_CONFIG
from tests.support.local_runs import assert_same_tensors

PATIENCE_S = 60.0  # for what must happen
GRACE_S = 0.3  # for what must not


class Training:
    """A small training state and its checkpointer, both of which end with the test."""

    def __init__(self, directory: Path, **options: Any):
        self.directory = directory
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.model = nn.Sequential(self.linear, nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.endings: list[SaveResult | CheckpointError] = []
        self.checkpointer = Checkpointer(
            directory, **{"on_ending": self.endings.append, "keep": Keep(last=9), **options}
        )

    def forward_backward(self) -> None:
        self.model(torch.randn(4, 8)).square().sum().backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int, **options: Any) -> PendingSave:
        return self.checkpointer.save(step, model=self.model, optimizer=self.optimizer, **options)

    def values(self) -> dict[str, torch.Tensor]:
        values = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for field, value in self.optimizer.state[parameter].items():
                values[f"{name}.{field}"] = value.clone()
        return values

    def restored(self, path: Path | None = None) -> dict[str, torch.Tensor]:
        """The values in a checkpoint, through other objects."""
        other = Training(self.directory)
        assert other.checkpointer.restore(path=path, model=other.model, optimizer=other.optimizer) is not None
        other.checkpointer.close()
        return other.values()

    @property
    def steps(self) -> list[int]:
        return [step_of(path) for path in committed(self.directory)]


Make = Callable[..., Training]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Make]:
    made: list[Training] = []

    def make(**options: Any) -> Training:
        made.append(Training(tmp_path / "checkpoints", **options))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(CheckpointError):
            one.checkpointer.close(2)


class Gate:
    """Holds up the writing thread until it is opened."""

    def __init__(self, real: Callable[..., Any]):
        self._real = real
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.reached.set()
        assert self._open.wait(PATIENCE_S)
        return self._real(*args, **options)

    def open(self, after_s: float = 0.0) -> None:
        threading.Timer(after_s, self._open.set).start() if after_s else self._open.set()


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Before the first byte of each block is written."""
    gate = Gate(os.pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    yield gate
    gate.open()


class FullDisk:
    """Writing fails while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.full = True
        self._real: Callable[..., int] = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, *args: Any) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._real(*args)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


# --------------------------------------------------------------------------------------------------------------- one by one


def test_a_save_returns_before_it_is_written(training: Make, writing: Gate) -> None:
    run = training()
    saving = run.save(3)
    assert writing.reached.wait(PATIENCE_S)
    assert not saving.done() and run.steps == []
    assert run.checkpointer.last_step == 3
    with pytest.raises(CheckpointError, match=r"the save of step 3 is not committed after 0\.1 s"):
        saving.result(0.1)
    with pytest.raises(CheckpointError, match="not committed after"):
        run.checkpointer.wait(0.1)
    writing.open()
    saved = run.checkpointer.wait(PATIENCE_S)
    assert saved is not None and saved == saving.result()
    assert saved.path == run.directory / "checkpoint_0000003" and saved.step == 3 and run.steps == [3]
    assert saved.size == sum(file.stat().st_size for file in saved.path.iterdir()) - sum(
        (saved.path / name).stat().st_size for name in ("manifest.json", "COMPLETE")
    )
    assert saved.seconds > 0.2 and saving.stall_s < saved.seconds
    assert run.checkpointer.last_step == 3
    assert run.checkpointer.wait() is None, "there is none in flight"


def test_one_save_is_in_flight_at_a_time(training: Make, writing: Gate) -> None:
    run = training()
    first = run.save(1)
    second: list[PendingSave] = []
    thread = threading.Thread(target=lambda: second.append(run.save(2)))
    thread.start()
    thread.join(GRACE_S)
    assert thread.is_alive() and not first.done()
    opened = time.monotonic()
    writing.open()
    thread.join(PATIENCE_S)
    assert first.done() and second[0].result(PATIENCE_S).step == 2
    assert second[0].stall_s >= opened - second[0].begun, "the wait for the one before holds up, too"
    assert run.steps == [1, 2]


# ---------------------------------------------------------------------------------------------------------------- failures


def test_a_failure_is_told_takes_no_space_and_the_next_save_tries_again(
    training: Make, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    run = training()
    disk.full = False
    run.save(1).result(PATIENCE_S)
    disk.full = True
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        run.save(2).result(PATIENCE_S)
    assert "free some space" in (caught.value.hint or "")
    run.save(3)
    with pytest.raises(CheckpointError, match="No space left"):
        run.checkpointer.wait(PATIENCE_S)
    assert run.checkpointer.wait() is None, "it was told"
    assert run.checkpointer.last_step == 1
    disk.full = False
    assert run.save(4).result(PATIENCE_S).step == 4
    assert len(caplog.messages) == 2 and "No space left" in caplog.messages[0]
    assert caplog.messages[0].startswith("the save of step 2 failed, older checkpoints are as they were: ")
    disk.full = True
    run.save(5)
    with pytest.raises(CheckpointError, match="No space left"):
        run.checkpointer.close()
    left = sorted(path.name for path in run.directory.iterdir() if path.name.startswith("checkpoint"))
    assert left == ["checkpoint_0000001", "checkpoint_0000004"]
    told = [ending.step if isinstance(ending, SaveResult) else type(ending) for ending in run.endings]
    assert told == [1, CheckpointError, CheckpointError, 4, CheckpointError]


@pytest.mark.parametrize(
    ("most", "fails", "ends"),
    [
        pytest.param(1, [True], True, id="one"),
        pytest.param(3, [True] * 3, True, id="three in a row"),
        pytest.param(2, [True, False, True, False, True, True], True, id="a success begins the count anew"),
        pytest.param(0, [True] * 7, False, id="no number of them is too many"),
    ],
)
def test_so_many_failures_in_a_row_end_it(
    training: Make, disk: FullDisk, most: int, fails: list[bool], ends: bool
) -> None:
    run = training(max_failures=most)
    for step, disk.full in enumerate(fails, start=1):
        assert run.save(step).wait(PATIENCE_S)
    disk.full = False
    written = [step for step, full in enumerate(fails, start=1) if not full]
    if ends:
        sentence = f"^{most} saves in a row have failed, the last of step {len(fails)}: .*No space"
        with pytest.raises(CheckpointError, match=sentence):
            run.save(len(fails) + 1)
    else:
        written.append(run.save(len(fails) + 1).result(PATIENCE_S).step)
    assert run.steps == written


def test_memory_and_space_are_looked_for_before_the_first_step(training: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = training(), nn.Linear(1000, 1000)
    objects: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    monkeypatch.setattr(staging, "available_memory", lambda: 8_000_000)  # enough without what the optimiser will have
    with pytest.raises(CheckpointError, match=r"needs 0\.01 GB of host memory"):
        run.checkpointer.restore(**objects)
    monkeypatch.setattr(staging, "available_memory", lambda: None)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=4_000_000, f_frsize=1))
    with pytest.raises(CheckpointError, match=r"4\.0 MB left, and a checkpoint of 12\.0 MB wants 1\.2 times its size"):
        run.checkpointer.restore(**objects)
    with pytest.raises(CheckpointError, match=r"a checkpoint of 4\.0 MB wants"):
        run.checkpointer.save(1, **objects).result(PATIENCE_S)
    assert not list(run.directory.glob("checkpoint_*"))


# ------------------------------------------------------------------------------------------------------ discard and close


def test_a_discarded_save_is_neither_there_nor_a_failure(
    training: Make, writing: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training(max_failures=2)
    saving = run.save(1)
    assert writing.reached.wait(PATIENCE_S)
    writing.open(after_s=0.2)
    run.checkpointer.discard()
    assert saving.done() and run.steps == []
    with pytest.raises(CheckpointError, match="given up"):
        saving.result()
    with monkeypatch.context() as patch:
        FullDisk(patch)
        assert run.save(2).wait(PATIENCE_S)
    assert run.save(3).result(PATIENCE_S).step == 3, "one failure in a row, not two"
    assert run.steps == [3]


def test_closing_waits_for_the_commit_and_nothing_is_saved_or_discarded_after_it(training: Make, writing: Gate) -> None:
    run = training()
    run.checkpointer.discard()  # nothing is there
    run.save(1)
    writing.open(after_s=0.2)
    run.checkpointer.close()
    assert run.steps == [1]
    run.checkpointer.close()  # twice is no harm
    run.checkpointer.discard()
    with pytest.raises(CheckpointError, match="closed"):
        run.save(2).result(PATIENCE_S)
    assert run.steps == [1] and run.checkpointer.last_step == 1


def test_closing_with_little_time_gives_it_up(training: Make, writing: Gate) -> None:
    run = training()
    saving = run.save(1)
    assert writing.reached.wait(PATIENCE_S)
    begun = time.monotonic()
    run.checkpointer.close(grace_s=0.2)
    assert time.monotonic() - begun < PATIENCE_S / 2
    writing.open()
    assert saving.wait(PATIENCE_S) and run.steps == []


def test_a_checkpointer_that_a_script_drops_lives_until_it_is_closed(tmp_path: Path, writing: Gate) -> None:
    incarnation = Incarnation(1, "the only one")
    checkpointer = Checkpointer(tmp_path, incarnation=incarnation)
    dropped = weakref.ref(checkpointer)
    checkpointer.save(1, model=nn.Linear(2, 2))
    del checkpointer
    gc.collect()
    with pytest.raises(CheckpointError, match="already has a Checkpointer in this process"):
        Checkpointer(tmp_path, incarnation=incarnation)
    writing.open()
    still = dropped()
    assert still is not None, "the end of the process has nothing to close"
    still.close()
    assert [step_of(path) for path in committed(tmp_path)] == [1]


# ------------------------------------------------------------------------------------------------- the state at the call


def test_what_comes_right_after_a_save_does_not_leak_into_it(training: Make, writing: Gate) -> None:
    """Neither a step nor a change by hand: not one through `.data`, which no counter of torch's shows."""
    run = training()
    run.step()
    averaged = nn.Linear(4, 4)
    expected, average = run.values(), averaged.weight.detach().clone()
    saving = run.save(1, averaged=averaged)
    run.linear.weight.data.mul_(2)
    averaged.weight.data.mul_(2)
    run.step()
    for state in run.optimizer.state.values():
        state["exp_avg"].data.mul_(2)
    writing.open()
    saving.result(PATIENCE_S)
    assert_same_tensors(run.restored(), expected)
    other = nn.Linear(4, 4)
    Checkpointer(run.directory).restore(averaged=other)
    assert torch.equal(other.weight, average)


def test_a_copy_that_is_not_what_was_to_be_saved_fails_the_save() -> None:
    """As of a parameter on a GPU that is changed by hand while its copy is still on the way."""
    for changed in (False, True):
        tensors = {"model.weight": torch.arange(12.0).reshape(3, 4)}
        plan = make_plan(FlatState(tensors), RankGroup(None), None)
        staging = Staging()
        image = staging.stage(plan, tensors, b"{}", guarded=(), optimizers=())
        (piece,) = plan.pieces
        copy = torch.frombuffer(
            image.data[plan.data_start + piece.begin : plan.data_start + piece.end], dtype=piece.dtype
        )
        image.copies, image.expected = [(piece.name, copy)], torch.stack([fingerprint(tensors["model.weight"])])
        if not changed:
            image.finish()
            continue
        copy[5] += 1
        with pytest.raises(CheckpointError, match=r"model\.weight was changed while it was copied") as caught:
            image.finish()
        assert "wait_staged()" in (caught.value.hint or "")


def test_memory_to_which_a_gpu_may_still_copy_is_never_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def register(address: int, size: int, flags: int) -> int:
        locked.append(address)
        return 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    for name, empty in (("_locked", set()), ("_unused", []), ("_written_to", [])):
        monkeypatch.setattr(staging, name, empty)
    first, second = Staging(), Staging()
    image = first.stage(make_plan(FlatState(), RankGroup(None), None), {}, b"{}", guarded=(), optimizers=())
    image.event = SimpleNamespace(query=lambda: False)  # type: ignore[assignment]
    first.release()
    second.prepare(1)
    assert len(locked) == 2


def test_restoring_during_a_save_harms_neither(training: Make, writing: Gate) -> None:
    """Both use one buffer."""
    run = training()
    writing.open()
    first = run.values()
    run.save(1).result(PATIENCE_S)
    run.step()
    second = run.values()
    writing._open.clear()
    saving = run.save(2)
    writing.open(after_s=GRACE_S)
    restored = run.checkpointer.restore(model=run.model, optimizer=run.optimizer)
    saving.result(PATIENCE_S)
    assert restored is not None and restored.step in (1, 2)
    assert_same_tensors(run.restored(), second)
    if restored.step == 2:
        assert_same_tensors(run.values(), second)
    else:
        assert_same_tensors({name: run.values()[name] for name in first}, first)


# ---------------------------------------------------------------------------------------------------------- what is handed in


def test_metrics_and_config_are_in_the_manifest_and_numbers_may_be_those_of_torch_and_numpy(
    training: Make,
) -> None:
    run = training(config={"width": 8}, run_id="run")
    metrics = {"valid_loss": torch.tensor(0.5), "accuracy": 0.25}
    saved = run.save(np.int64(5), metrics=metrics).result(PATIENCE_S)  # type: ignore[arg-type]
    manifest = read_manifest(saved.path)
    assert manifest.metrics == {"valid_loss": 0.5, "accuracy": 0.25}
    assert (manifest.step, manifest.config, manifest.run_id) == (5, {"width": 8}, "run")


def test_who_is_told_has_recorded_the_save_before_anybody_may_leave_because_of_it(
    training: Make,
) -> None:
    committed_now, may_record, recorded = threading.Event(), threading.Event(), list[Any]()

    def on_ending(ending: Any) -> None:
        committed_now.set()
        may_record.wait(PATIENCE_S)
        recorded.append(ending)
        raise OSError(28, "No space left on device")

    run = training(on_ending=on_ending)
    pending = run.save(1)
    assert committed_now.wait(PATIENCE_S) and not pending.done()
    may_record.set()
    saved = pending.result(PATIENCE_S)
    assert recorded == [saved]
    assert run.save(2).result(PATIENCE_S).step == 2, "an error of who is told ends nothing"


def test_a_checkpoint_that_is_held_for_somebody_stays(training: Make) -> None:
    made = training(keep=Keep(last=2))
    made.save(1).wait()
    hold(made.directory, 1, "evaluation")
    for step in (2, 3, 4):
        made.save(step).wait()
    made.checkpointer.close()  # which finishes cleaning up, too
    assert made.steps == [1, 3, 4]


def test_a_save_after_a_step_back_stays_beside_those_of_later_steps(training: Make) -> None:
    made = training(keep=Keep(last=2))
    for step in (10, 20, 5):
        made.save(step).wait()
    made.checkpointer.close()
    assert made.steps == [5, 10, 20]


def test_a_checkpoint_of_another_version_is_refused_and_stays_where_it_is(training: Make) -> None:
    run = training()
    path = run.save(1).result(PATIENCE_S).path
    run.checkpointer.close()
    values = json.loads((path / "manifest.json").read_text())
    text = json.dumps({**values, "format": 99})
    (path / "manifest.json").write_text(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(CheckpointError, match="has format 99, expected 4"):
        run.restored()
    assert path.is_dir()


@pytest.mark.parametrize("step", [-1, 2.5, None, "3"])
def test_a_step_that_no_reader_would_find_is_refused(training: Make, step: Any) -> None:
    run = training()
    with pytest.raises(CheckpointError, match="is not a number of optimiser steps"):
        run.save(step)
    assert run.save(1).result(PATIENCE_S).step == 1


def test_weights_that_are_no_numbers_replace_no_sound_checkpoint_and_end_the_run(
    training: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run = training(keep=Keep(last=2))
    for step in (1, 2, 3):
        run.save(step).result(PATIENCE_S)
    with torch.no_grad():
        run.linear.weight[3, 5] = math.nan
    for step in (4, 5, 6):
        run.save(step)
    with pytest.raises(
        NonFiniteError, match=r"^3 saves in a row have failed, .* model\.0\.weight is not finite"
    ) as caught:
        run.save(7)
    assert caught.value.exit_code == EXIT_CONFIG
    assert run.steps == [2, 3]
    assert (
        "the save of step 4 failed, older checkpoints are as they were: model.0.weight is not finite"
        in caplog.messages[0]
    )


def test_what_is_not_trained_may_be_infinite_and_what_is_and_its_moments_may_not(training: Make) -> None:
    run = training()
    run.step()
    run.model.register_buffer("mask", torch.full((4, 4), -math.inf))
    run.model.register_parameter("frozen", nn.Parameter(torch.tensor([math.inf]), requires_grad=False))
    run.save(1).result(PATIENCE_S)
    moment = run.optimizer.state[run.linear.weight]["exp_avg"]
    moment[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"optimizer\.state\.model\.0\.weight\.exp_avg is not finite after step 2"):
        run.save(2).result(PATIENCE_S)
    moment[0, 0] = 0.0
    run.model.bound = nn.Parameter(torch.tensor([math.inf]))
    with pytest.raises(NonFiniteError, match="bound is not finite"):
        run.save(3).result(PATIENCE_S)
    assert run.steps == [1]


def test_a_loop_of_ones_own_can_go_back_and_forget_what_came_after(training: Make) -> None:
    run = training()
    for step in (1, 2, 3):
        with torch.no_grad():
            run.linear.bias.fill_(step)
        run.save(step).result(PATIENCE_S)
    restored = run.checkpointer.restore(at_most=2, model=run.model, optimizer=run.optimizer)
    assert restored is not None and restored.step == 2 and run.linear.bias.unique().tolist() == [2.0]
    run.checkpointer.remove_newer(2)
    assert run.steps == [1, 2] and run.checkpointer.last_step == 2
    run.save(3).result(PATIENCE_S)
    assert run.steps == [1, 2, 3]
    assert run.checkpointer.restore(at_most=0, model=run.model, optimizer=run.optimizer) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_any_element_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    tensor = torch.randn(300_000).to(dtype)
    tensor[5] = torch.finfo(dtype).max
    tensor[6] = torch.finfo(dtype).smallest_normal / 2
    assert bytes_are_finite(tensor.view(torch.uint8).numpy().data, dtype)
    for place in (0, 131_072, 299_999):
        for bad in (math.nan, math.inf, -math.inf):
            other = tensor.clone()
            other[place] = bad
            assert not bytes_are_finite(other.view(torch.uint8).numpy().data, dtype)
    assert bytes_are_finite(memoryview(b""), dtype)
