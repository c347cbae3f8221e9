"""What has changed on a cluster since its file was written: `probe --check`. Pure functions.

Three things are looked at: whether a job of the file can run at all (`launch.queue_check`), whether a value of the file is
still what `probe` would write, and whether what the file was made of is still so, where `probe` has written that down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.launch.cluster_file.content import OBSERVED, OBSERVED_LINE, ClusterFile
from slurmtrain.launch.queue_check.request import check_request
from slurmtrain.slurm.facts import ClusterFacts

# Fields in which a person's file may well differ from what probe would write, within the limits that are checked.
_CHOICES_OF_A_PERSON = frozenset(
    {
        *("nodes", "time_limit_min", "signal_lead_s", "account", "qos", "constraint", "exclusive", "partition"),
        *(
            "tasks_per_node",
            "gpus_per_node",
            "cpus_per_task",
            "mem_per_node_gb",
            "network_interface",
            "slurm_conf",
            "gpu_type",
        ),
    }
)


class Kind(StrEnum):
    """How much a difference matters."""

    REFUSED = "cannot run"  # a job of this file would be refused, or would wait for ever
    CHANGED = "changed"  # the cluster is not as it was when the file was written
    DOUBT = "doubt"


@dataclass(frozen=True)
class Drift:
    """A difference between a cluster's file and the cluster.

    Attributes:
        field: of the config, or SLURM's name of a setting.
        hint: what to do; "" where there is nothing to say.
    """

    kind: Kind
    field: str
    message: str
    hint: str = ""


def drift(
    facts: ClusterFacts,
    cluster: ClusterConfig,
    text: str,
    fresh: ClusterFile,
    *,
    groups: Collection[str] | None = None,
    user_id: int | None = None,
) -> list[Drift]:
    """Return the differences between a file and the cluster, what cannot run first.

    Args:
        cluster: the file's values, with all defaults.
        text: the file.
        fresh: what `probe` would write today for the same partition.
        groups, user_id: as for `check_request`.
    """
    found = [
        Drift(Kind.REFUSED if each.fatal else Kind.DOUBT, each.field, each.message, each.hint)
        for each in check_request(facts, cluster, groups=groups, user_id=user_id)
    ]
    named = {each.field for each in found}
    for name, value in fresh.values.items():
        present = getattr(cluster, name)
        if name == "gpu_memory_gb" and cluster.gpu_type != fresh.values.get("gpu_type"):
            continue  # that of other nodes
        if name in _CHOICES_OF_A_PERSON or present is None or present == value or f"cluster.{name}" in named:
            continue
        found.append(Drift(Kind.CHANGED, f"cluster.{name}", f"the file has {name}: {present}, and probe finds {value}"))
    found += _settings(observed_in(text), fresh.observed)
    return sorted(found, key=lambda each: [*Kind].index(each.kind))


def _settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[Drift]:
    found = []
    for name, old in before.items():
        new = now.get(name)
        if new is None and name.startswith("limits of "):
            new = "none"
        if new is not None and new != old and "?" not in (new, old):
            found.append(Drift(Kind.CHANGED, name, f"{name} was {old}, and is {new}", _ADVICE.get(name, "")))
    added = [name for name in now if name.startswith("limits of ") and name not in before and now[name] != "none"]
    if before:
        found += [Drift(Kind.CHANGED, name, f"{name} was none, and is {now[name]}") for name in added]
    return found


_ADVICE = {
    "GraceTime": "does a step and a save still fit? checkpoint.every_minutes bounds what a preemption costs",
    "KillWait": "does a step and a save still fit? checkpoint.every_minutes bounds what a preemption costs",
    "PreemptMode": "`help requeue` says what slurmtrain does in each mode",
    "JobRequeue": "slurmtrain's jobs ask for it themselves; requeue=chain or requeue=resubmit does without",
}


def observed_in(text: str) -> dict[str, str]:
    """Return what a file was made of, as `probe` has written it at its end; {} for a file by hand."""
    _, found, rest = text.partition(OBSERVED)
    if not found:
        return {}
    matches = (OBSERVED_LINE.match(line.rstrip()) for line in rest.splitlines())
    return {match[1]: match[2] for match in matches if match is not None}
