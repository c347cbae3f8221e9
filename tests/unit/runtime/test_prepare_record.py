"""What the record of an attempt of job=prepare says of the units, whichever task is the first or the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.choices import JobKind
from slurmtrain.config.schema import Config, JobConfig, PrepareConfig
from slurmtrain.data.prepare.units_done import count_done, units_folder
from slurmtrain.runs import attempts
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.finish_attempt import finish_attempt
from slurmtrain.runtime.jobs.prepare import done_before
from tests.support.runs import add_attempt


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "prepare")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    units_folder(path).mkdir(parents=True)
    return path


def end(output: Path, *numbers: int) -> None:
    for number in numbers:
        (units_folder(output) / f"{number:05d}.json").touch()


def config_of(output: Path, part: int = 0, parts: int = 1) -> Config:
    prepare = PrepareConfig(output=str(output), part=part, parts=parts)
    return Config(job=JobConfig(kind=JobKind.PREPARE), prepare=prepare)


def test_units_that_other_tasks_end_after_rank_0_s_last_count_are_on_record(run: RunDir, output: Path) -> None:
    end(output, 0, 1, 2, 3, 4)
    (units_folder(output) / "00005.json.tmp").touch()
    attempt = add_attempt(run, said="stopped", stepping=1.0, last_step=2)
    finish_attempt(run, attempt.number, 75, config_of(output), None)
    assert attempts.read_attempt(run, attempt.number).last_step == 5


def test_a_part_of_an_array_counts_its_own_units(run: RunDir, output: Path) -> None:
    end(output, 0, 1, 2, 3, 5, 9)
    attempt = add_attempt(run, said="stopped", stepping=1.0, last_step=1)
    finish_attempt(run, attempt.number, 75, config_of(output, part=1, parts=4), None)
    assert attempts.read_attempt(run, attempt.number).last_step == 3
    assert [count_done(output, part, 4) for part in range(4)] == [1, 3, 1, 1]


def test_rank_0_s_count_stands_where_the_output_cannot_be_seen(run: RunDir, tmp_path: Path) -> None:
    attempt = add_attempt(run, said="stopped", stepping=1.0, last_step=2)
    finish_attempt(run, attempt.number, 75, config_of(tmp_path / "in the container"), None)
    assert attempts.read_attempt(run, attempt.number).last_step == 2


def test_what_others_have_done_in_the_output_is_not_on_record_of_an_attempt_that_did_not_begin(
    run: RunDir, output: Path
) -> None:
    end(output, 0, 1, 2)  # with other settings, so that the attempt was refused
    attempt = add_attempt(run)
    finish_attempt(run, attempt.number, 78, config_of(output), None)
    assert attempts.read_attempt(run, attempt.number).last_step is None


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
