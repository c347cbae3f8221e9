"""One real SLURM for all tests of this folder: a sandbox that they share, with partitions and settings of their own for some.

A machine without SLURM fails these tests instead of skipping them: a skip would hide that nothing was tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurmtrain.sandbox import SandboxSpec, default_directory, up
from slurmtrain.slurm.command_environment import PREFIX_FILE
from tests.slurm.project import Project, make_project
from tests.support.gloo import wait_until
from tests.support.slurm_cluster import Cluster, reconfigured

SHARED: list[Cluster] = []  # the sandbox, while there is one


def _cluster(name: str, spec: SandboxSpec) -> Iterator[Cluster]:
    sandbox = up(spec, default_directory(f"{name}-{os.getpid()}"), ends_with=os.getpid())
    # PATH leads to its commands, whatever SLURM it is. Where this file names their prefix, they would come before the fronts
    # that tests put on PATH.
    sandbox.slurm_conf.with_name(PREFIX_FILE).unlink(missing_ok=True)
    try:
        cluster = Cluster(sandbox)
        yield cluster
        cluster.run(["scancel", "-p", "low"])
        cluster.run(["scancel", "-p", "high"])
        # A test that leaves a node drained or down has hurt all that came after it.
        cluster.wait_for_nodes()
    finally:
        sandbox.down()


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Cluster]:
    """Eight nodes; preemption and requeue send SIGTERM, like most clusters."""
    spec = SandboxSpec(nodes=8, cpus=4, gpus=4, grace_s=30, kill_wait_s=10)
    for cluster in _cluster("tests", spec):
        SHARED.append(cluster)
        yield cluster
        SHARED.clear()


@pytest.fixture(scope="module", autouse=True)
def leaves_no_job() -> Iterator[None]:
    """What the tests of a module leave when one fails is cancelled: those of other modules would wait for its nodes."""
    yield
    if SHARED and (jobs := _jobs(SHARED[0])):
        SHARED[0].run(["scancel", *jobs], check=False)
        wait_until(lambda: not _jobs(SHARED[0]), "cancelled")


def _jobs(cluster: Cluster) -> list[str]:
    return cluster.run(["squeue", "--noheader", "--format=%A"]).stdout.split()


@pytest.fixture(scope="module")
def project(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A user's project, for the tests of a module."""
    return make_project(tmp_path_factory.mktemp("work") / "project", sandbox)


# It documents PreemptParameters=send_user_signal for SlurmctldParameters=preempt_send_user_signal, which it still takes.
# 22.05.8 knows the old one alone; 23.11.11, 24.11.7, 25.05.9 the new; 23.02 to 25.11 both by their source.
PREEMPT_PARAMETERS = (23, 2)


@pytest.fixture
def user_signal(sandbox: Cluster) -> Iterator[Cluster]:
    """The sandbox, where a preempted job gets the signal that it asked for with `--signal`."""
    current = sandbox.does(PREEMPT_PARAMETERS)
    line = "PreemptParameters=send_user_signal" if current else "SlurmctldParameters=preempt_send_user_signal"
    with reconfigured(sandbox, {"JobRequeue=1": f"{line}\nJobRequeue=1"}):
        yield sandbox
