"""The facts that ranks gather about themselves and their nodes before training. A fact that could not be read is None.

The first rank of each node tells the facts of its node, and every rank the few that may differ between the ranks of a node,
so that the facts of 4,096 ranks are a megabyte or two. They travel as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class GpuFacts:
    """What NVML says of a GPU that belongs to this job.

    Attributes:
        index: its number on the node.
        memory_gb, used_gb: in units of 1e9 bytes.
        processes: ids of the processes that compute on it.
        ecc_errors: uncorrectable errors since the driver was loaded.
        remap_pending, remap_failed: memory with errors waits to be replaced by spare rows, or cannot be.
        needs: what the driver recommends to recover it, such as "a reset"; empty if nothing.
        needs_later: programs may begin on it before that.
        slowed_by: what holds its clock down now, such as "heat".
        sliced: it is divided into slices (MIG), which NVML does not count as GPUs.
    """

    index: int
    name: str | None = None
    memory_gb: float | None = None
    used_gb: float | None = None
    processes: tuple[int, ...] | None = None
    ecc_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    needs: str | None = None
    needs_later: bool = False
    slowed_by: tuple[str, ...] | None = None
    sliced: bool | None = None


@dataclass(frozen=True)
class PathFacts:
    """A file or folder that the config names, as a node sees it.

    Attributes:
        kind: "file", "folder" or "missing".
        size_bytes: of a file; of a folder, of the files directly in it.
        digest: of a file's first and last 64 KiB; of a folder, of its manifest; None: it has none.
        listing: of a folder, digest of the names and sizes in it.
    """

    kind: str
    size_bytes: int | None = None
    digest: str | None = None
    listing: str | None = None


@dataclass(frozen=True)
class DiskFacts:
    """A folder in which the job writes.

    Attributes:
        free_gb: space that this user may take, in units of 1e9 bytes; None where the file system does not count it.
        free_files: how many files may be made there; None where the file system has no such limit.
        error: why nothing can be written there: "Read-only file system".
    """

    free_gb: float | None = None
    free_files: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class NodeFacts:
    """The facts of a node, told by its first rank.

    Attributes:
        versions: of Python, torch, CUDA, NCCL, the driver and the like, by name.
        packages: versions of the Python packages that its first rank imports, by name.
        code: digests of the source files of this package and of the run's code that its first rank has loaded, by name.
        config_hash: digest of the frozen config as this node reads it.
        paths: by path, what the config names.
        disks: by path, where the job writes.
        clock: unix seconds just before and just after one moment that is the same for all nodes.
        gpus: those of this job; None where there is no driver, or none was asked for.
        driver_error: why the driver does not answer.
        memory_gb: memory that is available, in units of 1e9 bytes.
        interface, interface_mbit: the network interface towards the other nodes, and its speed as the kernel states it.
        network: the IPv4 network that it is in, as in "10.0.0.0/16".
        folder: how it sees the attempt's folder, which all ranks share; None: nobody has looked.
        variables: environment variables that other programs have left, or that slow training down.
    """

    node: str
    rank: int
    versions: Mapping[str, str] | None = None
    packages: Mapping[str, str] | None = None
    code: Mapping[str, str] | None = None
    config_hash: str | None = None
    paths: Mapping[str, PathFacts] | None = None
    disks: Mapping[str, DiskFacts] | None = None
    clock: tuple[float, float] | None = None
    gpus: tuple[GpuFacts, ...] | None = None
    driver_error: str | None = None
    memory_gb: float | None = None
    interface: str | None = None
    interface_mbit: int | None = None
    network: str | None = None
    folder: FolderFacts | None = None
    variables: Mapping[str, str] | None = None


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
class RankFacts:
    """The facts of a rank.

    Attributes:
        node: name of its node.
        node_rank: number of its node.
        pid: its process.
        world_size: ranks of the job, as this rank has been told.
        device: "cpu", or "cuda:0".
        gpus_seen: GPUs that are visible to it; None where torch is built for CPUs.
        cpus: CPUs on which it may run, as the kernel lists them: "0-3,8".
        cpus_of_machine: how many the machine has.
        numa_nodes: NUMA nodes of the sockets of these CPUs.
        gpu_numa_node: that of its GPU.
        packages: digest of the versions of the packages that it imports.
        differs: versions of the packages that differ from those of its node's first rank; () in the place of one that is
            not there.
        variables: values of the environment variables that all ranks should agree on.
    """

    rank: int
    node: str
    local_rank: int = 0
    pid: int = 0
    world_size: int = 1
    device: str = "cpu"
    gpus_seen: int | None = None
    cpus: str | None = None
    cpus_of_machine: int | None = None
    numa_nodes: tuple[int, ...] | None = None
    gpu_numa_node: int | None = None
    packages: str | None = None
    differs: Mapping[str, str] | None = None
    variables: Mapping[str, str] | None = None
    node_rank: int = 0


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
        """Return it as JSON, without fields that have their default."""
        return json.dumps(_without_defaults(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Message:
        """Return what `encode` has made.

        Raises:
            ValueError: it is something else.
        """
        try:
            return typed(cls, json.loads(text))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"these are no facts of a rank: {error}") from None


def gathered(messages: Iterable[Message], unseen: Iterable[int] = ()) -> GatheredFacts:
    """Put together what all ranks have sent. From here on a node has a name that no other one has.

    Args:
        unseen: numbers of the nodes whose file in the shared folder rank 0 did not see in time.
    """
    ranks, nodes = [], []
    found = list(messages)
    names = distinct_names((each.rank.node_rank, each.rank.node) for each in found)
    for each in found:
        name = names[each.rank.node_rank, each.rank.node]
        ranks.append(dataclasses.replace(each.rank, node=name))
        if each.node is not None:
            nodes.append(dataclasses.replace(each.node, node=name))
    by_number = {number: name for (number, _), name in names.items()}
    return GatheredFacts(
        tuple(ranks), tuple(nodes), tuple(by_number[number] for number in unseen if number in by_number)
    )


def distinct_names(nodes: Iterable[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """Return a name for each node, given by number and name: its own, with its number behind it if others are called so, too.

    SLURM's nodes have names of their own. With torchrun a node calls itself as its host is called, and two containers of one
    image, or on one host, may be called the same.
    """
    known = set(nodes)
    count = Counter(name for _, name in known)
    return {(number, name): name if count[name] == 1 else f"{name} (node {number})" for number, name in known}


def _without_defaults(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            each.name: _without_defaults(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if getattr(value, each.name) != each.default
        }
    if isinstance(value, Mapping):
        return {key: _without_defaults(each) for key, each in value.items()}
    return [_without_defaults(each) for each in value] if isinstance(value, tuple) else value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def typed(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return an object of a dataclass of this module from values of JSON; unknown fields are left out.

    Raises:
        TypeError, KeyError, AttributeError: the values are others.
    """
    hints = _hints(typing.cast("typing.Hashable", kind))
    return kind(**{name: _value(hints[name], value) for name, value in values.items() if name in hints})


def _value(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_value(inner[0], each) for each in value)
    if origin is not None and issubclass(origin, Mapping):
        return {str(key): _value(inner[1], each) for key, each in value.items()}
    if dataclasses.is_dataclass(kind):
        return typed(typing.cast("type[Any]", kind), value)
    return value
