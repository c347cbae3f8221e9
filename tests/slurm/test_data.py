"""What a run has seen, on a real SLURM: the same samples in the same order, on however many ranks it is resumed."""

from __future__ import annotations

import pytest

from slurmtrain.checkpoint.format.directory import committed
from tests.slurm.project import Project, Run, make_project
from tests.support.slurm_cluster import Cluster

STEPS = 30
SHORT = [
    f"train.steps={STEPS}",
    "train.global_batch_size=12",
    "train.micro_batch_size=1",
    "train.eval_every=0",
    "+model.pause_s=0.03",
]


@pytest.fixture(scope="module")
def project(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("data") / "project", sandbox)


def hashes(run: Run) -> dict[int, str]:
    return {record["step"]: record["data_hash"] for record in run.losses() if "data_hash" in record}


def test_preempted_and_resumed_with_4_then_2_then_3_ranks_it_has_seen_what_the_undisturbed_run_has(
    project: Project,
) -> None:
    undisturbed = project.submit(*SHORT, "cluster.nodes=1", "cluster.tasks_per_node=1", nodes="n0")
    undisturbed.go_on()
    stages: list[Run] = []
    for ranks, workers in ((4, 0), (2, 1)):
        earlier = [f"checkpoint.restore_from={committed(stages[-1].run_dir.checkpoints)[-1]}"] if stages else []
        words = [
            f"cluster.tasks_per_node={ranks}",
            f"train.data_workers={workers}",
            "requeue=off",
        ]
        run = project.submit(*SHORT, "cluster.nodes=1", *words, *earlier, nodes="n1")
        run.wait_for_step(3 if not stages else stages[-1].step() + 3)
        run.preempt_by_high()
        assert run.wait_for_end().reason == "preempted"
        stages.append(run)
    last = project.submit(
        *SHORT, "cluster.nodes=1", "cluster.tasks_per_node=3", "train.data_workers=2",
        f"checkpoint.restore_from={committed(stages[-1].run_dir.checkpoints)[-1]}", nodes="n1",
    )  # fmt: skip
    last.finish()
    undisturbed.finish()

    logs = [hashes(run) for run in (*stages, last)]
    assert [step for log in logs for step in log] == list(range(1, STEPS + 1))
    assert {step: value for log in logs for step, value in log.items()} == hashes(undisturbed)
    compared = last.cli("runs", "compare", undisturbed.run_dir.id, last.run_dir.id, "--tolerance", "1e-4")
    assert f"they have seen the same samples in the same order up to step {STEPS}" in compared
