from __future__ import annotations

import io

import pytest

from slurmtrain.observe.progress import LINE_EVERY_S, ProgressLine, format_count


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


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (950.4, "950"), (12_345, "12.3k"), (999_960, "1.0M"), (4e6, "4.0M"), (1.23e9, "1.2G")]
)
def test_counts_are_short(value: float, text: str) -> None:
    assert format_count(value) == text
