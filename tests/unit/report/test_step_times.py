"""The time of a step, and of its parts, as a run has logged them."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.report.collect import step_times


def record(step: int, step_time_s: float = 1.0, **parts: float) -> dict[str, Any]:
    return {"step": step, "step_time_s": step_time_s, **{f"time_{name}_s": each for name, each in parts.items()}}


USUAL = {"data": 0.1, "forward_backward": 0.7, "communication": 0.15, "optimizer": 0.05, "other": 0.0}
LOGGED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a step is the sum of its parts without pauses": (
        [record(step, **USUAL, checkpoint=3.0) for step in range(4)],
        {"step_s": pytest.approx(1.0), "parts": USUAL},
    ),
    "the first half, in which steps allocate and compile, does not count": (
        [record(step, forward_backward=seconds) for step, seconds in enumerate((60.0, 5.0, 1.0, 1.0))],
        {"step_s": 1.0},
    ),
    "without parts it is the mean that was logged last": (
        [{"step": 1, "step_time_s": 9.0}, {"step": 2, "step_time_s": 2.0, "data_wait_s": 0.5}],
        {"step_s": 2.0, "parts": {"data": 0.5}},
    ),
}


@pytest.mark.parametrize("case", LOGGED)
def test_the_time_of_a_step(case: str) -> None:
    logged, expected = LOGGED[case]
    found = step_times(logged)
    assert {name: getattr(found, name) for name in expected} == expected
