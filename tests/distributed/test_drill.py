"""`drill` on this machine: what is forgotten is found, and what is not passes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runs.lookup import all_runs
from tests.support.gloo import wait_until
from tests.support.local_runs import PACED_MODEL, clean_environment

# A training loop of a user's own without torch, which may forget something when it is resumed: what `drill` has to find.
# It learns one number by samples in a shuffled order, with momentum. FORGETS: nothing, or "order".
LOOP = """
import json, os, pathlib, random, signal, sys, time

forgets = sys.argv[1] if len(sys.argv) > 1 else ""
folder = pathlib.Path(os.environ["SLURMTRAIN_RUN_DIR"])
saved = folder / "state.json"
told = False

def tell(number, frame):
    global told
    told = True

signal.signal(signal.SIGTERM, tell)
order = list(range(200))
random.Random(0).shuffle(order)
state = {"step": 0, "seen": 0, "weight": 0.0, "momentum": 0.0}
if saved.exists():
    state = json.loads(saved.read_text())
    if forgets == "order":
        state["seen"] = 0
while state["step"] < 25 and not told:
    sample = order[state["seen"]] / 200
    loss = (state["weight"] - sample) ** 2
    state["momentum"] = 0.9 * state["momentum"] + 2 * (state["weight"] - sample)
    state["weight"] -= 0.01 * state["momentum"]
    state["step"] += 1
    state["seen"] += 1
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": state["step"], "loss": loss}) + "\\n")
    time.sleep(0.1)
saved.write_text(json.dumps(state))
sys.exit(0 if state["step"] == 25 else 75)
"""


ONE = ["+cluster=local", "cluster.cpus_per_task=1"]


def drill(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Type `drill` in a folder; return its exit code, its JSON, and what it has logged."""
    before, _, after = " ".join(words).partition(" -- ")
    line = [sys.executable, "-m", "slurmtrain", *before.split(), "drill" if "drill" not in before else "", "--json"]
    line = [word for word in line if word] + (["--", *after.split()] if after else [])
    done = subprocess.run(
        line, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


def test_a_loop_that_forgets_its_order_is_told_with_the_step_at_which_it_parts(folder: Path) -> None:
    code, found, said = drill(folder, *ONE, "--", "python", "loop.py", "order")
    (way,) = found["ways"]
    assert (code, way["way"], way["result"]) == (1, "early_signal", "failed"), found
    assert way["comparison"]["divergence"]["step"] == way["stopped_at"] + 1
    assert f"diverges at step {way['stopped_at'] + 1}: loss" in way["sentence"]
    assert "the order of the data is not restored" in way["hints"][0]
    assert "are those of two undisturbed runs the same?" in said
    assert Path(found["kept"]).is_dir() and not all_runs(folder / "runs")


@pytest.mark.slow
def test_a_loop_that_forgets_nothing_passes_and_leaves_nothing(folder: Path) -> None:
    code, found, _ = drill(folder, *ONE, "--", "python", "loop.py")
    assert (code, found["ways"][0]["result"], found["kept"]) == (0, "passed", None), found
    assert "the same bits" in found["ways"][0]["sentence"]
    assert not (folder / "runs" / "drills").exists()


@pytest.mark.slow
def test_a_run_of_the_trainer_resumes_with_the_same_bits_and_stays_as_it_is(folder: Path) -> None:
    (folder / "paced.py").write_text(PACED_MODEL)
    words = ["+experiment=smoke", "model._target_=paced.Paced", "model.dropout=0.1", "train.steps=4"]
    submit = [sys.executable, "-m", "slurmtrain", *ONE, *words, "job.snapshot=cwd", "submit"]
    subprocess.run(submit, cwd=folder, env=clean_environment(), check=True, capture_output=True, timeout=120)
    (run_dir,) = all_runs(folder / "runs")
    before = {path: path.stat().st_mtime_ns for path in sorted(run_dir.path.rglob("*"))}
    ways = ("--ways", "early_signal,in_place", "--steps", "12", "--stop-at", "5")
    code, found, said = drill(folder, "drill", run_dir.id, *ways)
    told, killed = found["ways"]
    assert (code, told["result"], killed["result"]) == (0, "passed", "passed"), (found, said)
    assert (told["stopped_at"], told["resumed_at"]) == (5, 5), (found, said)
    assert killed["saved_step"] in (2, 4), (found, said)  # that of step 4 may still have been under way
    for compared in (told["comparison"], killed["comparison"]):
        assert (compared["same_bits"], compared["checkpoint"], len(compared["steps"])) == (True, 12, 12), found
    assert {path: path.stat().st_mtime_ns for path in sorted(run_dir.path.rglob("*"))} == before


@pytest.mark.slow
def test_ctrl_c_ends_all_that_a_drill_has_started(folder: Path) -> None:
    line = [sys.executable, "-m", "slurmtrain", *ONE, "drill", "--", "python", "loop.py"]
    process = subprocess.Popen(line, cwd=folder, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    logs = wait_until(lambda: list(folder.glob("runs/drills/*/*/*/metrics.jsonl")), "at work")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    run = logs[0].parent
    assert not [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _belongs_to(entry, run)]


def _belongs_to(entry: Path, run: Path) -> bool:
    try:
        return str(run).encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid()
    except OSError:
        return False
