"""Which model of GPU a name means."""

from __future__ import annotations

import pytest

from slurmtrain.planner.gpus import GPUS, gpu_of
from slurmtrain.planner.peaks import BF16, FP16


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("h100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("nvidia_h100_80gb_hbm3", "H100"),
        ("h100_nvl", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("a100_80gb", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("nvidia_a100_80gb_pcie", "A100 PCIe"),  # which has no NVLink
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("b200", "B200"),
        ("l40s", "L40S"),
        ("l4", "L4"),
        ("rtx4090", "RTX 4090"),
        ("rtx_a6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("v100", "V100"),
        ("mi300x", "MI300X"),
    ],
)
def test_a_gpu_is_known_by_the_names_that_slurm_and_people_give_it(name: str, model: str) -> None:
    found = gpu_of(name)
    assert found is not None
    assert found.name == model


@pytest.mark.parametrize(
    ("name", "memory_gb"),
    [
        ("a100", 40),
        ("a100_80gb", 80),
        ("a100-sxm4-80gb", 80),
        ("a100-80g", 80),
        ("NVIDIA A100-SXM-64GB", 64),
        ("NVIDIA A100-PCIE-40GB", 40),
        ("v100_32gb", 32),
        ("Tesla V100-SXM2-32GB", 32),
        ("v100", 16),
        ("h100_nvl", 94),
        ("h100_96gb", 96),
        ("gh200", 96),
        ("gh200_144gb", 144),
        ("NVIDIA GH200 480GB", 96),
        ("l40s", 48),
        ("nvidia_h100_80gb_hbm3", 80),
    ],
)
def test_a_name_that_states_the_memory_is_believed(name: str, memory_gb: float) -> None:
    found = gpu_of(name)
    assert found is not None
    assert found.memory_gb == memory_gb


@pytest.mark.parametrize("name", ["", "gpu", "h999", "a100_3g.20gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"])
def test_what_is_not_known_or_a_part_of_a_gpu_has_no_figures(name: str) -> None:
    assert gpu_of(name) is None


def test_every_gpu_of_the_table_has_a_peak_in_16_bit() -> None:
    for gpu in GPUS:
        assert gpu.peak(BF16).tflops or gpu.peak(FP16).tflops, gpu.name
