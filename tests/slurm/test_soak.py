"""Many runs, disturbed at any moment in every way there is: each finishes, by itself or by `resume`, with the same bits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from queue import SimpleQueue
from typing import Any

import pytest

import slurmtrain
from slurmtrain.report.status.state import RunStatus
from tests.slurm.project import Project, Run, make_project
from tests.support.children import children
from tests.support.gloo import wait_until
from tests.support.local_runs import assert_same_bits
from tests.support.slurm_cluster import Cluster, runs, start_node

pytestmark = pytest.mark.slow

RUNS, DISTURBANCES_EACH, STEPS = 20, 3, 120
LANES = ("n0,n1", "n2,n3", "n4,n5", "n6,n7")
WORDS = (
    *(f"train.steps={STEPS}", "cluster.tasks_per_node=1", "+model.pause_s=0.1", "cluster.time_limit_min=60"),
    *("watchdog.min_s=10", "watchdog.factor=2", "watchdog.save_s=20", "watchdog.evaluation_s=20"),
    *("watchdog.first_step_s=60", "requeue.max_attempts_without_progress=99"),
)
WAYS = (
    *("preemption", "kill of a rank", "kill of the supervisor", "kill of srun", "scancel", "scontrol requeue"),
    *("the verb requeue", "SIGSTOP", "time limit", "restart of the controller"),
)
controller = threading.RLock()


class Waiting(Cluster):
    """Its commands wait while a test has the controller down: only the runs are to be disturbed by that."""

    def run(self, *args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        with controller:
            return super().run(*args, **options)


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def supervisor_and_srun(run: Run) -> list[int]:
    """Their processes; empty if the batch process is not there, as between two attempts."""
    try:
        return run.supervisor_pids()
    except ValueError:
        return []


def controller_started(cluster: Cluster) -> bool:
    if runs(cluster.sandbox, "slurmctld"):  # the one before has not left yet
        return False
    start_node(cluster.sandbox, "slurmctld")
    return True


def disturb(run: Run, way: str, chance: random.Random) -> None:
    """Do this to a run that has a job. What is not there at that moment cannot be hurt: the next try may find it."""
    slurm = run.cluster
    match way:
        case "preemption":
            run.wait_until(lambda: bool(run.attempts()[-1].nodes), "on nodes that it has recorded")
            slurm.submit_high(nodes=run.attempts()[-1].nodes, seconds=0.1)
        case "kill of a rank" | "SIGSTOP":
            run.wait_until(lambda: len(run.rank_pids()) == 2, "with two ranks")
            pid = chance.choice(run.rank_pids())
            os.kill(pid, signal.SIGSTOP if way == "SIGSTOP" else signal.SIGKILL)
        case "kill of the supervisor":
            run.wait_until(lambda: bool(supervisor_and_srun(run)), "supervised")
            kill(supervisor_and_srun(run)[0])
        case "kill of srun":
            run.wait_until(lambda: len(supervisor_and_srun(run)) > 1, "with an srun")
            srun = supervisor_and_srun(run)[1]
            kill(*children(srun), srun)
        case "scancel":
            slurm.run(["scancel", run.job_id])
        case "scontrol requeue":
            slurm.run(["scontrol", "requeue", run.job_id])
        case "the verb requeue":
            run.cli("requeue", run.run_dir.id)
        case "time limit":
            number = len(run.attempts())
            slurm.run(["scontrol", "update", f"JobId={run.job_id}", "TimeLimit=1"])
            run.wait_until(
                lambda: len(run.attempts()) > number or run.attempts()[-1].verdict is not None, "at its limit"
            )
            again = ["scontrol", "update", f"JobId={run.job_id}", "TimeLimit=60"]  # refused while the job is completing
            run.wait_until(lambda: finished(run) or slurm.run(again, check=False).returncode == 0, "with its old limit")
        case "restart of the controller":
            with controller:
                slurm.run(["scontrol", "shutdown", "slurmctld"])
                time.sleep(chance.uniform(0, 3))  # for so long nobody answers
                wait_until(lambda: controller_started(slurm), "started")
                wait_until(slurm.sandbox.node_states, "answering")


def finished(run: Run) -> bool:
    attempts = run.attempts()
    return bool(attempts) and attempts[-1].verdict == "done"


def begun(run: Run, number: int) -> bool:
    """Whether attempt `number`, or one after it, trains, or the run has finished."""
    return finished(run) or any(attempt.stepping is not None for attempt in run.attempts()[number - 1 :])


def go_on(run: Run, number: int) -> bool:
    """Wait until attempt `number` trains; where only a person can bring it about, do as `status` says. Whether one had to."""
    job, resumed = slurmtrain.open_run(run.run_dir.path), False
    deadline = time.monotonic() + 300
    while not begun(run, number):
        if time.monotonic() > deadline:
            pytest.fail(f"run {run.run_dir.id} is stuck before attempt {number}\n{run.status()}\n{run.logs()}")
        if job.status().state in (RunStatus.STOPPED, RunStatus.FAILED, RunStatus.LOST):
            assert "resume" in run.status()
            run.cli("resume", run.run_dir.id)
            resumed = True
        time.sleep(0.5)
    return resumed


def soak(project: Project, lane: str, number: int, ways: tuple[str, ...]) -> tuple[Run, list[str]]:
    """Submit a run, disturb it, and let it finish; with what was done to it and when, for whoever has to find out why."""
    chance = random.Random(number)
    run = project.submit(*WORDS, nodes=lane)
    story: list[str] = []
    run.wait_until(lambda: bool(run.attempts()), "started")
    for way in ways:
        attempt = len(run.attempts())
        if chance.random() < 0.7:  # else while it starts
            go_on(run, attempt)
        time.sleep(chance.uniform(0, 4))
        attempt, step = len(run.attempts()), run.step()
        disturb(run, way, chance)
        resumed = False
        if way == "restart of the controller":  # nobody needs to notice
            go_on(run, attempt)
        else:
            resumed = go_on(run, attempt + 1)
        ended = run.attempts()[attempt - 1]
        story.append(f"{way} at step {step}: {ended.reason}, {ended.verdict}{', resumed' * resumed}")
    run.finish()
    return run, story


@pytest.fixture(scope="module")
def project(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("soak") / "project", Waiting(sandbox.sandbox))


def test_runs_that_are_disturbed_at_any_moment_finish_with_the_same_bits_and_drain_no_node(project: Project) -> None:
    reference = project.submit(*WORDS, nodes=LANES[0])
    reference.finish()
    lanes: SimpleQueue[str] = SimpleQueue()
    for lane in LANES:
        lanes.put(lane)
    ways = cycle(WAYS)

    def play(number: int, ways: tuple[str, ...]) -> tuple[Run, list[str]]:
        lane = lanes.get()
        try:
            return soak(project, lane, number, ways)
        finally:
            lanes.put(lane)

    with ThreadPoolExecutor(len(LANES)) as pool:
        played = [pool.submit(play, number, tuple(islice(ways, DISTURBANCES_EACH))) for number in range(RUNS)]
    for each in played:
        run, story = each.result()
        print(run.run_dir.id, len(run.attempts()), "attempts:", "; ".join(story))
        assert_same_bits(run, reference)
    project.cluster.wait_for_nodes()
    assert set(project.cluster.sandbox.node_states().values()) == {"idle"}
