"""A sandbox cluster, as tests use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.sandbox import Sandbox
from slurmtrain.sandbox.directory import START, Cell, recorded
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.parse_values import Version, does
from slurmtrain.system.process import kill_trees, send
from tests.support.gloo import wait_until


def cells(sandbox: Sandbox, name: str) -> list[Cell]:
    """What has run as a node, or as another daemon of the sandbox, such as "slurmctld"."""
    found = recorded(sandbox.directory)
    assert found is not None
    return [cell for cell in found.cells if cell.name == name]


def kill_node(sandbox: Sandbox, node: str, *, only_daemon: bool = False) -> None:
    """The power failure of a node: its slurmd, slurmstepds and tasks end at one instant.

    Args:
        only_daemon: kill slurmd and nothing else, as if the node were cut off: SLURM considers it dead, its tasks run on.
    """
    if only_daemon:
        for cell in cells(sandbox, node):
            send(signal.SIGKILL, [cell.daemon.pid])
    else:
        kill_trees(cell.process for cell in cells(sandbox, node))
    wait_until(lambda: not runs(sandbox, node), f"{node} has ended")


def runs(sandbox: Sandbox, node: str) -> bool:
    return any(cell.daemon.lives() for cell in cells(sandbox, node))


def start_node(sandbox: Sandbox, node: str) -> None:
    """Start the daemon of a node that was killed. SLURM sees it idle some seconds later."""
    (sandbox.directory / START).write_text(node)
    wait_until(lambda: runs(sandbox, node), f"{node} runs")


Job = dict[str, str]
"""What `scontrol show job -o` says about one job, by key."""


@dataclass(frozen=True)
class Cluster:
    """A sandbox with what tests do to clusters."""

    sandbox: Sandbox

    @property
    def directory(self) -> Path:
        return self.sandbox.directory

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.sandbox.nodes

    @property
    def words(self) -> list[str]:
        """Overrides with which jobs go to this cluster."""
        return ["+cluster=sandbox", "cluster.sandbox=null", f"cluster.slurm_conf={self.sandbox.slurm_conf}"]

    def env(self, **more: str) -> dict[str, str]:
        """Our environment, pointed at this cluster. SLURM_ variables of a job we may run in ourselves do not leak in."""
        mine = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return {**mine, **self.sandbox.env(), **more}

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: dict[str, str] | None = None,
        timeout_s: float = 240,
        check: bool = True,
        cwd: Path | None = None,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this cluster; by default one that fails fails the test, with its output."""
        done = subprocess.run(
            list(command),
            env=self.env(**(env or {})),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=cwd,
            input=input,
        )
        if check and done.returncode != 0:
            pytest.fail(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def slurmtrain(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run our command line, as `run` does."""
        return self.run([sys.executable, "-m", "slurmtrain", *words], **options)

    def sbatch(self, *options: str, script: str, cwd: Path) -> str:
        """Submit the text of a bash script; the job's id."""
        done = self.run(["sbatch", "--parsable", "-D", str(cwd), *options], input="#!/bin/bash\n" + script)
        return done.stdout.strip()

    def job(self, job_id: str) -> Job:
        text = self.run(["scontrol", "show", "job", "-o", job_id]).stdout
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def wait_for(
        self, job_id: str, what: str | Collection[str] | Callable[[Job], bool], *, timeout_s: float = 180
    ) -> Job:
        """Poll a job until it is in a state (or one of several), or a predicate of it holds."""
        states = {what} if isinstance(what, str) else what
        deadline = time.monotonic() + timeout_s
        job = self.job(job_id)
        while not (states(job) if callable(states) else job["JobState"] in states):
            if time.monotonic() > deadline:
                shown = {k: job.get(k) for k in ("JobState", "Reason", "Restarts", "NodeList", "ExitCode", "StartTime")}
                pytest.fail(f"job {job_id} is not {what} after {timeout_s} s: {shown}")
            time.sleep(0.1)
            job = self.job(job_id)
        return job

    def submit_high(self, *, nodes: Sequence[str], seconds: float) -> str:
        """Submit a job that takes whole nodes from whatever runs there in partition `low`."""
        options = ["-p", "high", "-w", ",".join(nodes), "--exclusive", "-N", str(len(nodes)), "-o", "/dev/null"]
        return self.run(["sbatch", "--parsable", *options, "--wrap", f"sleep {seconds}"]).stdout.strip()

    def does(self, difference: Version) -> bool:
        """Whether its version of SLURM behaves so."""
        return does(SlurmClient(str(self.sandbox.slurm_conf)).version(), difference)

    def kill_node(self, node: str, *, only_daemon: bool = False) -> None:
        kill_node(self.sandbox, node, only_daemon=only_daemon)

    def start_node(self, node: str) -> None:
        """Start a killed node and wait until SLURM uses it again."""
        start_node(self.sandbox, node)
        self.wait_for_nodes({node})

    def wait_for_nodes(self, nodes: Collection[str] | None = None, *, timeout_s: float = 180) -> None:
        """Wait until `nodes` (all, unless given) are idle."""
        wanted = set(nodes or self.nodes)
        deadline = time.monotonic() + timeout_s
        while {state for node, state in self.sandbox.node_states().items() if node in wanted} != {"idle"}:
            if time.monotonic() > deadline:
                pytest.fail(f"nodes are not idle after {timeout_s} s: {self.sandbox.node_states()}")
            time.sleep(0.1)

    @staticmethod
    def wait_for_text(path: Path, text: str, *, timeout_s: float = 180) -> str:
        """Poll a file that a job writes until `text` is in it; all of its content."""
        deadline = time.monotonic() + timeout_s
        while text not in (content := path.read_text() if path.exists() else ""):
            if time.monotonic() > deadline:
                pytest.fail(f"{text!r} is not in {path} after {timeout_s} s, which has:\n{content}")
            time.sleep(0.05)
        return content


@contextmanager
def partition(cluster: Cluster, name: str, **settings: str) -> Iterator[None]:
    """For a while the cluster has one more partition, of all nodes, whose jobs those in `high` preempt."""
    words = [f"{key}={value}" for key, value in settings.items()]
    cluster.run(["scontrol", "create", f"PartitionName={name}", "Nodes=ALL", "PriorityTier=1", *words])
    try:
        yield
    finally:
        cluster.run(["scancel", "-p", name])
        cluster.run(["scontrol", "delete", f"PartitionName={name}"])


@contextmanager
def reconfigured(cluster: Cluster, changes: dict[str, str]) -> Iterator[Cluster]:
    """The cluster with words of its slurm.conf replaced."""
    conf = cluster.sandbox.slurm_conf
    text = changed = conf.read_text()
    for before, after in changes.items():
        assert before in changed
        changed = changed.replace(before, after)
    conf.write_text(changed)
    cluster.run(["scontrol", "reconfigure"])
    try:
        yield cluster
    finally:
        conf.write_text(text)
        cluster.run(["scontrol", "reconfigure"])
        # The controller forgets the version of its nodes, which the next tests ask for, until they register again.
        wait_until(
            lambda: cluster.run(["scontrol", "show", "node"]).stdout.count(" Version=") == len(cluster.nodes), "there"
        )
