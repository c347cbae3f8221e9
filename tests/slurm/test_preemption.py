"""What becomes of a preempted job where SLURM's versions and its administrators' settings differ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurmtrain.slurm.parse_values import STARTS_PREEMPTED_JOBS_ONCE_MORE
from tests.slurm.project import Run, make_project
from tests.support.slurm_cluster import Cluster, partition

# The first attempt goes on until it is stopped, any other ends well at once.
UNTIL_STOPPED = """
touch "$SLURMTRAIN_RUN_DIR/begun"
[ "$SLURMTRAIN_ATTEMPT" != 1 ] || exec sleep 600
"""
MODES = {"requeue": "low", "cancel": "cancelling", "graceless": "graceless"}


@pytest.fixture(scope="module")
def preempted(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Run, Run]]]:
    """By mode, a run that is preempted in its first attempt, and one that was submitted to start after it."""
    project = make_project(tmp_path_factory.mktemp("preemption") / "project", sandbox)
    (project.path / "until_stopped.sh").write_text(UNTIL_STOPPED)
    one = ["job=command", "cluster.nodes=1", "cluster.tasks_per_node=1"]
    with (
        partition(sandbox, "cancelling", PreemptMode="CANCEL", GraceTime="10"),
        partition(sandbox, "graceless", PreemptMode="REQUEUE", GraceTime="0"),  # which is SLURM's default
    ):
        runs = {}
        for number, (mode, where) in enumerate(MODES.items()):
            words = [*one, "job.command='bash until_stopped.sh'", f"cluster.partition={where}"]
            run = project.submit(*words, small=False, nodes=f"n{number}")
            after = project.submit(*one, "job.command=true", small=False, words=("--after", run.run_dir.id))
            runs[mode] = run, after
        for run, _ in runs.values():
            run.wait_until((run.run_dir.path / "begun").exists, "running")
        sandbox.submit_high(nodes=["n0", "n1", "n2"], seconds=0.1)
        yield runs


@pytest.mark.parametrize("mode", ["requeue", "cancel"])
def test_a_run_that_was_preempted_ends_when_it_has_finished_and_so_those_start_that_wait_for_it(
    mode: str, preempted: dict[str, tuple[Run, Run]]
) -> None:
    run, after = preempted[mode]
    after.wait_until_done()
    once_more = run.cluster.does(STARTS_PREEMPTED_JOBS_ONCE_MORE)
    job = run.cluster.wait_for(run.job_id, "PREEMPTED" if mode == "cancel" and once_more else "COMPLETED")
    assert job["Restarts"] == ("2" if mode == "requeue" and once_more else "1")
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    assert "finished" in run.status().splitlines()[0]


def test_without_a_grace_time_the_preemption_is_told_as_one(preempted: dict[str, tuple[Run, Run]]) -> None:
    run, after = preempted["graceless"]
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    after.wait_until_done()
