"""Memory and links of GPUs, by the name that SLURM or a person gives their model; their arithmetic is in `planner.peaks`.

Figures are those of the makers' data sheets. Links count in one direction, where data sheets often add both up. What a
program reaches is less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from slurmtrain.planner.peaks import Peak, peak_of

PCIE_3, PCIE_4, PCIE_5 = 16.0, 32.0, 64.0  # 10^9 bytes per second, one direction, of 16 lanes


@dataclass(frozen=True)
class Gpu:
    """A model of GPU.

    Attributes:
        name: as its maker writes it.
        memory_gb: its memory in 10^9 bytes; the smallest, where it is sold with several.
        link_gb_per_s: 10^9 bytes per second to the other GPUs of its node, one direction.
        network_gb_per_s: 10^9 bytes per second and GPU between nodes, one direction, in the maker's own systems; None:
            there are none to go by.
    """

    name: str
    memory_gb: float
    link_gb_per_s: float
    network_gb_per_s: float | None = None

    def peak(self, dtype: str) -> Peak:
        """Return its most arithmetic in an element type of `planner.peaks`."""
        return peak_of(self.name, dtype)


# The network is that of DGX A100 (200 Gbit/s for each GPU), DGX H100, H200 and B200 (400), DGX B300 (800), and of AMD's
# reference nodes (400). Of MI250X, which PyTorch sees as two GPUs, one.
GPUS = (
    Gpu("GB300", 279, 900, 100),
    Gpu("B300", 270, 900, 100),
    Gpu("GB200", 186, 900, 50),
    Gpu("B200", 180, 900, 50),
    Gpu("H200 NVL", 141, PCIE_5),
    Gpu("GH200", 96, 450, 50),
    Gpu("H200", 141, 450, 50),
    Gpu("H100 NVL", 94, PCIE_5),
    Gpu("H100 PCIe", 80, PCIE_5),
    Gpu("H100", 80, 450, 50),
    Gpu("H800", 80, 200, 50),
    Gpu("H20", 96, 450, 50),
    Gpu("A100 PCIe", 40, PCIE_4),
    Gpu("A100", 40, 300, 25),
    Gpu("A800 PCIe", 80, PCIE_4),
    Gpu("A800", 80, 200, 25),
    Gpu("A30", 24, PCIE_4),
    Gpu("A40", 48, PCIE_4),
    Gpu("A10G", 24, PCIE_4),
    Gpu("A10", 24, PCIE_4),
    Gpu("L40S", 48, PCIE_4),
    Gpu("L40", 48, PCIE_4),
    Gpu("L4", 24, PCIE_4),
    Gpu("RTX 6000 Ada", 48, PCIE_4),
    Gpu("RTX A6000", 48, PCIE_4),
    Gpu("RTX 4090", 24, PCIE_4),
    Gpu("RTX 3090", 24, PCIE_4),
    Gpu("V100 PCIe", 16, PCIE_3),
    Gpu("V100", 16, 150),
    Gpu("T4", 16, PCIE_3),
    Gpu("MI355X", 288, 538, 50),
    Gpu("MI350X", 288, 538, 50),
    Gpu("MI325X", 256, 448, 50),
    Gpu("MI300X", 192, 448, 50),
    Gpu("MI250X", 64, 100, 12.5),
)
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


def _stated_gb(name: str, gpu: Gpu) -> float | None:
    """Return the memory that a name states; None if it states none.

    What no such GPU is sold with is something else: of GH200 480GB, the memory of its CPU.
    """
    stated = [float(size) for size in _SIZE.findall(name.lower().replace("_", "-"))]
    return next((size for size in reversed(stated) if gpu.memory_gb / 2 <= size <= gpu.memory_gb * 2.5), None)
