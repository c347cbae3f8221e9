"""What is said of broken GPUs, from the answers of nvidia-smi."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurmtrain.slurm.node_ledger import HARDWARE
from slurmtrain.system.gpu_health import broken_gpus, parse_health


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("0, 0, No, No\n1, 0, No, No\n", None),
        ("0, [N/A], [N/A], [N/A]\n", None),
        ("", None),
        ("0, 0, No, No\n3, 2, Yes, No\n", "GPU 3 has 2 uncorrectable ECC errors"),
        ("0, 0, Yes, No\n", "GPU 0 has uncorrectable memory that waits to be remapped"),
        (
            "0, 0, No, Yes\n1, 1, No, No\n",
            "GPU 0 has uncorrectable memory that cannot be remapped; GPU 1 has 1 uncorre",
        ),
    ],
)
def test_only_what_is_broken_is_said_and_counts_as_hardware(answer: str, said: str | None) -> None:
    found = parse_health(answer)
    assert found is None if said is None else found is not None and found.startswith(said)
    assert found is None or HARDWARE.search(found)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo '0, 4, No, No'", "GPU 0 has 4 uncorrectable ECC errors"),
        ("echo '0, 4, No, No'; exit 9", None),
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
