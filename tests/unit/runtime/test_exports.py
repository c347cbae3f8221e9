"""Exports beside training: each folder is that of the checkpoint which the run has, and a failure is told, and that is all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.format.directory import COMPLETE, MANIFEST, checkpoint_name
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.exports import Exports, finish_waits_s


class Training:
    """A run whose checkpoints and exports have a text in place of weights.

    Attributes:
        exported: the texts that were exported, in their order.
        while_it_exports: called in the midst of an export.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        self.run, self.exported = RunDir(path), list[str]()
        self.events: list[tuple[Event, int]] = []
        self.while_it_exports: Callable[[], None] = lambda: None
        monkeypatch.setattr(Exports, "_run", lambda exports, words: self._run(words))
        self.exports = self.begin()

    def begin(self) -> Exports:
        return Exports(self.run, None, lambda event, **values: self.events.append((event, values["step"])), 20.0)

    def do(self, step: int, text: str) -> None:
        """Do a step again whose checkpoint is to be exported, and wait for that."""
        self.exports.ask(step)
        self.commit(step, text)

    def commit(self, step: int, text: str) -> None:
        path = self.run.checkpoints / checkpoint_name(step)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        (path / MANIFEST).write_text(text)
        (path / COMPLETE).touch()
        self.exports.committed(step)
        self.exports.finish()

    def restart(self, step: int) -> None:
        """The next attempt continues from the checkpoint of this step."""
        self.exports.close()
        self.exports = self.begin()
        self.exports.ask(step, restored=True)
        self.exports.finish()

    def _run(self, words: list[str]) -> tuple[str, int]:
        path, out = Path(words[words.index("checkpoints") + 1]), Path(words[words.index("export") + 1])
        if out.exists() and "--force" not in words:
            return f"error: {out} exists", 2
        text = (path / MANIFEST).read_text()
        out.mkdir(exist_ok=True)
        (out / "weights").write_text(text)
        self.exported.append(text)
        meanwhile, self.while_it_exports = self.while_it_exports, lambda: None
        meanwhile()
        return "", 0

    def folders(self) -> dict[str, str]:
        """The texts in the exports, by folder; a file that asks for one has none."""
        paths = self.run.exports.iterdir()
        return {path.name: (path / "weights").read_text() if path.is_dir() else "" for path in paths}


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    made = Training(tmp_path, monkeypatch)
    yield made
    made.exports.close()


def test_a_step_that_was_rolled_back_and_done_again_is_exported_again_and_once_only(training: Training) -> None:
    training.do(4, "before")
    training.do(4, "again")
    training.restart(4)
    assert training.exported == ["before", "again"] and training.folders() == {"step_0000004": "again"}
    # A stop cuts the step short when it is done again, so that nobody asks for it.
    training.commit(4, "a third time")
    assert training.folders() == {"step_0000004": "a third time"}
    training.exports.ask(4)
    training.exports.close()  # stopped when it is done again, and before it is exported
    training.commit(4, "a fourth time")
    training.restart(4)
    assert training.folders() == {"step_0000004": "a fourth time"}


def test_exports_of_steps_that_were_taken_back_are_not_taken_for_those_of_the_run(training: Training) -> None:
    def roll_back(step: int) -> None:
        shutil.rmtree(training.run.checkpoints / checkpoint_name(step))
        training.exports.rolled_back(step - 4)

    for text in ("before", "again"):
        training.do(4, f"{text} 4")
        training.do(8, f"{text} 8")
        roll_back(8)
    assert training.folders() == {"step_0000004": "again 4", "rolled-back-step_0000008": "again 8"}
    training.while_it_exports = lambda: roll_back(8)
    training.do(8, "while it is exported")
    back = {"rolled-back-step_0000008": "while it is exported", ".asked-8": ""}
    assert training.folders() == {"step_0000004": "again 4", **back}
    training.do(8, "after")
    assert training.folders()["step_0000008"] == "after" and ".asked-8" not in training.folders()


def test_training_neither_ends_nor_waits_for_an_export_that_a_storage_prevents(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*words: Any, **values: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as failing:
        failing.setattr(Path, "touch", full)
        training.exports.ask(3)
    assert "step 3 is not exported" in caplog.text
    training.while_it_exports = full
    training.do(4, "on a full disk")
    assert "step 4 was not exported" in caplog.text and "No space left on device" in caplog.text
    training.do(8, "with room again")
    assert training.events == [(Event.EXPORT_FAILED, 4), (Event.EXPORTED, 8)]
    assert "has not ended" not in caplog.text
    # The last exports are waited for within the time of a collective, in which the other ranks wait.
    assert (finish_waits_s(1800), finish_waits_s(300)) == (600.0, 150.0)
