"""Check how a run goes on after a stop or a failure, and after what time it counts as hung."""

from __future__ import annotations

import math

from slurmtrain.choices import Backend, JobKind, RequeueMode
from slurmtrain.config.checks.values import at_least
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError


def check_requeue(config: Config) -> None:
    """Raise for budgets that allow no attempt, and for ways to go on that this job does not have."""
    _check_spare_nodes(config)
    if config.requeue.standby_ranks and (why := _no_standby_ranks(config)) is not None:
        raise ConfigError(
            f"requeue.standby_ranks=true, but {why}",
            hint="requeue.standby_ranks=false: ranks then load PyTorch when they start",
        )
    if config.requeue.mode == RequeueMode.CHAIN:
        at_least("requeue.chain_length", config.requeue.chain_length, 2, why="requeue=off submits a single job")
    at_least("requeue.max_attempts_without_progress", config.requeue.max_attempts_without_progress, 1)
    at_least("requeue.max_unseen_attempts", config.requeue.max_unseen_attempts, 1)
    at_least("requeue.long_attempt_min", config.requeue.long_attempt_min, 1)
    at_least("requeue.restart_delay_s", config.requeue.restart_delay_s, 0)
    at_least("requeue.blame_threshold", config.requeue.blame_threshold, 0)
    if not 0 < config.requeue.blame_expiry_h < math.inf:
        raise ConfigError(
            f"requeue.blame_expiry_h={config.requeue.blame_expiry_h} is not a valid expiry time",
            hint="give hours above 0, for example 24; requeue.blame_threshold=0 keeps no ledger of nodes",
        )


def _check_spare_nodes(config: Config) -> None:
    if config.cluster.spare_nodes and not config.requeue.starts_in_place:
        raise ConfigError(
            f"cluster.spare_nodes={config.cluster.spare_nodes}, but ranks start again in the same job only with "
            "requeue.in_place=true",
            hint="requeue.in_place=true, or cluster.spare_nodes=0",
        )
    if config.cluster.spare_nodes and config.sweep.pack > 1:
        raise ConfigError(
            f"cluster.spare_nodes={config.cluster.spare_nodes} with sweep.pack={config.sweep.pack}: runs that share a job "
            "would disagree on its nodes",
            hint="sweep.pack=1, or cluster.spare_nodes=0",
        )


def _no_standby_ranks(config: Config) -> str | None:
    """Say why no ranks can wait for the next start in the same job; return None if they can."""
    cluster = config.cluster
    if config.job.kind != JobKind.TRAIN:
        return f"job.kind={config.job.kind} has no ranks that load PyTorch for you"
    if cluster.backend == Backend.LOCAL:
        return "cluster.backend=local has no job in which ranks could wait"
    if not config.requeue.starts_in_place:
        return "ranks start again in the same job only with requeue.in_place=true"
    if cluster.spare_nodes or cluster.node_range.elastic:
        return "after a failure the ranks may start on other nodes (cluster.spare_nodes, or a range of cluster.nodes)"
    if cluster.container.kind is not None:
        return f"cluster.container.kind={cluster.container.kind} would have to start a second container on each node"
    if config.sweep.pack > 1:
        return f"sweep.pack={config.sweep.pack} runs share the job's memory"
    return None


def check_watchdog(config: Config) -> None:
    """Raise for limits below one second, and for a heartbeat file where the trainer has its own."""
    limits = config.watchdog
    for name in ("first_step_s", "factor", "min_s", "evaluation_s", "save_s"):
        at_least(f"watchdog.{name}", getattr(limits, name), 1, why="watchdog.enabled=false watches nothing")
    if limits.heartbeat_file is not None and config.job.kind != JobKind.COMMAND:
        raise ConfigError(
            f"watchdog.heartbeat_file={limits.heartbeat_file!r} is for job=command; the trainer's steps are visible without it",
            hint="watchdog.heartbeat_file=null",
        )
