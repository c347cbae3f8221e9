"""Sweeps with cluster=local, and what `-m ... --dry-run` prints: without any SLURM."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import Composer
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system import process
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import printed, shown

Out = pytest.CaptureFixture[str]
# A program for every point; $POINT says which.
COMMAND = ["-m", "+cluster=local", "job=command", "job.command='bash point.sh'", "requeue=off", "job.snapshot=none"]
TWO = [*COMMAND, "+cluster.env.POINT=1,2", "submit"]
UNTIL = "for _ in {{1..5000}}; do [ {0} ] && break; sleep 0.02; done; [ {0} ]"  # a program that waits also has an end


def attempts_of(project: Path) -> list[int]:
    (path,) = (project / "runs").glob("*/sweep.json")
    sweep = Sweep(path.parent)
    return [len(sweep.run_dir(point.run_id).attempt_numbers()) for point in sweep.points()]


def wait_for(path: Path) -> None:
    assert process.wait_until(path.exists, timeout_s=60), path


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
    assert "-0001 (cluster.env.POINT=2): crashed: this is 2 (rank 0: bash ended with exit code 1)" in said
    assert attempts_of(project) == [1, 1, 1]
    (project / "mended").touch()
    assert shown(*words)["states"] == {"finished": 3}
    assert attempts_of(project) == [1, 2, 1]


@pytest.mark.parametrize("words", [("--array-parallelism", "2"), ("sweep.pack=2",)])
def test_several_points_can_run_here_at_the_same_time(project: Path, words: tuple[str, ...]) -> None:
    (project / "point.sh").write_text('touch "here-$POINT"; ' + UNTIL.format("-e here-1 -a -e here-2"))
    assert main([*TWO, *words]) == 0


def test_ctrl_c_stops_the_point_that_runs_and_the_sweep(project: Path, cli: Cli) -> None:
    (project / "point.sh").write_text('touch "here-$POINT"; ' + UNTIL.format("-e go"))
    shell = subprocess.Popen([sys.executable, "-m", "slurmtrain", *TWO], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(project / "here-1")
        second = cli(*TWO)
        assert second.returncode == 1 and "is already running sweep" in second.stderr
        shell.send_signal(signal.SIGINT)
        _, said = shell.communicate(timeout=120)
    finally:
        shell.kill()
    assert shell.returncode == 75 and "stopped with Ctrl-C" in said, said
    assert attempts_of(project) == [1, 0]
    assert shown("sweep", "status", "last")["states"] == {"stopped": 1, "prepared": 1}
    (project / "go").touch()
    assert main(["sweep", "retry", "last"]) == 0
    assert attempts_of(project) == [2, 1]


def test_a_launcher_that_is_killed_leaves_nobody_behind(project: Path) -> None:
    (project / "point.sh").write_text('echo $$ >"pid"; mv pid pid-$POINT; ' + UNTIL.format("-e never"))
    shell = subprocess.Popen([sys.executable, "-m", "slurmtrain", *TWO], stdout=subprocess.DEVNULL)
    wait_for(project / "pid-1")
    shell.kill()
    shell.wait()
    pid = int((project / "pid-1").read_text())
    assert process.wait_until(lambda: not process.lives(pid), timeout_s=60)
    assert attempts_of(project) == [1, 0]


# In arrays of a cluster.


def test_a_dry_run_prints_the_script_of_every_array_and_leaves_nothing(
    project: Path, slurm: FakeSlurm, capsys: Out
) -> None:
    words = ["-m", "+cluster=a100x4", "cluster.nodes=1,2", "train.seed=range(10)", "submit", "--array-parallelism", "6"]
    assert main([*words, "--dry-run"]) == 0
    scripts = capsys.readouterr().out.split("#!/bin/bash\n")[1:]
    assert ["#SBATCH --array=0-9%6\n" in script for script in scripts] == [True, True]
    assert [f"#SBATCH --nodes={nodes}\n" in scripts[nodes - 1] for nodes in (1, 2)] == [True, True]
    assert "/RUN_ID-0009 " not in scripts[0] and "/RUN_ID-0009)" in scripts[0] and "/RUN_ID-0010 " in scripts[1]
    assert scripts[1].endswith("\n# 20 points for 2 arrays; what varies: cluster.nodes, train.seed\n")
    assert list(project.iterdir()) == [] and slurm.submitted == []


def test_what_a_dry_run_prints_is_what_is_submitted(project: Path, slurm: FakeSlurm) -> None:
    words = ["-m", "+cluster=a100x4", "sweep.pack=2", "train.seed=range(5)", "submit"]
    dry = printed(*words, "--dry-run")
    assert main(words) == 0
    (info,) = (project / "runs").glob("*/sweep.json")
    stamp = Sweep(info.parent).points()[0].run_id.removesuffix("-0000")
    script = slurm.submitted[-1].replace(stamp, "RUN_ID")
    assert dry.startswith(script) and "#SBATCH --array=0-2\n" in script


def test_the_same_command_composes_one_point_and_another_config_file_is_another_command(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "conf" / "cluster").mkdir(parents=True)
    (project / "conf" / "experiment").mkdir()
    file = project / "conf" / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\ntrain:\n  steps: 7\noptim:\n  warmup_steps: 0\n")
    words = ["-m", "+cluster=a100x4", "experiment=smoke,mine", "train.seed=range(20)", "submit"]
    composed = []
    compose = Composer.compose

    def noted(self: Composer, words: list[str]) -> object:
        composed.append(words)
        return compose(self, words)

    monkeypatch.setattr(Composer, "compose", noted)

    def submitted() -> tuple[str, int]:
        composed.clear()
        return shown(*words)["sweep"], len(composed)

    sweep, points = submitted()
    assert points >= 40 and submitted() == (sweep, 1) and len(slurm.submitted) == 1
    monkeypatch.setenv("SLURMTRAIN_RUNS", "elsewhere")  # which only the first point tells
    assert submitted()[1] >= 40 and len(slurm.submitted) == 2
    monkeypatch.delenv("SLURMTRAIN_RUNS")
    file.write_text("# @package _global_\ntrain:\n  steps: 8\noptim:\n  warmup_steps: 0\n")
    other, points = submitted()
    assert other != sweep and points >= 40 and len(slurm.submitted) == 3
