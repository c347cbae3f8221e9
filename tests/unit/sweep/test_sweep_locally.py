"""Sweeps with cluster=local, and what `-m ... --dry-run` prints: without any SLURM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system import process
from tests.support.fake_slurm import FakeSlurm

# A program for every point; $POINT says which.
COMMAND = ["-m", "+cluster=local", "job=command", "job.command='bash point.sh'", "requeue=off", "job.snapshot=none"]


def attempts_of(project: Path) -> list[int]:
    (path,) = (project / "runs").glob("*/sweep.json")
    sweep = Sweep(path.parent)
    return [len(sweep.run_dir(point.run_id).attempt_numbers()) for point in sweep.points()]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_points_run_here_one_after_the_other_and_the_same_command_runs_what_is_left(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "point.sh").write_text(
        'mkdir alone || exit 9; echo "this is $POINT"; rmdir alone; [ "$POINT" != 2 -o -e mended ]'
    )
    words = [*COMMAND, "+cluster.env.POINT=1,2,3", "submit"]
    assert main(words) == 1
    out, said = capfd.readouterr()
    assert "this is 1" in out and "this is 3" in out and "2 finished, 1 failed" in out
    assert "point 1 (cluster.env.POINT=2): crashed: rank 0: bash ended with exit code 1" in said
    assert attempts_of(project) == [1, 1, 1]
    (project / "mended").touch()
    assert main([*words, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["states"] == {"finished": 3}
    assert attempts_of(project) == [1, 2, 1]


@pytest.mark.parametrize("words", [("--array-parallelism", "2"), ("sweep.pack=2",)])
def test_several_points_can_run_here_at_the_same_time(project: Path, words: tuple[str, ...]) -> None:
    (project / "point.sh").write_text('touch "here-$POINT"; until [ -e here-1 -a -e here-2 ]; do sleep 0.02; done')
    assert main([*COMMAND, "+cluster.env.POINT=1,2", "submit", *words]) == 0


def test_ctrl_c_stops_the_point_that_runs_and_the_sweep(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "point.sh").write_text('touch "here-$POINT"; while [ ! -e go ]; do sleep 0.02; done')
    words = [*COMMAND, "+cluster.env.POINT=1,2", "submit"]
    shell = subprocess.Popen(
        [sys.executable, "-m", "slurmtrain", *words], cwd=project, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(project / "here-1")
        assert main(words) == 1 and "is already running sweep" in capsys.readouterr().err
        shell.send_signal(signal.SIGINT)
        _, said = shell.communicate(timeout=120)
    finally:
        shell.kill()
    assert shell.returncode == 75 and "stopped with Ctrl-C" in said, said
    assert attempts_of(project) == [1, 0]
    capsys.readouterr()
    assert main(["sweep", "status", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["states"] == {"stopped": 1, "prepared": 1}
    (project / "go").touch()
    assert main(["sweep", "retry", "last"]) == 0
    assert attempts_of(project) == [2, 1]


def test_a_launcher_that_is_killed_leaves_nobody_behind(project: Path) -> None:
    (project / "point.sh").write_text('echo $$ >"pid"; mv pid pid-$POINT; while sleep 0.02; do :; done')
    words = [*COMMAND, "+cluster.env.POINT=1,2", "submit"]
    shell = subprocess.Popen([sys.executable, "-m", "slurmtrain", *words], cwd=project, stdout=subprocess.DEVNULL)
    wait_for(project / "pid-1")
    shell.kill()
    shell.wait()
    pid = int((project / "pid-1").read_text())
    deadline = time.monotonic() + 60
    while process.lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert attempts_of(project) == [1, 0]


def test_a_dry_run_prints_the_script_of_every_array_and_leaves_nothing(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "+cluster=a100x4", "cluster.nodes=1,2", "train.seed=range(10)", "submit", "--array-parallelism", "6"]
    assert main([*words, "--dry-run"]) == 0
    scripts = capsys.readouterr().out.split("#!/bin/bash\n")[1:]
    assert ["#SBATCH --array=0-9%3\n" in script for script in scripts] == [True, True]
    assert [f"#SBATCH --nodes={nodes}\n" in scripts[nodes - 1] for nodes in (1, 2)] == [True, True]
    assert "/RUN_ID-0009 " not in scripts[0] and "/RUN_ID-0009)" in scripts[0] and "/RUN_ID-0010 " in scripts[1]
    assert scripts[1].endswith("\n# 20 points for 2 arrays; what varies: cluster.nodes, train.seed\n")
    assert list(project.iterdir()) == [] and slurm.submitted == []


@pytest.mark.parametrize("words", [["train.seed=1"], ["train.seed=1,2"]])
def test_a_sweep_in_which_nothing_varies_is_told_to_be_one_run(
    words: list[str], project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "+cluster=a100x4", *words, "submit", "--dry-run"]) == 0
    said = "nothing varies, so this is a sweep of one run; choices are written key=1,2" in capsys.readouterr().err
    assert said == (words == ["train.seed=1"])


def test_a_pruner_in_a_sweep_of_given_points_is_refused_since_it_would_prune_nothing(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "+cluster=a100x4", "train.seed=1,2", "search.pruner=median", "submit"]) == 2
    said = capsys.readouterr().err
    assert "search.pruner=median" in said and "hydra/sweeper=optuna" in said
    assert list(project.iterdir()) == [] and slurm.submitted == []


def test_what_a_dry_run_prints_is_what_is_submitted(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "+cluster=a100x4", "sweep.pack=2", "train.seed=range(5)", "submit"]
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert main([*words]) == 0
    (info,) = (project / "runs").glob("*/sweep.json")
    stamp = Sweep(info.parent).points()[0].run_id.removesuffix("-0000")
    script = slurm.submitted[-1].replace(stamp, "RUN_ID")
    assert shown.startswith(script) and "#SBATCH --array=0-2\n" in script
