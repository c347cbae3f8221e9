"""GPUs: which a job has, what speaks against them, how they are used, and what takes their memory when it runs out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmtrain.runs import gpu_use
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.gpu_use import GpuUse, read_gpu_use, start_gpu_sampler, total_of
from slurmtrain.runtime.gpu_memory import GIB, explain_out_of_memory, out_of_memory
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.gpu import GpuFacts, Gpus, NoAnswerError, read_gpus
from tests.support.fake_nvml import FakeNvml, recovery_action


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def attempt_dir(tmp_path: Path) -> AttemptDir:
    return AttemptDir(tmp_path)


def test_idle_time_and_use_are_added_up(nvml: FakeNvml) -> None:
    nvml.utilization = [90, 0]
    gpus = Gpus(nvml, {})
    use = GpuUse().with_sample([gpus.utilization(index) for index in gpus.indices], 30.0)
    assert (use.sampled_s, use.idle_s, use.utilization, use.idle_share) == (60.0, 30.0, 45.0, 0.5)
    assert total_of([use, GpuUse(60.0, 0.0, 6000.0)]) == GpuUse(120.0, 30.0, 8700.0)


def test_a_process_that_was_stopped_has_not_looked_meanwhile() -> None:
    assert GpuUse().with_sample([50.0], 36_000.0).sampled_s == 240.0


@pytest.mark.parametrize("lost", [None, 0])
def test_a_slice_or_a_lost_gpu_does_not_tell_its_use_and_is_not_idle(nvml: FakeNvml, lost: int | None) -> None:
    nvml.mig, nvml.lost = lost is None, lost
    gpus = Gpus(nvml, {})
    assert gpus.utilization(0) is None
    use = GpuUse().with_sample([gpus.utilization(0)], 30.0)
    assert use.sampled_s == 0 and use.idle_share is None


# What SLURM 22.05 gives to a task on the second node of a job, where GPU 0 belongs to another one.
SECOND = {"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"}


@pytest.mark.parametrize(
    ("count", "variables", "own"),
    [
        (4, {"SLURM_JOB_GPUS": "2,3"}, [2, 3]),
        (4, {"SLURM_JOB_GPUS": ""}, [0, 1, 2, 3]),
        (4, {"SLURM_JOB_GPUS": "6,7"}, [0, 1, 2, 3]),
        (4, {"SLURM_JOB_GPUS": "GPU-1"}, [0, 1, 2, 3]),
        (4, SECOND, [1, 2]),
        (2, SECOND, [0, 1]),  # cgroups hide the others, and NVML counts from 0
        (8, {"CUDA_VISIBLE_DEVICES": "2,5"}, [2, 5]),  # without SLURM, those that a program sees
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-8a3f"}, [0, 1]),
    ],
)
def test_only_the_gpus_of_the_job_are_sampled(count: int, variables: dict[str, str], own: list[int]) -> None:
    assert Gpus(FakeNvml(count), variables).indices == own


def test_only_the_first_rank_of_a_node_with_gpus_looks(
    attempt_dir: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_use, "has_gpu_files", lambda: False)
    assert start_gpu_sampler(attempt_dir, Environment(source="single")) is None
    monkeypatch.setattr(gpu_use, "has_gpu_files", lambda: True)
    monkeypatch.setattr(gpu_use, "EVERY_S", 0.0)
    second = Environment(source="slurm", rank=1, world_size=2, local_rank=1, local_world_size=2, nodes=("n1",))
    assert start_gpu_sampler(attempt_dir, second) is None


@pytest.mark.parametrize("breaks", ["no package", "no driver", "a driver that stops to answer"])
def test_without_a_package_or_a_driver_the_thread_ends_without_a_word(
    breaks: str, attempt_dir: AttemptDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml = FakeNvml()
    if breaks == "no driver":
        nvml.answers(nvmlInit=OSError("no libnvidia-ml"))
    if breaks == "a driver that stops to answer":
        answers = iter([50.0])
        monkeypatch.setattr(Gpus, "utilization", lambda self, index: next(answers))
    monkeypatch.setitem(sys.modules, "pynvml", None if breaks == "no package" else nvml)
    monkeypatch.setattr(gpu_use, "has_gpu_files", lambda: True)
    monkeypatch.setattr(gpu_use, "EVERY_S", 0.0)
    thread = start_gpu_sampler(attempt_dir, Environment(source="single"))
    assert thread is not None
    thread.join(timeout=30)
    assert not thread.is_alive() and capsys.readouterr() == ("", "")
    assert not read_gpu_use(attempt_dir)


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
        ({"nvmlDeviceGetFieldValues": FakeNvml.NVMLError("Not Supported")}, {"needs": None}),
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
SAID = "CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which"


TENSORS = "for 64.00 GiB more: of 80.0 GiB, its tensors take 69.5"
OUT = [
    # steps done, GiB that are free -> exit code, what it says
    (0, 9, 78, f"in step 1, {TENSORS}"),
    (0, 3, 1, f"in step 1, {TENSORS} and other processes 7.0"),
    (120, 9, 1, f"in step 121, {TENSORS}"),
]


@pytest.mark.parametrize(("steps_done", "free_gib", "exit_code", "message"), OUT)
def test_it_ends_a_run_that_has_never_done_a_step_unless_others_take_the_memory(
    steps_done: int, free_gib: int, exit_code: int, message: str
) -> None:
    own = int(69.5 * GIB), 70 * GIB
    error = out_of_memory(SAID, RANK, steps_done, free=free_gib * GIB, total=80 * GIB, own=own)
    assert error.exit_code == exit_code
    assert error.message == f"rank 3 on n1 ran out of GPU memory {message}"
    assert error.hint is not None and "train.micro_batch_size" in error.hint
    assert ("nvidia-smi" in error.hint) == ("other processes" in message)


def test_on_a_cpu_the_error_stays_as_it_is() -> None:
    with pytest.raises(torch.OutOfMemoryError), explain_out_of_memory(RANK, torch.device("cpu"), lambda: 0):
        raise torch.OutOfMemoryError(SAID)
