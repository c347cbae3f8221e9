"""Runs that go on in further jobs: submitted again, in a chain, after another run; on a real SLURM."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.slurm.project import Project, Run, assert_counted_once, counting

STEPS = 30
SLOW = counting(STEPS, pause_s=0.15)


def jobs(run: Run) -> list[str]:
    return [str(job_id) for job_id in run.run_dir.info()["job_ids"]]


class Preempted(NamedTuple):
    """Two runs that are preempted at the same time, and a run after each of them.

    Attributes:
        seen: what the jobs of the first saw of their environment.
    """

    resubmitted: Run
    chained: Run
    after: tuple[Run, Run]
    seen: Path


@pytest.fixture(scope="module")
def preempted(project: Project) -> Preempted:
    seen = project.path.parent / "seen"
    looks = f"cluster.setup=['echo \"$MARK|$PYTHONPATH\" >>{seen}','export MARK=left-over']"
    resubmitted = project.submit(*SLOW, "requeue=resubmit", looks, small=False, nodes="n0")
    chained = project.submit(*SLOW, "requeue=chain", small=False, nodes="n1")
    for run in (resubmitted, chained):
        run.wait_for_step(3)
        (run.run_dir.path / "hold").touch()
    assert "running" in chained.status()
    one, other = (
        project.submit(*counting(5), small=False, words=("--after", run.run_dir.id)) for run in (resubmitted, chained)
    )
    for run in (resubmitted, chained):
        run.preempt_by_high()
    # Those that wait do not take the end of a first job for that of the run.
    resubmitted.wait_until(lambda: all(len(run.attempts()) == 2 for run in (resubmitted, chained)), "in a further job")
    assert all("Dependency" in run.status() and run.attempts() == [] for run in (one, other))
    for run in (resubmitted, chained):
        (run.run_dir.path / "hold").unlink()
    return Preempted(resubmitted, chained, (one, other), seen)


def test_resubmitted_after_a_preemption_it_finishes_in_a_job_of_its_own(preempted: Preempted) -> None:
    run = preempted.resubmitted
    run.wait_until(lambda: len(jobs(run)) == 2, "submitted again")
    first, second = jobs(run)
    assert f"Comment=slurmtrain:{run.run_dir.id}:1" in run.cluster.run(["scontrol", "show", "job", "-o", second]).stdout
    run.finish()
    ends = [(attempt.job_id, attempt.reason) for attempt in run.attempts()]
    assert ends == [(first, "preempted"), (second, "finished")]
    assert run.attempts()[0].sentence == "preempted; it is submitted again"
    assert len(set(preempted.seen.read_text().splitlines())) == 1, (
        "the second job saw what the first one had made of its environment"
    )
    assert run.cluster.job(second)["Requeue"] == "0"
    assert_counted_once(run, STEPS)


def test_a_chain_goes_on_in_its_next_job_and_leaves_the_queue_when_it_has_finished(preempted: Preempted) -> None:
    run = preempted.chained
    chain = jobs(run)
    assert len(chain) == 4
    run.go_on()
    run.wait_until(lambda: len(run.attempts()) == 2 and run.attempts()[-1].verdict == "done", "finished")
    ends = [(attempt.job_id, attempt.reason) for attempt in run.attempts()]
    assert ends == [(chain[0], "preempted"), (chain[1], "finished")]
    for link in chain[2:]:
        run.cluster.wait_for(link, "CANCELLED")
    run.cluster.wait_for(chain[1], "COMPLETED")
    assert "the next job of the chain continues" in run.status()
    assert_counted_once(run, STEPS)


def test_a_run_after_another_starts_when_that_one_has_finished_in_a_further_job(
    preempted: Preempted, project: Project
) -> None:
    """In the same job: see test_preemption.py."""
    before = preempted.resubmitted, preempted.chained
    for run, first in zip(preempted.after, before, strict=True):
        first.finish()
        run.finish()
        assert run.attempts()[0].started > (first.attempts()[-1].ended or 0.0)
    both = f"{before[0].run_dir.id},{preempted.after[0].run_dir.id}"
    done = project.submit(*counting(5), small=False, words=("--after", both))
    assert "Dependency=(null)" in done.cluster.run(["scontrol", "show", "job", "-o", done.job_id]).stdout
    done.finish()
