"""NVML without a GPU. It imports nothing but the standard library, so that a test can put it in the place of `pynvml`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class FakeNvml:
    """The functions of `pynvml` that are used, over GPUs whose numbers a test sets."""

    NVML_SUCCESS, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 0, 230
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception):
        value = 0

    def __init__(self, count: int = 2):
        self.errors = [3] * count
        self.answers(nvmlInit=None, nvmlShutdown=None)
        self.answers(nvmlDeviceGetRemappedRows=(0, 0, 0, 0), nvmlDeviceGetCurrentClocksEventReasons=0x4)
        self.answers(nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=9)], nvmlDeviceGetMigMode=(0, 0))
        self.answers(nvmlDeviceGetFieldValues=recovery_action(0))

    def answers(self, **answers: Any) -> FakeNvml:
        """Let functions return this, or raise it."""

        def give(value: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        for name, value in answers.items():
            setattr(self, name, lambda *_, value=value: give(value))
        return self

    def nvmlDeviceGetCount(self) -> int:
        return len(self.errors)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"GPU number {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80_000_000_000, used=70_000_000_000)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self.errors[handle]


def recovery_action(number: int, code: int = 0) -> list[Any]:
    """What nvmlDeviceGetFieldValues returns for one field."""
    return [SimpleNamespace(fieldId=230, nvmlReturn=code, value=SimpleNamespace(uiVal=number))]
