"""Rates of a cluster that a run has measured, on which the arithmetic of other runs there rests instead of on data sheets."""

from __future__ import annotations

from collections.abc import Mapping

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.planner.hardware import Hardware
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.planner.step_time import COMMUNICATION_NAMES, Measured, operations_of, step_time

LEAST_COMPUTATION = 1e-3  # share of a step below which its times cannot be those of a training
LEAST_SHARE = 0.1  # of a step that must be computation, however long the communication should take by arithmetic


def calibrated(
    config: Config, dims: ParallelDims, hardware: Hardware, step_s: float, parts: Mapping[str, float]
) -> Measured:
    """Return the rates that explain the measured times of a run's step.

    Args:
        config, dims: of the run that was measured.
        hardware: of its cluster.
        step_s: seconds of a step, without evaluations and saves.
        parts: seconds by part: data, forward_backward, communication, optimizer, other; those that are missing count as
            a part of forward_backward.

    Raises:
        ConfigError: the times are not possible.
    """
    known = {name: seconds for name, seconds in parts.items() if name != "forward_backward"}
    computing = parts.get("forward_backward", step_s - sum(known.values()))
    if not computing > LEAST_COMPUTATION * step_s > 0:
        raise ConfigError(f"a step of {step_s:g} s leaves no time for computation", hint="--from another run")
    operations = operations_of(config, dims)
    # What is not measured as communication is within forward and backward, as long as it shows.
    first = step_time(config, dims, hardware, Measured(operations / computing))
    assert first is not None
    showing = sum(seconds for name, seconds in first.seconds.items() if name in COMMUNICATION_NAMES)
    measured = parts.get("communication")
    if measured is None and showing:
        computing = max(computing - showing, LEAST_SHARE * computing)
    elements = DecoderShape.of(config.model).num_parameters() / (dims.world_size / dims.dp_replicate)
    samples = dims.micro_batch_size(config.train) * dims.micro_batches(config.train)
    other = parts.get("other", 0.0)
    factor = None
    if measured is not None and showing > LEAST_SHARE / 100 * step_s:
        factor = measured / showing
    elif measured is not None:  # nothing of it is communication that the arithmetic knows
        other += measured
    return Measured(
        flops=operations / computing,
        communication=factor,
        per_sample_s=parts.get("data", 0.0) / samples,
        per_element_s=parts.get("optimizer", 0.0) / elements,
        other_s=other,
    )
