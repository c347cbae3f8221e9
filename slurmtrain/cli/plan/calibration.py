"""What an earlier run has measured, from its records: with `--from RUN`, a plan takes it instead of data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from slurmtrain.config.elastic import at_most
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import UsageError
from slurmtrain.planner.calibration import calibrated
from slurmtrain.planner.hardware import hardware_of
from slurmtrain.planner.plan import check_plannable
from slurmtrain.planner.step_time import Measured, sequence_length
from slurmtrain.report.step_times import config_of, read_save_times, read_step_times
from slurmtrain.runs import lookup


@dataclass(frozen=True)
class Calibration:
    """What an earlier run has measured.

    Attributes:
        run: its id.
        write_per_byte_s, stall_per_byte_s: of its saves; the latter for a rank's share. None: it has recorded none.
        tokens, rate: its tokens per step, and its learning rate.
        missing: parts of a step that it has not measured.
    """

    run: str
    measured: Measured
    write_per_byte_s: float | None
    stall_per_byte_s: float | None
    tokens: int
    rate: float
    missing: list[str]


def calibrate(reference: str, planned: Config) -> Calibration:
    """Return what a run has measured.

    Args:
        planned: what its rates are for, which has to be on the same kind of machine.

    Raises:
        UsageError: there is no such run, or it has logged no steps.
        ConfigError: the arithmetic does not know its model.
        UnreadableRecordError: its records cannot be read.
    """
    run_dir = lookup.find(reference, lookup.runs_root())
    config, times = at_most(config_of(run_dir)), read_step_times(run_dir)
    if times is None:
        raise UsageError(
            f"run {run_dir.id} has logged no steps, so its rates are unknown", hint="a run that has trained"
        )
    check_plannable(config)
    was, now = (_device(each) for each in (config, planned))
    if was != now:
        raise UsageError(
            f"run {run_dir.id} was computed on {was}, and the plan is for {now}",
            hint="--from a run on the same cluster",
        )
    dims = parallel_dims_of(config)
    measured = calibrated(config, dims, hardware_of(config), times.step_s, times.parts)
    saves = read_save_times(run_dir)
    return Calibration(
        run=run_dir.id,
        measured=measured,
        write_per_byte_s=saves.write_s / saves.size if saves else None,
        stall_per_byte_s=saves.stall_s / (saves.size / config.world_size) if saves else None,
        tokens=config.train.global_batch_size * sequence_length(config),
        rate=config.optim.lr,
        missing=times.missing,
    )


def _device(config: Config) -> str:
    """Return on what a config computes, and in which type: rates of one say nothing of another."""
    hardware, cluster = hardware_of(config), config.cluster
    kind = hardware.gpu or (cluster.gpu_type or "GPUs") if cluster.gpus_per_node else "CPUs"
    return f"{kind} in {hardware.dtype}"
