"""What is said of broken GPUs, from the answers of nvidia-smi."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.preflight.check import record_of
from slurmtrain.runtime.preflight.facts import GatheredFacts, GpuFacts, NodeFacts
from slurmtrain.slurm.node_ledger import HARDWARE
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.gpu_health import broken_gpus, parse_health


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("0, 0, No, No\n1, 0, No, No\n", None),
        ("0, [N/A], [N/A], [N/A]\n", None),
        ("", None),
        ("0, 0, No, No\n3, 2, Yes, No\n", "GPU 3 has 2 uncorrectable ECC errors"),
        ("0, 0, Yes, No\n", "GPU 0 has uncorrectable memory that waits to be remapped"),
        ("0, 2, No, No\n", None),  # long ago, perhaps, and harmless since
        ("0, 2, [N/A], [N/A]\n", "GPU 0 has 2 uncorrectable ECC errors"),
        ("0, 0, No, Yes\n1, 1, Yes, No\n", "GPU 0 has uncorrectable memory that cannot be remapped; GPU 1 has 1 "),
    ],
)
def test_only_what_is_broken_is_said_and_counts_as_hardware(answer: str, said: str | None) -> None:
    found = parse_health(answer)
    assert found is None if said is None else found is not None and found.startswith(said)
    assert found is None or HARDWARE.search(found)


def test_what_was_broken_before_is_not_said_again() -> None:
    before = ["GPU 0 has 2 uncorrectable ECC errors", "GPU 1 has uncorrectable memory that waits to be remapped"]
    assert parse_health("0, 2, No, No\n1, 0, Yes, No\n", before) is None
    assert parse_health("0, 3, No, No\n1, 0, Yes, No\n", before) == "GPU 0 has 3 uncorrectable ECC errors"
    assert parse_health("0, 2, No, No\n1, 0, No, Yes\n", before) is not None


def test_errors_that_preflight_has_counted_already_have_ended_no_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else a mistake in a program would blame each node that has had an error since its driver was loaded."""
    attempt_dir = RunDir(tmp_path / "run").attempt(1)
    attempt_dir.path.mkdir(parents=True)
    gpu = GpuFacts(0, ecc_errors=4, remap_pending=False, remap_failed=False)
    facts = GatheredFacts((), (NodeFacts("n3", 0, gpus=(gpu,)),))
    write_json(attempt_dir.preflight_file, record_of("quick", facts, [], 0.1, None))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    for errors, said in ((4, "ValueError"), (5, "ValueError (GPU 0 has 5 uncorrectable ECC errors)")):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\necho '0, {errors}, No, No'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        record_failure(attempt_dir, 0, Failure(1, "ValueError"))
        record = read_json(attempt_dir.failure_file(0))
        assert record is not None and record["sentence"] == said


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo '0, 4, Yes, No'", "GPU 0 has 4 uncorrectable ECC errors"),
        ("echo '0, 4, Yes, No'; exit 9", None),
        ("[[ $1 != *remapped* ]] || exit 2; echo '0, 4'", "GPU 0 has 4 uncorrectable ECC errors"),  # an older one
        ("exec sleep 30", None),
        (None, None),
    ],
)
def test_a_driver_that_does_not_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str | None, said: str | None
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    before = time.monotonic()
    assert broken_gpus(5.0 if said else 0.3) == said
    assert time.monotonic() - before < 10
