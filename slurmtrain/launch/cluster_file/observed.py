"""What a cluster's file was made of, by name: when one of these differs, the file may have to change."""

from __future__ import annotations

from collections.abc import Collection

from slurmtrain.launch.cluster_file.words import group_words, in_words, on_one_line
from slurmtrain.slurm.facts import ClusterFacts, Partition
from slurmtrain.slurm.job_limits import Bound, bounds_of
from slurmtrain.slurm.preemption import preemption_of


def observed(facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None) -> dict[str, str]:
    """Return what a file is made of, by name: when one of these differs, the file may have to change."""
    settings = {
        name: facts.config[name]
        for name in (
            *("PreemptType", "KillWait", "JobRequeue", "MaxArraySize", "AccountingStorageEnforce"),
            *("SelectTypeParameters", "TopologyPlugin", "PreemptParameters", "TaskPlugin"),
        )
        if name in facts.config
    }
    preemption = preemption_of(facts, partition, account=account, qos=qos)
    bounds = bounds_of(facts, partition, account, qos)
    found = {
        "SLURM": facts.config.get("SLURM_VERSION", "?"),
        "partition": partition.name,
        **settings,
        "PreemptMode": preemption.mode or "?",
        "GraceTime": "?" if preemption.grace_s is None else f"{preemption.grace_s:.0f} s",
        "time limit": "none" if partition.max_time_min is None else in_words(partition.max_time_min),
        "nodes": "; ".join(sorted(map(group_words, facts.nodes_of(partition.name)))),
        "accounts": _known(None if facts.associations is None else {each.account for each in facts.associations}),
        "QOS": _known(
            None if facts.associations is None else {name for each in facts.associations for name in each.qos}
        ),
    }
    for bound in bounds:
        found[f"limits of {bound.of}"] = _limit_words(bound)
    return {name: on_one_line(value) for name, value in found.items()}


def _limit_words(bound: Bound) -> str:
    limits = bound.limits
    parts = [f"{limits.wall_min} min"] if limits.wall_min is not None else []
    for label, amounts in (
        ("a job", limits.tres),
        ("a node", limits.tres_per_node),
        ("a user", limits.user_tres),
        ("all", limits.group_tres),
        ("at least", limits.least_tres),
    ):
        parts += [f"{name}={amount} {label}" for name, amount in sorted(amounts.items())]
    return ", ".join(parts) or "none"


def _known(names: Collection[str] | None) -> str:
    return "?" if names is None else ", ".join(sorted(names)) or "none"
