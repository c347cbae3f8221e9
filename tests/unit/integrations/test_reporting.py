"""What trainings of one script report of their progress, one after the other and after restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmtrain.integrations import reporting
from slurmtrain.integrations.reporting import ProgressReport
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.runs import attempts, reached_step
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.api import session
from slurmtrain.runtime.attempt_context import AttemptContext
from tests.support.runs import add_attempt, submitted_run


@pytest.fixture
def run(project: Path) -> RunDir:
    return submitted_run(project, "job=command", "job.command=x", "job.snapshot=none")


@pytest.fixture
def begin(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Attempt]:
    """Begin an attempt, in which a new process starts the script."""

    def begin() -> Attempt:
        attempt = add_attempt(run, reported_before=reached_step.furthest_reported(run))
        monkeypatch.setattr(session, "context", AttemptContext(run, attempt.number, supervised=True))
        monkeypatch.setattr(session, "distributed", SimpleNamespace(environment=SimpleNamespace(rank=0)))
        monkeypatch.setattr(session, "agreement", SimpleNamespace())
        monkeypatch.setattr(reporting, "_trainings", reporting._Trainings())
        return attempt

    return begin


def train(folder: str, first: int, last: int, *, total: int, ends: bool = True) -> None:
    report = ProgressReport(first, total, folder)
    for step in range(first + 100, last + 1, 100):
        report.log(step, loss=1.0)
    if ends:
        report.close()


def steps(run: RunDir) -> list[int]:
    return [record["step"] for record in read_metrics(run.metrics_file)]


def test_a_second_training_keeps_the_lines_of_the_first_and_is_progress(
    run: RunDir, begin: Callable[[], Attempt]
) -> None:
    first = begin()
    train("pretrained", 0, 500, total=500)
    train("tuned", 0, 200, total=400, ends=False)  # and is killed
    assert steps(run) == [100, 200, 300, 400, 500, 600, 700] and run.info()["steps"] == 900
    assert attempts.read_attempt(run, first.number).first_step == 0

    second = begin()
    train("pretrained", 500, 500, total=500)  # has its checkpoint, and ends at once
    train("tuned", 100, 300, total=400, ends=False)
    assert steps(run) == [100, 200, 300, 400, 500, 600, 700, 800], "step 700 once, by the attempt that went on from it"
    second = attempts.read_attempt(run, second.number)
    second.reported_step = reached_step.furthest_reported(run)
    assert second.progressed and (second.reported_step, second.first_step) == (800, 600)


def test_a_script_that_passes_over_a_training_that_is_done_goes_on_counting(
    run: RunDir, begin: Callable[[], Attempt]
) -> None:
    begin()
    train("pretrained", 0, 500, total=500)
    train("tuned", 0, 100, total=400, ends=False)
    begin()
    train("tuned", 100, 400, total=400)
    train("evaluated", 0, 100, total=100)
    assert steps(run) == [*range(100, 1001, 100)] and run.info()["steps"] == 1000


def test_a_first_training_that_is_done_again_leaves_the_lines_of_the_second(
    run: RunDir, begin: Callable[[], Attempt]
) -> None:
    begin()
    train("pretrained", 0, 300, total=300)
    train("tuned", 0, 200, total=200)
    begin()
    train("pretrained", 200, 300, total=300)
    assert sorted(steps(run)) == [100, 200, 300, 400, 500]


def test_several_trainings_in_one_folder_are_several_and_one_that_is_tried_again_is_one(
    run: RunDir, begin: Callable[[], Attempt]
) -> None:
    begin()
    train("folds", 0, 200, total=200)
    train("folds", 0, 100, total=200, ends=False)  # has too little memory
    train("folds", 0, 200, total=200)
    train("folds", 200, 300, total=300)  # goes on with more steps
    assert steps(run) == [100, 200, 300, 400, 500] and run.info()["steps"] == 500


def test_a_script_that_begins_from_scratch_in_a_new_folder_each_time_makes_no_progress(
    run: RunDir, begin: Callable[[], Attempt]
) -> None:
    for number in range(3):
        attempt = begin()
        train(f"out-{number}", 0, 200, total=1000, ends=False)  # and crashes
        last = attempts.read_attempt(run, attempt.number)
        last.reported_step = reached_step.furthest_reported(run)
        attempts.write_attempt(run, last)
        assert (last.progressed, last.reported_step, run.info()["steps"]) == (number == 0, 200, 1000)


def test_an_attempt_records_when_it_is_where_the_one_before_it_had_been(
    run: RunDir, begin: Callable[[], Attempt]
) -> None:
    """What it did until then was done again, which the goodput of the run counts."""
    killed = attempts.read_attempt(run, begin().number)
    train("out", 0, 300, total=1000, ends=False)
    killed.last_step = 300
    attempts.write_attempt(run, killed)
    begin()
    train("out", 100, 400, total=1000)
    assert [(event["attempt"], event["step"]) for event in run.events() if event["event"] == "caught up"] == [(2, 300)]
