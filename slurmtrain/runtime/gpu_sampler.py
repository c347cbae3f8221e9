"""Look at the GPUs of this node now and then, by NVML, and keep in the run directory how busy they were.

The first rank of each node does it, in a thread of its own: a driver whose GPU is lost may never answer, and then only this
thread waits. It needs `nvidia-ml-py` (the extra `gpu`), and does nothing where that or a driver is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.gpu_use import GpuUse, NodeGpus, Sample, write_gpu_use
from slurmtrain.slurm.environment import Environment, has_gpu_files

log = logging.getLogger(__name__)

EVERY_S = 30.0  # a sample takes some milliseconds of the driver for each GPU, and none of the GPU itself
WRITE_EVERY_S = 60.0  # a thousand nodes write to the same file system
FAILURES_MOST = 3  # in a row; then nobody looks any more
# NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NVML_ERROR_GPU_NOT_FOUND (nvml.h): no later answer will be another one.
LOST = (15, 16, 28)
LONGEST_GAP = 4  # intervals that a sample stands for at most: a process that was stopped has not looked in between

Value = TypeVar("Value")


class Gpus(Protocol):
    """The GPUs of this node."""

    def names(self) -> Mapping[int, str]:
        """Return the name of each GPU by its number."""

    def sample(self, index: int) -> Sample:
        """Return what is to be said of a GPU now."""

    def xids(self) -> Sequence[tuple[int, int]]:
        """Return the Xid errors since the last call: number of the GPU, number of the error."""


class Nvml:
    """The GPUs of this node that belong to this job, by NVML.

    Args:
        library: the module `pynvml`.
        variables: environment variables of this process.

    Raises:
        Exception: of the library: there is no driver, or it does not answer.
    """

    def __init__(self, library: Any, variables: Mapping[str, str] = os.environ):
        self._nvml = library
        library.nvmlInit()
        count = int(library.nvmlDeviceGetCount())
        # None: it is lost already, and the driver gives no handle of it.
        self._handles = {
            index: self._ask(library.nvmlDeviceGetHandleByIndex, index) for index in own_gpus(count, variables)
        }
        self._events: Any = self._ask(library.nvmlEventSetCreate)
        for handle in self._handles.values() if self._events is not None else ():
            if handle is not None:  # not every GPU tells of Xid errors, nor to every user
                self._ask(library.nvmlDeviceRegisterEvents, handle, library.nvmlEventTypeXidCriticalError, self._events)

    def names(self) -> Mapping[int, str]:
        names = {
            index: None if handle is None else self._ask(self._nvml.nvmlDeviceGetName, handle)
            for index, handle in self._handles.items()
        }
        return {index: name.decode() if isinstance(name, bytes) else str(name or "") for index, name in names.items()}

    def sample(self, index: int) -> Sample:
        nvml, handle = self._nvml, self._handles[index]
        if handle is None or self._is_lost(handle):
            return Sample(lost=True)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        degrees = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = self._ask(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, counter)
        return Sample(
            utilization=None if rates is None else float(rates.gpu),
            memory_gb=None if memory is None else memory.used / 1e9,
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=None if degrees is None else float(degrees),
            ecc_errors=None if errors is None else int(errors),
        )

    def xids(self) -> Sequence[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        if self._events is None:
            return found
        # It raises a time-out when there is none left.
        with contextlib.suppress(self._nvml.NVMLError):
            for _ in range(len(self._handles) * 16):
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                index = self._ask(self._nvml.nvmlDeviceGetIndex, event.device)  # which a lost one may not tell
                if index is not None:
                    found.append((int(index), int(event.eventData)))
        return found

    def _is_lost(self, handle: Any) -> bool:
        """Return whether the driver says that a GPU is gone ("fallen off the bus", Xid 79)."""
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError as error:
            return getattr(error, "value", None) in LOST
        return False

    def _ask(self, question: Callable[..., Value], *words: Any) -> Value | None:
        """Return the answer; None if this GPU does not tell that, as MIG slices do not tell their utilisation."""
        try:
            return question(*words)
        except self._nvml.NVMLError:
            return None


def own_gpus(count: int, variables: Mapping[str, str]) -> list[int]:
    """Return which of the `count` GPUs that NVML shows belong to this job.

    Where SLURM hides the others by cgroups, NVML shows only those of the job. Where it does not, SLURM_STEP_GPUS has their
    numbers on this node; SLURM_JOB_GPUS comes from the batch script, with the numbers on the job's first node, also where
    those on another one differ (seen with SLURM 22.05). Without SLURM, CUDA_VISIBLE_DEVICES says which GPUs a program takes.
    """
    names = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
    given = next((variables[name] for name in names if variables.get(name)), "")
    numbers = [int(word) for word in given.split(",") if word.isdecimal()]
    inside = sorted({number for number in numbers if number < count})
    return inside if 0 < len(numbers) < count and len(inside) == len(set(numbers)) else list(range(count))


@dataclass
class _Watched:
    use: GpuUse
    ecc_before: int | None = None


class GpuSampler:
    """Samples the GPUs of this node until the process ends.

    Args:
        attempt_dir: the folder of the attempt.
        node, node_rank: the name of this node as SLURM has it, and its place among the nodes of the attempt.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        gpus: Gpus,
        attempt_dir: AttemptDir,
        node: str,
        node_rank: int,
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._gpus, self._attempt_dir, self._node, self._node_rank = gpus, attempt_dir, node, node_rank
        self._every_s, self._clock = every_s, clock
        self._watched = {index: _Watched(GpuUse(index, name)) for index, name in gpus.names().items()}
        self._looked = clock()
        self._written: float | None = None
        for index, sample in self._samples().items():
            self._watched[index].ecc_before = sample.ecc_errors

    def look(self) -> None:
        """Take one sample of every GPU, and write what is known of them if it is time to."""
        now = self._clock()
        seconds, self._looked = min(now - self._looked, LONGEST_GAP * self._every_s), now
        for index, sample in self._samples().items():
            each = self._watched[index]
            if sample.lost and not each.use.lost_s:
                log.warning("GPU %d of %s does not answer its driver any more", index, self._node)
            if each.ecc_before is None:  # its first answer
                each.ecc_before = sample.ecc_errors
            each.use = each.use.with_sample(sample, seconds, ecc_before=each.ecc_before)
        errors = self._gpus.xids()
        for index, number in errors:
            if index in self._watched:
                self._watched[index].use = self._watched[index].use.with_xid(number)
        if errors or self._written is None or now - self._written >= WRITE_EVERY_S:
            self._written = now
            found = NodeGpus(self._node, tuple(each.use for each in self._watched.values()))
            with contextlib.suppress(OSError):  # the disk is full, say; the next one has all of it
                write_gpu_use(self._attempt_dir, self._node_rank, found)

    def _samples(self) -> dict[int, Sample]:
        """Return a sample of every GPU; one that cannot be asked is lost, and ends nothing for the others.

        Raises:
            Exception: of the library, if none can be asked.
        """
        found, failed = {}, None
        for index in self._watched:
            try:
                found[index] = self._gpus.sample(index)
            except Exception as error:
                failed = error
                log.debug("GPU %d could not be sampled: %s: %s", index, type(error).__name__, error)
        if failed is not None and not found:
            raise failed
        return {index: found.get(index, Sample(lost=True)) for index in self._watched}


def start_gpu_sampler(attempt_dir: AttemptDir, environment: Environment) -> threading.Thread | None:
    """Start to sample the GPUs of this node, on its first rank; None on others, and where there are no GPUs."""
    if environment.local_rank != 0 or not has_gpu_files():
        return None
    thread = threading.Thread(
        target=_sample_for_ever, args=(attempt_dir, environment), name="slurmtrain-gpus", daemon=True
    )
    thread.start()
    return thread


def _sample_for_ever(attempt_dir: AttemptDir, environment: Environment) -> None:
    try:
        gpus = Nvml(importlib.import_module("pynvml"))
        sampler = GpuSampler(gpus, attempt_dir, environment.node, environment.node_rank)
    except Exception as error:  # neither the package nor the driver has to be there
        log.debug("GPUs are not sampled: %s: %s", type(error).__name__, error)
        return
    failures = 0
    while failures < FAILURES_MOST:
        time.sleep(EVERY_S)
        try:
            sampler.look()
            failures = 0
        except Exception as error:
            failures += 1
            log.debug("the GPUs could not be sampled: %s: %s", type(error).__name__, error)
