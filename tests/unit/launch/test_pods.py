"""A run in pods, which are processes here, started again by the rules of its own manifest: see JobSetSimulator."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from tests.support.gloo import wait_until
from tests.support.jobset_simulator import JobSetSimulator
from tests.support.local_runs import SMALL, LocalRun, Project, assert_same_run
from tests.support.ranks import rank_pids

# Two pods with a rank each; their ranks meet on this machine.
TWO_PODS = [
    *(word for word in SMALL if not word.startswith("+cluster=")),
    *("+cluster=local", "cluster.backend=kubernetes", "cluster.nodes=2", "cluster.pods.image=none"),
    *("cluster.signal_lead_s=30", f"cluster.python={sys.executable}"),
]


class InPods(LocalRun):
    """A run in the pods of a JobSet that is simulated."""

    def __init__(self, project: Project, *words: str):
        volume = f"+cluster.pods.volumes={{{project.path}: claim}}"
        made = project.cli(*TWO_PODS, volume, *words, "render", "-o", "run.yaml")
        assert made.returncode == 0, made.stdout
        self._project = project.path
        folder = project.path / "pods"
        folder.mkdir()
        self.jobset = JobSetSimulator(yaml.safe_load((project.path / "run.yaml").read_text()), folder)

    @property
    def run_dir(self) -> RunDir:
        return all_runs(self._project / "runs")[-1]

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step, f"at step {step}")

    def last(self) -> Attempt:
        return attempts.all_attempts(self.run_dir)[-1]


@pytest.mark.slow
def test_two_pods_train_one_is_killed_one_is_drained_and_no_bit_differs(tmp_path: Path) -> None:
    project, words = Project(tmp_path / "project"), ["train.steps=20", "checkpoint.every_steps=5"]
    run = InPods(project, *words)
    (project.path / "pause").touch()  # it waits after its tenth step
    run.jobset.start()
    try:
        run.wait_for_step(7)
        os.kill(rank_pids(run.run_dir)[1], signal.SIGKILL)
        wait_until(lambda: run.jobset.look() or run.jobset.restarts, "in a second attempt")
        run.wait_for_step(9)
        run.jobset.evict(0)
        (project.path / "pause").unlink()
        assert run.jobset.run() == "Completed", run.jobset.logs()
    finally:
        run.jobset.reap()
    # Neither a crash behind a new checkpoint nor a drain counts.
    assert (run.jobset.restarts, run.jobset.counted) == (2, 0) and "exit code 75" in run.jobset.messages[-1]
    undisturbed = Project(tmp_path / "undisturbed").submit("cluster.tasks_per_node=2", *words).finish()
    assert_same_run(run.run_dir.path, undisturbed.run_dir.path)


def program(tmp_path: Path, text: str, *words: str) -> InPods:
    """A run of two pods with a program of its own."""
    project = Project(tmp_path / "project")
    (project.path / "p.sh").write_text(text)
    return InPods(project, "job=command", "job.command='bash p.sh'", "job.snapshot=none", *words)


ENDS = {
    "finished": ("exit 0", [], "Completed", 0, 0, "finished"),
    "wrong config": ("exit 78", [], "Failed", 0, 0, "config"),
    "fails twice": (
        *("exit $((2 + SLURMTRAIN_ATTEMPT))", ["requeue.max_attempts_without_progress=2"], "Failed", 1, 1, "crash"),
    ),
    "too often for Kubernetes": ("exit 3$SLURMTRAIN_ATTEMPT", ["cluster.pods.max_restarts=0"], "Failed", 0, 0, "crash"),
    "wants to go on": ("[ $SLURMTRAIN_ATTEMPT = 2 ] || exit 75", [], "Completed", 1, 1, "finished"),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_becomes_of_an_end(name: str, tmp_path: Path) -> None:
    """By the exit codes of the pods alone: nobody but the rules of the manifest starts them again."""
    text, words, ended, restarts, counted, reason = ENDS[name]
    run = program(tmp_path, text, *words)
    try:
        assert run.jobset.run() == ended, run.jobset.logs()
        assert (run.jobset.restarts, run.jobset.counted, run.last().reason) == (restarts, counted, reason)
        # Whatever ended for good stays so, whoever starts it again, and at once.
        if name in ("finished", "wrong config"):
            run.jobset.start()
            assert [pod.wait(60) for pod in run.jobset.pods] == [0 if ended == "Completed" else 78] * 2
            assert len(run.attempts()) == restarts + 1
    finally:
        run.jobset.reap()
