"""The GPUs of this node that belong to this job, by NVML: what is there, what is broken, and how busy they are.

It needs `nvidia-ml-py` (the extra `gpu`). Without that package, or where NVML cannot be asked (containers without the library,
other makes), nothing is known of the GPUs. A driver whose GPU is lost may never answer, so whoever must not wait for it asks
in a thread (`system.patience.begin`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.system.patience import begin

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
# Values of nvmlReturn_t (nvml.h) with which NVML cannot be asked at all, which tells nothing of the GPUs: not supported,
# no permission, library not found, function not found.
NOT_TO_BE_ASKED = (3, 4, 12, 13)
# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that mean trouble; a GPU at its power cap, or idle, is sound.
SLOWED_BY = {0x8: "a hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "a power brake"}
# Values of nvmlDeviceGpuRecoveryAction_t (nvml.h), which the driver (565 and later) sets after an Xid that needs more than a
# new process. With those of LATER a program may start again before: part of the memory is out of use, or it is not this GPU
# (`man nvidia-smi`, GPU Recovery Action).
NEEDS = {
    1: "a reset",
    2: "a reboot of its node",
    3: "its traffic to be drained",
    4: "to be drained and reset",
    5: "its IMEX domain to be recovered",
    6: "a reset of its PCIe bus",
    7: "a reboot of the system",
}
LATER = (4, 5)


class NoAnswerError(Exception):
    """The driver is there, and does not work."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU that belongs to this job; None where it does not tell.

    Attributes:
        index: its number on the node.
        memory_gb, used_gb: in units of 1e9 bytes.
        processes: ids of the processes that compute on it.
        ecc_errors: uncorrectable errors since the driver was loaded.
        remap_pending, remap_failed: memory with errors waits to be replaced by spare rows, or cannot be.
        needs: what the driver recommends to recover it, such as "a reset"; empty if nothing.
        needs_later: programs may begin on it before that.
        slowed_by: what holds its clock down now, such as "heat".
        sliced: it is divided into slices (MIG), which NVML does not count as GPUs.
    """

    index: int
    name: str | None = None
    memory_gb: float | None = None
    used_gb: float | None = None
    processes: Sequence[int] | None = None
    ecc_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    needs: str | None = None
    needs_later: bool = False
    slowed_by: Sequence[str] | None = None
    sliced: bool | None = None

    @property
    def broken(self) -> str | None:
        """Say which errors its memory has had, or that some waits to be remapped or cannot be; None: nothing."""
        if self.remap_failed:
            return f"GPU {self.index} has uncorrectable memory that cannot be remapped"
        if self.ecc_errors:
            return f"GPU {self.index} has {self.ecc_errors} uncorrectable ECC error{'s' if self.ecc_errors > 1 else ''}"
        return f"GPU {self.index} has uncorrectable memory that waits to be remapped" if self.remap_pending else None


def read_gpus(variables: Mapping[str, str] = os.environ, library: Any = None) -> tuple[GpuFacts, ...] | None:
    """Return the GPUs that belong to this job; None if NVML cannot be asked here.

    Args:
        library: the module `pynvml`; None: import it.

    Raises:
        NoAnswerError: there is no driver that answers.
    """
    try:
        nvml = library or importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        gpus = Gpus(nvml, variables)
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in NOT_TO_BE_ASKED:
            return None
        raise NoAnswerError(_words(error)) from None
    try:
        return tuple(gpus.facts(index) for index in gpus.indices)
    except nvml.NVMLError as error:  # a GPU that has fallen off the bus is counted, and gives no handle
        raise NoAnswerError(_words(error)) from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def ask_gpus(
    patience_s: float = PATIENCE_S, read: Callable[[], tuple[GpuFacts, ...] | None] = read_gpus
) -> tuple[tuple[GpuFacts, ...] | None, str | None]:
    """Return the GPUs that belong to this job, and what is wrong with their driver; None for what is not known.

    Args:
        patience_s: longest wait for the driver.
        read: asks it.
    """
    try:
        return begin(read).result(patience_s), None
    except NoAnswerError as error:
        return None, str(error)
    except TimeoutError:
        return None, f"nothing within {patience_s:.0f} s"
    except Exception as error:
        log.debug("the GPUs could not be read: %s: %s", type(error).__name__, error)
        return None, None


def broken_gpus(patience_s: float = PATIENCE_S, *, before: Collection[str] | None = None) -> str | None:
    """Say what is broken on GPUs of this node: "GPU 3 has 2 uncorrectable ECC errors"; None if nothing is, or is known.

    Errors are counted since the driver was loaded, by whichever job had the GPU. Those of weeks ago, in memory that has
    been replaced since, have ended no rank of today. So they count if they are new; and where that is not known, if some
    memory still waits to be replaced, or the GPU does not say.

    Args:
        before: what was said of its GPUs before, which is not said again; None: it is not known.
    """
    gpus, _ = ask_gpus(patience_s)
    counts = [gpu for gpu in gpus or () if before is not None or gpu.remap_failed or gpu.remap_pending is not False]
    found = [words for gpu in counts if (words := gpu.broken) is not None and words not in (before or ())]
    return "; ".join(found) or None


class Gpus:
    """The GPUs of this node that belong to this job.

    Args:
        nvml: the module `pynvml`.
        variables: environment variables of this process.

    Raises:
        Exception: of the library: there is no driver, or it does not answer.
    """

    def __init__(self, nvml: Any, variables: Mapping[str, str] = os.environ):
        self._nvml = nvml
        nvml.nvmlInit()
        self.indices = own_gpus(int(nvml.nvmlDeviceGetCount()), variables)

    def facts(self, index: int) -> GpuFacts:
        """Return what speaks for or against a GPU before training.

        Raises:
            Exception: of the library: it is lost.
        """
        nvml = self._nvml
        nvml.nvmlDeviceGetHandleByIndex(index)
        memory = self._ask("nvmlDeviceGetMemoryInfo", index)
        rows = self._ask("nvmlDeviceGetRemappedRows", index)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", index)
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", index)
        name = self._ask("nvmlDeviceGetName", index)  # bytes in older versions of the package
        slices = self._ask("nvmlDeviceGetMigMode", index)
        # What the driver recommends to recover it is a field without a function of its own.
        field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = self._ask("nvmlDeviceGetFieldValues", index, [field]) if field is not None else None
        recovery = int(values[0].value.uiVal) if values and values[0].nvmlReturn == nvml.NVML_SUCCESS else None
        return GpuFacts(
            index=index,
            name=name.decode() if isinstance(name, bytes) else name,
            memory_gb=None if memory is None else round(memory.total / 1e9, 2),
            used_gb=None if memory is None else round(memory.used / 1e9, 2),
            processes=None if processes is None else tuple(int(each.pid) for each in processes),
            ecc_errors=self._ecc_errors(index),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            needs=None if recovery is None else NEEDS.get(recovery, ""),
            needs_later=recovery in LATER,
            slowed_by=None if reasons is None else tuple(word for bit, word in SLOWED_BY.items() if int(reasons) & bit),
            sliced=None if slices is None else bool(slices[0]),
        )

    def _ecc_errors(self, index: int) -> int | None:
        kind, counter = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC
        errors = self._ask("nvmlDeviceGetTotalEccErrors", index, kind, counter)
        return None if errors is None else int(errors)

    def _ask(self, name: str, index: int, *words: Any) -> Any:
        """Return the answer of a GPU; None if it does not tell, or this version of the package does not ask."""
        try:
            return getattr(self._nvml, name)(self._nvml.nvmlDeviceGetHandleByIndex(index), *words)
        except (AttributeError, self._nvml.NVMLError):
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
