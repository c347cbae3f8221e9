"""`probe`, and the checks before training, on a real SLURM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmtrain.runs.reasons import Reason
from tests.slurm.project import SMALL, make_project
from tests.support.slurm_cluster import Cluster

# Python loads it first of all, from the snapshot: on one node another environment comes before the one of all others.
OTHER_PACKAGES = """
import os, pathlib, sys
if os.environ.get("SLURMD_NODENAME") == "n1" and "SLURM_PROCID" in os.environ:
    sys.path.insert(0, str(pathlib.Path(__file__).parent / "older"))
"""


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_verb_checks_an_allocation_and_trains_nothing(sandbox: Cluster, tmp_path: Path) -> None:
    words = ["+experiment=smoke", "cluster.nodes=2", "cluster.tasks_per_node=1", "preflight", "--full", "--json"]
    found = json.loads(sandbox.slurmtrain(*sandbox.words, *words, cwd=tmp_path).stdout)["preflight"]
    assert (found["mode"], found["ranks"], len(found["nodes"])) == ("full", 2, 2)
    assert [each["kind"] for each in found["findings"] if each["fatal"]] == []
    assert len(found["measured"]["links"]) == 1


def test_probe_writes_a_file_with_which_submit_works_untouched(sandbox: Cluster, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", sandbox)
    answer = json.loads(sandbox.slurmtrain("probe", "--json", cwd=project.path).stdout)
    assert answer["refused"] is None
    assert answer["values"]["network_interface"] == "lo"
    cluster = Path(answer["file"]).stem
    assert cluster == "sandbox-low"  # `sandbox` is a shipped one
    # Without GPUs that could compute, the ranks train on CPUs.
    overrides = [f"+cluster={cluster}", *SMALL, "train.steps=2", "train.device=cpu", "submit", "--follow"]
    assert "finished" in sandbox.slurmtrain(*overrides, cwd=project.path).stdout
    assert "fits cluster sandbox" in sandbox.slurmtrain("probe", "--check", cluster, cwd=project.path).stdout
