"""What the record of an attempt of job=prepare says of the units, whichever task is the first or the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.choices import JobKind
from slurmtrain.config.schema import Config, JobConfig, PrepareConfig
from slurmtrain.data.prepare.units_done import units_folder
from slurmtrain.runs import attempts
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.jobs.prepare import done_before
from slurmtrain.supervise.end_of_attempt import finish_attempt
from tests.support.runs import add_attempt


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "prepare")


@pytest.mark.parametrize(
    ("units", "folder", "part", "began", "expected"),
    [
        pytest.param([0, 1, 2, 3, 4], "tokens", (0, 1), True, 5, id="other tasks end some after rank 0's last count"),
        pytest.param([0, 1, 2, 3, 5, 9], "tokens", (1, 4), True, 3, id="a part of an array counts its own"),
        pytest.param([0, 1, 2, 3], "in the container", (0, 1), True, 2, id="the output cannot be seen"),
        pytest.param([0, 1, 2], "tokens", (0, 1), False, None, id="others have done them, and it was refused"),
    ],
)
def test_the_record_has_the_units_that_are_done_at_the_end(
    run: RunDir, tmp_path: Path, units: list[int], folder: str, part: tuple[int, int], began: bool, expected: int | None
) -> None:
    done = units_folder(tmp_path / "tokens")
    done.mkdir(parents=True)
    for name in (*(f"{number:05d}.json" for number in units), "00006.json.tmp"):
        (done / name).touch()
    prepare = PrepareConfig(output=str(tmp_path / folder), part=part[0], parts=part[1])
    config = Config(job=JobConfig(kind=JobKind.PREPARE), prepare=prepare)
    attempt = add_attempt(run, **({"said": "stopped", "stepping": 1.0, "last_step": 2} if began else {}))
    finish_attempt(run, attempt.number, 75 if began else 78, config, None)
    assert attempts.read_attempt(run, attempt.number).last_step == expected


@pytest.mark.parametrize(
    ("earlier", "now", "expected"),
    [
        pytest.param([], 7, 7, id="the first attempt, in an output of before"),
        pytest.param([2], 7, 2, id="another task has done five since"),
        pytest.param([2, 4], 7, 4, id="the newest"),
        pytest.param([2, None], 7, 2, id="one that never began"),
        pytest.param([7], 0, 0, id="somebody has removed the output"),
    ],
)
def test_an_attempt_begins_where_the_one_before_has_ended(
    run: RunDir, earlier: list[int | None], now: int, expected: int
) -> None:
    for step in earlier:
        add_attempt(run, last_step=step)
    own = add_attempt(run)
    assert done_before(AttemptContext(run, own.number, supervised=True), now) == expected
