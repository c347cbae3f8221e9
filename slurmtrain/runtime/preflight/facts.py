"""The facts that ranks gather about themselves and their nodes before training. A fact that could not be read is None.

The first rank of each node tells the facts of its node, and every rank the few that may differ between the ranks of a node,
so that the facts of 4,096 ranks are a megabyte or two. They travel as JSON.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from slurmtrain.system.gpu import GpuFacts

MISSING = "missing"  # what a node says of a path of the config that is not there


@dataclass(frozen=True)
class FolderFacts:
    """How a node sees the folder that all ranks share.

    Attributes:
        seen_after_s: seconds after all ranks knew of rank 0's file until this node saw it; None: it did not within `limit_s`.
        stale: it saw the name, and not what rank 0 had written.
        error: why it cannot write there.
        limit_s: how long it looked.
    """

    seen_after_s: float | None = None
    stale: bool = False
    error: str | None = None
    limit_s: float = 0.0


@dataclass(frozen=True)
class NodeFacts:
    """The facts of a node, told by its first rank.

    Attributes:
        versions: of Python, torch, CUDA, NCCL, the driver and the like, by name.
        packages: versions of the Python packages that its first rank imports, by name.
        code: digests of the source files of this package and of the run's code that its first rank has loaded, by name.
        config_hash: digest of the frozen config as this node reads it.
        paths: by path that the config names, what is there, in words.
        disks: by folder in which the job writes, why it cannot; empty if it can.
        clock: the least and the most seconds by which its clock can be ahead of rank 0's.
        gpus: those of this job; None where NVML cannot be asked, or none was asked for.
        driver_error: why the driver does not answer.
        folder: how it sees the attempt's folder, which all ranks share; None: nobody has looked.
    """

    node: str
    rank: int
    versions: Mapping[str, str] | None = None
    packages: Mapping[str, str] | None = None
    code: Mapping[str, str] | None = None
    config_hash: str | None = None
    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    disks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    clock: tuple[float, float] | None = None
    gpus: tuple[GpuFacts, ...] | None = None
    driver_error: str | None = None
    folder: FolderFacts | None = None


@dataclass(frozen=True)
class RankFacts:
    """The facts of a rank.

    Attributes:
        node, node_rank: name and number of its node.
        pid: its process.
        world_size: ranks of the job, as this rank has been told.
        gpus_seen: GPUs that are visible to it; None where none was asked for, or torch is built for CPUs.
        cpus: CPUs on which it may run; None: any of the machine's.
        variables: values of the environment variables that all ranks should agree on.
    """

    rank: int
    node: str
    node_rank: int = 0
    local_rank: int = 0
    pid: int = 0
    world_size: int = 1
    gpus_seen: int | None = None
    cpus: tuple[int, ...] | None = None
    variables: Mapping[str, str] | None = None


@dataclass(frozen=True)
class GatheredFacts:
    """The facts of all ranks and nodes.

    Attributes:
        unseen: nodes whose file in the shared folder rank 0 did not see in time.
    """

    ranks: tuple[RankFacts, ...]
    nodes: tuple[NodeFacts, ...]
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Message:
    """What one rank sends to rank 0: its own facts, and with the first rank of a node those of the node."""

    rank: RankFacts
    node: NodeFacts | None = None

    def encode(self) -> str:
        """Return it as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Message:
        """Return what `encode` has made."""
        return msgspec.json.decode(text, type=cls)


def gathered(messages: Iterable[Message], unseen: Iterable[int] = ()) -> GatheredFacts:
    """Put together what all ranks have sent. From here on a node has a name that no other one has.

    Args:
        unseen: numbers of the nodes whose file in the shared folder rank 0 did not see in time.
    """
    found = list(messages)
    names = distinct_names((each.rank.node_rank, each.rank.node) for each in found)
    of_number = {number: name for (number, _), name in names.items()}
    return GatheredFacts(
        tuple(dataclasses.replace(each.rank, node=of_number[each.rank.node_rank]) for each in found),
        tuple(
            dataclasses.replace(each.node, node=of_number[each.rank.node_rank])
            for each in found
            if each.node is not None
        ),
        tuple(of_number[number] for number in unseen if number in of_number),
    )


def distinct_names(nodes: Iterable[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """Return a name for each node, given by number and name: its own, with its number behind it if others are called so, too.

    SLURM's nodes have names of their own. With torchrun a node calls itself as its host is called, and two containers of one
    image, or on one host, may be called the same.
    """
    known = set(nodes)
    count = Counter(name for _, name in known)
    return {(number, name): name if count[name] == 1 else f"{name} (node {number})" for number, name in known}
