"""What rank 0 writes when a rank of a training is slow: an event, and a record against its node only if that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.jobs.run_record import RunRecord
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.slurm.node_ledger import NodeEvent, ledger_file, read_ledger

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


def test_a_slow_rank_is_an_event_of_its_attempt_and_no_record_against_its_node(tmp_path: Path) -> None:
    (event,) = tell(tmp_path / "run", blames=False).events()
    assert (event["event"], event["attempt"], event["node"], event["ranks"]) == ("straggler", 2, "n3", [3])
    assert read_ledger(ledger_file("demo")) == []


def test_if_asked_its_node_is_put_on_record(tmp_path: Path) -> None:
    run_dir = tell(tmp_path / "run", blames=True)
    tell(tmp_path / "run", blames=True, ratio=None, node="n4")
    first, second = read_ledger(ledger_file("demo"))
    assert (first.node, first.event, first.run, first.attempt) == ("n3", NodeEvent.SLOW, run_dir.id, 2)
    assert first.said == "took 1.6 times as long as other nodes for forward_backward"
    assert second.said == "took much longer than other nodes for forward_backward"


def test_without_a_ledger_or_outside_of_slurm_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    assert len(tell(tmp_path / "run", blames=True).events()) == 1
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    assert len(tell(tmp_path / "run", blames=True).events()) == 2
