"""Why ranks could not meet: which node cannot reach which address of rank 0, by which interface, and whose fault that is.

A rank that cannot connect says so in a file of the attempt's folder, one for each node, and goes on trying. Rank 0 reads these
files while it waits: it alone knows which nodes have come. Imports no torch.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from slurmtrain.choices import FindingKind
from slurmtrain.errors import PreflightError, RendezvousError, SlurmtrainError
from slurmtrain.runtime.addresses import address_of, interface_towards
from slurmtrain.runtime.preflight.findings import Fault, Finding, named
from slurmtrain.slurm.node_ledger import NODE_NAME
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.records import printable

PREFIX = "unreachable-"
OTHER_PORTS = (22, 6818)  # of sshd and slurmd, which nodes of a cluster have
PROBE_S = 2.0
WITNESSES = 2  # nodes besides that of rank 0 that must fail alike before the config is at fault


class Answer(StrEnum):
    """How a connection to rank 0 has ended."""

    CONNECTED = "connected"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    NO_ROUTE = "no route"
    UNRESOLVED = "its name does not resolve"
    STRANGER = "somebody else answers there"


@dataclass(frozen=True)
class Unreachable:
    """What a node that cannot reach rank 0 has seen.

    Attributes:
        host, port: the address that it tried.
        answer: an `Answer`.
        interface: the network interface through which that address is reached; None: it is not known.
        host_answers: that machine answers on other ports; None: nobody has asked.
    """

    node: str
    rank: int
    host: str
    port: int
    answer: str
    interface: str | None = None
    host_answers: bool | None = None

    @property
    def sentence(self) -> str:
        """Say what it has seen."""
        by = f" by {self.interface}" if self.interface else ""
        though = ", though that machine answers on another port" if self.host_answers else ""
        return f"cannot reach rank 0 at {self.host}:{self.port}{by}: {self.answer}{though}"


def answer_of(error: OSError) -> Answer:
    """Return how a connection has ended by the error that it raised."""
    if isinstance(error, socket.gaierror):
        return Answer.UNRESOLVED
    if isinstance(error, ConnectionRefusedError):
        return Answer.REFUSED
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return Answer.TIMED_OUT
    return Answer.NO_ROUTE


def knock(host: str, port: int, timeout_s: float = PROBE_S) -> Answer:
    """Connect to a port, say nothing, and return how that has ended."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return Answer.CONNECTED
    except OSError as error:
        return answer_of(error)


def look_into(node: str, rank: int, host: str, port: int, answer: Answer) -> Unreachable:
    """Find out by which interface an address is reached, and whether its machine answers at all. It takes some seconds."""
    answers = None
    if answer in (Answer.TIMED_OUT, Answer.NO_ROUTE):
        answers = any(knock(host, other) in (Answer.CONNECTED, Answer.REFUSED) for other in OTHER_PORTS)
    return Unreachable(node, rank, host, port, str(answer), interface_towards(address_of(host)), answers)


def report(directory: Path, node_rank: int, found: Unreachable) -> None:
    """Write what a node has seen where rank 0 reads it.

    Raises:
        OSError: it cannot be written.
    """
    write_json(directory / f"{PREFIX}{node_rank}.json", asdict(found), durable=False)


def reports(directory: Path) -> list[Unreachable]:
    """Return what nodes have reported so far; what is no report is left out."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(PREFIX) and name.endswith(".json"))
    except OSError:
        return []
    found = (_of_values(read_json(directory / name)) for name in names)
    return [each for each in found if each is not None]


def _of_values(values: dict[str, Any] | None) -> Unreachable | None:
    if values is None:
        return None
    node, rank, host, port = (values.get(name) for name in ("node", "rank", "host", "port"))
    answer, interface, answers = (values.get(name) for name in ("answer", "interface", "host_answers"))
    known = (
        isinstance(node, str)
        and NODE_NAME.fullmatch(node)
        and isinstance(rank, int)
        and isinstance(host, str)
        and isinstance(port, int)
        and isinstance(answer, str)
        and isinstance(interface, str | None)
        and isinstance(answers, bool | None)
    )
    if not known:
        return None
    shown = None if interface is None else printable(str(interface))[:40]
    return Unreachable(
        str(node), int(rank or 0), printable(str(host))[:255], int(port or 0), str(answer), shown, answers
    )


def kind_of(found: Unreachable, *, rank_0_waits: bool) -> FindingKind:
    """Return what is wrong where an address cannot be reached.

    Args:
        rank_0_waits: rank 0 is known to wait at that address.
    """
    if found.answer in (Answer.UNRESOLVED, Answer.STRANGER):
        return FindingKind.MASTER_ADDRESS
    if found.answer == Answer.REFUSED:
        return FindingKind.BLOCKED_PORT if rank_0_waits else FindingKind.MASTER_ADDRESS
    return FindingKind.BLOCKED_PORT if found.host_answers else FindingKind.INTERFACE


def diagnose(found: Sequence[Unreachable], reached: Collection[str], *, nodes: Sequence[str]) -> list[Finding]:
    """Return a finding for each way in which nodes could not reach rank 0.

    Where most nodes have reached it, those that have not are at fault. Where none has, its own node, the network or the
    config is, and nobody knows which.

    Args:
        reached: nodes besides that of rank 0 whose ranks have come.
        nodes: all nodes, that of rank 0 first.
    """
    others = [node for node in nodes[1:] if node in reached]
    groups: dict[tuple[FindingKind, str], list[str]] = defaultdict(list)
    for each in found:
        if each.node not in others:
            groups[kind_of(each, rank_0_waits=True), each.sentence].append(each.node)
    failed = {node for each in groups.values() for node in each}
    fault = Fault.NODE if len(others) >= len(failed) and others else Fault.CONFIG
    if others:
        expected = f"it can, as {named(others)}"
    elif len(failed) >= WITNESSES:
        expected = f"it can; none of the {len(failed)} other nodes does"
    else:
        expected = "it can"
    return [
        Finding(kind, tuple(dict.fromkeys(group)), sentence, expected, True, fault)
        for (kind, sentence), group in groups.items()
    ]


def error_of_reports(found: Sequence[Finding]) -> SlurmtrainError | None:
    """Return the error that ends an attempt whose ranks could not meet for these reasons; None if there are none.

    A node at fault is left out of another start. Two nodes or more that fail alike show that no other start would help. Else
    one may: the error is one after which the run is tried again.
    """
    if not found:
        return None
    first, nodes = found[0], tuple(dict.fromkeys(node for each in found for node in each.nodes))
    message, hint = f"preflight, {first.kind}: {first.sentence}", first.advice
    if first.fault is Fault.NODE:
        return PreflightError(message, hint=hint, nodes=nodes)
    if len(nodes) >= WITNESSES:
        return PreflightError(message, hint=hint)
    return RendezvousError(message, hint=hint, because_of_peer=True)  # of rank 0's node no more than of the other


def advice(kind: FindingKind, node: str) -> str:
    """Return what to do where a node cannot reach rank 0."""
    return Finding(kind, (node,), "", "").advice
