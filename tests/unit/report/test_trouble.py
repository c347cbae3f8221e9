"""What status says of numbers that broke."""

from __future__ import annotations

from slurmtrain.report.trouble import trouble


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
