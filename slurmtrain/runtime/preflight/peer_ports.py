"""Whether ranks reach each other at ports that the kernel chooses, before gloo and NCCL need that.

All ranks have met at one port of rank 0. gloo and NCCL connect them with each other, at ports that each asks of the kernel.
Where a firewall drops those, gloo would wait for cluster.collective_timeout_s, half an hour, and then name nobody. So the
first rank of each node connects to that of the next node, at such a port, and rank 0 judges.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from slurmtrain.choices import FindingKind
from slurmtrain.errors import PreflightError, RendezvousError, SlurmtrainError
from slurmtrain.runtime.addresses import interface_addresses, interface_towards
from slurmtrain.runtime.preflight.reachability import Answer, knock
from slurmtrain.runtime.told_error import error_of_word, word_of
from slurmtrain.slurm.environment import Environment

CONNECT_S = 10.0  # the kernel tries four times in it: a packet that is lost by chance is no firewall
GRACE_S = 10.0  # ranks leave after rank 0 did, so that they can repeat what it says; it waits no longer for them
KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Unreached:
    """A node that the one before it has not reached at a port of the kernel's choice.

    Attributes:
        node, before: the node, and the one that has tried.
        host, port: the address.
        answer: an `Answer`.
        interface: that of `before` through which it has tried; None: not known.
        alone: `before` has reached the node after that one; None: there is none.
        waited_s: seconds after which it gave up.
    """

    node: str
    before: str
    host: str
    port: int
    answer: str
    interface: str | None
    alone: bool | None
    waited_s: float

    @property
    def sentence(self) -> str:
        """Say who has not reached whom."""
        by = f" by {self.interface}" if self.interface else ""
        within = f" after {self.waited_s:g} s" if self.answer == Answer.TIMED_OUT else ""
        return f"{self.node}: {self.before} cannot connect to it at {self.host}:{self.port}{by}: {self.answer}{within}"


def check_peer_ports(store: dist.Store, environment: Environment, interface: str | None) -> None:
    """Connect the first rank of each node with that of the next one, and end the start where that is not possible.

    Args:
        interface: name of the one at which gloo and NCCL listen, of which the first counts; None: it is not known, or all
            ranks are on one machine.

    Raises:
        PreflightError, RendezvousError: nodes cannot be reached at such ports; the same on all ranks.
    """
    nodes = environment.nodes
    if len(nodes) == 1:
        return
    listener = _listener(interface) if environment.local_rank == 0 else None
    try:
        if environment.local_rank == 0:
            address = "" if listener is None else json.dumps(listener.getsockname())
            store.set(f"ports/listens/{environment.node_rank}", address)
            found = _try_next(store, environment, listening=listener is not None)
            store.set(f"ports/found/{environment.node_rank}", json.dumps(asdict(found)) if found is not None else "")
        if environment.rank == 0:
            _judge_for_all(store, environment)
        word = store.get("ports/word").decode()  # waits until rank 0 has said it
        if word:
            store.set(f"ports/heard/{environment.rank}", "")
    except dist.DistError as error:  # a rank has left, and the store with it if that was rank 0
        raise RendezvousError(
            f"rank {environment.rank} on {environment.node} did not hear whether all nodes reach each other: "
            f"{str(error).splitlines()[0]}",
            hint="see the logs of the other ranks",
            because_of_peer=True,
        ) from None
    finally:
        if listener is not None:
            listener.close()
    if word:
        raise error_of_word(word)


def _listener(interface: str | None) -> socket.socket | None:
    """Return a socket that listens at a port of the kernel's choice; the kernel itself accepts connections to it."""
    address = interface_addresses().get((interface or "").partition(",")[0].lstrip("="))
    if address is None:
        return None
    listener = socket.socket()
    try:
        listener.bind((address, 0))
        listener.listen(8)
    except OSError:
        listener.close()
        return None
    return listener


def _try_next(store: dist.Store, environment: Environment, *, listening: bool) -> Unreached | None:
    """Connect to the next node, and if that fails to the one after it."""
    nodes, own = environment.nodes, environment.node_rank
    following = [(own + step) % len(nodes) for step in range(1, min(3, len(nodes)))]
    place = _place_of(store, following[0])
    if place is None or not listening:
        return None
    answer = knock(*place, CONNECT_S)
    if answer is Answer.CONNECTED:
        return None
    other = _place_of(store, following[1]) if len(following) > 1 else None
    alone = None if other is None else knock(*other) is Answer.CONNECTED
    return Unreached(
        nodes[following[0]], environment.node, *place, str(answer), interface_towards(place[0]), alone, CONNECT_S
    )


def _place_of(store: dist.Store, node_rank: int) -> tuple[str, int] | None:
    text = store.get(f"ports/listens/{node_rank}").decode()  # waits until it is there
    if not text:
        return None
    host, port = json.loads(text)
    return str(host), int(port)


def _judge_for_all(store: dist.Store, environment: Environment) -> None:
    """Tell all ranks what was found, on rank 0, and raise it as an error there, too."""
    keys = [f"ports/found/{node_rank}" for node_rank in range(len(environment.nodes))]
    store.wait(keys)
    found = [Unreached(**json.loads(text)) for text in store.multi_get(keys) if text]
    error = error_of(found, environment.nodes)
    store.set("ports/word", "" if error is None else word_of(error))
    if error is not None:
        others = [f"ports/heard/{rank}" for rank in range(1, environment.world_size)]
        with contextlib.suppress(dist.DistError):  # the store ends with this process: they read it first
            store.wait(others, timedelta(seconds=GRACE_S))
        raise error


def error_of(found: Sequence[Unreached], nodes: Sequence[str]) -> SlurmtrainError | None:
    """Return the error that ends an attempt whose nodes were not reached; None if all were.

    Single nodes of at least three, that others than the one before them could be reached instead of, are at fault, and left
    out of another start. If most nodes are not reached, no other start would help. Else one may, and nobody is blamed.

    Args:
        nodes: all nodes of the job.
    """
    if not found:
        return None
    first = found[0]
    more = f"; the same of {len(found) - 1} more of {len(nodes)} nodes" if len(found) > 1 else ""
    message = (
        f"preflight, {FindingKind.BLOCKED_PORT}: {first.sentence}{more}; expected: ranks reach each other at any port that the "
        f"kernel chooses, and not only rank 0 at the one where they have met"
    )
    hint = (
        f"a firewall between the nodes: gloo and NCCL listen at ports that the kernel chooses ({_kernel_ports()}), which have "
        "to be open between the nodes; cluster.network_interface=NAME names another network"
    )
    if len(nodes) > 2 and all(each.alone for each in found) and 2 * len(found) <= len(nodes):
        return PreflightError(message, hint=hint, nodes=tuple(each.node for each in found))
    if len(nodes) > 2 and 2 * len(found) > len(nodes):
        return PreflightError(message, hint=hint)
    return RendezvousError(message, hint=hint, because_of_peer=True)  # of rank 0's node no more than of others


def _kernel_ports() -> str:
    try:
        return "net.ipv4.ip_local_port_range: " + "-".join(KERNEL_PORTS.read_text().split())
    except OSError:
        return "net.ipv4.ip_local_port_range"
