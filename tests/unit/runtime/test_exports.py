"""Exports beside training: each folder is that of the checkpoint which the run has, and a failure is told, and that is all."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.format.directory import COMPLETE, MANIFEST, checkpoint_name
from slurmtrain.checkpoint.store import retention
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import exports
from slurmtrain.runtime.exports import Exports, finish_waits_s


class Training:
    """A run whose checkpoints and exports have a text in place of weights.

    Attributes:
        instead: what an export does, in bash, in place of copying that text; "": nothing else.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        self.run, self.instead = RunDir(path), ""
        self.events: list[tuple[Event, int]] = []
        monkeypatch.setattr(exports, "command_of", self._command)
        self.exports = self.begin()

    def begin(self) -> Exports:

        def event(event: Event, **values: Any) -> None:
            self.events.append((event, values["step"]))

        return Exports(self.run, lambda step: step % 4 == 0, None, event, 20.0)

    def _command(self, checkpoint: Path, out: Path, dtype: str | None) -> list[str]:
        copy = f"mkdir -p {out}; cp {checkpoint / MANIFEST} {out}/weights"
        return ["bash", "-c", self.instead or copy]

    def do(self, step: int, text: str) -> None:
        """Do a step again, and wait for its export."""
        self.commit(step, text)
        self.exports.finish()

    def commit(self, step: int, text: str, *, told: bool = True) -> None:
        path = self.run.checkpoints / checkpoint_name(step)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        (path / MANIFEST).write_text(text)
        (path / COMPLETE).touch()
        if told:
            self.exports.committed(step)

    def restart(self) -> None:
        """The next attempt continues from the newest checkpoint."""
        self.exports.close()
        self.exports = self.begin()
        self.exports.finish()

    def folders(self) -> dict[str, str]:
        """The texts in the exports, by folder."""
        return {path.parent.name: path.read_text() for path in self.run.exports.glob("*/weights")}

    def asked(self) -> list[int]:
        return [step for step, _ in retention.held(self.run.checkpoints)]


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    made = Training(tmp_path, monkeypatch)
    yield made
    made.exports.close()


def test_a_step_that_was_rolled_back_and_done_again_is_exported_again_and_once_only(training: Training) -> None:
    training.do(4, "before")
    training.do(4, "again")
    training.restart()
    assert training.events == [(Event.EXPORTED, 4)] * 2 and training.folders() == {"step_0000004": "again"}
    training.commit(4, "a third time")
    training.exports.finish()
    assert training.folders() == {"step_0000004": "a third time"}
    assert training.asked() == []
    training.commit(5, "not due")
    training.restart()
    assert training.folders() == {"step_0000004": "a third time"}


def test_a_checkpoint_whose_attempt_was_killed_before_its_export_was_asked_for_is_exported(training: Training) -> None:
    training.exports.close()
    training.commit(8, "killed", told=False)
    training.restart()
    assert training.folders() == {"step_0000008": "killed"}


def test_an_export_that_a_stop_or_a_preemption_ends_is_made_by_the_next_attempt(training: Training) -> None:
    """SLURM sends SIGTERM to all processes of the job, and the ranks first finish their step."""
    training.instead = f"kill -{signal.SIGTERM.value} $$"
    training.do(4, "preempted")
    training.instead = "exec sleep 600"
    training.exports.committed(4)
    training.exports.close()
    assert training.events == [] and training.asked() == [4]
    training.instead = ""
    training.restart()
    assert training.events == [(Event.EXPORTED, 4)] and training.folders() == {"step_0000004": "preempted"}


def test_training_neither_ends_nor_waits_for_an_export_that_a_storage_prevents(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*words: Any, **values: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as failing:
        failing.setattr(retention, "hold", full)
        training.commit(4, "on a full disk")
    assert "No space left on device" in caplog.text
    training.instead = "echo 'error: the disk is full'; exit 1"
    training.do(4, "on a full disk")
    assert "step 4 was not exported: error: the disk is full" in caplog.text
    training.instead = ""
    training.do(8, "with room again")
    assert training.events == [(Event.EXPORT_FAILED, 4), (Event.EXPORTED, 8)]
    # The last exports are waited for within the time of a collective, in which the other ranks wait.
    assert (finish_waits_s(1800), finish_waits_s(300)) == (600.0, 150.0)
