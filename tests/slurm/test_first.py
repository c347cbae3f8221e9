"""cluster=first on a real SLURM: one run in two queues is trained once, whichever job starts first, and whoever dies."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmtrain.runs.choices import choices_of, claim_of, take
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.sandbox import SandboxSpec
from tests.slurm.conftest import _cluster
from tests.slurm.project import SMALL, Project, Run, events, make_project
from tests.support.slurm_cluster import Cluster

ONE_RANK = (
    "nodes: 1\ntasks_per_node: 1\ncpus_per_task: 1\ntime_limit_min: 10\nsignal_lead_s: 60\nnetwork_interface: lo\n"
)
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED"}


@pytest.fixture
def project(tmp_path: Path, sandbox: Cluster) -> Project:
    return make_project(tmp_path / "project", sandbox)


def describe(project: Path, name: str, cluster: Cluster, *lines: str) -> None:
    """Write a cluster file."""
    folder = project / "my_conf" / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([f"slurm_conf: {cluster.sandbox.slurm_conf}", *lines])
    (folder / f"{name}.yaml").write_text(f"{ONE_RANK}{text}\n")


def submit_to(project: Project, *names: str, pause_s: float = 0.0) -> Run:
    words = ["--config-dir", "my_conf", "cluster=first", f"cluster.choices=[{','.join(names)}]"]
    words += [*SMALL, "train.steps=20", f"+model.pause_s={pause_s}"]
    done = project.cluster.run([sys.executable, "-m", "slurmtrain", *words, "submit", "--json"], cwd=project.path)
    return Run(RunDir(Path(json.loads(done.stdout)["path"])), project.cluster, project.path)


def job_of(run: Run, name: str) -> str:
    return next(str(choice.job_id) for choice in choices_of(run.run_dir) if choice.name == name)


def assert_trained_once(run: Run, by: str) -> None:
    """It has finished, in the job of this choice, and no other job has left an attempt or is in the queue."""
    last = run.wait_for_end()
    assert last.reason == "finished", f"{run.status()}\n{run.logs()}"
    assert run.run_dir.info()["job_ids"] == [job_of(run, by)]
    assert {attempt.job_id for attempt in run.attempts()} == {job_of(run, by)}
    assert [record["step"] for record in run.losses() if "loss" in record] == list(range(1, 21))


@pytest.mark.slow
def test_the_partition_that_starts_first_trains_the_run_and_the_other_job_is_gone(project: Project) -> None:
    """Also when its job is requeued: it keeps the run."""
    describe(project.path, "later", project.cluster, "partition: high", "sbatch: {begin: now+2hours}")
    describe(project.path, "now", project.cluster, "partition: low")
    run = submit_to(project, "later", "now", pause_s=0.3)
    run.wait_until(lambda: claim_of(run.run_dir) is not None, "taken")
    project.cluster.wait_for(job_of(run, "later"), {"CANCELLED"})
    run.wait_for_attempt(1)
    assert "later" not in run.status().partition("overrides")[0]
    run.cli("preempt", run.run_dir.id)
    run.wait_for_attempt(2)
    run.go_on()
    assert_trained_once(run, "now")
    assert [event["choice"] for event in events(run, "taken")] == ["now"]


def test_of_two_jobs_that_start_together_one_trains_and_the_other_leaves_no_attempt(project: Project) -> None:
    describe(project.path, "one", project.cluster, "partition: low", "sbatch: {begin: now+1}")
    describe(project.path, "two", project.cluster, "partition: high", "sbatch: {begin: now+1}")
    run = submit_to(project, "one", "two")
    run.wait_until(lambda: bool(run.run_dir.info()["job_ids"]), "taken")
    winner = next(choice.name for choice in choices_of(run.run_dir) if choice.job_id == run.job_id)
    assert_trained_once(run, winner)
    loser = "two" if winner == "one" else "one"
    project.cluster.wait_for(job_of(run, loser), {"COMPLETED", "CANCELLED"})


@pytest.mark.slow
def test_a_run_whose_taker_died_before_it_began_is_taken_by_the_next_job_that_starts(project: Project) -> None:
    describe(project.path, "dies", project.cluster, "partition: low", "sbatch: {hold: true}", "setup: [sleep 600]")
    describe(project.path, "goes_on", project.cluster, "partition: low", "sbatch: {hold: true}")
    run = submit_to(project, "dies", "goes_on")
    dead = project.cluster.sbatch(script="#!/bin/bash\nexit 1\n", cwd=project.path)
    project.cluster.wait_for(dead, {"FAILED"})
    assert take(run.run_dir, "dies", dead, lambda claim: False).number == 1
    project.cluster.run(["scontrol", "release", job_of(run, "goes_on")])
    assert_trained_once(run, "goes_on")
    project.cluster.wait_for(job_of(run, "dies"), {"CANCELLED"})


@pytest.fixture
def other_sandbox() -> Iterator[Cluster]:
    """Another SLURM on this machine, with a controller and a queue of its own."""
    yield from _cluster("tests-other", SandboxSpec(nodes=1, grace_s=10, kill_wait_s=10))


@pytest.mark.slow
def test_of_two_clusters_the_first_trains_the_run_and_the_other_ones_job_is_taken_back(
    project: Project, other_sandbox: Cluster
) -> None:
    describe(project.path, "here", project.cluster, "partition: low", "sbatch: {begin: now+2hours}")
    describe(project.path, "there", other_sandbox, "partition: low")
    run = submit_to(project, "here", "there")
    run.wait_until(lambda: claim_of(run.run_dir) is not None, "taken")
    project.cluster.wait_for(job_of(run, "here"), {"CANCELLED"})
    assert_trained_once(Run(run.run_dir, other_sandbox, run.project), "there")
    assert run.run_dir.info()["slurm_conf"] == str(other_sandbox.sandbox.slurm_conf)


@pytest.mark.slow
def test_a_cluster_that_is_down_neither_keeps_the_other_from_starting_nor_trains_the_run_again(
    project: Project, other_sandbox: Cluster
) -> None:
    describe(project.path, "here", project.cluster, "partition: low")
    describe(project.path, "there", other_sandbox, "partition: low", "sbatch: {hold: true}")
    project.cluster.run(["scontrol", "update", "PartitionName=low", "State=DOWN"])
    try:
        run = submit_to(project, "here", "there")
        assert "waiting" in run.status()
        controller = int((other_sandbox.directory / "state" / "slurmctld.pid").read_text())
        os.kill(controller, signal.SIGSTOP)
    finally:
        project.cluster.run(["scontrol", "update", "PartitionName=low", "State=UP"])
    try:
        assert_trained_once(run, "here")
    finally:
        os.kill(controller, signal.SIGCONT)
    released = Run(run.run_dir, other_sandbox, run.project)
    other_sandbox.run(["scontrol", "release", job_of(run, "there")])
    other_sandbox.wait_for(job_of(run, "there"), {"COMPLETED"})
    assert len(released.attempts()) == len(run.attempts()) == 1
    assert [event["choice"] for event in events(run, "not taken")] == ["there"]
