"""What is said of broken GPUs when a rank fails."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.preflight.check import record_of
from slurmtrain.runtime.preflight.compare import Gathered
from slurmtrain.runtime.preflight.facts import NodeFacts, RankFacts
from slurmtrain.slurm.node_ledger import HARDWARE
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.gpu import GpuFacts, broken_gpus
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


def test_errors_that_preflight_has_counted_already_have_ended_no_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvml: FakeNvml
) -> None:
    """Else a mistake in a program would blame each node that has had an error since its driver was loaded."""
    attempt_dir = RunDir(tmp_path / "run").attempt(1)
    attempt_dir.path.mkdir(parents=True)
    gpu = GpuFacts(0, ecc_errors=4, remap_pending=False, remap_failed=False)
    facts = Gathered([RankFacts(0, "n3", of_node=NodeFacts(gpus=(gpu,)))])
    write_json(attempt_dir.preflight_file, record_of("quick", facts, [], 0.1, None))
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    for errors, said in ((4, "ValueError"), (5, "ValueError (GPU 0 has 5 uncorrectable ECC errors)")):
        nvml.errors = [errors]
        record_failure(attempt_dir, 0, Failure(1, "ValueError"))
        record = read_json(attempt_dir.failure_file(0))
        assert record is not None and record["sentence"] == said


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
