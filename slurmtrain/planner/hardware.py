"""What the machines of a cluster can do: from its config where it says so, from the data sheet of its GPUs, or assumed.

What is assumed is said, so that nobody takes a default for a fact of their cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from slurmtrain.config.schema import Config
from slurmtrain.planner.gpus import gpu_of, peak_of

GB = 1e9  # of links, networks and storage, as their makers count
# Share of the peak that the arithmetic of a compiled step reaches where no run was measured: BEST in products of large
# matrices. What is done with single elements is bound by memory: it grows with the width of a model, products with its
# square, so that at the width NARROW it takes as long as they do. GPUs whose memory is fast for their peak wait less for it.
# BEST and both widths are fitted to published runs; the page `planning` has the error of each. Without torch.compile
# torchtitan has about 0.85 of the speed.
BEST, LEAST, UNCOMPILED = 0.70, 0.40, 0.85
NARROW, NARROW_OF_FAST_MEMORY = 2450, 1100
FAST_MEMORY = ("A100", "H200")
# Share of a link's bandwidth that collectives of large tensors reach, as nccl-tests measure it on NVLink and InfiniBand.
LINK_SHARE = 0.8
NETWORK_GB_PER_S = 12.5  # of a node of which nothing is known: one adapter of 100 Gbit/s
STORAGE_GB_PER_S = 1.0  # for each node that writes, where nothing is known of the file system
HOST_GB_PER_S = 20.0  # from a GPU to its node's memory, as pinned memory over PCI Express 4.0 reaches


@dataclass(frozen=True)
class Hardware:
    """Rates of a cluster, per rank, in bytes or operations per second; infinite where nothing is known, which counts as free.

    Attributes:
        gpu: name of the GPU's model; None: not known, or there is none.
        dtype: element type that is computed in.
        peak_flops: most operations per second in that type; None: not known.
        link: to the other ranks of the node, in one direction.
        network: a rank's share of its node's network, in one direction.
        storage: of the whole job, to where checkpoints are written.
        host: from a GPU to its node's memory, into which a save copies.
        efficiency: share of the peak that a step's arithmetic is expected to reach.
        link_share: share of links and network that collectives are expected to reach.
        notes: sentences that say what was assumed.
    """

    gpu: str | None
    dtype: str
    peak_flops: float | None
    link: float
    network: float
    storage: float
    host: float = HOST_GB_PER_S * GB
    efficiency: float = BEST
    link_share: float = LINK_SHARE
    notes: tuple[str, ...] = field(default=())

    @property
    def flops(self) -> float | None:
        """Operations per second that are expected of a rank; None: not known."""
        return None if self.peak_flops is None else self.peak_flops * self.efficiency


def dtype_of(config: Config) -> str:
    """Return the element type in which the model computes."""
    return config.parallel.param_dtype or "float32"


def efficiency_of(gpu: str | None, config: Config) -> float:
    """Return the share of the peak that the arithmetic of a step is expected to reach."""
    narrow = NARROW_OF_FAST_MEMORY if gpu in FAST_MEMORY else NARROW
    width = config.model.get("dim")
    found = max(LEAST, BEST / (1 + narrow / width)) if isinstance(width, int) and width > 0 else LEAST
    return found * (1.0 if config.parallel.compile else UNCOMPILED)


def hardware_of(config: Config) -> Hardware:
    """Return what the cluster of a config can do, by its fields, and by the data sheet of cluster.gpu_type."""
    cluster, dtype, notes = config.cluster, dtype_of(config), []
    gpu = gpu_of(cluster.gpu_type) if cluster.gpu_type and cluster.gpus_per_node else None
    ranks = cluster.tasks_per_node
    device = (
        (gpu.name if gpu is not None else f"cluster.gpu_type={cluster.gpu_type}") if cluster.gpus_per_node else None
    )
    found = peak_of(device, dtype, stated_tflops=cluster.peak_tflops)
    peak = found.tflops
    if peak is None:
        notes.append(found.why)
    link = cluster.gpu_link_gb_per_s or (gpu.link_gb_per_s if gpu is not None else None)
    network = cluster.network_gb_per_s
    if network is None and gpu is not None and gpu.network_gb_per_s is not None:
        network = gpu.network_gb_per_s * cluster.gpus_per_node
        notes.append(
            f"cluster.network_gb_per_s={network:g} assumed: the value of the maker's own nodes with {gpu.name}"
        )
    elif network is None and cluster.gpus_per_node:
        network = NETWORK_GB_PER_S
        notes.append(f"cluster.network_gb_per_s={network:g} assumed: one adapter of 100 Gbit/s for each node")
    if link is None and ranks > 1 and (network is not None or cluster.gpus_per_node):
        notes.append("cluster.gpu_link_gb_per_s is not known: communication within a node counts as free")
    if network is None and cluster.node_range.most > 1:
        notes.append("cluster.network_gb_per_s is not known: communication between nodes counts as free")
    storage = cluster.storage_gb_per_s
    if storage is None:
        storage = STORAGE_GB_PER_S * cluster.node_range.most
        notes.append(f"cluster.storage_gb_per_s={storage:g} assumed: {STORAGE_GB_PER_S:g} GB/s for each node")
    return Hardware(
        gpu=gpu.name if gpu is not None else None,
        dtype=dtype,
        peak_flops=None if peak is None else peak * 1e12,
        link=math.inf if link is None else link * GB,
        network=math.inf if network is None else network * GB / ranks,
        storage=storage * GB,
        efficiency=efficiency_of(gpu.name if gpu is not None else None, config),
        notes=tuple(notes),
    )
