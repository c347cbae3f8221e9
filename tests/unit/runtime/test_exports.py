"""Exports beside training: what goes wrong with one is told, and that is all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.format.directory import COMPLETE, MANIFEST, checkpoint_name
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import exports
from slurmtrain.runtime.exports import Exports, finish_waits_s


def test_training_neither_ends_nor_waits_for_an_export_that_a_full_disk_prevents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*words: Any, **values: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Exports, "_checkpoint", lambda self, step: tmp_path)
    monkeypatch.setattr(Exports, "_run", lambda self, words: ("no space is left", 1))
    made = Exports(RunDir(tmp_path), None, full, 20.0)
    made.ask(3)
    made.committed(3)
    made.finish()
    assert not made._due and not list((tmp_path / "exports").iterdir())
    assert "step 3 was not exported: no space is left" in caplog.text and "has not ended" not in caplog.text
    monkeypatch.setattr(Path, "touch", full)
    made.ask(4)
    made.close()
    assert "step 4 is not exported" in caplog.text and not made._due


def test_a_storage_that_fails_ends_one_export_and_not_those_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = [errno.ESTALE]

    def export(self: Exports, step: int) -> tuple[str, int, float]:
        if numbers:
            raise OSError(number := numbers.pop(), os.strerror(number))
        return "", 0, 1.0

    def cannot_be_listed(directory: Path) -> list[Path]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    told: list[tuple[Event, int]] = []
    monkeypatch.setattr(Exports, "_export", export)
    made = Exports(RunDir(tmp_path), None, lambda event, **values: told.append((event, values["step"])), 20.0)
    with monkeypatch.context() as failing:
        failing.setattr(exports, "committed", cannot_be_listed)
        made.ask(2, restored=True)  # in the thread that trains
    monkeypatch.setattr(Exports, "_checkpoint", lambda self, step: tmp_path)
    for step in (3, 4):
        made.ask(step)
        made.committed(step)
    made.finish()
    made.close()
    assert told == [(Event.EXPORT_FAILED, 3), (Event.EXPORTED, 4)]
    assert "OSError" in caplog.text and "Stale file handle" in caplog.text and "has not ended" not in caplog.text


def test_the_last_exports_are_waited_for_within_the_time_of_a_collective() -> None:
    assert (finish_waits_s(1800), finish_waits_s(300)) == (600.0, 150.0)


class Training:
    """A run whose checkpoints and exports have a text in place of weights.

    Attributes:
        exported: the texts that were exported, in their order.
        while_it_exports: called in the midst of an export.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        self.run, self.exported = RunDir(path), list[str]()
        self.while_it_exports: Callable[[], None] = lambda: None
        monkeypatch.setattr(Exports, "_run", lambda exports, words: self._run(words))

    def begin(self) -> Exports:
        return Exports(self.run, None, lambda event, **values: None)

    def commit(self, step: int, text: str) -> None:
        path = self.run.checkpoints / checkpoint_name(step)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        (path / MANIFEST).write_text(text)
        (path / COMPLETE).touch()

    def _run(self, words: list[str]) -> tuple[str, int]:
        path, out = Path(words[words.index("checkpoints") + 1]), Path(words[words.index("export") + 1])
        if out.exists() and "--force" not in words:
            return f"error: {out} exists", 2
        out.mkdir(exist_ok=True)
        (out / "weights").write_text((path / MANIFEST).read_text())
        self.exported.append((path / MANIFEST).read_text())
        self.while_it_exports()
        return "", 0

    def folder(self, step: int) -> str:
        return (self.run.exports / f"step_{step:07d}" / "weights").read_text()

    def asked(self) -> list[str]:
        return [path.name for path in self.run.exports.glob(f"{exports.ASKED}*")]


def test_a_step_that_was_rolled_back_and_done_again_is_exported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch)
    made = training.begin()
    for text in ("before", "after it was rolled back"):
        made.ask(4)
        training.commit(4, text)
        made.committed(4)
        made.finish()
    assert training.folder(4) == "after it was rolled back" and training.asked() == []
    made.close()

    made = training.begin()  # the next attempt continues from that checkpoint
    made.ask(4, restored=True)
    made.finish()
    assert training.exported == ["before", "after it was rolled back"], "it is exported once only"
    # A stop cuts the step short when it is done again, so that nobody asks for it.
    training.commit(4, "done a third time")
    made.committed(4)
    made.finish()
    made.close()
    assert training.folder(4) == "done a third time"


def test_a_step_that_is_rolled_back_while_it_is_exported_is_exported_again_when_it_was_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch)
    made = training.begin()

    def roll_back() -> None:
        training.while_it_exports = lambda: None
        shutil.rmtree(training.run.checkpoints / checkpoint_name(4))

    training.while_it_exports = roll_back
    made.ask(4)
    training.commit(4, "before")
    made.committed(4)
    made.finish()
    assert training.asked() == [f"{exports.ASKED}4"]
    made.ask(4)
    training.commit(4, "after")
    made.committed(4)
    made.finish()
    made.close()
    assert training.folder(4) == "after" and training.asked() == []


def test_exports_of_steps_that_were_taken_back_are_not_taken_for_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch)
    made = training.begin()
    for text in ("before", "after"):
        for step in (4, 8):
            made.ask(step)
            training.commit(step, f"{text} {step}")
            made.committed(step)
            made.finish()
        made.rolled_back(4)
    assert training.folder(4) == "after 4" and not (training.run.exports / "step_0000008").exists()
    assert (training.run.exports / "rolled-back-step_0000008" / "weights").read_text() == "after 8"

    def roll_back() -> None:
        shutil.rmtree(training.run.checkpoints / checkpoint_name(8))
        made.rolled_back(4)

    training.while_it_exports = roll_back
    made.ask(8)
    training.commit(8, "while it is exported")
    made.committed(8)
    made.finish()
    made.close()
    assert {path.name for path in training.run.exports.glob("*step*")} == {"step_0000004", "rolled-back-step_0000008"}


def test_an_export_of_a_step_that_was_done_again_is_made_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.commit(4, "before")
    made = training.begin()
    made.ask(4, restored=True)
    made.finish()
    made.ask(4)
    training.commit(4, "after")
    made.close()  # stopped at this moment
    made = training.begin()
    made.ask(4, restored=True)
    made.finish()
    made.close()
    assert training.folder(4) == "after"
