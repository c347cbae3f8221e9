"""usage: where the hours of many runs went, by run and by person, and what SLURM and NVML add to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runs.run_dir import RunDir
from tests.support.fake_slurm import FakeSlurm
from tests.support.interrupted_run import GPUS, T0, RunFiles, interrupted_run
from tests.support.runs import no_waiting, printed
from tests.support.runs import shown as shown_by
from tests.support.stranger import Stranger

FIRST, SECOND = "20260101-000000-000aa", "20260102-000000-000bb"
HELD = 5210 - 635 - 3200  # seconds, of the interrupted run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm) -> Path:
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    no_waiting(monkeypatch)
    return tmp_path / "runs"


@pytest.fixture
def run(root: Path) -> RunDir:
    return interrupted_run(root / "train" / FIRST)


def finished(root: Path, run_id: str = SECOND, hours: float = 1.0, ended: float | None = None, **fields: Any) -> RunDir:
    """A run on 16 GPUs that has trained for so many hours and finished, half an hour before T0 unless `ended` says when."""
    end = -1800.0 if ended is None else ended - T0
    start = end - 3600 * hours
    files = RunFiles(root / "other" / run_id)
    files.event(start, "submitted", job_id="9")
    values = {"started": start, "stepping": start, "ended": end, "reason": "finished", "verdict": "done", **fields}
    files.attempt(1, start, job="9", **values)
    return files.run


def shown(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = shown_by("usage", *words)
    return found


def test_rows_add_up_to_the_total_and_the_table_says_why_hours_were_lost(run: RunDir, root: Path) -> None:
    finished(root)
    found = shown("--by", "run")
    assert [row["who"] for row in found["rows"]] == [FIRST, SECOND]
    for name in ("gpu_hours", "wall_s"):
        assert sum(row[name] for row in found["rows"]) == pytest.approx(found["total"][name])
    assert found["rows"][0]["gpu_hours"] == pytest.approx(HELD * GPUS / 3600)
    assert found["rows"][0]["seconds"]["hung"] == 40 and found["rows"][1]["goodput"] == 1.0
    assert found["total"]["runs"] == 2 and found["left_out"] == []
    header, _, row = printed("usage").splitlines()  # by person
    assert header.split()[:5] == ["user", "runs", "GPU", "h", "goodput"]
    assert row.split()[1:3] == ["2", f"{(HELD + 3600) * GPUS / 3600:.1f}"]
    assert f"hang {210 * GPUS / 3600:.3f}, crash {150 * GPUS / 3600:.3f}" in row


def test_hundreds_of_runs_are_read_by_several_processes_and_add_up_like_a_few(run: RunDir, root: Path) -> None:
    for number in range(250):
        finished(root, f"20260102-{number:06d}-000bb")
    finished(root, "20260103-000000-000cc").events_file.unlink()
    (root / "other" / "20260103-000000-000cc" / "events.jsonl").mkdir()
    found = shown()
    assert found["total"]["runs"] == 251 and len(found["left_out"]) == 1
    assert found["total"]["gpu_hours"] == pytest.approx((HELD + 250 * 3600) * GPUS / 3600)


SLOW = """
import os, time
from slurmtrain.report import usage
os.sched_getaffinity = lambda _: {0, 1}
def read(_):
    print(flush=True)
    time.sleep(60)
list(usage._map(read, range(200)))
"""


def test_the_processes_that_read_end_with_the_one_that_asks() -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() and process.stdout.readline()
        process.kill()
        process.communicate(timeout=20)  # whoever is left would keep the pipe open


def test_by_user_a_run_is_its_owners_whatever_it_says(run: RunDir, stranger: Stranger, root: Path) -> None:
    other = finished(root)
    for path in (other.path, other.info_file, other.attempts, other.checkpoints):
        os.chown(path, stranger.uid, -1)
    other.info_file.write_text(json.dumps({**other.info(), "user": "root"}))
    assert [row["runs"] for row in shown("--by", "user")["rows"]] == [1, 1]


def test_one_run_or_the_points_of_a_sweep_are_named(run: RunDir, root: Path) -> None:
    finished(root)
    assert [row["who"] for row in shown(FIRST[:8])["rows"]] == [FIRST]
    sweep = root / "other"
    (sweep / "sweep.json").write_text(json.dumps({"created": T0, "slurm_conf": None, "pack": 1, "backend": "slurm"}))
    point = {"number": 0, "varied": {"lr": "1"}, "identity": "a", "shape": "b", "run_id": SECOND}
    gone = {**point, "number": 1, "run_id": "20260103-000000-000cc"}
    (sweep / "points.jsonl").write_text(json.dumps(point) + "\n" + json.dumps(gone) + "\n")
    found = shown("other")
    assert (found["by"], [row["who"] for row in found["rows"]]) == ("run", [SECOND])


def test_only_what_was_after_a_time_counts(run: RunDir, root: Path) -> None:
    now = time.time()
    finished(root, hours=10.0, ended=now - 3600)
    found = shown("--since", "3h", "--by", "run")
    assert [row["who"] for row in found["rows"]] == [SECOND]
    assert found["total"]["gpu_hours"] == pytest.approx(2 * GPUS, rel=0.01)


def test_slurm_is_asked_once_and_only_about_runs_that_have_not_ended(run: RunDir, root: Path, slurm: FakeSlurm) -> None:
    slurm.add("5", state="RUNNING")
    shown()
    assert slurm.calls("squeue") == []
    for number in (1, 2):
        files = RunFiles(root / "alive" / f"2026010{number + 2}-000000-000cc", job_ids=["5"], user="root")
        files.event(0, "submitted", job_id="5")
        files.attempt(1, time.time() - T0 - 3600, job="5", started=time.time() - T0 - 3600)
    found = shown("--by", "run")
    assert len(slurm.calls("squeue")) == 1
    rows = [row for row in found["rows"] if row["running"]]
    assert [round(row["gpu_hours"], 1) for row in rows] == [GPUS, GPUS]


def test_runs_on_cpus_are_shown_in_hours(root: Path) -> None:
    finished(root, gpus=0.0, hours=2.0)
    header, _, row = printed("usage").splitlines()
    assert header.split()[:4] == ["user", "runs", "hours", "goodput"] and row.split()[1:4] == ["1", "2", "100"]


def test_a_run_that_cannot_be_read_is_left_out_and_said(run: RunDir, root: Path) -> None:
    finished(root).attempt(1).record_file.write_text('{"ended": "late\\u001b[2J"}')
    found = shown()
    assert found["total"]["runs"] == 1
    assert len(found["left_out"]) == 1 and "ended: expected" in found["left_out"][0]


def test_jobs_that_evaluate_count_with_their_run(run: RunDir) -> None:
    files = RunFiles(run.evaluation(100).path, job_ids=["11"])
    files.event(300, "submitted", job_id="11")
    times: dict[str, Any] = {"started": 310, "stepping": 320, "ended": 360}
    files.attempt(1, 305, job="11", kind="evaluate", **times, reason="finished", verdict="done")
    (row,) = shown("--by", "run")["rows"]
    assert (row["who"], row["runs"]) == (FIRST, 1)
    assert row["seconds"]["evaluation"] == 10 + 40


def test_status_of_a_run_has_a_line_of_it(run: RunDir) -> None:
    (line,) = [line for line in printed("status", run.id).splitlines() if line.startswith("  goodput:")]
    assert line.startswith(
        "  goodput: 58 % of 23 min on 16 GPUs (6.11 GPU h): startup 15 %, redone 20 %, checkpoint 2.2 %,"
    )
    assert line.endswith("queue 11 min, stopped 53 min; lost 2.2 GPU h: hang 0.933, crash 0.667, rolled back 0.222")
    found = shown_by("status", run.id)["goodput"]
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"]) == 5210
