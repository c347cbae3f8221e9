"""GPUs: which a job has, what speaks against them, and what is said when their memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slurmtrain.errors import SlurmtrainError
from slurmtrain.rank.distributed_context import explain_out_of_memory
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.gpu import GpuFacts, Gpus, NoAnswerError, read_gpus
from tests.support.fake_nvml import FakeNvml, recovery_action

# What SLURM 22.05 gives to a task on the second node of a job, where GPU 0 belongs to another one.
SECOND = {"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"}


@pytest.mark.parametrize(
    ("count", "variables", "own"),
    [
        (4, {"SLURM_JOB_GPUS": "2,3"}, [2, 3]),
        (4, {"SLURM_JOB_GPUS": "6,7"}, [0, 1, 2, 3]),
        (4, {"SLURM_JOB_GPUS": "GPU-1"}, [0, 1, 2, 3]),
        (4, SECOND, [1, 2]),
        (2, SECOND, [0, 1]),  # cgroups hide the others, and NVML counts from 0
        (8, {"CUDA_VISIBLE_DEVICES": "2,5"}, [2, 5]),  # without SLURM, those that a program sees
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-8a3f"}, [0, 1]),
    ],
)
def test_only_the_gpus_of_the_job_are_looked_at(count: int, variables: dict[str, str], own: list[int]) -> None:
    assert Gpus(FakeNvml(count), variables).indices == own


def test_nvml_is_read_into_facts() -> None:
    found = read_gpus({}, FakeNvml())
    assert found is not None and len(found) == 2
    assert found[0] == GpuFacts(0, "GPU number 0", 80.0, 70.0, (9,), 3, False, False, "", False, (), False)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"nvmlDeviceGetTotalEccErrors": 7}, {"ecc_errors": 7}),
        ({"nvmlDeviceGetRemappedRows": (0, 3, 1, 1)}, {"remap_pending": True, "remap_failed": True}),
        ({"nvmlDeviceGetFieldValues": recovery_action(1)}, {"needs": "a reset", "needs_later": False}),
        ({"nvmlDeviceGetFieldValues": recovery_action(4)}, {"needs": "to be drained and reset", "needs_later": True}),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x48}, {"slowed_by": ("a hardware slowdown", "heat (hardware)")}),
        ({"nvmlDeviceGetTotalEccErrors": FakeNvml.NVMLError("Not Supported")}, {"ecc_errors": None}),
        # A driver that is too old to say what a GPU needs.
        ({"nvmlDeviceGetFieldValues": recovery_action(0, code=3)}, {"needs": None}),
    ],
)
def test_what_speaks_against_a_gpu_is_read(answers: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read_gpus({}, FakeNvml().answers(**answers))
    assert found is not None
    assert {name: getattr(found[0], name) for name in expected} == expected


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_a_driver_that_does_not_answer_is_told_in_its_own_words(broken: str) -> None:
    with pytest.raises(NoAnswerError, match="Driver/library version mismatch"):
        read_gpus({}, FakeNvml().answers(**{broken: FakeNvml.NVMLError("Driver/library version mismatch")}))


def test_where_nvml_cannot_be_asked_nothing_is_known_of_the_gpus() -> None:
    missing = FakeNvml.NVMLError("NVML Shared Library Not Found")
    missing.value = 12
    assert read_gpus({}, FakeNvml().answers(nvmlInit=missing)) is None


RANK = Environment("slurm", rank=3, world_size=4, node_rank=1, nodes=("n0", "n1"), tasks_per_node=(2, 2))
SAID = "CUDA out of memory. Tried to allocate 64.00 GiB"


@pytest.mark.parametrize(("steps_done", "exit_code"), [(0, 78), (120, 1)])
def test_out_of_memory_ends_a_run_that_has_never_done_a_step(steps_done: int, exit_code: int) -> None:
    with pytest.raises(SlurmtrainError) as caught, explain_out_of_memory(RANK, lambda: steps_done):
        raise torch.OutOfMemoryError(f"{SAID}. If reserved but unallocated")
    assert caught.value.exit_code == exit_code
    assert caught.value.message == f"rank 3 on n1 ran out of GPU memory in step {steps_done + 1}: {SAID}."
    assert caught.value.hint is not None and "train.micro_batch_size" in caught.value.hint
