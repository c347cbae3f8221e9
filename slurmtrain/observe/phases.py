"""How long steps take on this rank, and each of their parts, without waiting for its device.

A step is a line of marks: each says which part begins there, so that the parts add up to the step without gaps. On a CPU a
mark is a reading of the clock. On a GPU it is an event in the stream that computes, which is read when the GPU has passed it:
what lies between two events is the time that passed on the GPU, so that waiting that the GPU's work hides takes no time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, Protocol

from slurmtrain.system import activity

STEPS_KEPT = 1000  # of those whose times nobody has taken


class Phase(StrEnum):
    """A part of a step."""

    DATA = "data"  # waiting for the next batch
    FORWARD_BACKWARD = "forward_backward"
    COMMUNICATION = "communication"  # with other ranks, and waiting for them, as far as nothing else goes on meanwhile
    OPTIMIZER = "optimizer"  # with clipping the gradients
    CHECKPOINT = "checkpoint"  # as long as training waits for a save
    EVALUATION = "evaluation"
    OTHER = "other"  # logging, hooks, and all else


PAUSES = (Phase.CHECKPOINT, Phase.EVALUATION)  # in which training does not go on
# As they are told to those who watch this rank, where not by their names.
TOLD = {Phase.FORWARD_BACKWARD: "forward/backward", Phase.CHECKPOINT: activity.SAVE, Phase.OTHER: "step"}


class Timer(Protocol):
    """What makes and reads marks."""

    def mark(self) -> Any:
        """Return a mark of this moment, and return at once."""

    def seconds(self, first: Any, second: Any) -> float | None:
        """Return the seconds between two marks, of which the first is not needed any more; None: the second has yet to pass."""


class HostTimer:
    """Marks of this process's own work: readings of the clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.mark = clock

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaTimer:
    """Marks in the stream of a GPU that is current when they are made."""

    def __init__(self) -> None:
        import torch  # this module is also read on login nodes, where torch takes seconds to import

        self._new: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
        self._unused: list[Any] = []

    def mark(self) -> Any:
        event = self._unused.pop() if self._unused else self._new()
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float | None:
        if not second.query():
            return None
        milliseconds: float = first.elapsed_time(second)
        self._unused.append(first)
        return milliseconds / 1e3


@dataclass(frozen=True)
class PhaseTimes:
    """The seconds that each part has taken, over several steps.

    Attributes:
        steps: number of steps.
        total_s: seconds from beginning to end, by the clock of this process.
        seconds: by part; they add up to `total_s`, on a GPU up to what lies between the clock and the GPU's events.
    """

    steps: int
    total_s: float
    seconds: Mapping[Phase, float]

    @property
    def communication_share(self) -> float:
        """The share of the time in which the rank communicates and does nothing else; saves and evaluations left out."""
        pauses = self.seconds[Phase.CHECKPOINT] + self.seconds[Phase.EVALUATION]
        stepping = sum(self.seconds.values()) - pauses
        return self.seconds[Phase.COMMUNICATION] / stepping if stepping > 0 else 0.0


class _Mark(NamedTuple):
    """A mark: from here on, `phase` counts; `ends_step` if a step ends here."""

    phase: Phase
    at: Any
    ends_step: bool = False


class PhaseClock:
    """The times of the parts of each step on this rank. `activity` asks it which part goes on.

    Every method returns at once. It is not for several threads, except that the backward pass may run in another one while
    its own waits for it.

    Args:
        timer: makes the marks; None: nothing is measured.
        communication_known: whether all communication that nothing hides is marked as such. Otherwise the rest of it counts
            to the part in which it happens.
    """

    def __init__(self, timer: Timer | None, *, communication_known: bool = True):
        self._timer = timer
        self.communication_known = communication_known
        self._marks: deque[_Mark] = deque()
        self._phase = Phase.OTHER
        self._seconds, self._step = _nothing(), _nothing()  # since `read`, and of this step
        self._steps: deque[dict[Phase, float]] = deque(maxlen=STEPS_KEPT)
        self._done, self._began = 0, 0.0  # steps that have ended since `read`, and when that was

    @property
    def measures(self) -> bool:
        """Whether anything is measured."""
        return self._timer is not None

    def start(self) -> None:
        """Begin to count, before the first step; what was counted before is dropped."""
        self._phase = Phase.OTHER
        activity.follow(self.told)
        if self._timer is None:
            return
        self._marks.clear()
        self._seconds, self._step = _nothing(), _nothing()
        self._steps.clear()
        self._done, self._began = 0, time.perf_counter()
        self._marks.append(_Mark(self._phase, self._timer.mark()))

    def end_step(self) -> None:
        """Mark the end of a step. What follows, such as a save after it, counts to the next one."""
        self._phase = Phase.OTHER
        if self._timer is not None:
            self._done += 1
            self._marks.append(_Mark(self._phase, self._timer.mark(), ends_step=True))
            self._read()

    def enter(self, phase: Phase) -> Phase:
        """Mark the beginning of a part, and return the part that has ended there."""
        before = self._phase
        if phase is not before:
            self._phase = phase
            if self._timer is not None:
                self._marks.append(_Mark(phase, self._timer.mark()))
        return before

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Mark what happens in the block as this part; before and after it is the part that it is within."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for communication that nothing hides; that of a save or an evaluation counts to these."""
        if self._phase in PAUSES:
            return nullcontext()
        return self.within(Phase.COMMUNICATION)

    def read(self) -> PhaseTimes | None:
        """Return the times since the last call, or `start`: all marks have to have passed. None: there is nothing to tell."""
        if self._timer is None:
            return None
        self._marks.append(_Mark(self._phase, self._timer.mark()))
        self._read()
        now = time.perf_counter()
        times = PhaseTimes(self._done, now - self._began, self._seconds)
        self._done, self._began, self._seconds = 0, now, _nothing()
        return times if times.steps else None

    def take_steps(self) -> list[dict[Phase, float]]:
        """Return the times of the steps that have ended since the last call, as far as the device has passed their marks."""
        self._read()
        taken = list(self._steps)
        self._steps.clear()
        return taken

    def told(self) -> str:
        """Return which part goes on, in the words of `activity`; asked in another thread."""
        return TOLD.get(self._phase, self._phase)

    def _read(self) -> None:
        """Add up what lies between marks that have passed."""
        if self._timer is None:
            return
        marks = self._marks
        while len(marks) > 1 and (seconds := self._timer.seconds(marks[0].at, marks[1].at)) is not None:
            phase = marks.popleft().phase
            self._seconds[phase] += seconds
            self._step[phase] += seconds
            if marks[0].ends_step:
                self._steps.append(self._step)
                self._step = _nothing()


def _nothing() -> dict[Phase, float]:
    return dict.fromkeys(Phase, 0.0)


class _Step(NamedTuple):
    seconds: float
    tokens: int
    data_wait_s: float
    samples: int
    work: tuple[int, ...]


class Speed(NamedTuple):
    """How fast the last steps were.

    Attributes:
        tokens_per_s, samples_per_s, work_per_s: over all ranks; the last for each number of `work`.
        step_time_s, data_wait_s: seconds of a step, and of its waiting for data.
        settled: the window is full, so that the first steps, with their one-time costs, no longer stand out.
    """

    tokens_per_s: float
    samples_per_s: float
    work_per_s: list[float]
    step_time_s: float
    data_wait_s: float
    settled: bool


class Throughput:
    """A moving window over finished steps.

    Args:
        window: number of the last steps that count.
        clock: returns seconds, monotonic.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        self._steps: deque[_Step] = deque(maxlen=window)
        self._clock = clock
        self._since = clock()

    def start(self) -> None:
        """Count the time from now on as that of the next step; called after an evaluation, a checkpoint or another pause."""
        self._since = self._clock()

    def step(self, tokens: int, data_wait_s: float = 0.0, *, samples: int = 0, work: tuple[int, ...] = ()) -> float:
        """Record a step, and return its seconds.

        Args:
            tokens, samples: number of tokens and of samples of the step, over all ranks.
            data_wait_s: seconds of it that this rank has waited for its data.
            work: what the model has computed on, over all ranks, in any numbers that add up.
        """
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._steps.append(_Step(seconds, tokens, data_wait_s, samples, work))
        return seconds

    def read(self) -> Speed:
        """Return the means over the window; there has been a step."""
        steps, seconds = self._steps, sum(step.seconds for step in self._steps)
        return Speed(
            sum(step.tokens for step in steps) / seconds,
            sum(step.samples for step in steps) / seconds,
            [sum(each) / seconds for each in zip(*(step.work for step in steps), strict=True)],
            seconds / len(steps),
            sum(step.data_wait_s for step in steps) / len(steps),
            len(steps) == steps.maxlen,
        )
