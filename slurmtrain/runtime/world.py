"""The ranks, together: device, process groups, and the way out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import EnvironmentMismatch
from slurmtrain.runtime.environment import Environment
from slurmtrain.runtime.rendezvous import meet
from slurmtrain.runtime.signals import StopSignals


@dataclass(frozen=True)
class World:
    """What a rank shares with the others.

    Attributes:
        group: all ranks, for gradients (NCCL on GPUs, gloo on CPUs); None for a single rank.
        control: all ranks, gloo: flags and counts, on the CPU.
        saving: all ranks, gloo: checkpoints only, so that they meet no other collective.
    """

    environment: Environment
    device: torch.device
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None

    def tell(self, text: str | None) -> str:
        """Rank 0's text, on all ranks."""
        box = [text]
        if self.control is not None:
            dist.broadcast_object_list(box, src=0, group=self.control)
        assert box[0] is not None
        return box[0]

    def leave_together(self) -> None:
        """Wait until all ranks are here. The first to leave would otherwise look like a failure to the others."""
        if self.control is not None:
            dist.barrier(group=self.control)


def join(
    cluster: ClusterConfig, device: str, environment: Environment, directory: Path | None, stop: StopSignals
) -> World:
    """Find the device, meet the other ranks, and make the process groups.

    Args:
        directory: where rank 0 publishes its address; not needed under torchrun or for a single rank.

    Raises:
        EnvironmentMismatch: a GPU was asked for that is not there.
        RendezvousError: somebody is missing.
    """
    own = choose_device(device, environment)
    if own.type == "cpu":
        # The same number in every attempt: how a sum is split over threads shows in its last bits.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", cluster.cpus_per_task)))
    else:
        torch.cuda.set_device(own)
    if environment.world_size == 1:
        return World(environment, own)
    meeting = meet(
        environment,
        directory or Path("."),
        timeout_s=cluster.rendezvous_timeout_s,
        stop_requested=lambda: stop.requested,
        interface=cluster.network_interface,
    )
    _choose_interface(cluster.network_interface, meeting.interface)
    timeout = timedelta(seconds=cluster.collective_timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo",
        store=meeting.store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        device_id=own if own.type == "cuda" else None,
    )
    assert dist.group.WORLD is not None
    control = dist.new_group(backend="gloo", timeout=timeout)
    saving = dist.new_group(backend="gloo", timeout=timeout)
    return World(environment, own, dist.group.WORLD, control, saving)


def choose_device(device: str, environment: Environment) -> torch.device:
    """ "auto", "cpu" or "cuda" -> this rank's device: number 0 when one is visible, else the local rank's.

    SLURM hands each task its own single GPU or all of the node's, depending on flags and version.

    Raises:
        EnvironmentMismatch: no GPU, or fewer than ranks on this node.
    """
    visible = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and visible == 0):
        return torch.device("cpu")
    if visible == 0:
        raise EnvironmentMismatch(
            f"train.device=cuda, but rank {environment.rank} on {environment.node} sees no GPU",
            hint="set cluster.gpus_per_node, or train.device=cpu",
        )
    if visible == 1:
        return torch.device("cuda", 0)
    if environment.local_rank >= visible:
        raise EnvironmentMismatch(
            f"{environment.local_world_size} ranks on {environment.node}, but only {visible} GPUs are visible there",
            hint=f"set cluster.tasks_per_node={visible}",
        )
    return torch.device("cuda", environment.local_rank)


def _choose_interface(configured: str, found: str | None) -> None:
    """Tell gloo and NCCL which network interface to use, unless the user's environment does."""
    name = {"auto": found, "none": None}.get(configured, configured)
    if name is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if name != "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
