"""What rank 0 writes when a rank of a training is slow: an event, and a record against its node only if that is asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.save.pending_save import SaveResult
from slurmtrain.checkpoint.store import retention
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.evaluation_jobs import EvaluationJobs
from slurmtrain.runtime.jobs.run_record import RunRecord
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.slurm.node_ledger import NodeEvent, ledger_file, read_ledger
from slurmtrain.system import records

SLOW = {
    "step": 120,
    "node": "n3",
    "ranks": [3],
    "phase": "forward_backward",
    "ratio": 1.62,
    "excess_s": 0.2,
    "step_s": 0.5,
}


@pytest.fixture(autouse=True)
def in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "demo")


def tell(run_path: Path, *, blames: bool, **changes: Any) -> RunDir:
    run_path.mkdir(exist_ok=True)
    run_dir = RunDir(run_path)
    record = RunRecord(AttemptContext(run_dir, 2, supervised=True), Timeline(), blames_stragglers=blames)
    record.event(Event.STRAGGLER, {**SLOW, **changes})
    return run_dir


def test_a_slow_rank_is_an_event_and_if_asked_a_record_against_its_node(tmp_path: Path) -> None:
    (event,) = tell(tmp_path / "run", blames=False).events()
    assert (event["event"], event["attempt"], event["node"], event["ranks"]) == ("straggler", 2, "n3", [3])
    assert read_ledger(ledger_file("demo")) == []
    run_dir = tell(tmp_path / "run", blames=True)
    tell(tmp_path / "run", blames=True, ratio=None, node="n4")
    first, second = read_ledger(ledger_file("demo"))
    assert (first.node, first.event, first.run, first.attempt) == ("n3", NodeEvent.SLOW, run_dir.id, 2)
    assert first.said == "took 1.6 times as long as other nodes for forward_backward"
    assert second.said == "took much longer than other nodes for forward_backward"


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
