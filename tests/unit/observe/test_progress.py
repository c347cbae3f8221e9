from __future__ import annotations

import io
import math

import pytest

from slurmtrain.observe.progress import LINE_EVERY_S, ProgressLine, format_count, format_duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_file_gets_plain_lines_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    bar = ProgressLine(400, 100, stream=stream, clock=clock)
    for step in range(101, 401):
        clock.now += 1.0
        bar.update(step, loss=2.314, lr=3e-4, tokens_per_s=12345)
    began, *lines = stream.getvalue().splitlines()
    assert began == "step 100/400  waiting for the first step"
    assert lines[0] == "step 101/400  loss 2.314  lr 3.0e-4  12.3k tok/s  eta 4:59"
    assert lines[-1] == "step 400/400  loss 2.314  lr 3.0e-4  12.3k tok/s  eta 0:00"
    assert len(lines) == pytest.approx(300 / LINE_EVERY_S, abs=1)
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_messages_in_a_log_file_are_lines_of_their_own() -> None:
    stream = io.StringIO()
    bar = ProgressLine(10, stream=stream)
    bar.message("checkpoint at step 5 [green]committed")
    assert stream.getvalue().splitlines()[1:] == ["checkpoint at step 5 [green]committed"]


def test_other_metrics_and_broken_values_are_shown_too() -> None:
    stream = io.StringIO()
    ProgressLine(2, stream=stream).update(1, loss=math.nan, grad_norm=0.12346)
    assert "loss nan  grad_norm 0.1235" in stream.getvalue()


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (950.4, "950"), (12_345, "12.3k"), (999_960, "1.0M"), (4e6, "4.0M"), (1.23e9, "1.2G")]
)
def test_counts_are_short(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (62.4, "1:02"), (59.7, "1:00"), (7384, "2:03:04"), (273_906, "3-04:05:06")]
)
def test_durations_are_clocks(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
