"""Runs that go on in further jobs: what sbatch gets, and who waits for whom. How a job hands over is in test_job.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.requests import RunAction, write_request
from slurmtrain.runs.run_dir import RunDir
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import add_attempt, judged, printed, refused, started, submitted_run

Make = Callable[..., RunDir]
Out = pytest.CaptureFixture[str]
CHAIN = ("101", "102", "103")


@pytest.fixture
def make(project: Path, slurm: FakeSlurm) -> Make:
    return partial(submitted_run, project, "cluster=a100x4")


def stopped(run: RunDir, verdict: str, job_id: str = "100", **fields: Any) -> Attempt:
    values = {"ended": time.time(), "reason": "preempted", "sentence": "preempted", **fields}
    return add_attempt(run, job_id=job_id, verdict=verdict, **values)


def chained(make: Make, slurm: FakeSlurm, *states: str) -> RunDir:
    """A chain of three jobs, in these states."""
    run = make("requeue=chain", job_ids=CHAIN)
    run.update_info(chain=list(CHAIN), chain_after=0)
    for job_id, state in zip(CHAIN, states, strict=False):
        slurm.add(job_id, state=state, reason="Dependency")
    return run


def status(run: RunDir, capsys: Out) -> str:
    capsys.readouterr()
    assert main(["status", run.id]) == 0
    return " ".join(capsys.readouterr().out.split())


# requeue.mode=chain.


def test_a_chain_is_submitted_at_once_and_each_job_waits_for_all_before_it(project: Path, slurm: FakeSlurm) -> None:
    assert "as job 101, followed by 102, 103" in printed(
        "+cluster=a100x4", "requeue=chain", "requeue.chain_length=3", "job.singleton=true", "submit"
    )
    (run,) = [RunDir(path) for path in project.glob("runs/train/*")]
    assert [(job["comment"], job["dependency"]) for job in slurm.jobs] == [
        (f"slurmtrain:{run.id}:s0", "singleton"),
        (f"slurmtrain:{run.id}:s1", "afterany:101,singleton"),
        (f"slurmtrain:{run.id}:s2", "afterany:101:102,singleton"),
    ]
    assert (run.info()["job_ids"], run.info()["chain"]) == (["101", "102", "103"], ["101", "102", "103"])
    assert len(set(slurm.submitted)) == 1 and "no-requeue" in slurm.jobs[0]["options"]


def test_a_chain_that_cannot_be_completed_is_taken_back(project: Path, slurm: FakeSlurm) -> None:
    slurm.fail("sbatch", "Batch job submission failed: Invalid account", after=2)
    assert main(["+cluster=a100x4", "requeue=chain", "submit"]) == 1
    assert slurm.calls("scancel") == ["scancel 102 101"] and not (project / "runs").exists()


def test_a_chain_between_two_jobs_says_which_one_goes_on(make: Make, slurm: FakeSlurm, capsys: Out) -> None:
    run = chained(make, slurm, "RUNNING", "PENDING", "PENDING")
    stopped(run, "next", job_id="101", sentence="preempted; the next job of the chain continues")
    assert "stopping" in status(run, capsys)
    slurm.change("101", state="FAILED")
    slurm.change("102", reason="Priority")
    said = "waiting to start again as job 102, 2 of 3 of its chain: jobs of higher priority come first (Priority)"
    assert said in status(run, capsys)
    slurm.change("102", state="RUNNING", reason="None")
    assert "starting" in status(run, capsys)
    add_attempt(run, job_id="102")
    assert "running" in status(run, capsys)
    assert main(["cancel", run.id]) == 0
    assert slurm.calls("scancel") == ["scancel 103 102"]


def test_only_what_ended_in_this_chain_or_finished_ends_a_link_at_its_start(
    make: Make, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = chained(make, slurm)
    monkeypatch.setenv("SLURM_JOB_ID", "103")
    assert started(run) == "go"
    stopped(run, "next", job_id="101")
    assert started(run) == "go"
    stopped(run, "end", job_id="102")
    assert started(run) == "end"
    run.update_info(chain=["201", "202"], chain_after=2, job_ids=[*CHAIN, "201", "202"])  # resumed
    assert started(run) == "end"  # of the chain before
    monkeypatch.setenv("SLURM_JOB_ID", "202")
    assert started(run) == "go"
    (run.attempt(run.new_attempt()).path / "setup-failed").write_text("set-up failed")
    assert started(run) == "end"
    stopped(run, "next", job_id="201")
    assert started(run) == "go"
    write_request(run, RunAction.CANCEL)  # when no rank was at work
    assert started(run) == "end"
    stopped(run, "done", job_id="201")
    assert started(run) == "done"


# submit --after, job.singleton.


# Preempted, and ended without a restart: it came to its end within the grace time.
@pytest.mark.parametrize(("restarts", "preempted", "freed"), [(1, False, True), (0, True, True), (0, False, False)])
def test_who_waits_for_a_run_is_freed_when_it_has_finished_in_a_job_that_slurm_will_not_let_end_as_a_success(
    make: Make, slurm: FakeSlurm, restarts: int, preempted: bool, freed: bool
) -> None:
    run = make("requeue.mode=requeue", job_ids=("7",))
    add_attempt(run, job_id="7", said="finished", restart_count=restarts)
    if preempted:
        at = time.strftime("%Y-%m-%dT%H:%M:%S")
        said = f"[{at}.1] error: *** JOB 7 ON n0 CANCELLED AT {at} DUE TO PREEMPTION ***"
        (run.path / "slurm-7.log").write_text(said)
    slurm.add("55", dependency="afterok:7(unfulfilled)")
    slurm.configure(SLURM_VERSION="25.05.9")
    assert judged(run, 1, 0) == "done"
    assert slurm.job("55")["dependency"] == ("" if freed else "afterok:7(unfulfilled)")


def test_submit_waits_for_runs_that_are_in_the_queue_and_not_for_one_that_has_finished(
    make: Make, slurm: FakeSlurm
) -> None:
    running, finished, task = make(job_ids=("7",)), make(job_ids=("8",)), make(job_ids=("9_1",))
    stopped(finished, "done", job_id="8")
    slurm.add("7", state="RUNNING")
    slurm.add("9", array="0-1", tasks={"1": {"state": "PENDING"}})
    words = ["+cluster=a100x4", "job.singleton=true", "submit", "--after", f"{running.id},{finished.id},{task.id}"]
    assert "#SBATCH --dependency=afterok:7,afterok:9_1,singleton\n" in printed(*words, "--dry-run")
    assert main(words) == 0
    assert slurm.jobs[-1]["dependency"] == "afterok:7,afterok:9_1,singleton"
    assert main(["+cluster=a100x4", "submit", "--after", finished.id]) == 0
    assert slurm.jobs[-1]["dependency"] == ""


def test_of_a_chain_the_job_that_finishes_the_run_is_waited_for(make: Make, slurm: FakeSlurm) -> None:
    run = chained(make, slurm, "PENDING", "PENDING", "PENDING")
    words = ["+cluster=a100x4", "submit", "--after", run.id]
    assert "#SBATCH --dependency='afterok:101?afterok:102?afterok:103'\n" in printed(*words, "--dry-run")
    assert "cannot wait for one of several" in refused("+cluster.sbatch.dependency='afterok:7'", *words)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("failed", "will not finish: failed"),
        ("prepared", "has not been submitted yet"),
        ("elsewhere", "is on another cluster"),
    ],
)
def test_what_cannot_be_waited_for_is_refused_and_nothing_is_left(
    make: Make, slurm: FakeSlurm, case: str, words: str, project: Path
) -> None:
    run = make(job_ids=() if case == "prepared" else ("7",))
    if case == "failed":
        stopped(run, "end", job_id="7", reason="crash", sentence="crashed: x")
    elif case == "elsewhere":
        (project / "slurm.conf").touch()
        run.update_info(slurm_conf=str(project / "slurm.conf"))
        slurm.add("7", state="RUNNING")
    before = len(slurm.jobs)
    error = refused("+cluster=a100x4", "submit", "--after", run.id)
    assert words in error and "hint: " in error
    assert len(slurm.jobs) == before and len(list(project.glob("runs/train/*"))) == 1
