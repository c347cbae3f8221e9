"""The ways to reach a rank: addresses, interfaces, ports, and the file in which rank 0 names its own. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slurmtrain.errors import EnvironmentMismatchError, SlurmtrainError
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.patience import may_pass
from slurmtrain.system.records import read_json
from slurmtrain.system.signals import StopDuringStartError


class RendezvousError(SlurmtrainError):
    """The ranks could not find each other in time. A retry on other nodes may help.

    Args:
        because_of_peer: others did not come, or have left; the rank that raises it was there, and its node says nothing.
    """

    def __init__(self, message: str, *, hint: str | None = None, because_of_peer: bool = False):
        super().__init__(message, hint=hint)
        self.because_of_peer = because_of_peer


def machine() -> str:
    """Return the identity of this machine and network namespace: ranks that share it reach rank 0 through the loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown-{socket.gethostname()}-{os.getpid()}"


def listening_address(environment: Environment, interface: str) -> str:
    """Return the one IPv4 address of this node on which rank 0 listens for the others.

    It is the loopback if all ranks are on this node; else the address of the configured interface; else the one to
    which this node's name resolves, or on which srun has started here; else that of its only network that is up; else
    the one from which the other nodes are reached.

    Raises:
        EnvironmentMismatchError: there is no such interface; or there are several, and nothing says which it is. Listening on
            all of them would let in whoever is on the others.
    """
    if environment.local_world_size == environment.world_size:
        return "127.0.0.1"
    all_known = interface_addresses()
    if interface not in ("auto", "none"):
        if interface not in all_known:
            raise EnvironmentMismatchError(
                f"cluster.network_interface={interface!r}, but {environment.node} has no such interface with an IPv4 address",
                hint=f"it has: {', '.join(sorted(all_known))}",
            )
        return all_known[interface]
    known = {name: address for name, address in all_known.items() if name != "lo"}
    names = (environment.node, socket.getfqdn(), socket.gethostname())
    for host in (os.environ.get("MASTER_ADDR"), *names, os.environ.get("SLURM_LAUNCH_NODE_IPADDR")):
        if host and (address := address_of(host)) in known.values():
            return address
    up = {name: address for name, address in known.items() if not _is_down(name)}
    if len(up) == 1:
        return next(iter(up.values()))
    for node in environment.nodes:
        # A name that does not resolve leads nowhere; one that leads to the loopback is this node's own.
        towards = interface_towards(address_of(node)) if node != environment.node else None
        if towards in up:
            return up[towards]
    networks = ", ".join(f"{name} ({address})" for name, address in sorted(up.items())) or "none that is up"
    raise EnvironmentMismatchError(
        f"rank 0 on {environment.node} cannot know which of its networks the other ranks use: it has {networks}, and neither "
        "its own name nor those of the other nodes resolve to an address of one",
        hint="cluster.network_interface=NAME names the one; `ip address` there shows them all",
    )


def _is_down(interface: str) -> bool:
    """Return whether the kernel says that nothing can be reached by an interface, as of Docker's bridge without containers."""
    try:
        return Path(f"/sys/class/net/{interface}/operstate").read_text().strip() == "down"
    except OSError:
        return False


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of every network interface that has one (SIOCGIFADDR, `man 7 netdevice`)."""
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def interface_towards(address: str) -> str | None:
    """Return the interface that has `address`, or through which it is reached; None if it is not known."""
    by_address = {own: name for name, own in interface_addresses().items()}
    if address in by_address:
        return by_address[address]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # UDP: nothing is sent, the kernel only chooses the route
            return by_address.get(probe.getsockname()[0])
    except OSError:
        return None


def address_of(host: str) -> str:
    """Return the IPv4 address of a host name, or the name itself when it does not resolve."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def bind_port(host: str, ports: range | None, node: str) -> socket.socket:
    """Return a socket that is bound to a free port of an address of this machine.

    Args:
        host: the address; "": all of them.
        ports: the range that the port has to lie in; None: any.
        node: the name of this node, for the error.

    Raises:
        RendezvousError: none of the range is free.
    """
    if ports is None:
        return _bound(host, 0)
    # Several jobs of a node, which begin at the same moment, do not all try the same ones first.
    for port in _in_any_order(ports):
        with contextlib.suppress(OSError):
            return _bound(host, port)
    raise RendezvousError(
        f"no port of cluster.port_range={ports.start}-{ports.stop - 1} is free on {node}",
        hint=f"`ss -tlnp` on {node} shows who has them; take a larger range",
    )


def _in_any_order(ports: range) -> list[int]:
    return random.SystemRandom().sample(ports, len(ports))


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    try:
        if port:
            # A port that a job before has just left has connections that are still being closed, and can be used. With that
            # option a port is somebody's only when he listens, which therefore follows here at once.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        if port:
            listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def hold_port(ports: range | None, node: str) -> socket.socket:
    """Hold a free port for a program that is given a number, and listens there seconds later, when it has loaded its libraries.

    Until then the kernel would hand the number to whoever asks for any: to a listener of another job, or an outgoing
    connection. So a socket stays bound to it, which does not listen. A listener that sets SO_REUSEADDR, as torch's store,
    gRPC and Python's `socket.create_server` do, may bind it as well (man 7 socket); one that does not, may not.

    Raises:
        RendezvousError: none of the range is free.
    """
    for port in [0] if ports is None else _in_any_order(ports):
        holder = socket.socket()
        try:
            holder.bind(("", port))  # without SO_REUSEADDR, so that no other job holds it
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return holder
    # Perhaps the connections of the attempt before are still being closed, for a minute, on all ports of a small range.
    holder = bind_port("", ports, node)
    holder.shutdown(socket.SHUT_RDWR)  # it listens no more, and stays bound
    return holder


# Waiting for files that rank 0 writes into a shared folder: less and less often, and first of all on one rank of each node. A
# shared file system has no event to await: 1,024 ranks that looked fifty times a second would be 50,000 directory reads.

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
NETWORK_HINT = (
    "see rank 0's log; cluster.network_interface=NAME names the network that connects the nodes, "
    "cluster.port_range=LOW-HIGH the ports that a firewall between them lets through"
)


class Pauses:
    """Sleeps that grow from `first_s` to `longest_s`, each randomly a little longer or shorter.

    None is much longer than half of the time that was waited before, so no rank is much too late.
    """

    def __init__(self, longest_s: float = LONGEST_PAUSE_S, *, first_s: float = FIRST_PAUSE_S):
        self._next_s, self._longest_s = first_s, longest_s

    def pause(self) -> None:
        """Sleep once more."""
        time.sleep(self._next_s * random.uniform(0.75, 1.25))  # so that many ranks do not look at the same moment
        self._next_s = min(1.5 * self._next_s, self._longest_s)


T = TypeVar("T")


def await_rank_0(
    path: Path,
    environment: Environment,
    timeout_s: float,
    stop_requested: Callable[[], bool],
    use: Callable[[dict[str, Any]], T],
) -> T:
    """Wait until rank 0 has published its address under `path`, and return what `use` makes of it, which may raise OSError.

    All ranks but the first of each node look ten times less often.

    Raises:
        RendezvousError: the time is over.
        StopDuringStartError: a stop was requested before.
    """
    times = 1 if environment.local_rank == 0 else 10
    pauses, deadline = Pauses(times * LONGEST_PAUSE_S, first_s=times * FIRST_PAUSE_S), time.monotonic() + timeout_s
    own, rank_0 = (
        f"rank {environment.rank} on {environment.node}",
        f"rank 0, expected on node {environment.expected_node(0)},",
    )
    failed = ""
    while True:
        address = look(path)
        if address is not None:
            try:
                return use(address)
            except OSError as error:
                by = interface_towards(address["host"])
                failed = f"{address['host']}:{address['port']}{f' by {by}' if by else ''}: {str(error).splitlines()[0]}"
        if stop_requested():
            raise StopDuringStartError
        if time.monotonic() > deadline and failed:
            raise RendezvousError(f"{own}: {rank_0} cannot be reached at {failed}", hint=NETWORK_HINT)
        if time.monotonic() > deadline:
            said = f"{own}: {rank_0} did not publish its address within {timeout_s:.0f} s"
            raise RendezvousError(said, hint="see rank 0's log", because_of_peer=True)
        pauses.pause()


def look(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that rank 0 has published under `path`; None while it is not there, or the storage fails.

    Raises:
        OSError: the file cannot be read, and that will not pass.
        UnreadableRecordError: it is not a regular file.
    """
    # Listing the directory makes NFS ask its server; opening a name that it remembers as missing does not.
    try:
        return read_json(path) if path.name in os.listdir(path.parent) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        if not may_pass(error):
            raise
        log.warning("%s cannot be read, and is looked for again: %s", path, error.strerror or error)
        return None
