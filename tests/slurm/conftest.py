"""A real SLURM for the tests: one sandbox for the session, another one for clusters that preempt with the job's own signal.

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
from tests.support.slurm_cluster import Cluster


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
    """Four nodes; preemption and requeue send SIGTERM, like most clusters."""
    yield from _cluster("tests", SandboxSpec(nodes=4, cpus=4, gpus=4, grace_s=10, kill_wait_s=10, slurmd_timeout_s=10))


@pytest.fixture(scope="module")
def user_signal_sandbox() -> Iterator[Cluster]:
    """Two nodes; a preempted job gets the signal it asked for with `--signal`."""
    spec = SandboxSpec(nodes=2, cpus=4, gpus=4, grace_s=10, kill_wait_s=10, slurmd_timeout_s=10, user_signal=True)
    yield from _cluster("tests-usr", spec)


@pytest.fixture(scope="module")
def cancelling_sandbox() -> Iterator[Cluster]:
    """One node; SLURM cancels preempted jobs instead of requeueing them."""
    yield from _cluster("tests-cancel", SandboxSpec(nodes=1, grace_s=10, kill_wait_s=10, preempt_mode="cancel"))


@pytest.fixture(scope="module")
def graceless_sandbox() -> Iterator[Cluster]:
    """One node; preemption requeues at once, without a GraceTime, which is SLURM's default."""
    yield from _cluster("tests-grace", SandboxSpec(nodes=1, grace_s=0, kill_wait_s=10))


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
