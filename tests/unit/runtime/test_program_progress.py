"""How a program of the user's own shows that it gets on: the verb, its lines in metrics.jsonl, a file; and what rests on it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.choices import JobKind
from slurmtrain.cli import main
from slurmtrain.config.schema import Config, JobConfig, RequeueConfig
from slurmtrain.report.progress import read_progress
from slurmtrain.runs import attempts, reached_step
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.outcome import AttemptOutcome
from slurmtrain.runs.reasons import Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.attempt_context import AttemptContext, open_attempt, update_attempt
from slurmtrain.runtime.finish_attempt import finish_attempt
from slurmtrain.runtime.jobs.program_exit_code import FinishedWhen
from slurmtrain.slurm.environment import Environment
from tests.support.commands import Cli


@pytest.fixture
def run(project: Path) -> RunDir:
    run_dir = create_run_dir(project / "runs", "command")
    run_dir.info_file.write_text(json.dumps({"id": run_dir.id, "name": "command", "steps": None}))
    return run_dir


def own(**job: Any) -> Config:
    return Config(job=JobConfig(kind=JobKind.COMMAND, command="x", **job), requeue=RequeueConfig(max_unseen_attempts=3))


def attempt(
    run: RunDir,
    config: Config,
    *,
    minutes: float = 1.0,
    step: int | None = None,
    code: int = 75,
    work: Callable[[], None] = lambda: None,
) -> AttemptOutcome:
    """One attempt of a program that reports this step, does this work, and leaves with this exit code."""
    number = run.new_attempt()
    open_attempt(AttemptContext(run, number, supervised=True), Environment(source="single"), config)
    record = attempts.read_attempt(run, number)
    record.started, record.program_code, record.said = time.time() - 60 * minutes, code, "stopped"
    attempts.write_attempt(run, record)
    work()
    if step is not None:
        with run.metrics_file.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
    return finish_attempt(run, number, code, config, None)


@pytest.mark.parametrize("folder", ["", "code"])
def test_a_file_counts_in_the_run_directory_and_where_the_program_runs(run: RunDir, folder: str) -> None:
    run.update_info(workdir="code")
    (run.path / folder / "out").mkdir(parents=True)
    config, times = own(progress_file="out/*.pt", finished_when="out/done"), iter(range(1000, 2000))

    def save() -> None:
        (run.path / folder / "out/a.pt").touch()
        os.utime(run.path / folder / "out/a.pt", (at := next(times), at))

    assert {attempt(run, config, code=1, work=save).verdict for _ in range(6)} == {Verdict.REQUEUE}
    rule = FinishedWhen.of("out/done")
    assert rule is not None and not rule.is_there(AttemptContext(run, 1, supervised=True))
    (run.path / folder / "out/done").touch()
    assert rule.is_there(AttemptContext(run, 1, supervised=True))


def test_a_program_that_does_a_chunk_each_time_and_says_so_goes_on(run: RunDir) -> None:
    assert {attempt(run, own(), step=10 * n).verdict for n in range(1, 8)} == {Verdict.REQUEUE}


def test_chunks_that_nobody_hears_of_and_steps_done_again_are_no_progress(run: RunDir) -> None:
    assert [attempt(run, own()).verdict for _ in range(3)] == ["requeue", "requeue", "end"]
    assert [attempt(run, own(), step=5).verdict for _ in range(4)] == ["requeue", "requeue", "requeue", "end"]


def test_hours_between_crashes_start_the_count_afresh_and_are_counted_themselves(run: RunDir) -> None:
    minutes = [1, 1, 90, 1, 1, 90, 1]
    assert {attempt(run, own(), minutes=each, code=1).verdict for each in minutes} == {Verdict.REQUEUE}
    last = attempt(run, own(), minutes=90, code=1)
    assert last.verdict == Verdict.END and "requeue.max_unseen_attempts" in last.sentence


def test_a_file_that_changes_while_an_attempt_runs_shows_progress(run: RunDir, project: Path) -> None:
    config, file = own(progress_file=f"{project}/out/*/model.pt"), project / "out" / "a" / "model.pt"
    file.parent.mkdir(parents=True)

    def save(moment: float) -> None:
        file.touch()
        os.utime(file, (moment, moment))

    assert [attempt(run, config, work=partial(save, n)).verdict for n in range(1, 5)] == ["requeue"] * 4
    save(99.0)  # between two attempts: the work of none
    assert [attempt(run, config).verdict for _ in range(3)] == ["requeue", "requeue", "end"]


def test_the_verb_writes_a_line_that_status_shows_with_the_time_left(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMTRAIN_RUN_DIR", str(run.path))
    monkeypatch.setenv("SLURMTRAIN_ATTEMPT", "1")
    place = AttemptContext(run, run.new_attempt(), supervised=True)
    open_attempt(place, Environment(source="single"), own())
    began = attempts.read_attempt(run, 1).started
    assert main(["progress", "10", "--of", "100"]) == 0
    run.metrics_file.write_text(run.metrics_file.read_text() + '{"step": 1')  # torn by a kill
    assert main(["progress", "20"]) == 0
    seen = read_progress(run, run.info()["steps"], running_since=began)
    assert (seen.step, seen.steps) == (20, 100) and seen.eta_s is not None
    monkeypatch.setenv("RANK", "1")
    assert main(["progress", "30"]) == 0 and reached_step.furthest_reported(run) == 20


def test_the_first_report_of_an_attempt_and_when_it_has_caught_up_are_told(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the time of steps that are done again is known."""
    monkeypatch.setenv("SLURMTRAIN_RUN_DIR", str(run.path))
    for number, steps in ((1, (10, 20)), (2, (5, 15, 20, 30))):
        place = AttemptContext(run, run.new_attempt(), supervised=True)
        open_attempt(place, Environment(source="single"), own())
        update_attempt(place, started=time.time() - 10)
        monkeypatch.setenv("SLURMTRAIN_ATTEMPT", str(number))
        for step in steps:
            assert main(["progress", str(step)]) == 0
        logged = run.metrics_file.stat().st_mtime
        finish_attempt(run, number, 75, own(), None)
        assert attempts.read_attempt(run, number).last_logged == logged
        os.utime(run.metrics_file, (logged - 3600, logged - 3600))  # the next attempt begins an hour later
    told = [(event["event"], event["attempt"], event["step"]) for event in run.events() if "step" in event]
    assert told == [("first report", 1, 10), ("first report", 2, 5), ("caught up", 2, 20)]


def test_outside_of_a_run_the_verb_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["progress", "10"]) == 2
    assert "works only inside a run: SLURMTRAIN_RUN_DIR is not set" in capsys.readouterr().err
    assert main(["progress", "ten"]) == 2
    assert "'ten' is not a number of steps" in capsys.readouterr().err


def test_a_script_that_exits_75_after_each_reported_chunk_comes_to_its_end(cli: Cli, project: Path) -> None:
    (project / "chunk.sh").write_text(
        "n=$(($(cat n 2>/dev/null) + 1)); echo $n >n\n"
        f"{sys.executable} -m slurmtrain progress $n --of 3\n[ $n = 3 ] || exit 75\n"
    )
    words = ["+cluster=local", "job=command", "job.command='bash chunk.sh'", "job.snapshot=none"]
    done = cli(*words, "requeue.max_attempts_without_progress=1", "submit")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(cli("status", "--json").stdout)
    assert (row["state"], row["step"], row["steps"], len(row["attempts"])) == ("finished", 3, 3, 3)
