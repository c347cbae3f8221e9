"""What becomes of a preempted job where SLURM's versions and its administrators' settings differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.slurm.versions import STARTS_PREEMPTED_JOBS_ONCE_MORE
from tests.slurm.project import Project, Run, make_project
from tests.support.slurm_cluster import Cluster

ONE = ["cluster.nodes=1", "cluster.tasks_per_node=1", "requeue.restart_delay_s=0"]
# The first attempt goes on until it is stopped, any other ends well at once.
UNTIL_STOPPED = """
touch "$SLURMTRAIN_RUN_DIR/begun"
[ "$SLURMTRAIN_ATTEMPT" != 1 ] || exec sleep 600
"""


def preempted_once(project: Project, *, nodes: str = "n0", after_it: bool = False) -> tuple[Run, Run | None]:
    """A run that is preempted in its first attempt; and, if wanted, one that was submitted to start after it."""
    (project.path / "until_stopped.sh").write_text(UNTIL_STOPPED)
    words = ["job=command", "job.command='bash until_stopped.sh'", *ONE]
    run = project.submit(*words, small=False, nodes=nodes)
    after = None
    if after_it:
        words = ["job=command", "job.command='true'", *ONE]
        after = project.submit(*words, small=False, nodes=nodes, words=("--after", run.run_dir.id))
    run.wait_until((run.run_dir.path / "begun").exists, "running")
    run.cluster.submit_high(nodes=[nodes], seconds=0.1)
    run.wait_until(lambda: run.attempts()[0].verdict is not None, "preempted")
    return run, after


@pytest.mark.parametrize("mode", ["requeue", "cancel"])
def test_a_run_that_was_preempted_ends_when_it_has_finished_and_so_those_start_that_wait_for_it(
    mode: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cluster: Cluster = request.getfixturevalue("sandbox" if mode == "requeue" else "cancelling_sandbox")
    run, after = preempted_once(make_project(tmp_path / "project", cluster), after_it=True)
    assert after is not None
    after.wait_until_done()
    once_more = cluster.does(STARTS_PREEMPTED_JOBS_ONCE_MORE)
    job = cluster.wait_for(run.job_id, "PREEMPTED" if mode == "cancel" and once_more else "COMPLETED")
    assert job["Restarts"] == ("2" if mode == "requeue" and once_more else "1")
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    status = run.status()
    assert "finished" in status.splitlines()[0]
    assert ("once more" in status) == (mode == "requeue" and once_more)


def test_without_a_grace_time_the_preemption_is_told_as_one(graceless_sandbox: Cluster, tmp_path: Path) -> None:
    run, _ = preempted_once(make_project(tmp_path / "project", graceless_sandbox))
    assert run.attempts()[0].reason == "preempted", run.status()
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
