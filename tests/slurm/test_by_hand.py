"""What is tried by hand on a real SLURM: layouts that share a model, the checks before training, scaling, a login node.

That all layouts go on with the same bits is shown by tests/distributed/test_change_of_layout.py, and that SLURM's preemption
changes no bit by test_training.py.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.resources import PACKAGE
from slurmtrain.runs.reasons import Reason
from slurmtrain.runs.run_dir import RunDir
from tests.slurm.project import SMALL, Project, Run, make_project
from tests.support.local_runs import assert_same_bits, assert_steps_join
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow

STEPS = 12
SHORT = [f"train.steps={STEPS}", "train.eval_every=6", "model.tie_embeddings=false"]
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
    made = make_project(tmp_path_factory.mktemp("by-hand") / "project", sandbox)
    (made.path / "slowed.py").write_text(SLOWED)
    return made


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


def scale(project: Project, *words: str) -> str:
    line = [*WORDS, f"cluster.slurm_conf={project.cluster.sandbox.slurm_conf}", *words]
    command = [sys.executable, "-m", "slurmtrain", *line, "scale", "--at-once", "1", "--steps", "20"]
    return project.cluster.run(command, cwd=project.path).stdout


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
    assert "preflight, packages: n1: numpy 1.0.0; expected: numpy " in (first.sentence or "")
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


SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Path]:
    """A folder with an `ssh` that logs in to an sshd of this test, with keys of its own."""
    assert SSHD is not None, "there is no sshd: apt-get install openssh-server"
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "me"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    shutil.copy(keys / "me.pub", keys / "authorized")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (keys / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/authorized\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nStrictModes no\nPidFile none\nPermitRootLogin yes\n"
    )
    (keys / "ssh_config").write_text(
        f"Host login\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {keys}/me\n  IdentitiesOnly yes\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile {keys}/known\n  LogLevel ERROR\n  BatchMode yes\n"
    )
    (keys / "bin").mkdir()
    (keys / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys}/ssh_config "$@"\n')
    (keys / "bin" / "ssh").chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (keys / "sshd.log").open("w") as log:
        daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(keys / "sshd_config")], stderr=log)
        try:
            deadline = time.monotonic() + 30
            while "listening" not in (keys / "sshd.log").read_text():
                assert time.monotonic() < deadline and daemon.poll() is None, (keys / "sshd.log").read_text()
                time.sleep(0.05)
            yield keys / "bin"
        finally:
            daemon.terminate()
            daemon.wait()


def test_a_run_is_submitted_watched_and_cancelled_from_a_laptop(tmp_path: Path, sandbox: Cluster, ssh: Path) -> None:
    laptop: Project = make_project(tmp_path / "laptop", sandbox)
    work = tmp_path / "on the login node"
    python = tmp_path / "python"  # an installation there: its Python knows this package
    python.write_text(f"#!/bin/sh\nexport PYTHONPATH='{PACKAGE.parent}'\nexec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    words = [sys.executable, "-m", "slurmtrain", f"--host=login:{work}", f"--host-python={python}"]
    # Of this machine's SLURM the laptop knows nothing.
    there = {**os.environ, "PATH": f"{ssh}:{os.environ['PATH']}", "PYTHONPATH": str(PACKAGE.parent)}

    def type_in(*verb: str, cwd: Path = laptop.path) -> str:
        done = subprocess.run(
            [*words, *verb], cwd=cwd, env=there, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    cluster = ["+cluster=sandbox", "cluster.sandbox=null", f"cluster.slurm_conf={sandbox.sandbox.slurm_conf}"]
    said = type_in(*cluster, *SMALL, "cluster.nodes=1", "train.steps=100000", "submit")
    path = next(line.strip() for line in said.splitlines() if line.startswith("  /"))
    run = Run(RunDir(Path(path)), sandbox, laptop.path)
    assert work in run.run_dir.path.parents and (run.run_dir.code / "paced.py").exists()
    run.wait_for_step(3)
    assert "running" in type_in("status", "last") and "step" in type_in("logs", "last")
    assert "is told to end" in type_in("cancel", "last")
    assert run.wait_for_end().reason == "cancelled"
    assert "stopped" in type_in("status", "last")
