"""Preempted on a real SLURM under a layout that shares a model: the same bits as if nothing had happened.

By hand: that all of them go on with the same bits is shown by tests/distributed/test_change_of_layout.py, and that SLURM's
preemption changes no bit by test_training.py.
"""

from __future__ import annotations

import pytest

from tests.slurm.project import Project, make_project
from tests.support.local_runs import assert_same_bits, assert_steps_join
from tests.support.slurm_cluster import Cluster

STEPS = 12
SHORT = [f"train.steps={STEPS}", "train.eval_every=6", "model.tie_embeddings=false"]


@pytest.fixture(scope="module")
def project(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("layouts") / "project", sandbox)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["parallel=fsdp", "cluster.tasks_per_node=1"], id="FSDP"),
        pytest.param(["parallel=fsdp_tp"], id="FSDP x TP"),
        pytest.param(["parallel.pp=2", "parallel.dp_replicate=1", "parallel.dp_shard=2"], id="FSDP x PP"),
    ],
)
def test_a_preempted_run_on_two_nodes_finishes_with_the_same_bits(project: Project, layout: list[str]) -> None:
    undisturbed = project.submit(*SHORT, *layout, nodes="n0,n1")
    preempted = project.submit(*SHORT, *layout, "+model.pause_s=0.3", nodes="n2,n3")
    preempted.wait_for_step(3)
    preempted.preempt_by_high()
    preempted.finish()
    undisturbed.finish()
    assert [attempt.reason for attempt in preempted.attempts()] == ["preempted", "finished"]
    assert_steps_join(preempted, total=STEPS)
    assert_same_bits(preempted, undisturbed)
