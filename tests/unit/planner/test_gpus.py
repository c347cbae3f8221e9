"""Which model of GPU a name means, and the memory and the most arithmetic of it."""

from __future__ import annotations

import pytest

from slurmtrain.planner.hardware import BF16, FP16, FP32, TF32, gpu_of, peak_of


@pytest.mark.parametrize(
    ("name", "model", "memory_gb", "dtype", "tflops"),
    [
        ("h100", "H100", 80, BF16, 989.4),
        ("NVIDIA H100 80GB HBM3", "H100", 80, TF32, 494.7),
        ("nvidia_h100_80gb_hbm3", "H100", 80, BF16, 989.4),
        ("h100_96gb", "H100", 96, BF16, 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", 80, BF16, 756.0),
        ("h100_nvl", "H100 NVL", 94, BF16, 835.5),
        ("NVIDIA H200", "H200", 141, BF16, 989.4),
        ("gh200", "GH200", 96, BF16, 989.4),
        ("gh200_144gb", "GH200", 144, BF16, 989.4),
        ("NVIDIA GH200 480GB", "GH200", 96, BF16, 989.4),
        ("a100", "A100", 40, BF16, 312.0),
        ("a100_80gb", "A100", 80, BF16, 312.0),
        ("a100-80g", "A100", 80, BF16, 312.0),
        ("NVIDIA A100-SXM4-80GB", "A100", 80, BF16, 312.0),
        ("NVIDIA A100-SXM-64GB", "A100", 64, BF16, 312.0),
        ("nvidia_a100_80gb_pcie", "A100 PCIe", 80, BF16, 312.0),  # which has no NVLink
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe", 40, FP32, 19.5),
        ("v100", "V100", 16, FP16, 125.0),
        ("v100_32gb", "V100", 32, FP16, 125.0),
        ("Tesla V100-SXM2-32GB", "V100", 32, FP16, 125.0),
        ("Tesla V100-PCIE-32GB", "V100 PCIe", 32, FP16, 112.0),
        ("b200", "B200", 180, BF16, 2250.0),
        ("l40s", "L40S", 48, BF16, 362.05),
        ("NVIDIA L40", "L40", 48, BF16, 181.05),
        ("l4", "L4", 24, BF16, 121.0),
        ("rtx4090", "RTX 4090", 24, BF16, 165.2),
        ("rtx_a6000", "RTX A6000", 48, BF16, 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 48, BF16, 364.2),
        ("AMD Instinct MI300X", "MI300X", 192, BF16, 1307.4),
    ],
)
def test_a_gpu_is_known_by_the_names_that_slurm_and_people_give_it(
    name: str, model: str, memory_gb: float, dtype: str, tflops: float
) -> None:
    found = gpu_of(name)
    assert found is not None
    assert (found.name, found.memory_gb, found.tflops(dtype)) == (model, memory_gb, tflops)
    if " " in name:  # as torch says it
        assert peak_of(name, dtype).tflops == tflops


@pytest.mark.parametrize(
    ("device", "dtype", "why"),
    [
        (None, "float32", "no peak is known for CPUs; cluster.peak_tflops states one"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", "is a part of a GPU"),
        ("Tesla V100-SXM2-32GB", "bfloat16", "V100 has no matrix units for bfloat16"),
        ("NVIDIA Z9000", "bfloat16", "no peak is known for NVIDIA Z9000"),
        ("NVIDIA A1000", "bfloat16", "no peak is known for NVIDIA A1000"),  # not that of an A100
    ],
)
def test_where_no_peak_is_known_the_reason_is_said_unless_the_config_states_one(
    device: str | None, dtype: str, why: str
) -> None:
    found = peak_of(device, dtype)
    assert found.tflops is None and why in found.why
    assert peak_of(device, dtype, stated_tflops=12.5).tflops == 12.5
