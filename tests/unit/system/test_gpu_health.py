"""What is said of broken GPUs, from the answers of nvidia-smi."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurmtrain.slurm.node_ledger import HARDWARE
from slurmtrain.system.gpu_health import broken_gpus, parse_health

BUS = "00000000:1A:00.0"


@pytest.mark.parametrize(
    ("errors", "remapped", "said"),
    [
        ("0, 0\n1, 0\n", f"{BUS}, No, No\n", None),
        ("0, [N/A]\n", f"{BUS}, [N/A], [N/A]\n", None),
        ("", "", None),
        ("0, 0\n3, 2\n", "", "GPU 3 has 2 uncorrectable ECC errors"),
        ("", f"{BUS}, Yes, No\n", f"GPU {BUS} has uncorrectable memory that waits to be remapped"),
        (
            "0, 1\n",
            f"{BUS}, No, Yes\n",
            f"GPU 0 has 1 uncorrectable ECC errors; GPU {BUS} has uncorrectable memory that cannot be remapped",
        ),
    ],
)
def test_only_what_is_broken_is_said_and_counts_as_hardware(errors: str, remapped: str, said: str | None) -> None:
    found = parse_health(errors, remapped)
    assert found == said
    assert found is None or HARDWARE.search(found)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo '0, 4'", "GPU 0 has 4 uncorrectable ECC errors"),
        # An older driver, whose nvidia-smi does not know all questions.
        ("case $1 in *remapped*) exit 2 ;; esac; echo '0, 4'", "GPU 0 has 4 uncorrectable ECC errors"),
        ("echo '0, 4'; exit 9", None),
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
