"""The most arithmetic that a GPU can do, by its name and the element type, from its maker's data sheet.

All figures are teraflops per second of dense matrix products, without the factor of two that makers add for sparse ones, and
at the clock of the data sheet. What `torch.cuda.get_device_name` says tells the variants of a GPU apart.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16, FP16, TF32, FP32 = "bfloat16", "float16", "tf32", "float32"
DTYPES = (BF16, FP16, TF32, FP32)


@dataclass(frozen=True)
class Peak:
    """The most arithmetic of a device.

    Attributes:
        tflops: dense teraflops per second; None: not known.
        why: where the figure comes from, or why there is none; a phrase.
    """

    tflops: float | None
    why: str


# Name, as it is a part of the device's -> (bfloat16, float16, TF32, float32); None: the GPU does not compute in it. The
# longest name that fits counts. NVIDIA's data sheets (H200, H100, A100, L40S, ...), where each says "with sparsity" half of
# it; AMD's of MI200 and MI300, for MI250X one of its two dies, which is what a process gets.
PEAKS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    "GB300": (2500.0, 2500.0, 1250.0, 80.0),
    "B300": (2250.0, 2250.0, 1125.0, 75.0),
    "GB200": (2500.0, 2500.0, 1250.0, 80.0),
    "B200": (2250.0, 2250.0, 1125.0, 75.0),
    "B100": (1750.0, 1750.0, 875.0, 60.0),
    "GH200": (989.4, 989.4, 494.7, 66.9),
    "H200": (989.4, 989.4, 494.7, 66.9),
    "H200 NVL": (835.5, 835.5, 417.7, 60.0),
    "H100": (989.4, 989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 756.0, 378.0, 51.0),
    "H100 NVL": (835.5, 835.5, 417.7, 60.0),
    "H800": (989.4, 989.4, 494.7, 66.9),
    "H20": (148.0, 148.0, 74.0, 44.0),
    "A100": (312.0, 312.0, 156.0, 19.5),
    "A800": (312.0, 312.0, 156.0, 19.5),
    "A30": (165.0, 165.0, 82.0, 10.3),
    "A40": (149.7, 149.7, 74.8, 37.4),
    "A10": (125.0, 125.0, 62.5, 31.2),
    "A10G": (70.0, 70.0, 35.0, 35.0),
    "L40S": (362.05, 362.05, 183.0, 91.6),
    "L40": (181.05, 181.05, 90.5, 90.5),
    "L4": (121.0, 121.0, 60.0, 30.3),
    "V100": (None, 125.0, None, 15.7),
    "V100-PCIE": (None, 112.0, None, 14.0),
    "T4": (None, 65.0, None, 8.1),
    "RTX 6000 Ada": (364.2, 364.2, 182.1, 91.1),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 71.0, 35.6, 35.6),
    "MI355X": (2516.6, 2516.6, None, 157.3),
    "MI350X": (2306.9, 2306.9, None, 144.2),
    "MI325X": (1307.4, 1307.4, 653.7, 163.4),
    "MI300X": (1307.4, 1307.4, 653.7, 163.4),
    "MI250X": (191.5, 191.5, None, 47.9),
    "MI210": (181.0, 181.0, None, 45.3),
}


def peak_of(device: str | None, dtype: str, *, stated_tflops: float | None = None) -> Peak:
    """Return the most that a device can do.

    Args:
        device: name of the GPU, as torch or nvidia-smi says it; None: the ranks compute on CPUs.
        dtype: one of `DTYPES`: the type in which matrices are multiplied.
        stated_tflops: cluster.peak_tflops, which counts instead of the table; None: it is not set.
    """
    if stated_tflops is not None:
        return Peak(stated_tflops, f"cluster.peak_tflops={stated_tflops:g}")
    if device is None:
        return Peak(None, "no peak is known for CPUs; cluster.peak_tflops states one")
    if "MIG" in device.split():
        return Peak(None, f"{device} is a part of a GPU; cluster.peak_tflops states its peak")
    words = _words(device)
    fitting = [name for name in PEAKS if _contains(words, _words(name))]
    if not fitting:
        return Peak(None, f"no peak is known for {device}; cluster.peak_tflops states one")
    name = max(fitting, key=len)
    tflops = PEAKS[name][DTYPES.index(dtype)]
    if tflops is None:
        return Peak(None, f"{name} has no matrix units for {dtype}; cluster.peak_tflops states a peak")
    return Peak(tflops, f"{name} in {dtype}, dense, by its data sheet")


def _words(name: str) -> list[str]:
    return name.replace("-", " ").upper().split()


def _contains(words: list[str], part: list[str]) -> bool:
    """Return whether `part` comes in `words`, in its order and without gaps, so that L4 is not found in L40."""
    return any(words[at : at + len(part)] == part for at in range(len(words) - len(part) + 1))
