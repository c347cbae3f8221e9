"""What NVML says of this node's GPUs before training: which there are, and what speaks against one."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from slurmtrain.runtime.gpu_sampler import own_gpus
from slurmtrain.runtime.preflight.facts import GpuFacts

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


# What NVML says (nvml.h) where it cannot be asked, which tells nothing of the GPUs: in some containers, and with other makes.
NOT_TO_BE_ASKED = (3, 4, 12, 13)  # not supported, no permission, library not found, function not found


class NoAnswerError(Exception):
    """The driver is there, and does not work."""


def read_gpus(variables: Mapping[str, str] = os.environ, library: Any = None) -> tuple[GpuFacts, ...] | None:
    """Return the facts of the GPUs that belong to this job; None if NVML cannot be asked here.

    Args:
        library: the module `pynvml`; None: import it.

    Raises:
        NoAnswerError: there is no driver that answers.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return None
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        if getattr(error, "value", None) in NOT_TO_BE_ASKED:
            return None
        raise NoAnswerError(_words(error)) from None
    try:
        count = int(library.nvmlDeviceGetCount())
        # A GPU that has fallen off the bus is counted, and gives no handle.
        return tuple(_gpu(library, index) for index in own_gpus(count, variables))
    except library.NVMLError as error:
        raise NoAnswerError(_words(error)) from None
    finally:
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _gpu(nvml: Any, index: int) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *words: Any) -> Any:
        question: Callable[..., Any] | None = getattr(nvml, name, None)  # not every version of the package has all
        if question is None:
            return None
        try:
            return question(handle, *words)
        except nvml.NVMLError:  # this GPU does not tell
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    errors = ask(
        "nvmlDeviceGetTotalEccErrors",
        getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1),
        getattr(nvml, "NVML_VOLATILE_ECC", 0),
    )
    rows = ask("nvmlDeviceGetRemappedRows")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    recovery = _recovery_action(nvml, ask)
    name = ask("nvmlDeviceGetName")
    slices = ask("nvmlDeviceGetMigMode")
    return GpuFacts(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        memory_gb=None if memory is None else round(memory.total / 1e9, 2),
        used_gb=None if memory is None else round(memory.used / 1e9, 2),
        processes=None if processes is None else tuple(int(each.pid) for each in processes),
        ecc_errors=None if errors is None else int(errors),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        needs=None if recovery is None else NEEDS.get(recovery, ""),
        needs_later=recovery in LATER,
        slowed_by=None if reasons is None else tuple(word for bit, word in SLOWED_BY.items() if int(reasons) & bit),
        sliced=None if slices is None else bool(slices[0]),
    )


def _recovery_action(nvml: Any, ask: Callable[..., Any]) -> int | None:
    """Return what the driver recommends to recover a GPU, which is a field without a function; None if it does not say."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    values = ask("nvmlDeviceGetFieldValues", [field]) if field is not None else None
    if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)
