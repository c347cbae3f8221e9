"""A run of an earlier version, stopped at step 125 of 300, before its modules and verbs had the names that they have now."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.checkpoint.format.directory import newest_committed_step
from slurmtrain.cli import main
from slurmtrain.cli.verbs import VERBS

EARLIER = Path(__file__).parent / "earlier"
RUN_ID = "20261122-182618-018e4"


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory, where `submit` would have put it today; FOLDER stands for the folder of the command."""
    run = tmp_path / "runs" / "earlier" / RUN_ID
    shutil.copytree(EARLIER, run)
    for path in (run / "run.json", run / "config.yaml", run / "job.sbatch"):
        path.write_text(path.read_text().replace("/FOLDER", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return run


def test_it_is_shown_and_its_checkpoint_is_sound(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", RUN_ID, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["step"], shown["steps"]) == ("stopped", 125, 300)
    assert main(["checkpoints", RUN_ID, "verify"]) == 0
    assert "sound" in capsys.readouterr().out


def test_its_checkpoint_is_evaluated_and_exported(earlier: Path) -> None:
    words = [sys.executable, "-m", "slurmtrain"]
    done = subprocess.run([*words, "evaluate", RUN_ID, "--json"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["step"] == 125
    assert main(["checkpoints", RUN_ID, "export", "weights.safetensors"]) == 0
    assert (earlier.parents[2] / "weights.safetensors").exists()


def test_it_is_resumed_from_its_checkpoint_and_finishes(earlier: Path) -> None:
    words = [sys.executable, "-m", "slurmtrain", "resume", RUN_ID]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming" in (earlier / "attempts" / "0002" / "rank-0.log").read_text()
    steps = [json.loads(line)["step"] for line in (earlier / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] == 300
    assert newest_committed_step(earlier / "checkpoints") == 300


def test_the_verbs_that_its_batch_script_calls_are_there(earlier: Path) -> None:
    script = (earlier / "job.sbatch").read_text()
    for verb in ("begin", "settle", "again"):
        assert f"slurmtrain {verb} " in script and verb in VERBS
