"""The parts of a step: they add up to it, and measuring them waits for nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurmtrain.observe.phases import HostTimer, Phase, PhaseClock


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(phases: PhaseClock, clock: Clock, *, data: float = 1.0, waiting: float = 0.5, save: float = 0.0) -> None:
    """A step of 1 s data, 4 s passes of which the last part waits, 2 s optimiser, and 0.25 s of other things."""
    with phases.within(Phase.DATA):
        clock.now += data
    phases.enter(Phase.FORWARD_BACKWARD)
    clock.now += 4.0 - waiting
    with phases.waiting():
        clock.now += waiting
    phases.enter(Phase.OTHER)
    clock.now += 0.125
    with phases.within(Phase.OPTIMIZER):
        clock.now += 2.0
    phases.end_step()
    with phases.within(Phase.CHECKPOINT):
        clock.now += save
    clock.now += 0.125


def test_communication_within_a_save_or_an_evaluation_counts_to_these(clock: Clock) -> None:
    phases = PhaseClock(HostTimer(clock))
    phases.start()
    for pause in (Phase.CHECKPOINT, Phase.EVALUATION):
        with phases.within(pause), phases.waiting():
            clock.now += 3.0
    step(phases, clock)
    times = phases.read()
    assert times is not None
    assert times.seconds[Phase.CHECKPOINT] == times.seconds[Phase.EVALUATION] == 3.0
    assert times.communication_share == 0.5 / 7.25


class DeviceTimer:
    """Marks that a device passes later, as a GPU does; to read one that it has not passed would have to wait."""

    def __init__(self, clock: Callable[[], float]):
        self._clock, self.passed_until, self.made = clock, 0.0, 0

    def mark(self) -> float:
        self.made += 1
        return self._clock()

    def seconds(self, first: float, second: float) -> float | None:
        return second - first if second <= self.passed_until else None


def test_marks_of_a_device_are_read_only_when_it_has_passed_them(clock: Clock) -> None:
    timer = DeviceTimer(clock)
    phases = PhaseClock(timer)
    phases.start()
    for number in range(6):
        timer.passed_until = clock.now - 20.0  # the host is almost three steps ahead
        step(phases, clock)
        assert len(phases.take_steps()) == (1 if number > 3 else 0)
    timer.passed_until = clock.now  # somebody has read the loss, and so waited for the device
    times = phases.read()
    assert times is not None and times.steps == 6
    assert sum(times.seconds.values()) == clock.now - 100.0
