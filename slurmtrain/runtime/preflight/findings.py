"""What the checks before training find: each kind with what to do about it, and whose fault it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from slurmtrain.choices import FindingKind
from slurmtrain.errors import PreflightError

MOST_NAMED = 8  # nodes in one sentence


class Fault(StrEnum):
    """Who has to put it right. Another start leaves out a node at fault; nothing but a person mends the config."""

    NODE = "node"
    CONFIG = "config"  # the config, the environment of the job, or all nodes alike


ADVICE = {
    FindingKind.GPU_MISSING: "`nvidia-smi` on {node} shows its GPUs; cluster.exclude={node} leaves that node out",
    FindingKind.GPU_DRIVER: "tell the admins of the cluster; cluster.exclude={node} leaves that node out",
    FindingKind.GPU_BROKEN: "tell the admins of the cluster; cluster.exclude={node} leaves that node out",
    FindingKind.GPU_SLOWED: "`nvidia-smi -q -d PERFORMANCE` on {node} says why; tell the admins if it stays so",
    FindingKind.GPU_BUSY: "`nvidia-smi` on {node} shows them; a job that has ended may have left them behind",
    FindingKind.VERSIONS: "use one environment for all nodes, or a container; PYTHONPATH and ~/.local/lib of {node} may put "
    "another one first",
    FindingKind.CODE: "config.yaml lies in the run directory: is that the same folder on {node}? Bytes that are stale there "
    "vanish when the node mounts it anew",
    FindingKind.DATA: "is it mounted on {node}? Copy the data there once more, or name a folder that all nodes share",
    FindingKind.CLOCK: "tell the admins of the cluster: chronyd or ntpd of {node} does not run, or has lost its server",
    FindingKind.DISK_FULL: "make room there: `runs prune`, `checkpoints RUN prune`, `df -h` and `df -i` on {node}",
    FindingKind.CPUS: "cluster.cpus_per_task asks for them, and srun binds ranks to them: see --cpu-bind of cluster.srun_args",
    FindingKind.SHARED_FOLDER: "job.runs_dir has to be one folder for all nodes: is it mounted on {node}?",
    FindingKind.SLOW_NODE: "cluster.exclude={node} leaves that node out, preflight.exclude_slow=true does so by itself",
    FindingKind.SLOW_LINK: "tell the admins of the cluster which pair it is",
    FindingKind.SLOW_NETWORK: "NCCL_DEBUG=INFO logs which network NCCL uses, and cluster.network_interface names another one; "
    "or correct cluster.network_gb_per_s",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        nodes: on which it is.
        ranks: which ranks it is about; () for all of those nodes.
        value: what was found, and `expected` what was not.
        fatal: training must not begin with it.
        fault: who has to put it right.
    """

    kind: FindingKind
    nodes: tuple[str, ...]
    value: str
    expected: str
    fatal: bool = False
    fault: Fault = Fault.CONFIG
    ranks: tuple[int, ...] = ()

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind].replace("{node}", ",".join(self.nodes[:MOST_NAMED]) or "the node")

    @property
    def where(self) -> str:
        """The nodes, and the ranks if not all of theirs are meant."""
        nodes = named(self.nodes)
        if not self.ranks:
            return nodes
        ranks = ", ".join(map(str, self.ranks[:MOST_NAMED])) + (", ..." if len(self.ranks) > MOST_NAMED else "")
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks} on {nodes}"

    @property
    def sentence(self) -> str:
        """Say where it is, what was found and what was expected."""
        return f"{self.where}: {self.value}; expected: {self.expected}"

    def values(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return {**asdict(self), "advice": self.advice, "sentence": self.sentence}


def named(nodes: Sequence[str]) -> str:
    """Return the names of nodes in words, the first few of many."""
    shown = ", ".join(nodes[:MOST_NAMED])
    return f"{shown} and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else shown


def without(found: Iterable[Finding], ignored: Collection[str]) -> list[Finding]:
    """Leave out the kinds that the config says to ignore."""
    return [each for each in found if each.kind not in ignored]


def sorted_by_weight(found: Iterable[Finding]) -> list[Finding]:
    """Return the fatal ones first, and of those the config's own first."""
    return sorted(found, key=lambda each: (not each.fatal, each.fault is Fault.NODE, each.kind, each.nodes))


def error_of(found: Sequence[Finding]) -> PreflightError | None:
    """Return the error that ends an attempt with these findings; None if it may go on.

    Where only nodes are at fault, it names them, so that another start leaves them out. A fault of the config would be
    there on other nodes, too.
    """
    fatal = [each for each in sorted_by_weight(found) if each.fatal]
    if not fatal:
        return None
    of_config = [each for each in fatal if each.fault is Fault.CONFIG]
    first = (of_config or fatal)[0]
    nodes = () if of_config else tuple(dict.fromkeys(node for each in fatal for node in each.nodes))
    more = len(fatal) - 1
    also = f" (and {more} more: {', '.join(dict.fromkeys(str(each.kind) for each in fatal[1:]))})" if more else ""
    return PreflightError(
        f"preflight, {first.kind}: {first.sentence}{also}",
        hint=f"{first.advice}; preflight.ignore=[{first.kind}] ignores it",
        nodes=nodes,
        told_all=True,
    )
