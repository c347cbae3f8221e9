"""The ways in which `drill` interrupts a run, the configs of its scratch runs, and who can preempt them. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurmtrain.choices import Backend, EvalMode, JobKind, PreflightMode, RequeueMode
from slurmtrain.config.fields import merge
from slurmtrain.config.frozen import to_config, to_values
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.errors import UsageError, nearest
from slurmtrain.slurm.facts import NOT_AT_ALL, ClusterFacts, association_of, first_partition, preemption_of, qos_of

INTERRUPTION = "slurmtrain.training.hooks.interruption.Interruption"
# If a command line has only these words, the site is drilled.
SITE_WORDS = ("cluster", "requeue", "job.runs_dir", "job.name", "job.singleton", "hydra")
# The tiny training that drills a site. Dropout draws random numbers.
TINY = (
    *("model=tiny", "model.dropout=0.1", "data=stdlib_tiny", "optim.warmup_steps=2"),
    *("train.eval_every=0", "checkpoint.every_steps=4", "job.snapshot=none"),
)
TIME_LIMIT_MIN = 10  # of a tiny job: it ends by itself, should the shell be killed
CHAIN_LENGTH = 3
MOST_CPUS, RANK_GB = 4, 8  # of a rank of a tiny job, if the config asks for more


class Way(StrEnum):
    """A way in which a run is interrupted."""

    EARLY_SIGNAL = "early_signal"  # the warning before the time limit
    REQUEUE = "requeue"  # scontrol requeue
    CRASH = "crash"  # kill -9 of a rank, and the job ends
    IN_PLACE = "in_place"  # kill -9 of a rank, and the ranks start again in the same job
    PREEMPTION = "preemption"  # by a job of a higher partition or QOS

    @property
    def kills(self) -> bool:
        """Whether a rank is killed, rather than told to stop."""
        return self in (Way.CRASH, Way.IN_PLACE)


@dataclass(frozen=True)
class Plan:
    """What a drill does.

    Attributes:
        steps: how far every run trains. A program that has reached this step is cancelled.
        stop_at: the step after which a run is interrupted.
        leaving_s: seconds that a training takes to stop, besides its own.
        within_min: minutes after which the drill judges what it has.
    """

    ways: Sequence[Way] = tuple(Way)
    steps: int = 16
    stop_at: int = 8
    leaving_s: float = 0.0
    within_min: float = 30.0


def parse_ways(text: str) -> list[Way]:
    """Return the ways that a person has typed, in their order.

    Raises:
        UsageError: there is no such way.
    """
    words = [word.strip().replace("-", "_") for word in text.split(",")]
    unknown = next((word for word in words if word not in tuple(Way)), None)
    if unknown is not None:
        raise UsageError(f"--ways {text}: there is no way {unknown!r}", hint=nearest(unknown, list(Way)))
    return [Way(word) for word in dict.fromkeys(words)]


def is_for_site(overrides: Sequence[str]) -> bool:
    """Return whether these overrides are of the cluster alone, so that the site is drilled and not a config."""
    keys = [key.partition("@")[0] for key in keys_of(overrides)]
    return all(key in SITE_WORDS or key.startswith(("cluster.", "requeue.", "hydra.")) for key in keys)


def keys_of(overrides: Sequence[str]) -> set[str]:
    """Return the dotted keys that overrides set."""
    return {override.lstrip("+~").partition("=")[0] for override in overrides}


def tiny_config(config: Config, plan: Plan, given: Collection[str]) -> Config:
    """Return the config of a training on one rank of one node, but for the keys that the person has set (`given`)."""
    cluster = config.cluster
    tasks = cluster.tasks_per_node if "cluster.tasks_per_node" in given else 1
    wanted: dict[str, Any] = {
        "nodes": 1,
        "spare_nodes": 0,
        "tasks_per_node": tasks,
        "exclusive": False,
        # The warning must not come by itself.
        "time_limit_min": TIME_LIMIT_MIN + round(2 * (cluster.signal_lead_s + plan.leaving_s) / 60),
        "cpus_per_task": min(cluster.cpus_per_task, MOST_CPUS),
        "gpus_per_node": tasks if cluster.gpus_per_node else 0,
        # What SLURM gives by itself, rather than 0, which is all of a node's.
        "mem_per_node_gb": min(cluster.mem_per_node_gb, RANK_GB * tasks) if cluster.mem_per_node_gb else None,
    }
    wanted = {name: value for name, value in wanted.items() if f"cluster.{name}" not in given}
    found = replace(config, cluster=replace(cluster, **wanted))
    return replace(found, train=replace(found.train, global_batch_size=8 * found.world_size))


def scratch_config(config: Config, plan: Plan, way: Way | None, folder: Path) -> Config:
    """Return the config of one run of a drill, in its own folder, with nothing that reaches out of it.

    It has no loggers, hooks or mirror, and no evaluation jobs, and waits for no jobs of the same name.

    Args:
        way: None: of the undisturbed run.
    """
    cluster, requeue, lead_s = config.cluster, config.requeue, config.cluster.signal_lead_s
    limit_min = math.ceil(plan.within_min + 2 * (lead_s + plan.leaving_s) / 60)
    in_place = requeue.in_place
    if way is not None:
        in_place = way is Way.IN_PLACE and in_place is not False
    changes: dict[str, Any] = {
        "job": {"name": f"drill-{way or 'undisturbed'}", "runs_dir": str(folder), "singleton": False},
        "requeue": {"in_place": in_place, "blame_threshold": 0},  # its crashes are no fault of the nodes
        "cluster": {
            "time_limit_min": min(cluster.time_limit_min, limit_min),
            "exclusive": cluster.exclusive or way is Way.PREEMPTION,  # so that nobody else's job is preempted with ours
        },
        "optim": {"warmup_steps": min(config.optim.warmup_steps, plan.steps)},
        "checkpoint": {"mirror": None},
        "eval": {"mode": EvalMode.INLINE},
        "sweep": {"pack": 1},
    }
    if requeue.mode == RequeueMode.CHAIN:
        changes["requeue"]["chain_length"] = CHAIN_LENGTH
    if config.preflight.mode == PreflightMode.FULL:
        changes["preflight"] = {"mode": PreflightMode.QUICK}
    if config.job.kind == JobKind.TRAIN:
        changes["train"] = {"steps": plan.steps, "log_every": 1, "tensorboard": False}
        if way is not None:  # one that is told to stop stops after another step
            after = plan.stop_at - (not way.kills)
            hook = {"_target_": INTERRUPTION, "after_step": after, "kill": way.kills, "leaving_s": plan.leaving_s}
            changes["train"]["hooks"] = [*config.train.hooks, hook]
        if way is not None and way.kills:  # it needs a checkpoint before that
            changes["checkpoint"]["every_steps"] = max(1, plan.stop_at // 2)
    values = to_values(config) | {"observe": {"phases": False, "straggler_every": 0}, "hooks": {}}
    merge(values, changes)
    return to_config(values)


def why_not_here(way: Way, config: Config) -> str | None:
    """Return why a way cannot be tried with this config, without asking SLURM; None if it can."""
    if way.kills and config.job.kind == JobKind.COMMAND:
        return "drill kills ranks of the trainer only, not of a program of your own"
    if config.cluster.backend == Backend.LOCAL:
        if way in (Way.REQUEUE, Way.PREEMPTION):
            return "cluster=local has no SLURM"
        if way is Way.CRASH:
            return "with cluster=local the ranks always start again in place, which in_place tries"
    elif way is Way.IN_PLACE and config.requeue.in_place is False:
        return "requeue.in_place=false"
    return None


def preemptors(
    facts: ClusterFacts, *, partition: str | None, account: str | None = None, qos: str | None = None
) -> list[tuple[str, ...]] | str:
    """Return options of sbatch for jobs that may preempt ours, the gentlest first; or why nothing preempts it.

    Whether this person may use them, and has the node of our job there, is for SLURM to say.

    Args:
        partition, account, qos: of our job; None: the default ones. Of several partitions the first counts.
    """
    by, own = facts.config.get("PreemptType", ""), facts.partition(first_partition(partition))
    if not facts.config or not facts.partitions:
        return "SLURM's controller did not say who preempts whom"
    if by in NOT_AT_ALL:
        return "SLURM preempts nothing here (PreemptType=preempt/none)"
    if own is None:
        return f"SLURM does not show partition {partition}" if partition else "there is no default partition"
    found = preemption_of(facts, own.name, account=account, qos=qos)
    if not found.ends_jobs:
        return f"preempted jobs of {found.of} do not end (PreemptMode={found.mode})"
    if by == "preempt/partition_prio":
        above = [each for each in facts.partitions if each.state == "UP" and each.priority_tier > own.priority_tier]
        names = [each.name for each in sorted(above, key=lambda each: each.priority_tier)]
        return [(f"--partition={name}",) for name in names] or f"no partition may preempt {found.of}"
    its = qos_of(facts, association_of(facts, account, own.name), qos)
    if its is None:
        return f"SLURM's accounting does not show QOS {qos}" if qos else "cluster.qos is not set, and decides about it"
    # In the default partition, it might not even be able to have the node of our job.
    where = (f"--partition={partition}",) if partition else ()
    names = [each.name for each in facts.qos or () if its.name in each.preempt]
    return [(*where, f"--qos={name}") for name in names] or f"no QOS preempts QOS {its.name}"


def time_given(way: Way, cluster: ClusterConfig, facts: ClusterFacts) -> float | None:
    """Return the seconds from the signal until SLURM kills; None: it is not known, or nothing is told to stop."""
    if cluster.backend == Backend.LOCAL or way.kills:
        return None
    if way is Way.EARLY_SIGNAL:
        return float(cluster.signal_lead_s)
    its = preemption_of(facts, cluster.partition, account=cluster.account, qos=cluster.qos)
    return its.to_leave_s if way is Way.PREEMPTION else its.kill_wait_s


def preemptor_script(account: str | None, options: Sequence[str]) -> str:
    """Return the batch script of the job that preempts ours: it does nothing, and ends as soon as it starts."""
    lines = ["--job-name=drill-preemptor", "--ntasks=1", "--time=1", "--output=/dev/null", "--no-requeue", *options]
    lines += [f"--account={account}"] if account else []
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + "exit 0\n"
