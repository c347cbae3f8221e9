"""What a training of a library reports of its progress, also after restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmtrain.integrations.reporting import ProgressReport
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.rank.api import session
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.run_dir import RunDir
from tests.support.runs import add_attempt, submitted_run


@pytest.fixture
def run(project: Path) -> RunDir:
    return submitted_run(project, "job=command", "job.command=x", "job.snapshot=none")


@pytest.fixture
def begin(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Attempt]:
    """Begin an attempt, in which a new process starts the script."""

    def begin() -> Attempt:
        attempt = add_attempt(run, reported_before=attempts.furthest_reported(run))
        monkeypatch.setattr(session, "context", AttemptContext(run, attempt.number, supervised=True))
        monkeypatch.setattr(session, "distributed", SimpleNamespace(environment=SimpleNamespace(rank=0)))
        monkeypatch.setattr(session, "agreement", SimpleNamespace())
        return attempt

    return begin


def train(first: int, last: int, *, total: int, ends: bool = True) -> None:
    report = ProgressReport(first, total)
    for step in range(first + 100, last + 1, 100):
        report.log(step, loss=1.0)
    if ends:
        report.close()


def steps(run: RunDir) -> list[int]:
    return [record["step"] for record in read_metrics(run.metrics_file)]


def test_a_second_training_takes_the_place_of_the_first(run: RunDir, begin: Callable[[], Attempt]) -> None:
    begin()
    train(0, 500, total=500)
    train(0, 200, total=400)
    assert steps(run) == [100, 200] and run.info()["steps"] == 400


def test_a_script_that_begins_from_scratch_each_time_makes_no_progress(
    run: RunDir, begin: Callable[[], Attempt]
) -> None:
    for number in range(3):
        attempt = begin()
        train(0, 200, total=1000, ends=False)  # and crashes
        last = attempts.read_attempt(run, attempt.number)
        last.reported_step = attempts.furthest_reported(run)
        attempts.write_attempt(run, last)
        assert (last.progressed, last.reported_step, run.info()["steps"]) == (number == 0, 200, 1000)


def test_an_attempt_records_when_it_is_where_the_one_before_it_had_been(
    run: RunDir, begin: Callable[[], Attempt]
) -> None:
    """What it did until then was done again, which the goodput of the run counts."""
    killed = attempts.read_attempt(run, begin().number)
    train(0, 300, total=1000, ends=False)
    killed.last_step = 300
    attempts.write_attempt(run, killed)
    begin()
    train(100, 400, total=1000)
    assert [(event["attempt"], event["step"]) for event in run.events() if event["event"] == "caught up"] == [(2, 300)]
