"""A job of a range of nodes on a real SLURM: it takes what is there, and no sample and no step is lost or done twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slurmtrain.runs.lookup import all_runs
from tests.slurm.project import Project, Run, counting
from tests.support.local_runs import assert_steps_join
from tests.support.slurm_cluster import Cluster

BATCH, STEPS, TOKENS = 24, 16, 64
# The model of tests/slurm/project.py, which also notes every sample that it is trained on. The first pass of
# DDP in a process is one whose gradients are discarded.
SEEN_MODEL = """
import hashlib, os
from paced import Paced, RUN_DIR

class Seen(Paced):
    def forward(self, tokens):
        if self.training and (self.passes or os.environ.get("SLURM_NTASKS", "1") == "1"):
            rows = [hashlib.sha256(row.numpy().tobytes()).hexdigest() + "\\n" for row in tokens]
            with (RUN_DIR / "seen").open("a") as file:
                file.write("".join(rows))
        return super().forward(tokens)
"""
SAME = [
    "model._target_=seen.Seen",
    "model.dropout=0.0",  # whose masks depend on the rank
    f"train.steps={STEPS}",
    f"train.global_batch_size={BATCH}",
    "train.eval_every=0",
]
ELASTIC = ["cluster.nodes=2-4", "cluster.tasks_per_node=1", "+model.pause_s=0.2"]


@pytest.fixture(scope="module")
def project(project: Project) -> Project:
    (project.path / "seen.py").write_text(SEEN_MODEL)
    project.cluster.run(["git", "add", "-A"], cwd=project.path)
    return project


def seen(run_dir: Path) -> Counter[str]:
    return Counter((run_dir / "seen").read_text().split())


def logged(run: Run, field: str) -> dict[int, Any]:
    return {record["step"]: record[field] for record in run.losses() if field in record}


class Changed(NamedTuple):
    """Two runs at the same time, on nodes of their own.

    Attributes:
        resized: of three nodes, lost one to a colleague, was then ended, and resumed on one.
        said: what `resume` has said to that.
        shrunk: a program that counts; one of its four nodes died.
    """

    resized: Run
    said: str
    shrunk: Run


@pytest.fixture(scope="module")
def changed(project: Project, sandbox: Cluster) -> Changed:
    words = [*counting(60, pause_s=0.15), "cluster.nodes=2-4", "cluster.exclude='n[0-3]'"]
    shrunk = project.submit(*words, small=False)
    resized = project.submit(*SAME, *ELASTIC, "cluster.exclude='n[3-7]'")
    resized.wait_for_step(3)
    colleague = sandbox.submit_high(nodes=resized.attempts()[0].nodes[2:], seconds=600)
    shrunk.wait_for_step(3)
    hold = shrunk.run_dir.path / "hold"
    hold.touch()  # or it has ended before SLURM misses the node
    sandbox.kill_node("n7", only_daemon=True)
    try:
        resized.wait_for_attempt(2)
        resized.wait_for_step((resized.attempts()[1].first_step or 0) + 2)
        sandbox.run(["scancel", colleague])
        resized.cli("cancel", resized.run_dir.id)
        sandbox.wait_for(resized.job_id, "CANCELLED")
        said = resized.cli("resume", resized.run_dir.id, "cluster.nodes=1")
        shrunk.wait_until(lambda: len(shrunk.attempts()) == 2, "started again")
        hold.unlink()
        resized.wait_for_attempt(3)
        for run in (resized, shrunk):
            run.finish()
    finally:
        sandbox.start_node("n7")
        sandbox.run(["scancel", colleague])
    return Changed(resized, said, shrunk)


def test_on_three_then_two_nodes_and_then_one_every_sample_is_seen_once_and_the_loss_is_that_of_one_size(
    changed: Changed, project: Project, sandbox: Cluster
) -> None:
    """The losses differ by the order of float additions only.

    A float32 sum of n terms in another order differs by up to about sqrt(n) * 2**-24 relative; n is the tokens of a global
    batch. Each step feeds the differences of those before on, so that they stay within as many times that.
    """
    run = changed.resized
    assert "cluster.nodes: 2-4 -> 1" in changed.said
    tries = run.attempts()
    assert [(attempt.world_size, len(attempt.nodes)) for attempt in tries] == [(3, 3), (2, 2), (1, 1)]
    assert [attempt.reason for attempt in tries] == ["preempted", "cancelled", "finished"]
    assert len(run.run_dir.info()["job_ids"]) == 2 and tries[0].job_id == tries[1].job_id != tries[2].job_id
    assert_steps_join(run, total=STEPS)
    alone = [word for word in SAME if not word.startswith("cluster")]
    small = ["+cluster=local", "+experiment=smoke", "train.log_every=1", "train.tensorboard=false"]
    sandbox.slurmtrain(*small, *alone, "job.name=alone", "submit", cwd=project.path)
    one = Run(
        next(each for each in all_runs(project.path / "runs") if each.path.parent.name == "alone"),
        sandbox,
        project.path,
    )
    assert seen(run.run_dir.path) == seen(one.run_dir.path) and sum(seen(one.run_dir.path).values()) == STEPS * BATCH
    assert logged(run, "data_hash") == logged(one, "data_hash")  # the same samples in the same order
    expected, found = logged(one, "loss"), logged(run, "loss")
    assert found.keys() == expected.keys() == set(range(1, STEPS + 1))
    tolerance = STEPS * (BATCH * TOKENS) ** 0.5 * 2**-24
    assert all(abs(found[step] - loss) <= tolerance * loss for step, loss in expected.items())


def test_without_a_spare_node_the_run_goes_on_with_fewer_nodes_in_the_same_job(changed: Changed) -> None:
    first, second = changed.shrunk.attempts()
    assert (first.reason, first.verdict, first.failed_on) == ("node failure", "in-place", "n7")
    assert (first.nodes, second.nodes) == (["n4", "n5", "n6", "n7"], ["n4", "n5", "n6"])
    assert (second.job_id, second.restart_count, second.world_size) == (first.job_id, 0, 3)
    assert changed.shrunk.step() == 60
