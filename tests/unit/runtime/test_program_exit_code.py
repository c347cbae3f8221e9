"""What the end of a program of the user's own means: every exit code, told to stop or not, with and without a rule."""

from __future__ import annotations

import pytest

from slurmtrain.runtime.jobs.command import FinishedWhen, contract_code

ROWS = [
    # the program's own code, told to stop, job.finished_when, its file is there -> the contract's code
    (0, False, None, False, 0),
    (0, True, None, False, 75),
    (75, False, None, False, 75),
    (78, True, None, False, 78),
    (3, False, None, False, 3),
    (3, True, None, False, 75),
    (-15, True, None, False, 75),
    (-15, False, None, False, -15),
    (0, False, "done", False, 75),
    (0, False, "done", True, 0),
    (0, True, "done", True, 0),
    (-15, True, "done", True, 0),  # it was done, and then died of the signal
    (3, False, "done", True, 3),  # a crash is a crash: the file may be an old one
    (75, True, "done", True, 75),
    (0, True, "0", False, 0),  # a program whose 0 can be relied on
    (9, False, "9", False, 0),
    (9, True, "9", False, 0),
    (0, False, "9", False, 75),
    (3, False, "9", False, 3),
]


@pytest.mark.parametrize(("code", "told", "rule", "there", "meaning"), ROWS)
def test_what_the_end_of_a_program_means(code: int, told: bool, rule: str | None, there: bool, meaning: int) -> None:
    assert contract_code(code, told=told, rule=FinishedWhen.of(rule), there=there) == meaning
