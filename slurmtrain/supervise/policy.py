"""The part of a run's config that decides on its attempts: when they are given up, and which nodes are left out."""

from __future__ import annotations

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.config.elastic import usable_sizes
from slurmtrain.config.schema import Config
from slurmtrain.launch.node_exclusion import blame_policy
from slurmtrain.runs.evidence import Policy


def policy(config: Config, links_left: int = 0, *, can_start_again: bool = False) -> Policy:
    """Return the part of the config that decides on an attempt.

    Args:
        links_left: jobs of the chain that still wait for this one.
        can_start_again: as for `finish_attempt`.
    """
    mode = config.requeue.mode
    local = config.cluster.backend == Backend.LOCAL
    if local and mode != RequeueMode.OFF:
        mode = RequeueMode.REQUEUE  # there is no queue: whoever started the ranks starts them again
    return Policy(
        mode=mode,
        links_left=links_left,
        max_attempts_without_progress=config.requeue.max_attempts_without_progress,
        max_unseen_attempts=config.requeue.max_unseen_attempts,
        long_attempt_s=60 * min(config.requeue.long_attempt_min, config.cluster.time_limit_min / 2),
        signal_lead_s=config.cluster.signal_lead_s,
        blame=blame_policy(config),
        local=local,
        in_place=can_start_again and config.requeue.starts_in_place,
        node_counts=tuple(reversed(usable_sizes(config))),
    )
