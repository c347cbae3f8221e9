"""eval.mode=job on a real SLURM: a job for each due checkpoint, once."""

from __future__ import annotations

import json
from typing import Any

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.runs import attempts
from tests.slurm.project import Project, Run

EVERY, STEPS = 4, 8
SHORT = [f"train.steps={STEPS}", f"train.eval_every={EVERY}", "checkpoint.every_steps=1"]
SHORT += ["cluster.nodes=1", "cluster.tasks_per_node=1"]
LATER = "eval.cluster.sbatch.begin=now+1hour"  # a queue in which nothing moves until a person wants it to


def test_each_due_checkpoint_is_evaluated_once_by_a_job(project: Project) -> None:
    """That it measures what the training would have measured is shown in tests/distributed/test_evaluation.py."""
    own = ["eval.metrics.accuracy=true", "eval.mode=job", "eval.cluster.tasks_per_node=1", LATER]
    run = project.submit(*SHORT, *own, nodes="n1")
    run.finish()

    # The training was not held up, and what is still to be evaluated has outlived newer checkpoints.
    assert [attempt.reason for attempt in run.attempts()] == ["finished"]
    waiting = evaluations(run)
    assert [(each["name"], each["state"]) for each in waiting] == [
        (f"step_{step:07d}", "waiting") for step in range(EVERY, STEPS + 1, EVERY)
    ]
    there = {step_of(path) for path in committed(run.run_dir.checkpoints)}
    assert {4, 8} <= there and not {1, 2, 3, 5} & there
    assert not run.run_dir.evaluations_file.exists()

    for each in waiting:
        run.cluster.run(["scontrol", "update", f"JobId={each['job_id']}", "StartTime=now"])
    its = run.run_dir.all_evaluations()

    def verdicts() -> list[str | None]:
        return [attempt.verdict for each in its for attempt in attempts.all_attempts(each)]

    run.wait_until(lambda: verdicts() == ["done", "done"], "evaluated, each in one attempt")
    assert all(each["metrics"] for each in evaluations(run))
    assert [each["job_ids"] for each in evaluations(run)] == [[each["job_id"]] for each in waiting]
    assert len({each["job_id"] for each in waiting}) == len(run.events("evaluation submitted")) == 2

    by_jobs = sorted(read_metrics(run.run_dir.evaluations_file), key=lambda record: record["step"])
    assert [record["step"] for record in by_jobs] == [4, 8] and all("valid_accuracy" in record for record in by_jobs)
    assert not any("valid_loss" in record for record in run.losses())
    assert f"valid loss {by_jobs[-1]['valid_loss']:.4f}" in run.status()
    assert not list((run.run_dir.checkpoints / ".held").iterdir())


def evaluations(run: Run) -> list[dict[str, Any]]:
    shown: dict[str, Any] = json.loads(run.cli("status", run.run_dir.id, "--json"))
    return list(shown["evaluations"])
