"""What the record of an attempt of job=prepare says of the units, whichever task is the first or the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.choices import JobKind
from slurmtrain.config.schema import Config, JobConfig, PrepareConfig
from slurmtrain.runs import attempts
from slurmtrain.runs.create import create_run_dir
from slurmtrain.supervise.end_of_attempt import finish_attempt
from tests.support.runs import add_attempt


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
    tmp_path: Path, units: list[int], folder: str, part: tuple[int, int], began: bool, expected: int | None
) -> None:
    run = create_run_dir(tmp_path, "prepare")
    for name in (*(f"{number:05d}" for number in units), ".00006", "packed"):
        (tmp_path / "tokens" / name).mkdir(parents=True)
    prepare = PrepareConfig(output=str(tmp_path / folder), part=part[0], parts=part[1])
    config = Config(job=JobConfig(kind=JobKind.PREPARE), prepare=prepare)
    attempt = add_attempt(run, **({"said": "stopped", "stepping": 1.0, "last_step": 2} if began else {}))
    finish_attempt(run, attempt.number, 75 if began else 78, config, None)
    assert attempts.read_attempt(run, attempt.number).last_step == expected
