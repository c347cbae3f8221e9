"""What the machines of a cluster can do: from its config where it says so, from the data sheet of its GPUs, or assumed.

What is assumed is said, so that nobody takes a default for a fact of their cluster.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmtrain.config.schema import Config

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


BF16, FP16, TF32, FP32 = "bfloat16", "float16", "tf32", "float32"
DTYPES = (BF16, FP16, TF32, FP32)
TABLE = Path(__file__).with_name("gpus.csv")


@dataclass(frozen=True)
class Gpu:
    """A model of GPU.

    Attributes:
        name: as its maker writes it.
        memory_gb: its memory in 10^9 bytes; the smallest, where it is sold with several.
        link_gb_per_s: 10^9 bytes per second to the other GPUs of its node, one direction.
        network_gb_per_s: 10^9 bytes per second and GPU between nodes, one direction, in the maker's own systems; None:
            there are none to go by.
        bf16, fp16, tf32, fp32: its most teraflops per second in that type; None: it does not compute in it.
    """

    name: str
    memory_gb: float
    link_gb_per_s: float
    network_gb_per_s: float | None
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float

    def tflops(self, dtype: str) -> float | None:
        """Return its most teraflops per second in one of `DTYPES`."""
        return dict(zip(DTYPES, (self.bf16, self.fp16, self.tf32, self.fp32), strict=True))[dtype]


@dataclass(frozen=True)
class Peak:
    """The most arithmetic of a device.

    Attributes:
        tflops: dense teraflops per second; None: not known.
        why: where the figure comes from, or why there is none; a phrase.
    """

    tflops: float | None
    why: str


def _read_table() -> Iterator[Gpu]:
    with TABLE.open(newline="", encoding="ascii") as file:
        for row in csv.DictReader(file):
            numbers = {name: float(cell) if cell else None for name, cell in row.items() if name != "name"}
            yield Gpu(row["name"], **numbers)  # type: ignore[arg-type]


# The network is that of DGX A100 (200 Gbit/s for each GPU), DGX H100, H200 and B200 (400), DGX B300 (800), and of AMD's
# reference nodes (400). Of MI250X, which PyTorch sees as two GPUs, one. GPUs with PCI Express alone: 16 lanes of it.
GPUS = tuple(_read_table())
_WORDS = re.compile(r"rtx|[a-z]+\d*[a-z]*|\d+[a-z]*")
_SIZE = re.compile(r"(?<![a-z0-9.])(\d{2,3}) ?g(?:i?b)?(?![a-z0-9])")
_PART = re.compile(r"\bmig\b|\d+g[._]\d+gb", re.IGNORECASE)  # a part of a GPU has a part of its memory and its peak


def gpu_of(name: str) -> Gpu | None:
    """Return the model of a GPU; None: not known, or a part of a GPU (MIG).

    Args:
        name: SLURM's type of it ("h100", "a100_80gb", "nvidia_h100_80gb_hbm3"), or its device's name.
    """
    if _PART.search(name):
        return None
    words = set(_WORDS.findall(name.lower()))
    for gpu in GPUS:  # of models that share a word, the more specific one comes first
        if set(_WORDS.findall(gpu.name.lower())) <= words:
            return replace(gpu, memory_gb=_stated_gb(name, gpu) or gpu.memory_gb)
    return None


def peak_of(device: str | None, dtype: str, *, stated_tflops: float | None = None) -> Peak:
    """Return the most that a device can do.

    Args:
        device: name of the GPU, as for `gpu_of`; None: the ranks compute on CPUs.
        dtype: one of `DTYPES`: the type in which matrices are multiplied.
        stated_tflops: cluster.peak_tflops, which counts instead of the table; None: it is not set.
    """
    if stated_tflops is not None:
        return Peak(stated_tflops, f"cluster.peak_tflops={stated_tflops:g}")
    gpu = gpu_of(device or "")
    if gpu is None:
        part = device is not None and _PART.search(device)
        why = f"{device} is a part of a GPU" if part else f"no peak is known for {device or 'CPUs'}"
        return Peak(None, f"{why}; cluster.peak_tflops states {'its peak' if part else 'one'}")
    tflops = gpu.tflops(dtype)
    if tflops is None:
        return Peak(None, f"{gpu.name} has no matrix units for {dtype}; cluster.peak_tflops states a peak")
    return Peak(tflops, f"{gpu.name} in {dtype}, dense, by its data sheet")


def _stated_gb(name: str, gpu: Gpu) -> float | None:
    """Return the memory that a name states; None if it states none.

    What no such GPU is sold with is something else: of GH200 480GB, the memory of its CPU.
    """
    stated = [float(size) for size in _SIZE.findall(name.lower().replace("_", "-"))]
    return next((size for size in reversed(stated) if gpu.memory_gb / 2 <= size <= gpu.memory_gb * 2.5), None)
