"""checkpoints RUN list|verify."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.commit import Incarnation, committed
from slurmtrain.cli import main
from slurmtrain.rundir import RunDir, create


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with two checkpoints."""
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path))
    run_dir = create(tmp_path, "train")
    run_dir.info_file.write_text(json.dumps({"id": run_dir.id}))
    checkpointer = Checkpointer(run_dir.checkpoints, incarnation=Incarnation(1, "attempt 1, job 7"))
    for step in (10, 20):
        checkpointer.save(step, model=torch.nn.Linear(64, 64))
    return run_dir


def test_the_list_has_a_row_for_each_with_who_wrote_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "last"]) == 0
    rows = [line.split("   ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["10", "20"]
    assert all("attempt 1, job 7" in "   ".join(row) and "complete" in row[-1] for row in rows)


def test_verify_finds_one_wrong_bit_and_exits_with_1(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "last", "verify"]) == 0
    assert capsys.readouterr().out.count("sound") == 2
    shard = committed(run.checkpoints)[-1] / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert main(["checkpoints", "last", "list"]) == 0  # sizes only
    assert "digest" not in capsys.readouterr().out
    assert main(["checkpoints", "last", "verify"]) == 1
    said = capsys.readouterr().out
    assert "checkpoint_0000010: sound" in said
    assert "checkpoint_0000020: DAMAGED: __0_0.distcp is not what was written" in said


def test_a_missing_file_shows_in_the_list_already(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (committed(run.checkpoints)[0] / "rank00000.json").unlink()
    assert main(["checkpoints", "last"]) == 0
    assert "rank00000.json cannot be read" in capsys.readouterr().out


def test_a_run_without_any_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = create(tmp_path, "train")
    run_dir.info_file.write_text("{}")
    assert main(["checkpoints", str(run_dir.path)]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_it_loads_no_torch(run: RunDir) -> None:
    code = (
        "import sys; from slurmtrain.cli import main; main(['checkpoints', sys.argv[1], 'verify']);"
        "assert 'torch' not in sys.modules and 'hydra' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=True)
