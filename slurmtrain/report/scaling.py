"""What a scaling test has shown: the time of a step at each size, its efficiency, what holds it up, and what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.config.parallel_dims import AXES, parallel_dims_of, sequence_lengths
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.planner.bottleneck import Bottleneck, Expected, SlowRank, bottleneck
from slurmtrain.planner.calibration import calibrated
from slurmtrain.planner.hardware import hardware_of
from slurmtrain.planner.plan import check_plannable
from slurmtrain.planner.scaling import Doubling, Size, doublings, losses_of
from slurmtrain.planner.step_time import StepTime, step_time
from slurmtrain.report.step_times import StepTimes


@dataclass(frozen=True)
class Measurement:
    """A size that has run.

    Attributes:
        config: its config.
        times: its steps, as it has logged them.
        planned_s: seconds of a step by arithmetic, with the rates that the smallest size has measured; None: not known.
    """

    run_id: str
    config: Config
    times: StepTimes
    planned_s: float | None = None

    @property
    def nodes(self) -> int:
        return self.config.cluster.node_range.most

    @property
    def size(self) -> Size:
        return _size(self.config, self.times)


@dataclass(frozen=True)
class ScalingTest:
    """All sizes that have run, ascending, and what became of each against the one before.

    Attributes:
        bottlenecks: what holds up each size but the first; None: nothing noticeable.
        planned: the doublings by arithmetic; None where it is not known.
        why_no_plan: why there is none; None: there is one.
    """

    strong: bool
    measurements: tuple[Measurement, ...]
    doublings: tuple[Doubling, ...]
    bottlenecks: tuple[Bottleneck | None, ...]
    planned: tuple[Doubling | None, ...]
    why_no_plan: str | None = None

    @property
    def first_below(self) -> int | None:
        """The index of the first doubling that is not worth it; None: all are."""
        return next((index for index, each in enumerate(self.doublings) if not each.worth_it), None)

    @property
    def missing(self) -> list[str]:
        """The parts of a step that not every run has measured."""
        return sorted({name for each in self.measurements for name in each.times.missing})


def scaling_test(runs: Sequence[tuple[str, Config, StepTimes]], *, strong: bool) -> ScalingTest:
    """Return what these runs have shown, in ascending order of nodes: run id, config and times of each."""
    predicted, why = _predict(runs)
    measurements = [
        Measurement(run_id, config, times, None if found is None else found.expected_s)
        for (run_id, config, times), found in zip(runs, predicted, strict=True)
    ]
    found = doublings([each.size for each in measurements])
    bottlenecks, planned = [], []
    for index, doubling in enumerate(found):
        before, after = predicted[index], predicted[index + 1]
        config, times = measurements[index + 1].config, measurements[index + 1].times
        bottlenecks.append(bottleneck(doubling, expected_of(config, before, after), slow_rank(times), times.missing))
        planned.append(_planned(config, predicted[0], before, after))
    return ScalingTest(strong, tuple(measurements), tuple(found), tuple(bottlenecks), tuple(planned), why)


def slow_rank(times: StepTimes) -> SlowRank | None:
    """Return the slowest rank of a run, if it has compared its ranks."""
    if times.slowest_rank is None or times.slowest_ratio is None:
        return None
    return SlowRank(times.slowest_rank, times.slowest_ratio)


def _size(config: Config, times: StepTimes) -> Size:
    # If the data do not say how long their rows are, sequences count: all sizes have the same data.
    tokens = config.train.global_batch_size * max(sequence_lengths(config.data).values(), default=1)
    return Size(config.cluster.node_range.most, config.world_size, tokens, times.step_s, times.parts)


def _predict(runs: Sequence[tuple[str, Config, StepTimes]]) -> tuple[list[StepTime | None], str | None]:
    """Return the time of each size's step with the rates that the first has measured; or why that is not known."""
    _, first, times = runs[0]
    try:
        check_plannable(first)
        measured = calibrated(first, parallel_dims_of(first), hardware_of(first), times.step_s, times.parts)
    except ConfigError as error:
        return [None] * len(runs), error.message
    return [step_time(config, parallel_dims_of(config), hardware_of(config), measured) for _, config, _ in runs], None


def expected_of(config: Config, before: StepTime | None, after: StepTime | None) -> Expected:
    """Return what the arithmetic says of the larger of two sizes."""
    dims = parallel_dims_of(config)
    axes = {axis: size for axis, size in zip(AXES, dims.shape, strict=True) if size > 1}
    if before is None or after is None:
        return Expected(axes, {}, {})
    sizes = [_planned_size(config, each) for each in (before, after)]
    between = {each.axis: each.bytes_sent for each in after.traffic if each.nodes > 1}
    return Expected(axes, dict(losses_of(*sizes)), between)


def _planned_size(config: Config, found: StepTime) -> Size:
    return Size(config.cluster.node_range.most, found.ranks, found.tokens, found.expected_s, found.seconds)


def _planned(
    config: Config, first: StepTime | None, before: StepTime | None, after: StepTime | None
) -> Doubling | None:
    if first is None or before is None or after is None:
        return None
    steps = [before, after] if before is first else [first, before, after]
    return doublings([_planned_size(config, each) for each in steps])[-1]
