"""The scaling test on a real SLURM: an artificial slow link, and a slow loader, that more than one node has."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.slurm.project import Project, make_project
from tests.support.slurm_cluster import Cluster

# Hooks of the user's own that make a part of each step slow as soon as there are several nodes.
SLOWED = """
import os, time
import torch.distributed as dist
from slurmtrain.data.loading.loader import BatchLoader
from slurmtrain.training.hooks.base import TrainingHook

SEVERAL = int(os.environ["SLURM_NNODES"]) > 1

def slowed(owner, name, seconds):
    original = getattr(owner, name)
    def wrapped(*arguments, **named):
        time.sleep(seconds)
        return original(*arguments, **named)
    if SEVERAL:
        setattr(owner, name, wrapped)

class Link(TrainingHook):
    def __init__(self):
        slowed(dist, "all_gather_into_tensor", 0.05)
        slowed(dist, "reduce_scatter_tensor", 0.05)

class Data(TrainingHook):
    def __init__(self):
        slowed(BatchLoader, "__next__", 0.4)
"""
WORDS = [
    *("+cluster=sandbox", "cluster.sandbox=null", "cluster.nodes=2", "cluster.tasks_per_node=1", "+experiment=smoke"),
    *("parallel=fsdp", "train.global_batch_size=8", "cluster.network_gb_per_s=1", "job.name=lm"),
]


@pytest.fixture(scope="module")
def project(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = make_project(tmp_path_factory.mktemp("scale") / "project", sandbox)
    (made.path / "slowed.py").write_text(SLOWED)
    return made


def scale(project: Project, *words: str) -> str:
    line = [*WORDS, f"cluster.slurm_conf={project.cluster.sandbox.slurm_conf}", *words]
    command = [sys.executable, "-m", "slurmtrain", *line, "scale", "--at-once", "1", "--steps", "20"]
    return project.cluster.run(command, cwd=project.path).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "kind", "named"),
    [
        ("Link", [], ("communication", "dp_shard")),
        ("Data", ["--strong"], ("data", None)),
    ],
)
def test_what_is_slow_on_more_nodes_is_named(
    hook: str, kind: list[str], named: tuple[str, str | None], project: Project
) -> None:
    words = [f"train.hooks=[{{_target_: slowed.{hook}}}]", *kind]
    found: dict[str, Any] = json.loads(scale(project, *words, "--json"))
    assert [each["nodes"] for each in found["sizes"]] == [1, 2]
    assert [each["global_batch_size"] for each in found["sizes"]] == ([8, 8] if kind else [4, 8])
    assert found["not_measured"] == []
    (doubling,) = found["doublings"]
    assert not doubling["worth_it"]
    assert (doubling["bottleneck"]["kind"], doubling["bottleneck"]["axis"]) == named
    assert doubling["planned"]["efficiency"] > doubling["efficiency"]
    # The same command shows it again, and submits nothing.
    text = scale(project, *words, "--plot", "scaling.png")
    assert "using more than 1 node is not worth it" in text
    assert (project.path / "scaling.png").exists()
    again = json.loads(scale(project, *words, "--json"))
    assert again["sizes"] == found["sizes"]
