"""Ranks on two machines, two on each: here, two network namespaces with a cable between them.

A sandbox cannot show this, because all of its nodes share one loopback.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
RANK = """
import os, sys
from pathlib import Path
from slurmtrain.runtime import signals
from slurmtrain.runtime.environment import Environment
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.runtime.world import join
import torch, torch.distributed as dist

rank, nodes, interface = int(sys.argv[1]), tuple(sys.argv[2].split(",")), sys.argv[3]
environment = Environment(
    source="slurm", rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2, node_rank=rank // 2,
    nodes=nodes, tasks_per_node=(2, 2), job_id="1", step_id="0",
)
cluster = ClusterConfig(rendezvous_timeout_s=120, collective_timeout_s=120, network_interface=interface)
join(cluster, "cpu", environment, Path(sys.argv[4]), signals.arm())
total = torch.ones(1)
dist.all_reduce(total)
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("NCCL_SOCKET_IFNAME"), int(total))
"""


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces and a veth pair: `left0` in one, `right0` in the other."""
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
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.parametrize("nodes", ["n0,n1", ",".join(ADDRESSES)], ids=["names that do not resolve", "names that do"])
def test_ranks_of_two_machines_use_the_interfaces_that_connect_them(
    machines: tuple[str, str], nodes: str, tmp_path: Path
) -> None:
    variables = {**os.environ, "SLURM_LAUNCH_NODE_IPADDR": ADDRESSES[0]}
    ranks = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                machines[rank // 2],
                sys.executable,
                "-c",
                RANK,
                str(rank),
                nodes,
                "auto",
                tmp_path,
            ],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = [out.strip() for out, _ in outputs]
    assert said == ["left0 =left0 4"] * 2 + ["right0 =right0 4"] * 2, "\n".join(error for _, error in outputs)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
