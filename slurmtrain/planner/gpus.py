"""What GPUs can do, by the name that SLURM, a person or torch gives their model: arithmetic, memory and links.

Figures are those of the makers' data sheets: teraflops per second of dense matrix products, without the factor of two that
makers add for sparse ones, at the clock of the data sheet; links in one direction, where data sheets often add both up. What
a program reaches is less.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

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
