"""When to save: the interval that loses the least time, when the next save is due, and the last one before the end."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.checkpoint.save.schedule import (
    Interval,
    SaveSchedule,
    choose_last_save,
    daly,
    latest_stop,
    mean_time_between_failures,
)
from slurmtrain.errors import CheckpointError

HOUR, DAY = 3600.0, 86400.0


# ------------------------------------------------------------------------------------------------- the optimum interval


def expected_run_time(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Expected seconds per second of work, exactly, for failures at a constant rate (Daly 2006, equation 13, R = 0).

    A stretch of work and its save are done over until they get through without a failure.
    """
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


def test_the_formula_is_that_of_daly() -> None:
    # C = 50 s, M = 10,000 s: sqrt(2 C M) = 1000, sqrt(C / 2M) = 0.05.
    assert daly(50, 10_000) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert daly(20_000, 10_000) == daly(99_999, 10_000) == 10_000


def simulated_run_time(interval_s: float, cost_s: float, mtbf_s: float, *, work_s: float, restart_s: float) -> float:
    """Seconds until `work_s` are done, failure by failure: each one throws back to the last save."""
    random = np.random.default_rng(0)
    now, done, next_failure = 0.0, 0.0, random.exponential(mtbf_s)
    while done < work_s:
        if now + interval_s + cost_s <= next_failure:
            now, done = now + interval_s + cost_s, done + interval_s
        else:
            now = next_failure + restart_s
            next_failure = now + random.exponential(mtbf_s)
    return now / done


def test_a_simulated_run_is_quickest_with_the_interval_of_daly() -> None:
    # Over 20,000 failures the time lost per second of work (0.17) is known to about 1 / sqrt(20,000) = 0.7 % of itself.
    # By theory 1.7 times longer or shorter lose 12 % of it more; three times longer or shorter, half as much again.
    cost_s, mtbf_s = 20.0, 4 * 600.0
    best_s = daly(cost_s, mtbf_s)

    def lost(interval_s: float) -> float:
        return simulated_run_time(interval_s, cost_s, mtbf_s, work_s=20_000 * mtbf_s, restart_s=60.0) - 1

    least = lost(best_s)
    assert least < 0.75 * lost(best_s / 3) and least < 0.75 * lost(best_s * 3)
    assert least < 0.95 * lost(best_s / 1.7) and least < 0.95 * lost(best_s * 1.7)
    # The exact expression, with the restarts besides, is what the simulation finds.
    exact = expected_run_time(best_s, cost_s, mtbf_s) - 1
    restarts = (1 + exact) * 60.0 / mtbf_s  # as many as there are failures, about; they take time of their own
    assert least == pytest.approx(exact + restarts, rel=0.03)


# ----------------------------------------------------------------------------------------------------- the failure rate


def test_before_anything_is_observed_the_published_rate_counts() -> None:
    # 128 nodes x 6.5e-3 failures per node and day: 28.8 h, as reliability studies of 1,024 GPUs say.
    assert mean_time_between_failures(128, observed_failures=0, observed_s=0) / HOUR == pytest.approx(28.8, abs=0.1)


def test_observations_soon_weigh_more_than_the_published_rate() -> None:
    # The cluster that was published: 7.9 h where the rate says 28.8 h. After ten failures it is known by a third.
    after_ten = mean_time_between_failures(128, observed_failures=10, observed_s=10 * 7.9 * HOUR)
    assert after_ten / HOUR == pytest.approx(7.9, rel=0.3)
    after_many = mean_time_between_failures(128, observed_failures=1000, observed_s=1000 * 7.9 * HOUR)
    assert after_many / HOUR == pytest.approx(7.9, rel=0.01)


def test_one_failure_right_at_the_start_halves_the_time_and_no_more() -> None:
    before = mean_time_between_failures(4, observed_failures=0, observed_s=0)
    assert mean_time_between_failures(4, observed_failures=1, observed_s=0) == pytest.approx(before / 2)


@given(nodes=st.integers(1, 4096), failures=st.integers(0, 1000), observed_s=st.floats(0, 1e8), more=st.floats(1, 1e6))
def test_a_quiet_time_raises_and_a_failure_lowers_the_mean(
    nodes: int, failures: int, observed_s: float, more: float
) -> None:
    now = mean_time_between_failures(nodes, observed_failures=failures, observed_s=observed_s)
    assert mean_time_between_failures(nodes, observed_failures=failures, observed_s=observed_s + more) > now
    assert mean_time_between_failures(nodes, observed_failures=failures + 1, observed_s=observed_s) < now
    assert mean_time_between_failures(nodes + 1, observed_failures=failures, observed_s=observed_s) < now


# ----------------------------------------------------------------------------------------------------- when one is due


def saves(
    cadence: SaveSchedule, *, steps: range, step_s: float, start: float, stall_s: float | None = 0.0
) -> list[tuple[int, float]]:
    """Train `steps`, each taking `step_s`, and save when due: the steps saved, and when."""
    now, made = start, []
    for step in steps:
        now += step_s
        if cadence.due(step, now):
            made.append((step, now))
            now += stall_s or 0.0
            cadence.saved(step, now, stall_s)
    return made


def test_by_steps_the_multiples_are_saved() -> None:
    cadence = SaveSchedule(Interval(steps=50), now=0)
    assert [step for step, _ in saves(cadence, steps=range(1, 201), step_s=1, start=0)] == [50, 100, 150, 200]


def test_a_step_that_was_resumed_from_or_saved_for_another_reason_is_not_saved_again() -> None:
    cadence = SaveSchedule(Interval(steps=50), now=0, step=50)
    assert not cadence.due(50, 1) and cadence.due(100, 2)
    cadence.saved(100, 3, 1)
    assert not cadence.due(100, 4)


def test_by_minutes_so_much_time_lies_between_two_saves() -> None:
    cadence = SaveSchedule(Interval(minutes=10), now=1000)
    made = saves(cadence, steps=range(1, 200), step_s=45, start=1000, stall_s=5)
    times = [now for _, now in made]
    assert times[0] == 1000 + 630  # the first step that ends after 10 minutes
    assert {later - earlier for earlier, later in pairwise(times)} == {635}


def test_a_save_for_another_reason_puts_the_next_one_off() -> None:
    cadence = SaveSchedule(Interval(minutes=10), now=0)
    cadence.saved(3, 500, 1)
    assert not cadence.due(4, 601)
    assert cadence.due(5, 1100)


def test_whichever_comes_first() -> None:
    cadence = SaveSchedule(Interval(steps=100, minutes=1), now=0)
    made = saves(cadence, steps=range(1, 211), step_s=1, start=0)
    assert [step for step, _ in made] == [60, 100, 160, 200]


def test_without_an_interval_nothing_is_ever_due() -> None:
    assert saves(SaveSchedule(Interval(), now=0), steps=range(1, 100), step_s=1e5, start=0) == []


def test_auto_measures_with_a_first_save_after_a_minute() -> None:
    mtbf_s = 28.8 * HOUR
    cadence = SaveSchedule(Interval(auto=True), now=0, mtbf_s=mtbf_s)
    made = saves(cadence, steps=range(1, 1000), step_s=7, start=0, stall_s=2)
    times = [now for _, now in made]
    assert 60 <= times[0] < 67
    assert 0 <= times[1] - times[0] - 2 - daly(2, mtbf_s) < 7
    assert cadence.seconds == pytest.approx(daly(2, mtbf_s))


def auto_seconds(*stalls: float | None, mtbf_s: float = 28.8 * HOUR, detection_s: float = 0.0) -> float:
    cadence = SaveSchedule(Interval(auto=True), now=0, mtbf_s=mtbf_s, detection_s=detection_s)
    for step, stall in enumerate(stalls, 1):
        cadence.saved(step, 0, stall)
    return cadence.seconds


def test_auto_goes_by_the_worst_of_the_last_stalls_and_forgets_older_ones() -> None:
    assert auto_seconds(9, 1, 2) == auto_seconds(9)
    assert auto_seconds(9, 1, 1, 2) == auto_seconds(2)


def test_auto_goes_on_with_what_it_knows_when_a_save_could_not_be_measured() -> None:
    assert auto_seconds(None) == auto_seconds() == 60
    assert auto_seconds(4, None, math.nan) == auto_seconds(4)


def test_auto_does_not_write_all_the_time_however_small_the_stall() -> None:
    assert auto_seconds(0.0) == auto_seconds(1e-6) == auto_seconds(-1.0) == 60


def test_auto_loses_no_more_than_an_hour_where_hourly_saves_cost_less_than_a_hundredth() -> None:
    quiet = 150 * DAY  # one node, by hardware failures alone
    assert auto_seconds(30, mtbf_s=quiet) == 3600
    assert auto_seconds(30, mtbf_s=math.inf) == 3600
    expensive = auto_seconds(120, mtbf_s=quiet)
    assert expensive > 3600 and 120 / (expensive + 120) == pytest.approx(0.01)


def test_auto_saves_as_often_as_pays_even_where_that_costs_more_than_a_hundredth() -> None:
    cost_s, mtbf_s = 36.0, HOUR
    seconds = auto_seconds(cost_s, mtbf_s=mtbf_s)
    assert seconds == pytest.approx(8 * 60, rel=0.05)
    at_a_hundredth = expected_run_time(99 * cost_s, cost_s, mtbf_s)
    assert at_a_hundredth > 1.49 * expected_run_time(seconds, cost_s, mtbf_s)


def test_auto_does_not_save_more_often_than_a_failure_takes_to_be_noticed() -> None:
    assert auto_seconds(1, mtbf_s=HOUR, detection_s=1800) == 1800
    assert auto_seconds(1, mtbf_s=28.8 * HOUR, detection_s=30) == auto_seconds(1)


def test_auto_saves_more_often_where_things_fail_more_often() -> None:
    assert 60 < auto_seconds(1, mtbf_s=HOUR) < auto_seconds(1, mtbf_s=10 * HOUR) < auto_seconds(1, mtbf_s=100 * HOUR)


def test_auto_with_minutes_is_the_shorter_of_both() -> None:
    cadence = SaveSchedule(Interval(minutes=2, auto=True), now=0, mtbf_s=28.8 * HOUR)
    cadence.saved(1, 0, 10)
    assert cadence.seconds == 120


@pytest.mark.parametrize("interval", [Interval(minutes=10), Interval(auto=True)])
def test_a_clock_that_jumps_back_puts_the_next_save_off_by_one_interval_at_most(interval: Interval) -> None:
    cadence = SaveSchedule(interval, now=1e9, mtbf_s=28.8 * HOUR)
    cadence.saved(1, 1e9, 2)
    seconds = cadence.seconds
    assert not cadence.due(2, 1e9 + seconds - 1)
    back = 1e9 - 365 * DAY
    assert not cadence.due(3, back)
    assert not cadence.due(4, back + seconds - 1)
    assert cadence.due(5, back + seconds + 1)
    cadence.saved(5, back + seconds + 1, 2)
    assert not cadence.due(6, back + seconds + 2)


@given(
    changes=st.lists(st.floats(-1e6, 1e6) | st.floats(-10, 100), max_size=30),
    interval=st.builds(Interval, minutes=st.floats(1, 60), auto=st.booleans()),
)
def test_however_the_clock_jumps_it_has_to_go_forward_by_an_interval_for_each_save(
    changes: list[float], interval: Interval
) -> None:
    cadence, now, forward = SaveSchedule(interval, now=0), 0.0, 0.0
    for step, change in enumerate(changes, 1):
        now, forward = now + change, forward + max(0.0, change)
        if cadence.due(step, now):
            assert forward >= cadence.seconds - 1e-3
            cadence.saved(step, now, 0.1)
            forward = 0.0
        assert not cadence.due(step, now)
    assert cadence.due(len(changes) + 1, now + cadence.seconds + 1)  # the clock behaves again


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -5}, "every -5 steps is not possible\n  hint: give a number of steps, or 0"),
        ({"minutes": -0.5}, "every -0.5 minutes is not possible\n  hint: give a number of minutes, or 0"),
        ({"minutes": math.nan}, "every nan minutes is not possible"),
        ({"minutes": math.inf}, "every inf minutes is not possible"),
    ],
)
def test_an_interval_that_cannot_be_is_refused_with_its_value_and_a_hint(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Interval(**wrong)  # type: ignore[arg-type]
    assert message in str(caught.value)


# --------------------------------------------------------------------------------------------------------- the last one


def test_a_stop_is_asked_for_early_enough_for_one_step_and_one_save() -> None:
    assert latest_stop(10_000, step_s=20, save_s=60) == 10_000 - 1.5 * 80
    assert latest_stop(10_000, step_s=20, save_s=60, margin=1) == 10_000 - 80


def test_a_stop_is_never_asked_for_in_the_last_moments() -> None:
    assert latest_stop(10_000, step_s=0.1, save_s=0.5) == 10_000 - 30
    assert latest_stop(10_000, step_s=0.1, save_s=0.5, floor_s=90) == 10_000 - 90


@given(end=st.floats(1.5e9, 2.5e9), step_s=st.floats(0, 1e4), save_s=st.floats(0, 1e4), slower=st.floats(1, 1.5))
def test_a_stop_in_time_leaves_room_for_a_step_and_a_save_half_as_long_again(
    end: float, step_s: float, save_s: float, slower: float
) -> None:
    assert latest_stop(end, step_s=step_s, save_s=save_s) + slower * (step_s + save_s) <= end + 1e-3


CHOICES: dict[str, tuple[float | None, float | None, float | None, int, str]] = {
    # grace, left of the one in flight, a whole save, steps behind
    "time for both": (30, 10, 20, 5, "both"),
    "time for a whole one only": (25, 10, 20, 5, "new"),
    "time for the one in flight only": (15, 10, 20, 5, "in flight"),
    "time for none, and the one in flight is the nearest to its end": (5, 10, 20, 5, "in flight"),
    "nothing done since": (30, 10, 20, 0, "in flight"),
    "nothing done since, and nothing known": (None, None, None, 0, "in flight"),
    "grace not known": (None, 10, 20, 5, "both"),
    "grace not known, nothing measured": (None, None, None, 5, "both"),
    "how far it is not known, time for two": (40, None, 20, 5, "both"),
    "how far it is not known, time for one": (39, None, 20, 5, "new"),
    "the very first save is in flight": (60, 1, None, 5, "in flight"),
    "no grace": (0, 0, 20, 5, "in flight"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_save_in_flight_is_finished_or_discarded_for_the_better(case: str) -> None:
    grace_s, left_s, save_s, behind, choice = CHOICES[case]
    made = choose_last_save(grace_s=grace_s, in_flight_left_s=left_s, save_s=save_s, steps_behind=behind)
    assert made == choice


seconds = st.floats(0, 1000)


@given(grace_s=seconds, left_s=seconds, save_s=seconds, behind=st.integers(0, 100))
def test_a_save_in_flight_is_given_up_only_for_one_that_fits(
    grace_s: float, left_s: float, save_s: float, behind: int
) -> None:
    choice = choose_last_save(grace_s=grace_s, in_flight_left_s=left_s, save_s=save_s, steps_behind=behind)
    if choice == "new":
        assert behind > 0 and save_s <= grace_s < left_s + save_s
    if choice == "both":
        assert left_s + save_s <= grace_s
