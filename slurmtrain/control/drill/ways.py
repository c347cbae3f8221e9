"""The ways in which `drill` interrupts a run, and the configs of the tiny runs that it does it to. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from slurmtrain.choices import Backend, EvalMode, PreflightMode, RequeueMode
from slurmtrain.config.schema import Config, HooksConfig, ObserveConfig
from slurmtrain.errors import UsageError, nearest

INTERRUPTION = "slurmtrain.training.hooks.interruption.Interruption"
# What a drill of the site takes.
SITE_WORDS = ("cluster", "requeue", "job.runs_dir", "job.name", "job.singleton", "hydra")
TINY = ("model=tiny", "model.dropout=0.1", "data=stdlib_tiny", "optim.warmup_steps=2")  # dropout draws random numbers
STEPS, STOP_AT, SAVE_EVERY = 16, 8, 4
TIME_LIMIT_MIN = 10  # of each job: what a killed shell leaves behind ends by itself
CHAIN_LENGTH = 3
MOST_CPUS, RANK_GB = 4, 8  # of a rank, where the config asks for more
HOLD_S = 300.0  # longest wait for a signal in the middle of training


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


def parse_ways(text: str | None) -> list[Way]:
    """Return the ways that a person has typed, in their order; all without a text.

    Raises:
        UsageError: there is no such way.
    """
    if text is None:
        return list(Way)
    found = []
    for word in filter(None, (word.strip().replace("-", "_") for word in text.split(","))):
        if word not in tuple(Way):
            raise UsageError(f"--ways {word}: there is no such way", hint=nearest(word, list(Way)))
        found.append(Way(word))
    if not found:
        raise UsageError(f"--ways {text!r} names no way", hint=f"--ways {','.join(Way)}")
    return list(dict.fromkeys(found))


def is_for_site(overrides: Sequence[str]) -> bool:
    """Return whether these overrides are of the cluster alone, so that the site is drilled and not a config."""
    keys = [override.lstrip("+~").partition("=")[0].partition("@")[0] for override in overrides]
    return all(key in SITE_WORDS or key.startswith(("cluster.", "requeue.", "hydra.")) for key in keys)


def keys_of(overrides: Sequence[str]) -> set[str]:
    """Return the dotted keys that overrides set."""
    return {override.lstrip("+~").partition("=")[0] for override in overrides}


def site_config(
    config: Config,
    way: Way | None,
    folder: Path,
    *,
    given: Collection[str],
    leaving_s: float = 0.0,
    node_mb: int | None = None,
) -> Config:
    """Return the config of the tiny run of one way; None: of the undisturbed one.

    It asks for one rank on one node, unless the person has set (`given`) how many.

    Args:
        config: a composed one, with the site's cluster and a tiny model.
        folder: that of the drill, for its runs.
        leaving_s: seconds that the run takes to leave after it was told to, besides its own.
        node_mb: most memory of a node there, as SLURM sees it: 1 where slurm.conf does not say; None: not known.
    """
    cluster = config.cluster
    if "cluster.nodes" not in given:
        cluster = dataclasses.replace(cluster, nodes=1, spare_nodes=0)
    if "cluster.tasks_per_node" not in given:
        cluster = dataclasses.replace(cluster, tasks_per_node=1)
    if cluster.gpus_per_node and "cluster.gpus_per_node" not in given:
        cluster = dataclasses.replace(cluster, gpus_per_node=cluster.tasks_per_node)
    if "cluster.cpus_per_task" not in given:
        cluster = dataclasses.replace(cluster, cpus_per_task=min(cluster.cpus_per_task, MOST_CPUS))
    most_gb = RANK_GB * cluster.tasks_per_node
    has_less = cluster.mem_per_node_gb == 0 and node_mb is not None and node_mb < 1024 * most_gb
    if cluster.mem_per_node_gb is not None and "cluster.mem_per_node_gb" not in given and not has_less:
        asked_gb = cluster.mem_per_node_gb or most_gb  # 0: all of the node's
        cluster = dataclasses.replace(cluster, mem_per_node_gb=min(asked_gb, most_gb))
    if "cluster.exclusive" not in given:
        cluster = dataclasses.replace(cluster, exclusive=False)
    if "cluster.time_limit_min" not in given:
        cluster = dataclasses.replace(cluster, time_limit_min=time_limit_min(cluster.signal_lead_s, leaving_s))
    if way is Way.PREEMPTION:  # so that nobody else's job is preempted with ours
        cluster = dataclasses.replace(cluster, exclusive=True)
    ranks = cluster.node_range.most * cluster.tasks_per_node
    train = dataclasses.replace(
        config.train,
        steps=STEPS,
        global_batch_size=8 * ranks,
        log_every=1,
        eval_every=0,
        hooks=[] if way is None else [interruption(STOP_AT, way.kills, leaving_s)],
    )
    checkpoint = dataclasses.replace(config.checkpoint, every_steps=SAVE_EVERY)
    changed = dataclasses.replace(config, cluster=cluster, train=train, checkpoint=checkpoint)
    return scratch_config(changed, way, folder)


def time_limit_min(lead_s: float, leaving_s: float) -> int:
    """Return the time limit of a tiny job: enough for its holds, and for the warning before the limit, which must not come."""
    return TIME_LIMIT_MIN + round(2 * (lead_s + leaving_s) / 60)


def interruption(stop_at: int, kill: bool, leaving_s: float = 0.0) -> dict[str, Any]:
    """Return the config of the hook that interrupts training: told to stop, the run stops after step `stop_at`."""
    after = stop_at if kill else stop_at - 1
    return {"_target_": INTERRUPTION, "after_step": after, "kill": kill, "within_s": HOLD_S, "leaving_s": leaving_s}


def scratch_config(config: Config, way: Way | None, folder: Path) -> Config:
    """Return the config for a run of a drill: its own folder, and nothing that reaches out of it.

    No loggers, hooks, mirror or export, no evaluation jobs, and no waiting for jobs of the same name.
    """
    requeue = config.requeue
    if way is Way.IN_PLACE and requeue.in_place is None:
        requeue = dataclasses.replace(requeue, in_place=True)
    elif way is not None and way is not Way.IN_PLACE:
        requeue = dataclasses.replace(requeue, in_place=False, standby_ranks=False)
    if requeue.mode == RequeueMode.CHAIN:
        requeue = dataclasses.replace(requeue, chain_length=CHAIN_LENGTH)
    mode = config.preflight.mode
    # A minute of measurements says nothing here.
    preflight = PreflightMode.QUICK if mode == PreflightMode.FULL else mode
    # Its crashes speak against no node, and a ledger full of them would leave good nodes out.
    requeue = dataclasses.replace(requeue, blame_threshold=0)
    return dataclasses.replace(
        config,
        requeue=requeue,
        job=dataclasses.replace(
            config.job, name=f"drill-{way or 'undisturbed'}", runs_dir=str(folder), singleton=False
        ),
        checkpoint=dataclasses.replace(config.checkpoint, mirror=None, export_every_steps=0),
        eval=dataclasses.replace(config.eval, mode=EvalMode.INLINE),
        observe=ObserveConfig(phases=False, straggler_every=0),
        hooks=HooksConfig(),
        preflight=dataclasses.replace(config.preflight, mode=preflight),
        sweep=dataclasses.replace(config.sweep, pack=1),
        train=dataclasses.replace(config.train, tensorboard=False),
    )


def why_not_here(way: Way, config: Config) -> str | None:
    """Return why a way cannot be tried with this config, without asking SLURM; None if it can."""
    local = config.cluster.backend == Backend.LOCAL
    if local and way in (Way.REQUEUE, Way.PREEMPTION):
        return "cluster=local has no SLURM"
    if local and way is Way.CRASH:
        return "with cluster=local the ranks always start again in place, which in_place tries"
    if way is Way.IN_PLACE and not local and config.requeue.in_place is False:
        return "requeue.in_place=false"
    return None
