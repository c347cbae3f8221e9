"""One real SLURM for all tests of this folder: a sandbox that they share, with partitions and settings of their own for some.

A machine without SLURM fails these tests instead of skipping them: a skip would hide that nothing was tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurmtrain.errors import ClusterError
from slurmtrain.sandbox import SandboxSpec, default_directory, up
from slurmtrain.sandbox.files import find_programs
from slurmtrain.slurm.command_environment import PREFIX_FILE
from slurmtrain.slurm.versions import PREEMPT_PARAMETERS
from tests.support.gloo import wait_until
from tests.support.slurm_cluster import Cluster, reconfigured


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
    spec = SandboxSpec(nodes=8, cpus=4, gpus=4, grace_s=30, kill_wait_s=10, slurmd_timeout_s=10, cred_expire_s=5)
    yield from _cluster("tests", spec)


def _owners(cluster: Cluster, states: str) -> dict[str, str]:
    """The jobs in these states, each with the run or the sweep that it belongs to; any other job is its own."""
    lines = cluster.run(["squeue", "--noheader", f"--states={states}", "--format=%F|%k"]).stdout.splitlines()
    jobs = (line.strip().split("|", 1) for line in lines)
    return {job: ":".join(comment.split(":")[:2]) if "slurmtrain:" in comment else job for job, comment in jobs}


@pytest.fixture(autouse=True)
def leaves_no_job(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves when it fails is cancelled: the others would wait for its nodes. Runs of its module stay."""
    if "sandbox" not in request.fixturenames:
        yield
        return
    cluster: Cluster = request.getfixturevalue("sandbox")
    before = set(_owners(cluster, "all").values())
    yield
    if left := [job for job, whose in _owners(cluster, "PENDING,RUNNING,SUSPENDED").items() if whose not in before]:
        cluster.run(["scancel", *left], check=False)
        wait_until(lambda: not {*left} & _owners(cluster, "PENDING,RUNNING,SUSPENDED,COMPLETING").keys(), "cancelled")


@pytest.fixture
def user_signal(sandbox: Cluster) -> Iterator[Cluster]:
    """The sandbox, where a preempted job gets the signal that it asked for with `--signal`."""
    current = sandbox.does(PREEMPT_PARAMETERS)
    line = "PreemptParameters=send_user_signal" if current else "SlurmctldParameters=preempt_send_user_signal"
    with reconfigured(sandbox, {"JobRequeue=1": f"{line}\nJobRequeue=1"}):
        yield sandbox


@pytest.fixture(scope="module")
def accounting_sandbox() -> Iterator[Cluster]:
    """Two nodes, with slurmdbd: accounts and limits, and QOS that preempt each other. `tests/run` does not install it."""
    try:
        find_programs(accounting=True)
    except ClusterError as error:
        pytest.skip(f"{error.message} {error.hint}")
    yield from _cluster(
        "tests-db",
        SandboxSpec(nodes=2, cpus=4, gpus=2, grace_s=10, kill_wait_s=10, slurmd_timeout_s=10, accounting=True),
    )
