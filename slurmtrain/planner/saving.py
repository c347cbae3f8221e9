"""The size of checkpoints, how often to save, and the share of the time that is left for training, by arithmetic.

How often: Young 1974 and Daly 2006; see `checkpoint/save/schedule.py`. What is left: the effective training time ratio of
Kokolis et al. 2024 (arXiv:2410.21680, section IV), with the steps lost since the save that was last complete:

    (1 - (u + d / 2 + w) / M) / (1 + c / d)

where d is the time between two saves, c the time for which one holds training up, w the time until it is complete, u
that of a restart, and M the mean time between failures. Waiting in the queue is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurmtrain.checkpoint.save.schedule import daly, mean_time_between_failures
from slurmtrain.config.schema import Config
from slurmtrain.planner.hardware import Hardware
from slurmtrain.planner.memory import ADAM_STATES
from slurmtrain.planner.shape import DecoderShape

PARAMETER_BYTES = 4  # of parameters and of each state of the optimiser
HALF_BYTES = 2  # of a weight in bfloat16, as it is exported
RESTART_S = 180.0  # until the first step: requeue, interpreter, rendezvous, restore, compilation; assumed


@dataclass(frozen=True)
class Saving:
    """Checkpoints of a run, in bytes and seconds.

    Attributes:
        size: bytes of a checkpoint: parameters and both states of the optimiser.
        weights: bytes of the weights alone in 16 bit.
        write_s: seconds until all of it is written.
        stall_s: seconds for which a save holds training up.
        mtbf_s: mean seconds between failures of the whole job.
        restart_s: seconds that a restart takes.
        daly_s: the best time between two saves.
        interval_s: the time between two saves that the config asks for; None: it asks for the best one, or for none.
    """

    size: int
    weights: int
    write_s: float
    stall_s: float
    mtbf_s: float
    restart_s: float
    daly_s: float
    interval_s: float | None

    def goodput(self, interval_s: float) -> float:
        """Return the share of the time that brings steps which are kept, if saves are so far apart; at least 0."""
        lost = self.restart_s + interval_s / 2 + (self.write_s if self.write_s > self.stall_s else 0.0)
        return max(0.0, 1 - lost / self.mtbf_s) / (1 + self.stall_s / interval_s)


def saving_of(config: Config, step_s: float | None, hardware: Hardware) -> Saving:
    """Return the arithmetic of a config's checkpoints.

    Args:
        step_s: seconds of a step, for an interval in steps; None: not known.
    """
    shape, nodes = DecoderShape.of(config.model), config.cluster.node_range.most
    count = shape.num_parameters()
    trained = shape.adapter_elements(config.lora.r, 1) if config.lora.r else count
    size = trained * PARAMETER_BYTES * (1 + ADAM_STATES)
    written = size / hardware.storage
    copying = size / (config.world_size * hardware.host)
    stalled = min(copying, written) if config.checkpoint.asynchronous else written
    mtbf_s = failure_interval_s(config, nodes)
    return Saving(
        size=size,
        weights=count * HALF_BYTES,
        write_s=written,
        stall_s=stalled,
        mtbf_s=mtbf_s,
        restart_s=RESTART_S + config.requeue.restart_delay_s,
        daly_s=daly(stalled, mtbf_s),
        interval_s=_asked(config, step_s),
    )


def failure_interval_s(config: Config, nodes: int) -> float:
    """Return the mean seconds between failures: as configured, or by the number of nodes and their usual rate."""
    if config.checkpoint.mtbf_hours is not None:
        return config.checkpoint.mtbf_hours * 3600
    rate = config.cluster.failures_per_1000_node_days / 1000
    return mean_time_between_failures(nodes, observed_failures=0, observed_s=0.0, per_node_day=rate)


def _asked(config: Config, step_s: float | None) -> float | None:
    saving = config.checkpoint
    if saving.auto:
        return None
    asked = [saving.every_minutes * 60] if saving.every_minutes else []
    if saving.every_steps and step_s is not None:
        asked.append(saving.every_steps * step_s)
    return min(asked, default=None)
