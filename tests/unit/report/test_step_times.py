"""The time of a run's step from what it has logged, whoever has written it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.report.step_times import RECORDS, read_step_times, step_times
from slurmtrain.runs.run_dir import RunDir


def record(step: int, step_time_s: float = 1.0, **parts: float) -> dict[str, Any]:
    return {"step": step, "step_time_s": step_time_s, **{f"time_{name}_s": each for name, each in parts.items()}}


def test_a_step_is_the_sum_of_its_parts_without_pauses() -> None:
    logged = [
        record(step, data=0.1, forward_backward=0.7, communication=0.15, optimizer=0.05, checkpoint=3.0, other=0.0)
        for step in range(4)
    ]
    found = step_times(logged)
    assert found is not None
    assert found.step_s == pytest.approx(1.0)
    assert found.parts["communication"] == 0.15
    assert found.missing == []


def test_the_first_half_does_not_count() -> None:
    """The first steps allocate and compile."""
    logged = [record(0, forward_backward=60.0), record(1, forward_backward=5.0)]
    logged += [record(step, forward_backward=1.0) for step in (2, 3)]
    found = step_times(logged)
    assert found is not None
    assert (found.step_s, found.records) == (1.0, 2)


def test_without_parts_it_is_the_mean_that_was_logged_last() -> None:
    found = step_times([{"step": 1, "step_time_s": 9.0}, {"step": 2, "step_time_s": 2.0, "data_wait_s": 0.5}])
    assert found is not None
    assert (found.step_s, found.parts) == (2.0, {"data": 0.5})
    assert found.missing == ["forward_backward", "communication", "optimizer", "other"]


def test_the_slowest_rank_is_the_one_that_was_named_last() -> None:
    logged = [record(1) | {"slowest_rank": 3, "slowest_rank_ratio": 1.1}, record(2) | {"slowest_rank": 5}]
    logged += [record(3), record(4) | {"slowest_rank": 7, "slowest_rank_ratio": 1.5}]
    found = step_times(logged)
    assert found is not None
    assert (found.slowest_rank, found.slowest_ratio) == (7, 1.5)


@pytest.mark.parametrize("value", [None, "1", -1.0, math.nan, math.inf, 1e308, [1.0], True, {}])
def test_what_is_no_time_counts_as_missing(value: Any) -> None:
    assert step_times([{"step": 1, "step_time_s": value}]) is None
    found = step_times([record(1) | {"time_forward_backward_s": value, "slowest_rank": value}])
    assert found is not None
    assert (found.step_s, found.slowest_rank) == (1.0, None)
    assert "forward_backward" in found.missing


def test_a_step_of_no_time_at_all_is_none() -> None:
    assert step_times([record(1, step_time_s=1e-300)]) is None
    found = step_times([record(1, forward_backward=1e-300)])
    assert found is not None
    assert found.step_s == 1.0


def test_a_long_run_is_read_from_its_end(tmp_path: Path) -> None:
    """100,000 records, of which the last one is torn."""
    run_dir = RunDir(tmp_path)
    line = '{"step": %d, "step_time_s": 1.0, "time_forward_backward_s": %s}\n'
    lines = [line % (step, 9.0 if step < 99_000 else 0.5) for step in range(100_000)]
    run_dir.metrics_file.write_text("".join(lines) + '{"step": 100000, "time_forw')
    found = read_step_times(run_dir)
    assert found is not None
    assert (found.step_s, found.records) == (0.5, RECORDS)


@pytest.mark.parametrize("text", ["", "\n\n", "no JSON\n", "[]\n3\nnull\n", '{"step": 1}\n'])
def test_a_run_without_steps_has_no_times(text: str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert read_step_times(run_dir) is None
    run_dir.metrics_file.write_text(text)
    assert read_step_times(run_dir) is None
