"""Ranks that talk over NCCL and share one GPU.

NCCL refuses two ranks on one GPU of a host, so each of these is told that it is on a host of its own; then they talk over the
loopback. This is slow, because the GPU runs the kernels of one process at a time, but it is all of NCCL that one GPU can show.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmtrain.runtime.distributed_context import init_distributed
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals
from tests.support.gloo import cluster_config


def nccl_variables(rank: int) -> dict[str, str]:
    """What a rank is told so that it is alone on its node."""
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
    }


def joined_by_nccl(directory: Path, function: Callable[..., Any], *args: Any) -> Any:
    """As `tests.support.gloo.joined`, on the GPU."""
    os.environ.update(nccl_variables(int(os.environ["RANK"])))
    stop_flag = signals.install_signal_handlers()
    world = init_distributed(cluster_config(), "cuda", Environment.detect(), directory, stop_flag)
    value = function(world, *args)
    world.leave_together()
    return value
