"""A run before it is submitted: memory, time, checkpoints and cost of a config, and whether more nodes help.

All of it is arithmetic on the config, so that it answers at once on a machine without GPUs and without torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slurmtrain.checkpoint.save.schedule import daly, mean_time_between_failures
from slurmtrain.choices import Backend, JobKind
from slurmtrain.config.known_models import is_our_decoder
from slurmtrain.config.parallel_dims import (
    ParallelDims,
    is_possible,
    parallel_dims_of,
)
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.planner.fit import memory_of
from slurmtrain.planner.hardware import Hardware, gpu_of, hardware_of
from slurmtrain.planner.memory import ADAM_STATES, GIB, StageMemory
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.planner.step_time import StepTime, at_nodes, sequence_length, step_time

DOUBLINGS = 5  # of the nodes that are looked at
PARAMETER_BYTES = 4  # of parameters and of each state of the optimiser
HALF_BYTES = 2  # of a weight in bfloat16, as it is exported
RESTART_S = 180.0  # until the first step: requeue, interpreter, rendezvous, restore, compilation; assumed
WORTH_IT = 0.8  # efficiency at a doubling below which more nodes waste more than a fifth of themselves
NOTICEABLE = 0.02  # share of a step's time below which a cause is noise


# The size of checkpoints, how often to save, and the share of the time that is left for training.
#
# How often: Young 1974 and Daly 2006; see `checkpoint/save/schedule.py`. What is left: the effective training time ratio of
# Kokolis et al. 2024 (arXiv:2410.21680, section IV), with the steps lost since the save that was last complete:
#
#     (1 - (u + d / 2 + w) / M) / (1 + c / d)
#
# where d is the time between two saves, c the time for which one holds training up, w the time until it is complete, u
# that of a restart, and M the mean time between failures. Waiting in the queue is not in it.


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
    stalled = min(copying, written)
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


# How well a job scales. A size is judged by the rank-seconds that a token costs: twice the ranks should take half the time for
# the same tokens (strong scaling), or the same time for twice as many (weak scaling); either way a token costs what it did.


@dataclass(frozen=True)
class Doubling:
    """What became of a job from one size to the next, larger one.

    Attributes:
        efficiency: 1: a token costs the rank-seconds that it did; 0.5: twice as many.
        total: the same against the first size.
        cause: what costs most that it did not cost before; None: nothing worth naming.
        share: the cause's share of the larger size's step that it did not have before.
    """

    before: StepTime
    after: StepTime
    efficiency: float
    total: float
    cause: str | None
    share: float

    @property
    def worth_it(self) -> bool:
        """Whether the efficiency is at least 80 % for each doubling of the ranks."""
        return math.log(self.efficiency) >= math.log(WORTH_IT) * math.log2(self.after.ranks / self.before.ranks)


def doublings(sizes: Sequence[StepTime]) -> list[Doubling]:
    """Return what became of each size against the one before; sizes in ascending order."""
    found = []
    for before, after in itertools.pairwise(sizes):
        cost = after.rank_seconds_per_token
        costs = [{name: each.ranks * s / each.tokens for name, s in each.seconds.items()} for each in (before, after)]
        lost = {name: (costs[1].get(name, 0.0) - costs[0].get(name, 0.0)) / cost for name in costs[0] | costs[1]}
        worst = max(lost, key=lambda name: lost[name], default=None)
        if worst is not None and lost[worst] < NOTICEABLE:
            worst = None
        efficiency, total = (size.rank_seconds_per_token / cost for size in (before, sizes[0]))
        share = 0.0 if worst is None else lost[worst]
        found.append(Doubling(before, after, efficiency, total, cause=worst, share=share))
    return found


def first_not_worth_it(found: Sequence[Doubling]) -> Doubling | None:
    """Return the first step to more nodes that is not worth it."""
    return next((each for each in found if not each.worth_it), None)


@dataclass(frozen=True)
class Plan:
    """What a config will need and do.

    Attributes:
        memory: bytes on a GPU, by pipeline stage.
        memory_limit: bytes that a GPU has; None: not known.
        fits: whether it fits into that, as far as it is known.
        step: None: it does not fit, or no peak is known.
        tokens: tokens to train on, for the cost.
        more_nodes: what becomes of the step on twice the nodes, and twice those, with the same global batch.
        no_further: why no larger size was looked at; None: it was.
    """

    config: Config
    dims: ParallelDims
    hardware: Hardware
    memory: list[StageMemory]
    memory_limit: float | None
    fits: bool
    step: StepTime | None
    saving: Saving
    tokens: int
    more_nodes: list[Doubling]
    no_further: str | None

    @property
    def nodes(self) -> int:
        """The nodes that are planned for: of a range, the most."""
        return self.config.cluster.node_range.most

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * sequence_length(self.config)

    @property
    def fullest(self) -> StageMemory:
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def interval_s(self) -> float:
        """The best time between two saves: Daly's, but no shorter than it takes to write one."""
        return max(self.saving.daly_s, self.saving.write_s)

    @property
    def goodput(self) -> float:
        """The share of the time that brings steps which are kept, with the interval of the config, or the best one."""
        return self.saving.goodput(self.saving.interval_s or self.interval_s)

    @property
    def gpu_hours(self) -> float | None:
        """Rank-hours to train on `tokens`, with what failures and saves cost; None: the step's time is not known."""
        if self.step is None or not self.goodput:
            return None
        return self.tokens / self.step.tokens_per_s / self.goodput * self.step.ranks / 3600


def check_plannable(config: Config) -> None:
    """Raise ConfigError unless the config trains a model whose sizes are known."""
    if config.job.kind != JobKind.TRAIN:
        raise ConfigError(f"plan works with the built-in trainer, but job.kind is {config.job.kind}", hint="job=train")
    if not is_our_decoder(config.model) or config.model.get("vocab_size") is None:
        raise ConfigError(
            f"plan supports only the built-in decoder, but the model is {config.model.get('_target_')}",
            hint="choose a preset of about its size, such as model=llama3_8b; or measure a few steps: submit train.steps=20",
        )


def memory_limit_of(config: Config) -> float | None:
    """Return the bytes of a GPU: as configured, else of its data sheet; None: neither says so."""
    cluster = config.cluster
    if cluster.gpu_memory_gb is not None:
        return cluster.gpu_memory_gb * GIB
    gpu = gpu_of(cluster.gpu_type) if cluster.gpu_type and cluster.gpus_per_node else None
    return None if gpu is None else gpu.memory_gb * 1e9


def plan_of(config: Config, dims: ParallelDims, *, tokens: int | None = None) -> Plan:
    """Return the plan of a validated config.

    Args:
        tokens: to train on; None: those of train.steps.

    Raises:
        ConfigError: the arithmetic does not know its model.
    """
    check_plannable(config)
    hardware = hardware_of(config)
    memory = memory_of(config, dims)
    if memory is None:
        raise ConfigError("the sizes of the model are not numbers", hint="model=llama3_8b has all of them")
    limit = memory_limit_of(config)
    fits = limit is None or max(stage.total for stage in memory) <= limit
    step = step_time(config, dims, hardware) if fits else None
    saving = saving_of(config, step.expected_s if step else None, hardware)
    sizes, no_further = ([], None) if step is None else _sizes(config)
    return Plan(
        config=config,
        dims=dims,
        hardware=hardware,
        memory=memory,
        memory_limit=limit,
        fits=fits,
        step=step,
        saving=saving,
        tokens=tokens or config.train.steps * config.train.global_batch_size * sequence_length(config),
        more_nodes=doublings(sizes),
        no_further=no_further,
    )


def _sizes(config: Config) -> tuple[list[StepTime], str | None]:
    """Return the time of a step on 1, 2, 4, ... times the nodes, and why there is no further one."""
    nodes = config.cluster.node_range.most
    found: list[StepTime] = []
    for doubling in range(DOUBLINGS + 1):
        if doubling and config.cluster.backend == Backend.LOCAL:
            return found, "with cluster.backend=local there is one node"
        sized = on_nodes(config, nodes * 2**doubling)
        if isinstance(sized, str):
            return found, f"{nodes * 2**doubling} nodes: {sized}"
        size = step_time(sized, parallel_dims_of(sized), hardware_of(sized))
        if size is not None:
            found.append(size)
    return found, None


def on_nodes(config: Config, nodes: int) -> Config | str:
    """Return the config on another number of nodes, with smaller micro batches if need be; or why that cannot be."""
    sized = at_nodes(config, nodes)
    while True:
        if is_possible(sized):
            return sized
        size = sized.train.micro_batch_size
        if size is None or size == 1:
            break
        train = replace(sized.train, micro_batch_size=size // 2 if size % 2 == 0 else 1)
        sized = replace(sized, train=train)
    try:
        parallel_dims_of(sized)
    except ConfigError as error:
        return error.message
    raise AssertionError("unreachable")
