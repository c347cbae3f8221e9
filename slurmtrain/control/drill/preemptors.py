"""Who can preempt a job here, and whether this user may: pure functions of what SLURM says of its partitions and QOS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.slurm.client import chosen_partition
from slurmtrain.slurm.nodelist import expand_nodelist


@dataclass(frozen=True)
class Preemptor:
    """Options of sbatch with which a job preempts ours, and how a person calls that."""

    options: tuple[str, ...]
    name: str


def preemptors(
    configuration: Mapping[str, str],
    partitions: str,
    qos: str,
    associations: str,
    *,
    partition: str | None,
    own_qos: str | None,
) -> list[Preemptor] | str:
    """Return what may preempt a job of this partition and QOS, the gentlest first; or why nothing does.

    Args:
        configuration: slurm.conf as the controller sees it.
        partitions: the output of `scontrol show partition -o`.
        qos: of `sacctmgr -nP show qos format=name,preempt,preemptmode`; empty without accounting.
        associations: of `sacctmgr -nP show assoc user=ME format=qos`.
        partition: of the job; None: the default one.
        own_qos: of the job; None: the default one.
    """
    by = configuration.get("PreemptType", "")
    if by in ("", "preempt/none", "(null)"):
        return "SLURM preempts nothing here (PreemptType=preempt/none)"
    if by == "preempt/partition_prio":
        return _by_partition(partitions, partition, configuration.get("PreemptMode", ""))
    if by == "preempt/qos":
        return _by_qos(qos, associations, own_qos)
    return f"nothing is known of PreemptType={by}"


def _by_partition(text: str, partition: str | None, usual_mode: str) -> list[Preemptor] | str:
    name, own = chosen_partition(text, partition)
    if not own:
        return f"SLURM does not say how partition {name} is preempted" if name else "there is no default partition"
    mode = own.get("PreemptMode") or usual_mode
    refusal = _not_by_mode(f"partition {name}", mode)
    if refusal is not None:
        return refusal
    found: list[tuple[int, str]] = []
    for line in text.splitlines():
        fields = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
        tier = _number(fields.get("PriorityTier"))
        if fields.get("State") == "UP" and tier > _number(own.get("PriorityTier")) and _share_nodes(own, fields):
            found.append((tier, fields["PartitionName"]))
    if not found:
        return f"no other partition on its nodes has a higher PriorityTier than partition {name}"
    return [Preemptor((f"--partition={each}",), f"partition {each}") for _, each in sorted(found)]


def _by_qos(text: str, associations: str, own_qos: str | None) -> list[Preemptor] | str:
    if own_qos is None:
        return "cluster.qos is not set, and SLURM preempts by QOS here (PreemptType=preempt/qos)"
    rows = {words[0]: words for words in (line.split("|") for line in text.splitlines()) if len(words) >= 3}
    if own_qos not in rows:
        return f"SLURM's accounting does not show QOS {own_qos}"
    refusal = _not_by_mode(f"QOS {own_qos}", rows[own_qos][2])
    if refusal is not None:
        return refusal
    above = [name for name, words in rows.items() if own_qos in words[1].split(",")]
    if not above:
        return f"no QOS preempts QOS {own_qos}"
    mine = {name for line in associations.splitlines() for name in line.strip().split(",")}
    allowed = [name for name in above if name in mine]
    if not allowed:
        return f"you may use none of the QOS that preempt {own_qos}: {', '.join(above)}"
    return [Preemptor((f"--qos={name}",), f"QOS {name}") for name in allowed]


def _not_by_mode(whose: str, mode: str) -> str | None:
    words = mode.upper().split(",")
    if "OFF" in words:
        return f"jobs of {whose} are not preempted (PreemptMode=OFF)"
    if "SUSPEND" in words or words == ["GANG"]:
        return f"preempted jobs of {whose} are suspended, and go on by themselves (PreemptMode=SUSPEND)"
    return None


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _share_nodes(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    nodes = [_nodes(fields.get("Nodes", "")) for fields in (one, other)]
    return not nodes[0] or not nodes[1] or bool(nodes[0] & nodes[1])


def _nodes(text: str) -> set[str]:
    try:
        return set(expand_nodelist(text)) if text not in ("", "(null)", "ALL") else set()
    except EnvironmentMismatchError:  # written in a way that is not known: it may share nodes
        return set()


def script_of(account: str | None, options: Sequence[str] = ()) -> str:
    """Return the batch script of the job that preempts ours: it does nothing, and ends as soon as it starts."""
    lines = ["--job-name=drill-preemptor", "--ntasks=1", "--time=1", "--output=/dev/null", "--no-requeue", *options]
    lines += [f"--account={account}"] if account else []
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + "exit 0\n"
