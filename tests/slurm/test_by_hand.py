"""What is tried by hand on a real SLURM: layouts that share a model, the checks before training.

That all layouts go on with the same bits is shown by tests/distributed/test_change_of_layout.py, and that SLURM's preemption
changes no bit by test_training.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.runs.reasons import Reason
from tests.slurm.project import Project, make_project
from tests.support.local_runs import assert_same_bits, assert_steps_join
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow

STEPS = 12
SHORT = [f"train.steps={STEPS}", "train.eval_every=6", "model.tie_embeddings=false"]
WORDS = [
    *("+cluster=sandbox", "cluster.sandbox=null", "cluster.nodes=2", "cluster.tasks_per_node=1", "+experiment=smoke"),
    *("parallel=fsdp", "train.global_batch_size=8", "cluster.network_gb_per_s=1", "job.name=lm"),
]


@pytest.fixture(scope="module")
def project(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = make_project(tmp_path_factory.mktemp("by-hand") / "project", sandbox)
    return made


def test_a_preempted_run_on_two_nodes_finishes_with_the_same_bits(project: Project) -> None:
    undisturbed = project.submit(*SHORT, "parallel=fsdp_tp", nodes="n0,n1")
    preempted = project.submit(*SHORT, "parallel=fsdp_tp", "+model.pause_s=0.3", nodes="n2,n3")
    preempted.wait_for_step(3)
    preempted.preempt_by_high()
    preempted.finish()
    undisturbed.finish()
    assert [attempt.reason for attempt in preempted.attempts()] == ["preempted", "finished"]
    assert_steps_join(preempted, total=STEPS)
    assert_same_bits(preempted, undisturbed)


# Python loads it first of all, from the snapshot: on one node another environment comes before the one of all others.
OTHER_PACKAGES = """
import os, pathlib, sys
if os.environ.get("SLURMD_NODENAME") == "n1" and "SLURM_PROCID" in os.environ:
    sys.path.insert(0, str(pathlib.Path(__file__).parent / "older"))
"""


def test_a_node_with_other_packages_is_left_out_of_the_next_start_and_the_run_finishes(
    sandbox: Cluster, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project", sandbox)
    older = project.path / "older" / "numpy-1.0.0.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Name: numpy\nVersion: 1.0.0\n")
    (project.path / "sitecustomize.py").write_text(OTHER_PACKAGES)
    run = project.submit(
        *("cluster.nodes=3", "cluster.tasks_per_node=1", "train.steps=4", "train.global_batch_size=12"),
    )
    run.finish()
    first, *_, last = run.attempts()
    assert (first.reason, first.bad_nodes) == (Reason.BAD_NODE, ["n1"])
    assert "preflight, versions: n1: numpy 1.0.0; expected: numpy " in (first.sentence or "")
    assert "n1" in first.nodes and "n1" not in last.nodes
    assert last.reason == "finished"


def test_the_verb_checks_an_allocation_and_trains_nothing(sandbox: Cluster, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", sandbox)
    words = ["+cluster=sandbox", "cluster.sandbox=null", f"cluster.slurm_conf={sandbox.sandbox.slurm_conf}"]
    words += ["+experiment=smoke", "cluster.nodes=2", "cluster.tasks_per_node=1", "preflight", "--full", "--json"]
    done: subprocess.CompletedProcess[str] = sandbox.run(
        [sys.executable, "-m", "slurmtrain", *words], cwd=project.path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["preflight"]
    assert (found["mode"], found["ranks"], len(found["nodes"])) == ("full", 2, 2)
    assert [each["kind"] for each in found["findings"] if each["fatal"]] == []
    assert len(found["measured"]["links"]) == 1
