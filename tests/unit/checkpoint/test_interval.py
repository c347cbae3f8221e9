"""When to save: the interval that loses the least time, when the next save is due, and the last one before the end."""

from __future__ import annotations

import math

import pytest

from slurmtrain.checkpoint.save.schedule import (
    Interval,
    SaveSchedule,
    daly,
    is_better_discarded,
    mean_time_between_failures,
)

HOUR, DAY = 3600.0, 86400.0


def test_the_interval_is_that_of_daly() -> None:
    # C = 50 s, M = 10,000 s: sqrt(2 C M) = 1000, sqrt(C / 2M) = 0.05.
    assert daly(50, 10_000) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert daly(20_000, 10_000) == daly(99_999, 10_000) == 10_000


def test_the_time_between_failures_goes_from_the_published_to_the_observed_one() -> None:
    # 128 nodes x 6.5e-3 failures per node and day: 28.8 h, as reliability studies of 1,024 GPUs say.
    published = mean_time_between_failures(128, observed_failures=0, observed_s=0.0)
    assert published == pytest.approx(28.8 * HOUR, rel=0.005)
    # The cluster that was published: 7.9 h; after ten failures that is known by a third.
    observed = mean_time_between_failures(128, observed_failures=10, observed_s=79 * HOUR)
    assert observed == pytest.approx(7.9 * HOUR, rel=0.3)


# ----------------------------------------------------------------------------------------------------- when one is due


def saves(
    cadence: SaveSchedule, *, steps: range, step_s: float, start: float, stall_s: float
) -> list[tuple[int, float]]:
    """Train `steps`, each taking `step_s`, and save when due: the steps saved, and when."""
    now, made = start, []
    for step in steps:
        now += step_s
        if step >= cadence.step or now >= cadence.moment:
            made.append((step, now))
            now += stall_s
            cadence.saved(step, now)
            cadence.measured(stall_s)
    return made


@pytest.mark.parametrize(
    ("interval", "step_s", "saved"),
    [
        pytest.param(Interval(steps=50), 1, [50, 100, 150, 200], id="by steps the multiples"),
        # The first step that ends after 10 minutes, each save taking 5 s.
        pytest.param(
            Interval(minutes=10), 45, [14, 28, 42, 56, 70, 84, 98, 112, 126, 140, 154, 168, 182, 196], id="by time"
        ),
        pytest.param(Interval(steps=100, minutes=1), 1, [60, 100, 160, 200], id="whichever comes first"),
    ],
)
def test_what_is_saved_goes_by_steps_and_by_time(interval: Interval, step_s: float, saved: list[int]) -> None:
    cadence = SaveSchedule(interval, now=1000)
    assert [step for step, _ in saves(cadence, steps=range(1, 211), step_s=step_s, start=1000, stall_s=5)][:14] == saved


def test_a_save_for_another_reason_puts_the_next_one_off_and_no_step_is_saved_twice() -> None:
    cadence = SaveSchedule(Interval(steps=50, minutes=10), now=0, step=50)
    assert (cadence.step, cadence.moment) == (100, 600)
    cadence.saved(70, 500)
    assert (cadence.step, cadence.moment) == (100, 1100)
    cadence.saved(100, 700)
    assert (cadence.step, cadence.moment) == (150, 1300)


def test_auto_measures_with_a_first_save_after_a_minute() -> None:
    mtbf_s = 28.8 * HOUR
    cadence = SaveSchedule(Interval(auto=True), now=0, mtbf_s=mtbf_s)
    made = saves(cadence, steps=range(1, 1000), step_s=7, start=0, stall_s=2)
    times = [now for _, now in made]
    assert 60 <= times[0] < 67
    assert 0 <= times[1] - times[0] - 2 - daly(2, mtbf_s) < 7
    assert cadence.seconds == pytest.approx(daly(2, mtbf_s))


def auto_seconds(*stalls: float, mtbf_s: float = 28.8 * HOUR) -> float:
    cadence = SaveSchedule(Interval(auto=True), now=0, mtbf_s=mtbf_s)
    for stall in stalls:
        cadence.measured(stall)
    return cadence.seconds


QUIET_S = 150 * DAY  # one node, by hardware failures alone


@pytest.mark.parametrize(
    ("stalls", "options", "same_as"),
    [
        pytest.param((9, 1, 2), {}, (9,), id="the worst of the last stalls counts"),
        pytest.param((9, 1, 1, 2), {}, (2,), id="older ones are forgotten"),
        pytest.param((4, math.nan), {}, (4,), id="a save that could not be measured changes nothing"),
        pytest.param((), {}, 60, id="nothing was saved"),
        pytest.param((1e-6,), {}, 60, id="however small the stall, not all the time"),
        pytest.param((30,), {"mtbf_s": QUIET_S}, 3600, id="no more than an hour is lost where that is cheap"),
        pytest.param((120,), {"mtbf_s": QUIET_S}, 99 * 120, id="hourly saves would cost more than a hundredth"),
        pytest.param((1,), {"mtbf_s": HOUR}, daly(1, HOUR), id="more often where things fail more often"),
    ],
)
def test_auto_chooses_the_seconds_between_two_saves(
    stalls: tuple[float, ...], options: dict[str, float], same_as: float | tuple[float, ...]
) -> None:
    expected = auto_seconds(*same_as) if isinstance(same_as, tuple) else same_as
    assert auto_seconds(*stalls, **options) == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------------- the last one


DISCARDED: dict[str, tuple[tuple[float | None, float, float | None, int], bool]] = {
    # grace, since the one in flight began, a whole save, steps behind
    "time for both": ((30, 10, 20, 5), False),
    "time for a whole one only": ((25, 10, 20, 5), True),
    "time for the one in flight only": ((15, 10, 20, 5), False),
    "time for none, and the one in flight is the nearest to its end": ((5, 10, 20, 5), False),
    "nothing done since": ((25, 10, 20, 0), False),
    "grace not known": ((None, 10, 20, 5), False),
    "the very first save is in flight": ((60, 1, None, 5), False),
}


@pytest.mark.parametrize("case", DISCARDED)
def test_the_save_in_flight_is_discarded_only_where_that_saves_more_steps(case: str) -> None:
    (grace_s, running_s, save_s, behind), discarded = DISCARDED[case]
    made = is_better_discarded(grace_s=grace_s, running_s=running_s, save_s=save_s, steps_behind=behind)
    assert made is discarded
