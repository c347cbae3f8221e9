"""What is said of broken GPUs when a rank fails."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from slurmtrain.slurm.node_ledger import HARDWARE
from slurmtrain.system.gpu import broken_gpus
from tests.support.fake_nvml import FakeNvml

UNKNOWN = FakeNvml.NVMLError("Not Supported")
SOUND, PENDING, FAILED = (0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)
WAITS = "GPU 0 has uncorrectable memory that waits to be remapped"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A node with one GPU."""
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeNvml(1)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize(
    ("errors", "rows", "before", "said"),
    [
        (0, SOUND, None, None),
        (UNKNOWN, UNKNOWN, None, None),
        (2, PENDING, None, "GPU 0 has 2 uncorrectable ECC errors"),
        (0, PENDING, None, WAITS),
        (2, SOUND, None, None),  # long ago, perhaps, and harmless since
        (2, UNKNOWN, None, "GPU 0 has 2 uncorrectable ECC errors"),
        (1, FAILED, None, "GPU 0 has uncorrectable memory that cannot be remapped"),
        # What was broken before is not said again.
        (2, SOUND, ["GPU 0 has 2 uncorrectable ECC errors"], None),
        (0, PENDING, [WAITS], None),
        (3, SOUND, ["GPU 0 has 2 uncorrectable ECC errors"], "GPU 0 has 3 uncorrectable ECC errors"),
        (2, FAILED, [WAITS], "GPU 0 has uncorrectable memory that cannot be remapped"),
    ],
)
def test_only_what_is_broken_is_said_and_counts_as_hardware(
    errors: Any, rows: Any, before: list[str] | None, said: str | None, nvml: FakeNvml
) -> None:
    nvml.answers(nvmlDeviceGetTotalEccErrors=errors, nvmlDeviceGetRemappedRows=rows)
    assert broken_gpus(before=before) == said
    assert said is None or HARDWARE.search(said)


@pytest.mark.parametrize("driver", ["does not answer", "is broken", "is not there", "cannot be asked"])
def test_a_driver_that_does_not_answer_holds_nobody_up(
    driver: str, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver == "does not answer":
        monkeypatch.setattr(nvml, "nvmlDeviceGetCount", threading.Event().wait)
    elif driver == "is broken":
        nvml.answers(nvmlInit=FakeNvml.NVMLError("Driver/library version mismatch"))
    elif driver == "is not there":
        nvml.answers(nvmlInit=OSError("no library"))
    else:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    before = time.monotonic()
    assert broken_gpus(0.3) is None
    assert time.monotonic() - before < 10
