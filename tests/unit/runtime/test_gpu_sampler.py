"""The GPUs of a node are sampled in a thread of its first rank, by NVML, and nothing of that can harm the training."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.gpu_use import Sample, read_gpu_use, total_of
from slurmtrain.runtime import gpu_sampler
from slurmtrain.runtime.gpu_sampler import GpuSampler, Nvml, own_gpus, start_gpu_sampler
from slurmtrain.slurm.environment import Environment


class FakeNvml:
    """The functions of `pynvml` that are used, over GPUs whose numbers a test sets."""

    NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        value = 0

    def check(self, handle: int) -> None:
        if handle == self.lost:
            error = self.NVMLError("GPU is lost")
            error.value = 15
            raise error

    def __init__(self, count: int = 2):
        self.utilization, self.watts, self.errors = [90] * count, [500] * count, [3] * count
        self.pending: list[tuple[int, int]] = []
        self.mig = False
        self.lost: int | None = None

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.utilization)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.check(index)
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"GPU number {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if self.mig:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.utilization[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self.check(handle)
        return SimpleNamespace(used=70_000_000_000)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 1000 * self.watts[handle]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 60 + handle

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self.errors[handle]

    def nvmlEventSetCreate(self) -> list[int]:
        return []

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: list[int]) -> None:
        events.append(handle)

    def nvmlEventSetWait_v2(self, events: list[int], milliseconds: int) -> Any:
        if not self.pending:
            raise self.NVMLError("Timeout")
        device, number = self.pending.pop(0)
        return SimpleNamespace(device=device, eventData=number)

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        self.check(handle)
        return handle


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def attempt_dir(tmp_path: Path) -> AttemptDir:
    return AttemptDir(tmp_path)


def sampler_of(nvml: FakeNvml, attempt_dir: AttemptDir, ticks: list[float]) -> GpuSampler:
    return GpuSampler(Nvml(nvml, {}), attempt_dir, "n1", 0, every_s=30.0, clock=iter(ticks).__next__)


def test_idle_time_use_power_and_errors_are_added_up(nvml: FakeNvml, attempt_dir: AttemptDir) -> None:
    sampler = sampler_of(nvml, attempt_dir, [0.0, 30.0, 60.0, 90.0])
    sampler.look()
    nvml.utilization, nvml.errors, nvml.pending = [90, 0], [3, 5], [(1, 79), (1, 31)]
    sampler.look()
    sampler.look()  # not yet time to write
    (node,) = read_gpu_use(attempt_dir)
    first, second = node.gpus
    assert (node.node, first.name, first.memory_gb, second.temperature_c) == ("n1", "GPU number 0", 70.0, 61.0)
    assert (first.sampled_s, first.idle_s, second.idle_s) == (60.0, 0.0, 30.0)
    assert (second.ecc_errors, second.xids) == (2, (79, 31))
    total = total_of([node])
    assert (total.utilization, total.power_w, total.idle_share) == (67.5, 500.0, 0.25)


@pytest.mark.parametrize("from_the_start", [False, True])
def test_a_lost_gpu_ends_the_samples_of_no_other(
    nvml: FakeNvml, attempt_dir: AttemptDir, from_the_start: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.watts = [500, 300]
    nvml.lost = 1 if from_the_start else None
    sampler = sampler_of(nvml, attempt_dir, [0.0, 30.0, 60.0, 120.0])
    sampler.look()
    nvml.lost, nvml.pending = 1, [(1, 79), (0, 31)]
    sampler.look()
    sampler.look()
    (node,) = read_gpu_use(attempt_dir)
    first, second = node.gpus
    assert (first.sampled_s, first.lost_s, first.xids) == (120.0, 0.0, (31,))
    assert (second.sampled_s, second.lost_s) == ((0.0, 120.0) if from_the_start else (30.0, 90.0))
    assert [message for message in caplog.messages if "does not answer" in message] == [
        "GPU 1 of n1 does not answer its driver any more"
    ]
    # The mean is over the GPUs and the time that were sampled.
    total = total_of([node])
    assert total.lost_s == second.lost_s
    assert total.power_w == pytest.approx(500 if from_the_start else (500 * 120 + 300 * 30) / 150)


def test_watts_that_are_not_told_are_not_0(nvml: FakeNvml, attempt_dir: AttemptDir) -> None:
    def refuse(handle: int) -> int:
        if handle == 0:
            raise nvml.NVMLError("Not Supported")
        return 400_000

    nvml.nvmlDeviceGetPowerUsage = refuse  # type: ignore[method-assign]
    sampler_of(nvml, attempt_dir, [0.0, 30.0]).look()
    (node,) = read_gpu_use(attempt_dir)
    assert (node.gpus[0].power_w, node.gpus[1].power_w, total_of([node]).power_w) == (None, 400.0, 400.0)


def test_a_process_that_was_stopped_has_not_looked_meanwhile(nvml: FakeNvml, attempt_dir: AttemptDir) -> None:
    sampler_of(nvml, attempt_dir, [0.0, 36_000.0]).look()
    (node,) = read_gpu_use(attempt_dir)
    assert node.gpus[0].sampled_s == 120.0


def test_a_slice_that_does_not_tell_its_use_is_not_idle(nvml: FakeNvml, attempt_dir: AttemptDir) -> None:
    nvml.mig = True
    sampler_of(nvml, attempt_dir, [0.0, 30.0]).look()
    total = total_of(read_gpu_use(attempt_dir))
    assert total.sampled_s == 0 and total.idle_share is None
    assert Nvml(nvml, {}).sample(0) == Sample(None, 70.0, 500.0, 60.0, 3)


@pytest.mark.parametrize(
    ("given", "own"),
    [("2,3", [2, 3]), ("0,1,2,3", [0, 1, 2, 3]), ("", [0, 1, 2, 3]), ("6,7", [0, 1, 2, 3]), ("GPU-1", [0, 1, 2, 3])],
)
def test_only_the_gpus_of_the_job_are_sampled(given: str, own: list[int]) -> None:
    assert own_gpus(4, {"SLURM_JOB_GPUS": given}) == own
    assert list(Nvml(FakeNvml(4), {"SLURM_JOB_GPUS": given}).names()) == own


def test_the_numbers_of_gpus_are_those_of_this_node_and_not_of_the_first_one() -> None:
    # What SLURM 22.05 gives to a task on the second node of a job, where GPU 0 belongs to another one.
    second = {"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"}
    assert own_gpus(4, second) == [1, 2]
    assert own_gpus(2, second) == [0, 1]  # cgroups hide the others, and NVML counts from 0


def test_without_slurm_the_gpus_are_those_that_a_program_sees() -> None:
    assert own_gpus(8, {"CUDA_VISIBLE_DEVICES": "2,5"}) == [2, 5]
    assert own_gpus(2, {"CUDA_VISIBLE_DEVICES": "GPU-8a3f"}) == [0, 1]


def test_only_the_first_rank_of_a_node_with_gpus_looks(
    attempt_dir: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_sampler, "has_gpu_files", lambda: False)
    assert start_gpu_sampler(attempt_dir, Environment(source="single")) is None
    monkeypatch.setattr(gpu_sampler, "has_gpu_files", lambda: True)
    monkeypatch.setattr(gpu_sampler, "EVERY_S", 0.0)
    second = Environment(source="slurm", rank=1, world_size=2, local_rank=1, local_world_size=2, nodes=("n1",))
    assert start_gpu_sampler(attempt_dir, second) is None


def test_a_full_disk_costs_no_sample(nvml: FakeNvml, attempt_dir: AttemptDir) -> None:
    sampler = sampler_of(nvml, AttemptDir(attempt_dir.path / "later"), [0.0, 30.0, 90.0])
    sampler.look()
    (attempt_dir.path / "later").mkdir()
    sampler.look()
    (node,) = read_gpu_use(AttemptDir(attempt_dir.path / "later"))
    assert node.gpus[0].sampled_s == 90.0


@pytest.mark.parametrize("breaks", ["no package", "no driver", "a driver that stops to answer"])
def test_without_a_package_or_a_driver_the_thread_ends_without_a_word(
    breaks: str, attempt_dir: AttemptDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml = FakeNvml()
    if breaks == "no driver":
        monkeypatch.setattr(nvml, "nvmlInit", lambda: exec("raise OSError('no libnvidia-ml')"))
    if breaks == "a driver that stops to answer":
        monkeypatch.setattr(Nvml, "xids", lambda self: exec("raise nvml.NVMLError('GPU is lost')", {"nvml": nvml}))
    monkeypatch.setitem(sys.modules, "pynvml", None if breaks == "no package" else nvml)
    monkeypatch.setattr(gpu_sampler, "has_gpu_files", lambda: True)
    monkeypatch.setattr(gpu_sampler, "EVERY_S", 0.0)
    thread = start_gpu_sampler(attempt_dir, Environment(source="single"))
    assert thread is not None
    thread.join(timeout=30)
    assert not thread.is_alive() and capsys.readouterr() == ("", "")
