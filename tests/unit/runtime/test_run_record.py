"""What rank 0 writes of a training, when the disk is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.save.job import SaveResult
from slurmtrain.checkpoint.store import retention
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.evaluation_jobs import EvaluationJobs
from slurmtrain.runtime.jobs.run_record import RunRecord
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.system import records


def test_what_a_full_disk_refuses_is_told_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*words: Any, **values: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run_dir = RunDir(tmp_path)
    run_dir.checkpoints.mkdir()
    monkeypatch.setattr(records, "open_to_append", full)
    monkeypatch.setattr(retention, "hold", full)
    jobs = EvaluationJobs(run_dir)
    record = RunRecord(AttemptContext(run_dir, 2, supervised=True), Timeline(), jobs)
    for event in (Event.UPDATE_SKIPPED, Event.LOSS_SPIKE):
        record.event(event, {"step": 1})
    record.on_ending(SaveResult(tmp_path, 1, 0.0, 0.0, 0))
    jobs.ask(2)
    jobs.ask(3)
    assert caplog.text.count("events of the run") == caplog.text.count("requests for evaluations") == 1
    monkeypatch.undo()
    record.event(Event.LOSS_SPIKE, {"step": 3})
    assert [event["step"] for event in run_dir.events()] == [3] and "can be written again" in caplog.text
