"""Ranks on two machines, two on each: here, two network namespaces with a cable between them.

A sandbox cannot show this, because all of its nodes share one loopback.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import SlurmtrainError
from slurmtrain.rank.distributed_context import init_distributed
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals
from tests.support.descriptors import listening
from tests.support.gloo import GlooRanks

ADDRESSES = ("10.77.0.1", "10.77.0.2")
OTHERS = ("10.78.0.1", "10.79.0.1")  # of networks that do not connect the two
LISTENS = "01004D0A"  # 10.77.0.1, as the kernel writes it


class Said(NamedTuple):
    """What a rank has found: its interfaces, how many ranks there are, and where it listens; or why it has failed."""

    code: int
    found: str
    error: str = ""


def enter(machine: str) -> None:
    """Move this process to a network namespace, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{machine}", os.O_RDONLY)
    new_network, new_mounts, recursive, slave, detach = 0x40000000, 0x20000, 1 << 14, 1 << 19, 2
    for failed in (
        libc.setns(namespace, new_network),
        libc.unshare(new_mounts),
        libc.mount(b"", b"/", b"none", recursive | slave, None),
        libc.umount2(b"/sys", detach),
        libc.mount(machine.encode(), b"/sys", b"sysfs", 0, None),  # which shows the interfaces of the namespace
    ):
        assert not failed, os.strerror(ctypes.get_errno())


def be_rank(
    directory: Path, machines: tuple[str, str], nodes: tuple[str, ...], launched_from: str, cluster: ClusterConfig
) -> Said:
    rank = int(os.environ["RANK"])
    enter(machines[rank // 2])
    os.environ["SLURM_LAUNCH_NODE_IPADDR"] = launched_from
    os.environ.pop("MASTER_ADDR", None)
    environment = Environment(
        source="slurm",
        rank=rank,
        world_size=4,
        local_rank=rank % 2,
        local_world_size=2,
        node_rank=rank // 2,
        nodes=nodes,
        tasks_per_node=(2, 2),
        job_id="1",
        step_id="0",
    )
    try:
        init_distributed(cluster, "cpu", environment, directory, signals.install_signal_handlers())
    except SlurmtrainError as error:
        return Said(error.exit_code, "", str(error))
    total = torch.ones(1)
    dist.all_reduce(total)
    port = json.loads((directory / "rendezvous.json").read_text())["port"]
    dist.barrier()
    interfaces = os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("NCCL_SOCKET_IFNAME")
    return Said(0, " ".join(map(str, (*interfaces, int(total), *listening(port)))))


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces, a veth pair (`left0` in one, `right0` in the other), and a network of its own in each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"slurmtrain-a{os.getpid()}", f"slurmtrain-b{os.getpid()}")
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", names[0], "link", "add", "left0", "type", "veth", "peer", "name", "right0", "netns", names[1])
        for name, link, address in zip(names, ("left0", "right0"), ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
        for name, address in zip(names, OTHERS, strict=True):
            _ip("-n", name, "link", "add", "other0", "type", "veth", "peer", "name", "end0")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "other0")
            for link in ("other0", "end0"):
                _ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.parametrize(
    ("nodes", "launched_from"),
    [("n0,n1", ADDRESSES[0]), (f"n0,{ADDRESSES[1]}", "10.9.9.9")],
    ids=["names that do not resolve", "only the other's name does"],
)
def test_ranks_of_two_machines_meet_by_the_network_that_connects_them_and_by_no_other(
    machines: tuple[str, str], nodes: str, launched_from: str, tmp_path: Path
) -> None:
    said = meet(machines, nodes, launched_from, tmp_path)
    assert [each.found for each in said] == [f"left0 =left0 4 {LISTENS}"] * 2 + ["right0 =right0 4"] * 2, said


def test_a_network_that_does_not_connect_the_machines_is_named(machines: tuple[str, str], tmp_path: Path) -> None:
    said = meet(machines, "n0,n1", ADDRESSES[0], tmp_path, interface="other0")
    for rank in (2, 3):
        assert f"rank {rank} on n1: rank 0, expected on node n0, cannot be reached at 10.78.0.1:" in said[rank].error
        assert "cluster.network_interface=NAME" in said[rank].error
    assert "2 of 4 ranks did not arrive within 10 s: rank 2 (on n1), 3 (on n1)" in said[0].error


def meet(
    machines: tuple[str, str],
    nodes: str,
    launched_from: str,
    directory: Path,
    interface: str = "auto",
) -> list[Said]:
    """What each rank says."""
    cluster = ClusterConfig(
        rendezvous_timeout_s=10 if interface == "other0" else 120,
        collective_timeout_s=120,
        network_interface=interface,
    )
    with GlooRanks(directory) as ranks:
        told = machines, tuple(nodes.split(",")), launched_from, cluster
        return ranks.start(4, be_rank, *told, directory=directory).results(240)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
