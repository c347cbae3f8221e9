"""Sweeps on a real SLURM: one array, nothing twice, whatever is killed, refused or answered late."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.slurm.parse_values import STARTS_PREEMPTED_JOBS_ONCE_MORE
from tests.slurm.project import SMALL, Run, assert_counted_once, counting, make_project
from tests.support.slurm_cluster import Cluster

# Fails for some seeds, until a file says that somebody has mended it; else it counts.
STUMBLING_PROGRAM = """
import os, sys

if sys.argv.pop(1) in ("3", "5", "7") and not os.path.exists("{mended}"):
    sys.exit(4)
import counting
"""


def stumbling(steps: int, pause_s: float) -> list[str]:
    """Overrides of this program, with the seed of each point."""
    return [word.replace(" counting.py", " stumbling.py ${train.seed}") for word in counting(steps, pause_s)]


# In front of the real sbatch: the first call is accepted, and kills who called.
KILLING_SBATCH = """#!/bin/bash
case " $* " in *" --test-only "*) exec {sbatch} "$@" ;; esac
mkdir {folder}/called 2>/dev/null || exec {sbatch} "$@"
{sbatch} "$@" > /dev/null
# timeout, which was env, is this shell's parent; its parent is the one that submits
kill -KILL "$(ps -o ppid= -p "$PPID" | tr -d ' ')"
sleep 1
"""


@dataclass(frozen=True)
class Sweeper:
    """A project, and sweeps submitted from it as a person would."""

    path: Path
    cluster: Cluster

    def words(self, *overrides: str) -> list[str]:
        return ["-m", *self.cluster.words, "cluster.nodes=1", "cluster.tasks_per_node=1", *overrides, "submit"]

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "slurmtrain", *words],
            cwd=self.path,
            env=self.cluster.env(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def cli(self, *words: str, check: bool = True, **env: str) -> str:
        done = self.cluster.slurmtrain(*words, cwd=self.path, check=check, env=env, timeout_s=400)
        return done.stdout + (done.stderr if not check else "")

    def submit(self, *overrides: str, **env: str) -> Sweep:
        answer = json.loads(self.cli(*self.words(*overrides), "--json", check=True, **env))
        return Sweep(Path(answer["path"]))

    def state(self, sweep: Sweep) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cli("sweep", "status", sweep.id, "--json"))
        return found

    def wait_until_ended(self, sweep: Sweep, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while set((now := self.state(sweep))["states"]) - {"finished", "failed", "stopped", "lost"}:
            assert time.monotonic() < deadline, now
            time.sleep(1)
        return now

    def queue(self) -> dict[str, int]:
        """Tasks in the queue and those that slurmctld remembers, by the id of their array; of this project's sweeps only."""
        mine = str(self.path)
        text = self.cluster.run(["squeue", "-h", "--array", "--states=all", "--format=%F|%K|%o|%Z|%k"]).stdout
        rows = [line.strip().split("|") for line in text.splitlines()]
        return Counter(row[0] for row in rows if row[3].startswith(mine) and "slurmtrain:" in row[4])


@pytest.fixture
def sweeper(sandbox: Cluster, tmp_path: Path) -> Iterator[Sweeper]:
    project = make_project(tmp_path / "project", sandbox)
    (project.path / "stumbling.py").write_text(STUMBLING_PROGRAM.format(mended=tmp_path / "mended"))
    subprocess.run(["git", "add", "-A"], cwd=project.path, check=True)
    yield Sweeper(project.path, sandbox)
    jobs = Sweeper(project.path, sandbox).queue()
    if jobs:
        sandbox.run(["scancel", *jobs], check=False)


def test_a_sweep_survives_its_shell_preemptions_and_points_that_fail(sweeper: Sweeper) -> None:
    points = 8
    words = sweeper.words(
        *stumbling(20, pause_s=0.5), f"train.seed=range({points})", "requeue.max_attempts_without_progress=1"
    )
    # The shell is killed in the moment in which SLURM has the array and the shell does not know it yet.
    front = sweeper.path.parent / "front"
    front.mkdir()
    (front / "sbatch").write_text(KILLING_SBATCH.format(folder=front, sbatch=shutil.which("sbatch")))
    (front / "sbatch").chmod(0o755)
    path = f"{front}:{os.environ['PATH']}"
    shell = sweeper.start(*words, "--array-parallelism", "8", PATH=path)
    assert shell.wait(240) == -signal.SIGKILL
    answer = json.loads(sweeper.cli(*words, "--array-parallelism", "8", "--json", PATH=path))
    sweep = Sweep(Path(answer["path"]))
    assert len(sweeper.queue()) == 1 and sum(sweeper.queue().values()) == points
    # Two of its tasks are preempted, and come back by themselves.
    runs = [Run(sweep.run_dir(point.run_id), sweeper.cluster, sweeper.path) for point in sweep.points()]
    preempting = []
    for run in runs[:2]:
        run.wait_for_step(1)
        preempting.append(sweeper.start("preempt", run.run_dir.id))
    for verb in preempting:
        _, said = verb.communicate(timeout=180)
        assert verb.returncode == 0, said
    for run in runs:
        run.go_on()
    now = sweeper.wait_until_ended(sweep, timeout_s=276)
    assert now["states"] == {"finished": points - 3, "failed": 3}
    assert [point["point"] for point in now["points"] if point["state"] == "failed"] == [3, 5, 7]
    assert all("exit code 4" in point["sentence"] for point in now["points"] if point["state"] == "failed")
    assert [[attempt.reason for attempt in run.attempts()] for run in runs[:2]] == [["asked", "finished"]] * 2
    states = {run.job_id: sweeper.cluster.wait_for(run.job_id, {"COMPLETED", "FAILED"})["JobState"] for run in runs}
    assert [states[runs[number].job_id] for number in (3, 5, 7)] == ["FAILED"] * 3
    assert Counter(states.values()) == {"COMPLETED": points - 3, "FAILED": 3}
    # Once more, only what failed; everything stays in its run directory.
    (sweeper.path.parent / "mended").touch()
    before = {run.run_dir.id: len(run.attempts()) for run in runs}
    sweeper.cli("sweep", "retry", sweep.id)
    # What runs is the snapshot: the file is looked at where it was named.
    now = sweeper.wait_until_ended(sweep, timeout_s=240)
    assert now["states"] == {"finished": points}
    more = {number: len(run.attempts()) - before[run.run_dir.id] for number, run in enumerate(runs)}
    assert {number for number, count in more.items() if count} == {3, 5, 7}
    assert "nothing to retry" in sweeper.cli("sweep", "retry", sweep.id)
    rows = list(csv.DictReader(io.StringIO(sweeper.cli("sweep", "collect", sweep.id, "--format", "csv"))))
    assert [int(row["point"]) for row in rows] == list(range(points))
    assert all(row["state"] == "finished" and float(row["loss"]) > 0 and row["step"] == "20" for row in rows)
    assert [row["train.seed"] for row in rows] == [str(number) for number in range(points)]


# Has its secrets at hand when it fails, after a checkpoint.
LEAKING_MODEL = """
import os
from paced import Paced

class Leaking(Paced):
    def __init__(self, *, login, **arguments):
        super().__init__(**arguments)
        self.login, self.left = login, 4

    def forward(self, tokens):
        self.left -= 1
        if self.left == 0:
            print("logging in as", self.login)
            assert self.login[::-1] == "{reversed_env}"
            raise ValueError(f"no login as {{self.login}} with {{os.environ['FROM_FILE']}}")
        return super().forward(tokens)
"""


def test_secrets_reach_the_ranks_where_nothing_is_exported_and_lie_nowhere(sweeper: Sweeper, tmp_path: Path) -> None:
    """By sbatch, srun and the batch script; in a sweep that fails with them in its words, and whose hook prints them."""
    from_env, from_file = "tok-in-the-shell", "tok-in-a-file"
    (sweeper.path / "leaking.py").write_text(LEAKING_MODEL.format(reversed_env=from_env[::-1]))
    file = tmp_path / "token"
    file.write_text(from_file + "\n")
    file.chmod(0o600)
    small = [word for word in SMALL if not word.startswith(("model._target_", "checkpoint"))]
    sweep = sweeper.submit(
        *small,
        "model._target_=leaking.Leaking",
        "+model.login='${oc.env:FROM_ENV}'",
        "+secrets.FROM_ENV=env",
        f"+secrets.FROM_FILE=file:{file}",
        "hooks.on_failure='echo $FROM_ENV $FROM_FILE'",
        "checkpoint.every_steps=2",
        "requeue=off",
        "train.seed=1",
        FROM_ENV=from_env,
        SBATCH_EXPORT="NONE",
    )
    now = sweeper.wait_until_ended(sweep, timeout_s=240)
    words = "ValueError: no login as ***FROM_ENV*** with ***FROM_FILE***"
    assert [words in point["sentence"] for point in now["points"]] == [True], now
    (run_dir,) = sweep.run_dirs().values()
    attempt = run_dir.attempt(1).path
    Cluster.wait_for_text(attempt / "hook.log", "***FROM_ENV*** ***FROM_FILE***\n")
    log = (attempt / "rank-0.log").read_text()
    assert "logging in as ***FROM_ENV***" in log and words in log
    assert "***FROM_ENV***" in (run_dir.checkpoints / "checkpoint_0000002" / "manifest.json").read_text()
    found = subprocess.run(["grep", "-rlE", f"{from_env}|{from_file}", sweeper.path], capture_output=True, text=True)
    assert found.stdout == ""


def test_packed_runs_share_a_job_and_each_ends_resumes_and_obeys_for_itself(sweeper: Sweeper) -> None:
    words = [*stumbling(40, pause_s=0.2), "requeue.max_attempts_without_progress=1"]
    sweep = sweeper.submit(*words, "train.seed=0,1,2,3,6,8", "sweep.pack=3", "cluster.exclusive=true")
    assert list(sweeper.queue().values()) == [2]
    runs = [Run(sweep.run_dir(point.run_id), sweeper.cluster, sweeper.path) for point in sweep.points()]
    clean, raising, cancelled, rest = runs[:3], runs[3], runs[4], runs[5:]
    assert len({run.job_id for run in clean}) == 1 and len({run.job_id for run in runs}) == 2

    # One is cancelled, and one told to start again: the others of their jobs go on.
    cancelled.wait_for_step(1)
    cancelled.cli("cancel", cancelled.run_dir.id)
    clean[0].wait_for_step(1)
    clean[0].cli("requeue", clean[0].run_dir.id)
    clean[0].wait_until(lambda: clean[0].attempts()[0].verdict == "requeue", "stopped")
    assert "it is requeued when the others of its pack have left" in clean[0].status()
    clean[1].wait_for_step(2)
    assert [run.attempts()[0].verdict for run in clean[1:]] == [None] * 2

    # A preemption takes the whole job. It is requeued once; the other job is not touched.
    clean[1].preempt_by_high()
    for run in (*clean, *rest):
        run.finish()
    assert [[attempt.reason for attempt in run.attempts()] for run in clean] == [
        ["asked", "finished"],
        *[["preempted", "finished"]] * 2,
    ]
    states = [sweeper.cluster.wait_for(run.job_id, {"COMPLETED", "FAILED"}) for run in (clean[0], raising)]
    starts = "2" if sweeper.cluster.does(STARTS_PREEMPTED_JOBS_ONCE_MORE) else "1"
    assert [(job["JobState"], job["Restarts"]) for job in states] == [("COMPLETED", starts), ("FAILED", "0")]
    assert [(run.attempts()[-1].reason, len(run.attempts())) for run in (raising, cancelled, *rest)] == [
        ("crash", 1),
        ("cancelled", 1),
        ("finished", 1),
    ]
    assert sweeper.state(sweep)["states"] == {"finished": 4, "failed": 1, "stopped": 1}

    # One goes on in a job of its own, what is left in a pack.
    (sweeper.path.parent / "mended").touch()
    cancelled.cli("resume", cancelled.run_dir.id)
    assert json.loads(sweeper.cli("sweep", "retry", sweep.id, "--json"))["runs"] == [raising.run_dir.id]
    for run in (cancelled, raising):
        run.finish()
    assert "_" not in cancelled.job_id
    assert sweeper.state(sweep)["states"] == {"finished": 6}
    for run in runs:
        assert_counted_once(run, 40)
