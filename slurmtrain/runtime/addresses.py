"""The ways to reach a rank: names, addresses, network interfaces. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

from slurmtrain.errors import EnvironmentMismatch
from slurmtrain.runtime.environment import Environment


def machine() -> str:
    """Return the identity of this machine and network namespace: ranks that share it reach rank 0 through the loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown-{socket.gethostname()}-{os.getpid()}"


def own_addresses(environment: Environment, interface: str) -> list[str]:
    """Return names and addresses under which other nodes may reach this one, the likeliest first."""
    candidates: list[str] = []
    if interface not in ("auto", "none"):
        address = interface_addresses().get(interface)
        if address is None:
            raise EnvironmentMismatch(
                f"cluster.network_interface={interface!r}, but {environment.node} has no such interface with an IPv4 address",
                hint=f"it has: {', '.join(sorted(interface_addresses()))}",
            )
        candidates.append(address)
    if os.environ.get("MASTER_ADDR"):
        candidates.append(os.environ["MASTER_ADDR"])
    candidates += [environment.node, socket.getfqdn(), socket.gethostname()]
    if os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        candidates.append(os.environ["SLURM_LAUNCH_NODE_IPADDR"])  # the node that ran srun: usually this one
    candidates += [address for name, address in interface_addresses().items() if name != "lo"]
    return list(dict.fromkeys(candidates))


def listening_address(environment: Environment, interface: str) -> str | None:
    """Return the one IPv4 address of this node on which rank 0 listens for the others; None if it is not known.

    It is the loopback if all ranks are on this node; else the address of the configured interface; else the one to
    which this node's name resolves; else that of its only network.
    """
    if environment.local_world_size == environment.world_size:
        return "127.0.0.1"
    if interface not in ("auto", "none"):
        return own_addresses(environment, interface)[0]
    known = {address for name, address in interface_addresses().items() if name != "lo"}
    names = (os.environ.get("MASTER_ADDR"), environment.node, socket.getfqdn(), socket.gethostname())
    by_name = [address for host in names if host and (address := address_of(host)) in known]
    return by_name[0] if by_name else next(iter(known)) if len(known) == 1 else None


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


def free_port() -> int:
    """Return a port that is free now, for programs that must be given a number; our own bind first and publish then."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
