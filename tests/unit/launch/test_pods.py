"""A run in pods, which are processes here, started again by the rules of its own manifest: see JobSetSimulator."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.platforms.pods import Pod, own_pod
from tests.support.gloo import wait_until
from tests.support.jobset_simulator import JobSetSimulator
from tests.support.local_runs import SMALL, LocalRun, Project, assert_same_run, assert_steps_join
from tests.support.podman import IMAGE, Podman, PodmanJobSet, python_folders
from tests.support.ranks import rank_pids

# Two pods with a rank each; their ranks meet on this machine.
TWO_PODS = [
    *(word for word in SMALL if not word.startswith("+cluster=")),
    *("+cluster=local", "cluster.backend=kubernetes", "cluster.nodes=2", "cluster.pods.image=none"),
    *("cluster.signal_lead_s=30", f"cluster.python={sys.executable}"),
]


class InPods(LocalRun):
    """A run in the pods of a JobSet that is simulated."""

    def __init__(
        self,
        project: Project,
        *words: str,
        simulator: Callable[[dict[str, Any], Path], JobSetSimulator] = JobSetSimulator,
    ):
        volume = f"+cluster.pods.volumes={{{project.path}: claim}}"
        volumes = [] if any("volumes" in word for word in words) else [volume]
        made = project.cli(*TWO_PODS, *volumes, *words, "render", "-o", "run.yaml")
        assert made.returncode == 0, made.stdout
        self._project = project.path
        folder = project.path / "pods"
        folder.mkdir()
        self.jobset = simulator(yaml.safe_load((project.path / "run.yaml").read_text()), folder)

    @property
    def run_dir(self) -> RunDir:
        return all_runs(self._project / "runs")[-1]

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step, f"at step {step}")

    def last(self) -> Attempt:
        return attempts.all_attempts(self.run_dir)[-1]


@pytest.fixture
def in_pods(tmp_path: Path) -> Iterator[InPods]:
    """A run of two pods, which waits after its tenth step while a file `pause` is there."""
    run = InPods(Project(tmp_path / "project"), "train.steps=20", "checkpoint.every_steps=5")
    (tmp_path / "project" / "pause").touch()
    yield run
    run.jobset.reap()


def undisturbed(tmp_path: Path) -> Path:
    project = Project(tmp_path / "undisturbed")
    words = ("cluster.tasks_per_node=2", "train.steps=20", "checkpoint.every_steps=5")
    run = project.submit(*words).finish()
    return run.run_dir.path


@pytest.mark.slow
def test_two_pods_train_one_is_killed_both_come_back_and_no_bit_differs(in_pods: InPods, tmp_path: Path) -> None:
    in_pods.jobset.start()
    in_pods.wait_for_step(7)
    os.kill(rank_pids(in_pods.run_dir)[1], signal.SIGKILL)
    (tmp_path / "project" / "pause").unlink()
    assert in_pods.jobset.run() == "Completed", in_pods.jobset.logs()
    first, last = in_pods.attempts()
    assert (first.reason, last.reason, first.nodes) == ("crash", "finished", ["pod-0", "pod-1"])
    # It had a new checkpoint, and so it does not count.
    assert (in_pods.jobset.restarts, in_pods.jobset.counted) == (1, 0)
    assert_same_run(in_pods.run_dir.path, undisturbed(tmp_path))


@pytest.mark.slow
def test_a_pod_that_is_drained_lets_all_save_leave_and_come_back(in_pods: InPods, tmp_path: Path) -> None:
    in_pods.jobset.start()
    in_pods.wait_for_step(6)
    in_pods.jobset.evict(1)
    (tmp_path / "project" / "pause").unlink()
    assert in_pods.jobset.run() == "Completed", in_pods.jobset.logs()
    assert ["exit code 75" in message for message in in_pods.jobset.messages] == [True]
    assert (in_pods.jobset.restarts, in_pods.jobset.counted) == (1, 0)
    assert_steps_join(in_pods, total=20)
    assert_same_run(in_pods.run_dir.path, undisturbed(tmp_path))


def program(tmp_path: Path, text: str, *words: str) -> InPods:
    """A run of two pods with a program of its own."""
    project = Project(tmp_path / "project")
    (project.path / "p.sh").write_text(text)
    return InPods(project, "job=command", "job.command='bash p.sh'", "job.snapshot=none", *words)


ENDS = {
    "finished": ("exit 0", [], "Completed", 0, 0, "finished"),
    "wrong config": ("exit 78", [], "Failed", 0, 0, "config"),
    "always fails": ("exit $((2 + SLURMTRAIN_ATTEMPT))", [], "Failed", 2, 2, "crash"),
    "fails once": ("[ $SLURMTRAIN_ATTEMPT = 2 ] || [ $RANK = 0 ]", [], "Completed", 1, 1, "finished"),
    "too often for Kubernetes": ("exit 3$SLURMTRAIN_ATTEMPT", ["cluster.pods.max_restarts=1"], "Failed", 1, 1, "crash"),
    "wants to go on": ("[ $SLURMTRAIN_ATTEMPT = 3 ] || exit 75", [], "Completed", 2, 2, "finished"),
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
        if name != "too often for Kubernetes":
            run.jobset.start()
            assert [pod.wait(60) for pod in run.jobset.pods] == [0 if ended == "Completed" else 78] * 2
            assert len(run.attempts()) == restarts + 1
    finally:
        run.jobset.reap()


def test_pods_that_wait_for_others_leave_when_they_are_told_and_that_costs_nothing(tmp_path: Path) -> None:
    run = program(tmp_path, "exit 0")
    run.jobset.start()
    try:
        run.jobset.pods[1].kill()
        folder = run.run_dir.attempt(1)
        wait_until(lambda: folder.pods.is_dir(), "in an attempt")
        run.jobset.pods[0].send_signal(signal.SIGTERM)
        assert run.jobset.pods[0].wait(60) == 75
        assert (run.last().reason, run.last().stalled) == ("asked", False)
    finally:
        run.jobset.reap()


def test_a_pod_that_is_stopped_in_its_set_up_leaves_after_the_line_at_work_and_that_costs_nothing(
    tmp_path: Path,
) -> None:
    run = program(
        tmp_path,
        "exit 0",
        "cluster.setup=['touch $SLURMTRAIN_RUN_DIR/begun-$JOB_COMPLETION_INDEX', 'until [ -e go ]; do sleep 0.05; done']",
    )
    run.jobset.start()
    try:
        wait_until(lambda: (run.run_dir.path / "begun-1").exists(), "in its set-up")
        run.jobset.pods[1].send_signal(signal.SIGTERM)
        assert run.jobset.pods[1].wait(60) == 75
        assert run.run_dir.attempt_numbers() == []
    finally:
        run.jobset.reap()


def test_a_set_up_that_fails_says_at_which_line_and_is_counted(tmp_path: Path) -> None:
    run = program(tmp_path, "exit 0", "cluster.setup=['cat missing']", "cluster.pods.max_restarts=1")
    assert run.jobset.run() == "Failed" and run.jobset.counted == 1
    said = "slurmtrain: the set-up has ended with exit code 1 at: cat missing"
    assert said in run.jobset.logs()


TOLD = {
    "an Indexed Job": ({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "r-node-0-0.r"}, Pod(1, None, "r-node-0-0.r")),
    "a TrainJob": (
        {"JOB_COMPLETION_INDEX": "1", "PET_NODE_RANK": "1", "PET_NNODES": "4", "PET_MASTER_ADDR": "t-node-0-0.t"},
        Pod(1, 4, "t-node-0-0.t"),
    ),
    "no pod": ({"RANK": "1", "PATH": "/bin"}, None),
}


@pytest.mark.parametrize("name", TOLD)
def test_an_engine_says_which_pod_this_is(name: str) -> None:
    variables, pod = TOLD[name]
    assert own_pod(variables) == pod


def test_a_pod_whose_number_cannot_be_read_says_which_variable_it_is() -> None:
    with pytest.raises(
        EnvironmentMismatchError, match="PET_NODE_RANK and PET_NNODES should be numbers, not '0' and 'x'"
    ):
        own_pod({"PET_NODE_RANK": "0", "PET_NNODES": "x"})


def test_another_number_of_pods_than_the_config_says_never_starts(tmp_path: Path) -> None:
    run = program(tmp_path, "exit 0")
    run.jobset.variables = {"PET_NODE_RANK": "0", "PET_NNODES": "3", "PET_MASTER_ADDR": "x"}
    assert run.jobset.run() == "Failed"
    assert "this is pod 0 of 3, but the config says cluster.nodes=2" in run.jobset.logs()


@pytest.mark.slow
def test_in_real_containers_a_pod_is_killed_one_is_drained_and_no_bit_differs(tmp_path: Path) -> None:
    if shutil.which("podman") is None or os.getuid() != 0:
        pytest.skip("needs podman, and root to start containers")
    podman = Podman()
    try:
        if (why := podman.why_not()) is not None:
            pytest.skip(f"podman cannot start a container here: {why}")
        volumes = ", ".join(f"{each}: {{hostPath: {{path: {each}}}}}" for each in [tmp_path, *python_folders()])
        run = InPods(
            Project(tmp_path / "project"),
            *("train.steps=20", "checkpoint.every_steps=5", f"+cluster.pods.volumes={{{volumes}}}"),
            *(f"cluster.pods.image={IMAGE}", "cluster.pods.pull_policy=Never", "cluster.pods.host_network=true"),
            "cluster.pods.shm_gb=1",
            simulator=lambda manifest, folder: PodmanJobSet(manifest, folder, podman),
        )
        (tmp_path / "project" / "pause").touch()
        run.jobset.start()
        run.wait_for_step(7)
        run.jobset.pods[1].kill()
        wait_until(lambda: run.jobset.look() or run.jobset.restarts, "in a second attempt")
        run.wait_for_step(9)
        run.jobset.evict(0)
        (tmp_path / "project" / "pause").unlink()
        assert run.jobset.run() == "Completed", run.jobset.logs()
        assert (run.jobset.restarts, run.jobset.counted) == (2, 1)
        assert_same_run(run.run_dir.path, undisturbed(tmp_path))
    finally:
        podman.close()
