"""What `status` and `preempt` say of a run beside its state: broken numbers, slow ranks, nodes found unfit, how it left."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_slurm import FakeSlurm
from tests.support.interrupted_run import T0
from tests.support.runs import RUN_ID, Job, at_moment, no_waiting, printed, shown

ENDED: dict[str, Any] = {"verdict": "end", "reason": "crash", "sentence": "crashed: x"}


@pytest.fixture
def job(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, project: Path) -> Job:
    no_waiting(monkeypatch)
    return Job.waiting(tmp_path / "runs", slurm, monkeypatch)


def lines(job: Job, *events: dict[str, Any]) -> dict[str, str]:
    """The lines of `status` by their first word, of a run that has ended after these events."""
    if not job.run.attempt_numbers():
        job.attempt(**ENDED)
    text = "".join(json.dumps({"time": T0, **event}) + "\n" for event in events)
    job.run.events_file.write_text(text)
    found = [line.strip().partition(": ") for line in printed("status", RUN_ID).splitlines()]
    return {name: said for name, _, said in found}


def straggler(**changes: Any) -> dict[str, Any]:
    usual = {"event": "straggler", "attempt": 1, "step": 120, "node": "n2", "ranks": [3], "phase": "forward_backward"}
    return {**usual, "ratio": 1.62, "excess_s": 0.2, "step_s": 0.5, **changes}


def test_skips_and_rollbacks_are_one_phrase_and_foreign_events_do_no_harm(job: Job) -> None:
    assert "numbers" not in lines(job, {"event": "checkpoint", "step": 4})
    said = lines(
        job,
        {"event": "update skipped", "step": 6, "skipped": 1},
        {"event": "update skipped", "step": 12, "skipped": 4},
        {"event": "rolled back", "step": 8, "from_step": 14},
    )
    assert said["numbers"] == (
        "4 updates skipped (the last in step 12), went back once (the last time from step 14 to 8)"
    )
    odd = {"event": "update skipped", "skipped": "many"}
    assert lines(job, odd)["numbers"] == "1 update skipped (the last in step None)"


def test_slow_ranks_are_told_with_node_and_part_and_when_they_have_recovered(job: Job) -> None:
    found = straggler()
    said = lines(job, found, straggler(step=400, node="n5", ranks=[8, 9], phase="data", ratio=None))
    assert said["slow ranks"] == (
        "rank 3 on n2 (1.6 times as long for forward_backward, in attempt 1 since step 120); "
        "ranks 8, 9 on n5 (much longer for data, in attempt 1 since step 400)"
    )
    over = straggler(event="straggler over", step=360)
    said = lines(job, found, over)
    assert (
        said["slow ranks"] == "rank 3 on n2 (1.6 times as long for forward_backward, in attempt 1 from step 120 to 360)"
    )
    (slow,) = shown("status", RUN_ID)["slow_ranks"]
    assert (slow["share"], slow["attempt"], slow["until"]) == (0.4, 1, 360)
    # Another attempt's recovery, or another part's, says nothing of this one.
    for other in ({"attempt": 2}, {"phase": "data"}, {"node": "n3"}, {"ranks": [4]}):
        assert lines(job, found, {**over, **other})["slow ranks"].endswith("since step 120)")
    told = lines(job, *(straggler(step=step) for step in range(0, 1000, 10)))["slow ranks"]
    assert told.count("rank 3 on n2") == 3 and told.endswith("since step 990); 97 more before")


# How it left, when it was told to.

PARTITION = "PartitionName=low Default=YES GraceTime=20 PreemptMode=REQUEUE State=UP\n"
STOPPED = "it stopped after step 40, 7.5 s after it was told to stop; "


@pytest.mark.parametrize(
    ("config", "stops", "says"),
    [
        ({"KillWait": "30 sec", "PreemptType": "preempt/partition_prio"}, True, STOPPED + "partition low gives 50 s"),
        ({"KillWait": "30 sec", "PreemptType": "preempt/none"}, True, STOPPED + "SLURM gives 30 s"),
        ({"KillWait": "30 sec"}, False, "it has not stopped in time: SLURM gives 30 s"),
        ({}, True, "resumes by itself"),  # nothing is known, and nothing waited for
    ],
)
def test_preempt_says_how_long_the_run_took_beside_what_a_preemption_would_give(
    config: dict[str, str], stops: bool, says: str, job: Job
) -> None:
    number = job.attempt({"rank-0.log": ""}, host="elsewhere", pid=1)
    job.slurm.add("7", state="RUNNING")
    job.slurm.configure(**config)
    job.slurm.answer("scontrol --all --oneliner show partition", PARTITION)
    asked = time.time()
    at_moment(job.monkeypatch, asked)

    def meanwhile(waited_s: float) -> None:
        if stops and waited_s > 7.0:
            record = {**job.record(number), "ended": asked + 7.5, "last_step": 40}
            job.run.attempt(number).record_file.write_text(json.dumps(record))

    no_waiting(job.monkeypatch, meanwhile)
    assert says in printed("preempt", RUN_ID)
