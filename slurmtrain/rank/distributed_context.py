"""The ranks together: device, process groups, and a common exit."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slurmtrain.choices import Device
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import EnvironmentMismatchError, SlurmtrainError
from slurmtrain.rank.rendezvous import CONNECT_S, meet
from slurmtrain.slurm.environment import LAUNCHER_VARIABLE, Environment, no_gpu
from slurmtrain.system.activity import waiting
from slurmtrain.system.gpu import ask_gpus
from slurmtrain.system.signals import StopFlag

# A collective of NCCL that times out ends the process with SIGABRT, whatever it is about to say. Ranks that wait for each other
# on the CPU, too, get an error of gloo's before that, and find out who did not come.
AFTER_GLOO_S = 300


@dataclass(frozen=True)
class DistributedContext:
    """The device of a rank, and what it shares with the others.

    Attributes:
        device_group: all ranks, for gradients (NCCL on GPUs, gloo on CPUs); None for a single rank.
        control_group: all ranks, gloo: flags and sums, on the CPU.
        checkpoint_group: all ranks, gloo: checkpoints only, separate from all other collectives.
        store_address: host and port of the store in rank 0's process; None for a single rank.
    """

    environment: Environment
    device: torch.device
    device_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None
    store_address: tuple[str, int] | None = None

    def connect_to_store(self) -> dist.Store:
        """Return a connection to the store of its own, for a thread that must not share that of the groups.

        Raises:
            ConnectionRefusedError: the process that had the store is gone.
            OSError, dist.DistError: it does not answer within `CONNECT_S` seconds.
        """
        assert self.store_address is not None
        with socket.create_connection(self.store_address, timeout=CONNECT_S):
            pass  # torch itself would try a closed port again and again
        store = dist.TCPStore(*self.store_address, None, False, timedelta(seconds=CONNECT_S))
        return dist.PrefixStore(f"restart-{self.environment.restart_count}", store)

    @waiting()
    def broadcast_text(self, text: str | None) -> str:
        """Return rank 0's text on all ranks."""
        if self.control_group is None:
            assert text is not None
            return text
        # As bytes: a pickle from the network would be a program.
        own = (text or "").encode(errors="surrogatepass")
        size = torch.tensor([len(own)])
        dist.broadcast(size, src=0, group=self.control_group)
        if int(size.item()) == 0:
            return ""
        told = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.environment.rank == 0:
            told = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        dist.broadcast(told, src=0, group=self.control_group)
        return told.numpy().tobytes().decode(errors="surrogatepass")

    @waiting()
    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank, on rank 0; none on the others."""
        group, own = self.control_group, text.encode(errors="surrogatepass")
        if group is None:
            return [text]
        if self.environment.rank != 0:
            dist.send(torch.tensor([len(own)]), 0, group=group)
            dist.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), 0, group=group)
            return []
        texts = [text]
        for rank in range(1, self.environment.world_size):
            size = torch.empty(1, dtype=torch.int64)
            dist.recv(size, rank, group=group)
            received = torch.empty(int(size.item()), dtype=torch.uint8)
            dist.recv(received, rank, group=group)
            texts.append(received.numpy().tobytes().decode(errors="surrogatepass"))
        return texts

    @waiting()
    def leave_together(self) -> None:
        """Wait until all ranks are here. The first to exit would otherwise look like a failure to the others."""
        if self.control_group is not None:
            dist.barrier(group=self.control_group)


def init_distributed(
    cluster: ClusterConfig,
    device: str,
    environment: Environment,
    directory: Path | None,
    stop_flag: StopFlag,
    *,
    on_met: Callable[[DistributedContext], None] = lambda met: None,
) -> DistributedContext:
    """Find the device, meet the other ranks, and make the process groups.

    Where torch's default process group exists already (Trainer, Accelerate and others make it), it is used.

    Args:
        directory: folder where rank 0 publishes its address; not needed under torchrun or for a single rank.
        on_met: called when the ranks have met, with what they share so far: a store, and no group yet. NCCL has no time-out
            for the start of a group, so whoever watches over the ranks has to begin now.

    Raises:
        EnvironmentMismatchError: a GPU was asked for that does not exist.
        RendezvousError: a rank is missing.
    """
    own = choose_device(device, environment, gpus_per_node=cluster.gpus_per_node)
    if own.type == "cpu":
        # The same number in every attempt: how a sum is split over threads shows in its last bits.
        torch.set_num_threads(threads_of(os.environ.get("OMP_NUM_THREADS", ""), cluster.cpus_per_task))
    else:
        torch.cuda.set_device(own)
    if environment.world_size == 1:
        alone = DistributedContext(environment, own)
        on_met(alone)
        return alone
    timeout = timedelta(seconds=cluster.collective_timeout_s)
    if dist.is_initialized():
        _choose_interface(cluster.network_interface, None)
        met = DistributedContext(environment, own, store_address=_address_of_store())
        on_met(met)
        return _with_groups(met, timeout)
    rendezvous = meet(environment, directory or Path("."), cluster, lambda: stop_flag.requested)
    met = DistributedContext(environment, own, store_address=rendezvous.address)
    on_met(met)
    if own.type == "cuda":
        _check_own_gpu(rendezvous.store, environment, own)
    _choose_interface(cluster.network_interface, rendezvous.interface)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo",
        store=rendezvous.store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout + timedelta(seconds=AFTER_GLOO_S if own.type == "cuda" else 0),
        device_id=own if own.type == "cuda" else None,
    )
    return _with_groups(met, timeout)


def _with_groups(met: DistributedContext, timeout: timedelta) -> DistributedContext:
    """Make the groups beside torch's default process group."""
    assert dist.group.WORLD is not None
    control_group = dist.new_group(backend="gloo", timeout=timeout)
    checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
    return replace(met, device_group=dist.group.WORLD, control_group=control_group, checkpoint_group=checkpoint_group)


def _address_of_store() -> tuple[str, int] | None:
    """Return the address of the store that env:// uses; None: the variables do not say it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdigit() else None


def environment_of_process_group(detected: Environment) -> Environment:
    """Return this rank's place in torch's default process group, which exists already.

    It is what was detected, unless a launcher that leaves no mark of its own has started several ranks in one task.

    Raises:
        EnvironmentMismatchError: the group lacks ranks of the job.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if (detected.rank, detected.world_size) == (rank, size):
        return detected
    if size < detected.world_size:
        raise EnvironmentMismatchError(
            f"torch's process group has {size} ranks, and the job has {detected.world_size}",
            hint="let slurmtrain.init() create the process group, or create it with init_method='env://'",
        )
    # As from cluster=local, which leaves everything else to these variables.
    variables = {LAUNCHER_VARIABLE: "local", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), **os.environ}
    return Environment.detect({**variables, "RANK": str(rank), "WORLD_SIZE": str(size)})


def threads_of(setting: str, cpus: int) -> int:
    """Return the number of threads that OMP_NUM_THREADS asks for: "4", or "4,2" with those of nested loops.

    Else one per CPU.
    """
    first = setting.partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else cpus


def choose_device(device: str, environment: Environment, *, gpus_per_node: int = 0) -> torch.device:
    """Choose this rank's device: "cpu", or GPU number 0 when one is visible, else the local rank's.

    SLURM gives each task its own single GPU or all of the node's, depending on flags and version.

    Args:
        device: "cpu", "cuda", or "auto": a GPU if the job has asked for some or one is visible, else the CPU.
        gpus_per_node: number of GPUs that the job has asked for.

    Raises:
        EnvironmentMismatchError: there is no GPU, or there are fewer than ranks on this node.
    """
    if device == Device.CPU:
        return torch.device("cpu")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == Device.AUTO and visible == 0 and gpus_per_node == 0:
        return torch.device("cpu")
    if visible == 0:
        raise no_gpu(
            environment,
            f"cluster.gpus_per_node={gpus_per_node}" if gpus_per_node else "train.device=cuda",
            ""
            if torch.version.cuda or torch.version.hip
            else f", and its torch {torch.__version__} is built for CPUs only",
            ask_gpus()[1] if torch.version.cuda else None,
        )
    if visible == 1:
        return torch.device("cuda", 0)
    if environment.local_rank >= visible:
        asked = f" of cluster.gpus_per_node={gpus_per_node}" if gpus_per_node > visible else ""
        raise EnvironmentMismatchError(
            f"{environment.local_world_size} ranks on {environment.node}, but only {visible} GPUs{asked} are visible there",
            hint=f"`nvidia-smi` on {environment.node} shows them; cluster.exclude={environment.node} leaves that node out"
            if asked
            else f"set cluster.tasks_per_node={visible}",
            nodes=(environment.node,) if asked and environment.source == "slurm" else (),
        )
    return torch.device("cuda", environment.local_rank)


def _check_own_gpu(store: dist.Store, environment: Environment, device: torch.device) -> None:
    """Compare this rank's GPU with those of the other ranks on its node.

    A rank that sees a single GPU cannot tell whether it is its own; two on one would share its memory, or fail in NCCL.

    Raises:
        EnvironmentMismatchError: another rank has the same one.
    """
    first = environment.rank - environment.local_rank
    neighbours = range(first, min(first + environment.local_world_size, environment.world_size))
    store.set(f"gpu/{environment.rank}", str(torch.cuda.get_device_properties(device).uuid))
    gpus = {rank: store.get(f"gpu/{rank}").decode() for rank in neighbours}
    sharing = [rank for rank, gpu in gpus.items() if gpu == gpus[environment.rank]]
    if len(sharing) > 1:
        raise EnvironmentMismatchError(
            f"ranks {', '.join(map(str, sharing))} on {environment.node} see the same GPU, and no other",
            hint=f"cluster.gpus_per_node must be at least the {environment.local_world_size} ranks of a node, and "
            "CUDA_VISIBLE_DEVICES must not hide them",
        )


def _choose_interface(configured: str, found: str | None) -> None:
    """Tell gloo and NCCL which network interface to use, unless the user's environment does."""
    name = {"auto": found, "none": None}.get(configured, configured)
    if name is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if name != "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


MEMORY_HINT = (
    "a smaller train.micro_batch_size leaves the global batch as it is; parallel.activation_checkpointing=full and "
    "parallel=fsdp need less memory, too; `plan` shows what fits"
)


@contextlib.contextmanager
def explain_out_of_memory(environment: Environment, steps_done: Callable[[], int]) -> Iterator[None]:
    """Turn torch's error of the block into one that says what to change. A run that never did a step is not tried again.

    Args:
        steps_done: returns the number of steps that the run has done, over all attempts.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        done, said = steps_done(), str(error).partition(" If reserved but")[0]
        where = f"rank {environment.rank} on {environment.node} ran out of GPU memory in step {done + 1}"
        explained = (SlurmtrainError if done else EnvironmentMismatchError)(f"{where}: {said}", hint=MEMORY_HINT)
        raise explained from error
