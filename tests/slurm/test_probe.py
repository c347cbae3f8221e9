"""probe on a real SLURM: it writes a file with which submit works untouched."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slurmtrain.slurm.read_facts import read_facts
from tests.slurm.project import SMALL, make_project
from tests.support.slurm_cluster import Cluster


def test_probe_writes_a_file_with_which_submit_works_untouched(sandbox: Cluster, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", sandbox)
    answer = json.loads(_run(sandbox, project.path, "probe", "--json"))
    assert answer["refused"] is None
    assert answer["values"]["network_interface"] == "lo"
    cluster = Path(answer["file"]).stem
    assert cluster == "sandbox-low"  # `sandbox` is a shipped one
    # Without GPUs that could compute, the ranks train on CPUs.
    overrides = [f"+cluster={cluster}", *SMALL, "train.steps=2", "train.device=cpu", "submit", "--follow"]
    said = _run(sandbox, project.path, *overrides)
    assert "finished" in said
    assert "fits cluster sandbox" in _run(sandbox, project.path, "probe", "--check", cluster)


def test_the_facts_of_a_sandbox_are_those_that_it_was_started_with(sandbox: Cluster) -> None:
    facts = read_facts(lambda command: sandbox.run(command).stdout)  # however long an answer takes
    low = facts.partition(None)
    assert low is not None
    assert (low.name, low.preempt_mode, low.grace_s) == ("low", "REQUEUE", 30.0)
    (nodes,) = facts.nodes_of("low")
    assert (nodes.count, nodes.cpus, nodes.gpu_count, nodes.memory_mb) == (8, 4, 4, 4000)
    assert not facts.keeps_accounts


def _run(cluster: Cluster, folder: Path, *words: str) -> str:
    return cluster.run([sys.executable, "-m", "slurmtrain", *words], cwd=folder).stdout
