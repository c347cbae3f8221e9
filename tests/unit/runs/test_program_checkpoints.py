"""The checkpoints of a program of the user's own: their steps, which are whole, and what is moved aside before a restart."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest

from slurmtrain.choices import JobKind
from slurmtrain.cli import main
from slurmtrain.config.schema import Config, JobConfig
from slurmtrain.rank.attempt_context import AttemptContext, open_attempt
from slurmtrain.rank.jobs.own_checkpoints import look_before_start
from slurmtrain.runs import program_checkpoints
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import Environment
from slurmtrain.supervise.end_of_attempt import finish_attempt
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import Job, no_waiting, printed, shown

PATTERN, RULE = "out/checkpoint-*", "trainer_state.json"

PROGRAM = """
mkdir -p out; ls -A out | sort > seen-$SLURMTRAIN_ATTEMPT
save() { mkdir -p $1; echo w > $1/weights; printf '%s' "$2" > $1/trainer_state.json; }
case $SLURMTRAIN_ATTEMPT in
  1) save out/checkpoint-10 '{"max_steps": 100}'; mkdir out/checkpoint-20
     ln -s "$PWD/elsewhere" out/checkpoint-30; ln -s gone out/checkpoint-40; exit 1 ;;
  2) save out/checkpoint-20 ''; exit 1 ;;
  3) save out/checkpoint-50 '{"max_steps": 100}' ;;
esac
"""


def test_what_is_incomplete_is_moved_aside_before_a_restart_and_the_program_goes_on_from_the_newest_whole_one(
    project: Path,
) -> None:
    for folder in ("out/checkpoint-5", "elsewhere"):  # incomplete, and left by somebody before the first start
        (project / folder).mkdir(parents=True)
    (project / "p.sh").write_text(PROGRAM)
    words = ["+cluster=local", "job=command", "job.command=bash p.sh", "job.snapshot=none"]
    assert main([*words, f"job.checkpoints={PATTERN}", f"job.checkpoint_complete={RULE}", "submit"]) == 0
    seen = [(project / f"seen-{number}").read_text().split() for number in (1, 2, 3)]
    aside = [f".incomplete-checkpoint-{step}-attempt-2" for step in (20, 30, 40, 5)]
    assert seen[0] == ["checkpoint-5"]  # nothing is moved before the first start
    assert seen[1] == [*aside, "checkpoint-10"]
    # Once more under the same name: nothing is overwritten. What a link names is not touched.
    assert seen[2] == [aside[0], ".incomplete-checkpoint-20-attempt-3", *aside[1:], "checkpoint-10"]
    assert (project / "elsewhere").is_dir()
    now = shown("status", "last")
    assert (now["state"], now["step"]) == ("finished", 50)
    assert [each["first_step"] for each in now["attempts"]][1:] == [10, 10]
    assert "5 incomplete ones moved aside (the last: checkpoint-20)" in printed("status", "last")


# Which of them is the newest, and whole: as `status` shows a run that is over.


@pytest.fixture
def job(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, project: Path) -> Job:
    no_waiting(monkeypatch)
    made = Job.waiting(tmp_path / "runs", slurm, monkeypatch)
    made.run.update_info(own_checkpoints={"pattern": PATTERN, "complete": RULE}, steps=None)
    made.files.config(job={"name": "train", "kind": "command", "command": "x"})
    (made.run.path / "out").mkdir()
    return made


def save(run: RunDir, step: int, state: str | None = '{"max_steps": 100}', at: float | None = None) -> Path:
    folder = run.path / "out" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("w")
    if state is not None:
        (folder / RULE).write_text(state)
    if at is not None:
        os.utime(folder, (at, at))
    return folder


def step_of(job: Job, pattern: str = "out/*", complete: str | None = None) -> int | None:
    job.run.update_info(own_checkpoints={"pattern": pattern, "complete": complete})
    step: int | None = shown("status", job.run.id)["step"]
    return step


def test_the_step_is_the_last_number_in_the_name(job: Job) -> None:
    names = {"last.ckpt": None, "checkpoint-1.5": 5, "v2-step-7": 7, "step_12.safetensors": 12, "global_step80": 80}
    names |= {"checkpoint-500": 500, "checkpoint_0001000.pt": 1000, "epoch=3-step=1200.ckpt": 1200}
    for name, step in names.items():
        (job.run.path / "out" / name).mkdir()
        (job.run.path / "out" / name / "weights").write_text("w")
        assert step_of(job) == step


# What the start of an attempt does, up to the moment at which its program would start.


def config_of(pattern: str | None = PATTERN, rule: str | None = RULE) -> Config:
    return Config(job=JobConfig(kind=JobKind.COMMAND, command="x", checkpoints=pattern, checkpoint_complete=rule))


def begin(run: RunDir, config: Config, *, told_to_stop: bool = False) -> int:
    context = AttemptContext(run, run.new_attempt(), supervised=True)
    open_attempt(context, Environment(source="single"), config)
    look_before_start(config, context, lambda: told_to_stop)
    return context.number


@pytest.fixture
def run(job: Job) -> RunDir:
    """A run that has had an attempt, which left no checkpoint."""
    begin(job.run, config_of())
    finish_attempt(job.run, 1, 1, config_of(), None)
    return job.run


def left(run: RunDir) -> set[str]:
    return {path.name for path in (run.path / "out").iterdir() if not path.name.startswith(".incomplete-")}


def test_a_checkpoint_that_cannot_be_read_now_may_be_whole_and_stays(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a file server hiccups: nothing is known of it, and it may be the newest one."""
    whole, unlisted = save(run, 20), save(run, 30, state=None)
    listdir = os.listdir

    def fails(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(program_checkpoints, "cut", fails)
    monkeypatch.setattr(os, "listdir", lambda path=".": fails(path) if path == unlisted else listdir(path))
    begin(run, config_of())
    assert whole.exists() and unlisted.exists()


def test_what_another_run_left_in_the_same_folder_before_this_one_began_is_not_touched(
    run: RunDir, tmp_path: Path
) -> None:
    config = config_of(f"{tmp_path}/shared/checkpoint-*")
    for step, at in ((5, 1000.0), (6, time.time() + 5)):
        folder = tmp_path / "shared" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        os.utime(folder, (at, at))
    begin(run, config)
    assert [path.name for path in (tmp_path / "shared").glob("checkpoint-*")] == ["checkpoint-5"]


def test_a_restart_with_no_checkpoint_to_be_seen_is_reported(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for config in (config_of(), config_of(None, None)):
        number = begin(job.run, config)
        finish_attempt(job.run, number, 1, config, None)
    save(job.run, 5)
    begin(job.run, config_of())
    assert "none visible at the start of attempt 2" in printed("status", job.run.id)  # not at the first start


def test_a_newer_complete_checkpoint_is_progress_and_reported_steps_are_not(job: Job) -> None:
    verdicts = []
    for step in (10, 20, None, None, None):
        number = begin(job.run, config_of())
        save(job.run, step or 1000 + number, *([] if step else [None]))
        with job.run.metrics_file.open("a") as file:
            file.write(json.dumps({"step": 10 * number}) + "\n")
        verdicts.append(finish_attempt(job.run, number, 1, config_of(), None).verdict)
    assert verdicts == ["requeue", "requeue", "requeue", "requeue", "end"]
