"""`probe`, and the checks before training, on a real SLURM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.project import make_project
from tests.support.slurm_cluster import Cluster


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
    # Without GPUs that could compute, which a program is not asked for.
    words = [f"+cluster={cluster}", "train.device=cpu", "submit", "--follow", "--", "echo", "counted"]
    assert "finished" in sandbox.slurmtrain(*words, cwd=project.path).stdout
