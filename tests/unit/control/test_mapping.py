"""`slurmtrain.map`: what is refused, what is sent, and what becomes of results, without a cluster."""

from __future__ import annotations

import functools
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

import slurmtrain
from slurmtrain.control.mapping import MapRun
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.rank.jobs import map_task
from slurmtrain.report.status.waiting import RunFailedError
from slurmtrain.runs import attempts
from slurmtrain.runs.failures import Failures
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmtrain.runs.sweep_dir import Sweep
from tests.support.fake_slurm import FakeSlurm
from tests.support.pickles import Evil
from tests.support.runs import add_attempt

map_on_slurm = functools.partial(slurmtrain.map, cluster="a100x4", overrides=["requeue=off"])


class NoLuckError(Exception):
    pass


class Unreadable(Exception):  # noqa: N818
    def __init__(self, one: int, other: int):
        super().__init__("cannot be read again")


def twice(number: int) -> int:
    if number == 2:
        raise NoLuckError(f"no luck with {number}")
    if number == 3:
        raise Unreadable(1, 2)
    return 2 * number


@pytest.fixture
def calls(project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> MapRun:
    """Four calls, made here as their jobs would."""
    found = map_on_slurm(twice, [1, 2, 3, 4])
    for task in list(found)[:3]:
        attempt = add_attempt(task._run_dir, job_id=task.run.job_ids[-1])
        monkeypatch.setenv(RUN_DIR_VARIABLE, str(task.run.path))
        monkeypatch.setenv(ATTEMPT_VARIABLE, str(attempt.number))
        code = map_task.main()
        attempt.ended, attempt.verdict, attempt.exit_code = 1.0, "end" if code else "done", code
        attempt.reason, attempt.sentence = ("config", "as it said") if code else ("finished", "finished")
        attempts.write_attempt(task._run_dir, attempt)
    return found


def test_all_calls_are_one_array_with_the_same_script(project: Path, slurm: FakeSlurm) -> None:
    found = map_on_slurm(twice, range(5), max_parallel=2)
    assert [task.run.job_ids for task in found] == [[f"101_{index}"] for index in range(5)]
    script = (Sweep(found.path).array(0) / "job.sbatch").read_text()
    assert "--array=0-4%2" in script and "--nodes=1" in script and "--ntasks-per-node=1" in script
    assert len(slurm.jobs) == 1
    again = map_on_slurm(twice, range(5))
    assert again.path != found.path, "a second map is another one"


def test_results_come_back_and_what_raised_raises_with_the_traceback_of_the_job(calls: MapRun) -> None:
    assert calls[0].result() == 2
    with pytest.raises(NoLuckError, match="no luck with 2") as raised:
        calls[1].result()
    assert "in twice" in str(raised.value.__cause__) and "NoLuckError: no luck with 2" in str(raised.value.__cause__)
    with pytest.raises(RunFailedError, match=r"item 2 raised .*cannot be read again") as unread:
        calls[2].result()
    assert "in twice" in str(unread.value.__cause__)
    with pytest.raises((NoLuckError, RunFailedError)):
        calls.results(timeout_s=5)
    first = Failures.read(calls[1]._run_dir.attempt(1)).first()
    assert first is not None and first.exit_code == 78 and "no luck with 2" in first.sentence


def test_lambdas_closures_and_several_iterables_are_sent(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = 10
    (task,) = map_on_slurm(lambda a, b: a + b + offset, [1], [2])
    (job_id,) = task.run.job_ids
    attempt = add_attempt(task._run_dir, job_id=job_id)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(task.run.path))
    monkeypatch.setenv(ATTEMPT_VARIABLE, "1")
    assert map_task.main() == 0
    attempts.write_attempt(task._run_dir, attempts.Attempt(1, job_id=job_id, started=1.0, ended=2.0, verdict="done"))
    assert attempt.number == 1 and task.result(timeout_s=60) == 13


@pytest.mark.parametrize(
    ("arguments", "more", "said"),
    [
        (([threading.Lock()],), {}, "item 0 cannot be pickled: TypeError"),
        (([],), {}, "there are no items"),
        ((), {}, "there are no items"),
        (([1, 2], [1]), {}, "the iterables have 2, 1 items"),
        (([1],), {"max_parallel": 0}, "max_parallel=0"),
        (([1],), {"overrides": "optim.lr=1"}, "expected a list"),
    ],
)
def test_what_cannot_be_mapped_is_one_sentence_and_leaves_nothing(
    project: Path, arguments: Any, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        slurmtrain.map(twice, *arguments, **more)
    assert not (project / "runs").exists()


def test_a_secret_is_not_pickled(project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", value := "abcdefgh-0123")
    with pytest.raises(ConfigError, match="item 0 holds the value of the secret MY_KEY"):
        slurmtrain.map(twice, [value], cluster="a100x4", overrides=["+secrets.MY_KEY=env"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_results_in_files_of_other_users_are_refused_unread(calls: MapRun, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    result = calls[0].run.path / map_task.RESULT
    result.write_bytes(pickle.dumps(Evil(canary)))
    os.chown(result, 65534, 65534)
    with pytest.raises(UsageError, match=f"{result} belongs to user nobody"):
        calls[0].result()
    assert not canary.exists()
