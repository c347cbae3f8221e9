"""What status says of numbers that broke."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.report.trouble import slow_ranks, trouble, trouble_of_ranks


def test_a_run_without_trouble_is_not_talked_about() -> None:
    assert trouble([{"event": "checkpoint", "step": 4}]) == ""


def test_skips_spikes_and_rollbacks_are_one_phrase() -> None:
    events = [
        {"event": "update skipped", "step": 6, "skipped": 1},
        {"event": "update skipped", "step": 12, "skipped": 4},
        {"event": "loss spike", "step": 13},
        {"event": "rolled back", "step": 8, "from_step": 14},
    ]
    assert trouble(events) == (
        "4 updates skipped (the last in step 12), 1 spike of the loss (the last in step 13), "
        "went back once (the last time from step 14 to 8)"
    )


def test_events_of_a_foreign_hand_do_no_harm() -> None:
    assert trouble([{"event": "update skipped", "skipped": "many"}]) == "1 update skipped (the last in step None)"


def straggler(**changes: Any) -> dict[str, Any]:
    usual = {"event": "straggler", "attempt": 1, "step": 120, "node": "n2", "ranks": [3], "phase": "forward_backward"}
    return {**usual, "ratio": 1.62, "excess_s": 0.2, "step_s": 0.5, "sporadic": False, **changes}


def test_slow_ranks_are_told_with_node_and_part_and_when_they_have_recovered() -> None:
    events = [straggler(), straggler(step=400, node="n5", ranks=[8, 9], phase="data", ratio=None)]
    assert trouble_of_ranks(events) == (
        "rank 3 on n2 (1.6 times as long for forward_backward, in attempt 1 since step 120); "
        "ranks 8, 9 on n5 (much longer for data, in attempt 1 since step 400)"
    )
    over = straggler(event="straggler over", step=360)
    assert trouble_of_ranks([events[0], over]) == (
        "rank 3 on n2 (1.6 times as long for forward_backward, in attempt 1 from step 120 to 360)"
    )
    (found,) = slow_ranks([events[0]])
    assert (found.share, found.attempt, found.until) == (0.4, 1, None)


def test_another_attempts_recovery_or_another_parts_says_nothing_of_this_one() -> None:
    over = straggler(event="straggler over", step=360)
    for other in ({"attempt": 2}, {"phase": "data"}, {"node": "n3"}, {"ranks": [4]}):
        assert slow_ranks([straggler(), {**over, **other}])[0].until is None


def test_only_the_last_findings_of_a_long_run_are_told() -> None:
    told = trouble_of_ranks([straggler(step=step) for step in range(0, 1000, 10)])
    assert told.count("rank 3 on n2") == 3 and told.endswith("since step 990); 97 more before")


@pytest.mark.parametrize(
    "odd",
    [
        {"ranks": []},
        {"ranks": "all"},
        {"ranks": [True]},
        {"ranks": ["3"]},
        {"step": None},
        {"step": "120"},
        {"node": 7},
        {"phase": None},
    ],
)
def test_slow_ranks_that_no_run_would_write_are_left_out(odd: dict[str, Any]) -> None:
    assert trouble_of_ranks([straggler(**odd)]) == ""


def test_odd_times_of_slow_ranks_do_no_harm() -> None:
    for odd in ({"ratio": "NaN"}, {"ratio": float("nan")}, {"step_s": 0}, {"excess_s": None}, {"ranks": [1] * 5000}):
        assert "on n2" in trouble_of_ranks([straggler(**odd)])
    assert len(trouble_of_ranks([straggler(ranks=list(range(5000)))])) < 200
