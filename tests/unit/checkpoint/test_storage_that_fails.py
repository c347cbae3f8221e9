"""A storage that fails for a while says nothing about the checkpoints on it: none is set aside for it."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import UnreadableError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.restore.restorer import Restored
from slurmtrain.checkpoint.store.retention import Keep, unwanted
from slurmtrain.cli import main
from slurmtrain.system import patience
from slurmtrain.system.patience import Patience

OUTAGES = [errno.EIO, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ESTALE]


class Outage:
    """The first calls of a function of `os` fail, as far as they are about files of a checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str, number: int, calls: float):
        self.left, self._number = calls, number
        self._real: Callable[..., Any] = getattr(os, function)
        self._lock = threading.Lock()
        monkeypatch.setattr(os, function, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        meant = not isinstance(args[0], (str, Path)) or Path(args[0]).parent.name.startswith("checkpoint_")
        with self._lock:
            fails = meant and self.left > 0
            self.left -= fails
        if fails:
            raise OSError(self._number, os.strerror(self._number))
        return self._real(*args, **options)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With two checkpoints, of the steps 1 and 2."""
    model = nn.Linear(2, 2)
    with closing(Checkpointer(tmp_path)) as checkpointer:
        for step in (1, 2):
            nn.init.constant_(model.weight, step)
            checkpointer.save(step, model=model)
            checkpointer.wait()
    return tmp_path


def restore(directory: Path) -> tuple[Restored, float]:
    model = nn.Linear(2, 2)
    with closing(Checkpointer(directory)) as checkpointer:
        restored = checkpointer.restore(model=model)
    assert restored is not None
    return restored, model.weight[0, 0].item()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoint_*"))


@pytest.mark.parametrize("number", OUTAGES)
@pytest.mark.parametrize("function", ["preadv", "open", "stat"])
def test_a_failure_that_passes_costs_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    outage = Outage(monkeypatch, function, number, calls=2)
    restored, weight = restore(directory)
    assert (restored.step, weight, restored.set_aside, outage.left) == (2, 2.0, (), 0)


@pytest.mark.parametrize("function", ["preadv", "open", "stat"])
def test_an_outage_that_lasts_ends_the_attempt_and_leaves_all_checkpoints_as_they_are(
    directory: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    before = names(directory)
    with monkeypatch.context() as patch:
        patch.setattr(patience, "RESTORE", Patience((0.1,), within_s=0.2))
        Outage(patch, function, errno.EIO, calls=float("inf"))
        with pytest.raises(UnreadableError, match="cannot be read: Input/output error, still after") as caught:
            restore(directory)
        assert caught.value.exit_code == 1  # to be tried again
    assert names(directory) == before
    assert restore(directory)[0].step == 2


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    """torch.set_default_device("cuda") is what many scripts begin with; "meta" stands for a device that has no bytes here."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, other)]
    model(torch.ones(2)).sum().backward()
    optimizers[0].step()
    torch.set_default_device("meta")
    try:
        with closing(Checkpointer(tmp_path)) as checkpointer:
            checkpointer.save(1, model=model, optimizer=optimizers[0]).result()
        with closing(Checkpointer(tmp_path)) as checkpointer:
            assert checkpointer.restore(model=other, optimizer=optimizers[1])
    finally:
        torch.set_default_device(None)
    assert torch.equal(model.weight, other.weight)
    for one, two in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_verify_calls_nothing_damaged_that_it_could_not_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patience, "RESTORE", Patience((0.1,), within_s=0.2))
    Outage(monkeypatch, "preadv", errno.EIO, calls=float("inf"))
    assert main(["checkpoints", str(directory), "verify"]) == 1
    said = capsys.readouterr().out
    assert "DAMAGED" not in said
    assert [line.partition(":")[0] for line in said.splitlines() if "NOT READ" in line] == names(directory)
    assert main(["checkpoints", str(directory), "verify", "--json"]) == 1
    assert [each["sound"] for each in json.loads(capsys.readouterr().out)] == [None, None]


def test_list_says_what_it_could_not_read_and_prune_removes_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patience, "RESTORE", Patience((0.1,), within_s=0.2))
    Outage(monkeypatch, "open", errno.EIO, calls=float("inf"))
    assert main(["checkpoints", str(directory), "list"]) == 0
    said = capsys.readouterr().out
    assert said.count("was not read") == 2 and "damaged" not in said
    assert main(["checkpoints", str(directory), "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["complete"], each["damage"]) for each in listed] == [(None, []), (None, [])]
    assert main(["checkpoints", str(directory), "prune", "--keep-last", "2"]) == 1
    assert "says nothing about the checkpoint" in capsys.readouterr().err
    assert names(directory) == ["checkpoint_0000001", "checkpoint_0000002"]


def test_the_best_stays_when_its_metrics_cannot_be_read_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Keep(last=2, best=1)
    with closing(Checkpointer(tmp_path, keep=keep)) as checkpointer:
        for step, loss in ((1, 0.5), (2, 2.0), (3, 2.0)):
            checkpointer.save(step, model=nn.Linear(2, 2), metrics={"valid_loss": loss}).result()
    with monkeypatch.context() as patch:
        patch.setattr(patience, "RESTORE", Patience((0.1,), within_s=0.2))
        Outage(patch, "open", errno.EIO, calls=float("inf"))
        assert unwanted(tmp_path, committed(tmp_path), keep) == []
    Outage(monkeypatch, "open", errno.EIO, calls=2)
    assert unwanted(tmp_path, committed(tmp_path), keep) == []
    assert names(tmp_path) == ["checkpoint_0000001", "checkpoint_0000002", "checkpoint_0000003"]
