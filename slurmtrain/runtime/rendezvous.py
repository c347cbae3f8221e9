"""Rendezvous of the ranks: rank 0 binds a free port and publishes its address, the others read it and connect.

A port computed from the job id collides when two steps share a node and lies in the range from which the kernel hands
out ports; a host name taken from the node list need not resolve. A published address has neither problem. The file lies
in the attempt's directory, so no rank of an older incarnation can be met by mistake; a token proves it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from slurmtrain.errors import EnvironmentMismatchError, PreflightError, SlurmtrainError
from slurmtrain.runtime.addresses import (
    RendezvousError,
    address_of,
    bind_port,
    interface_towards,
    listening_address,
    machine,
)
from slurmtrain.runtime.shared_file_wait import Pauses, look
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import write_json
from slurmtrain.system.signals import StopDuringStartError

ADDRESS_FILE = "rendezvous.json"  # in the attempt's folder, or the rendezvous folder of ranks that were started by hand
LONGEST_PAUSE_S = 0.5  # between two questions to the store, which lives in rank 0 and is asked by all
GRACE_S = 10  # ranks leave after rank 0 did, so that they can repeat what it says; it waits no longer for them
CONNECT_S = 5  # a stranger on a port must not hold a rank for long
MISSING_HINT = "their logs say why; cluster.rendezvous_timeout_s is the limit"
RANKS_HINT = "start all ranks with one srun, torchrun or `submit`; unset RANK, WORLD_SIZE and SLURM_* of another job"
NETWORK_HINT = (
    "see rank 0's log; cluster.network_interface=NAME names the network that connects the nodes, "
    "cluster.port_range=LOW-HIGH the ports that a firewall between them lets through"
)


@dataclass(frozen=True)
class Rendezvous:
    """The store through which all ranks of this attempt can communicate.

    Attributes:
        store: the store, with keys of this attempt only.
        interface: the network interface that reaches the other ranks, or None if it is not known.
        address: host and port of the store, for further connections to it.
    """

    store: dist.Store
    interface: str | None
    address: tuple[str, int]


class _Connection(NamedTuple):
    """A connection to rank 0's store: its host and port, and the address by which it is reached; "" on rank 0 itself."""

    store: dist.Store
    address: tuple[str, int]
    via: str


def meet(
    environment: Environment,
    directory: Path,
    *,
    timeout_s: float,
    stop_requested: Callable[[], bool],
    interface: str = "auto",
    ports: range | None = None,
) -> Rendezvous:
    """Bring all ranks together.

    Args:
        directory: a directory that all ranks share and this attempt alone uses.
        timeout_s: seconds for which rank 0 waits for the last rank. The others wait as long as it does.
        stop_requested: polled while waiting.
        interface: name of the interface at which rank 0 should be reached, or "auto".
        ports: the ports on which rank 0 may wait; None: any.

    Raises:
        RendezvousError: none of the ports is free, or ranks are missing; the message says which, and on which nodes.
        EnvironmentMismatchError: two processes are the same rank, or ranks have been told different numbers of ranks.
        StopDuringStartError: a stop was requested before all ranks were there.
    """
    deadline = time.monotonic() + timeout_s
    if environment.source == "torchrun":
        found = _connect_to_launcher(environment, timeout_s)
    elif environment.rank == 0:
        found = _publish(environment, directory, interface, ports, timeout_s)
    else:
        found = _connect(environment, directory / ADDRESS_FILE, deadline, timeout_s, stop_requested)
    _take_place(found.store, environment, found.via)
    if environment.rank == 0:
        _gather_presence(found.store, environment, deadline, timeout_s, stop_requested)
    else:
        _await_word(found.store, environment, timeout_s, stop_requested)
    ours = _agree_on_interface(found.store, environment, found.via)
    return Rendezvous(dist.PrefixStore("ranks", found.store), ours, found.address)


# Rank 0's store.


def _publish(
    environment: Environment, directory: Path, interface: str, ports: range | None, timeout_s: float
) -> _Connection:
    """Open the store on rank 0, and publish where it is.

    Raises:
        RendezvousError: none of the ports is free.
    """
    listens, timeout = listening_address(environment, interface), timedelta(seconds=timeout_s)
    with bind_port(listens, ports, environment.node) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store's from now on
    # Given a port alone it would listen on every network of this node.
    store = dist.TCPStore(listens, port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    token = secrets.token_hex(8)
    store.set("token", token)
    address = {"host": listens, "port": store.port, "machine": machine(), "token": token}
    write_json(directory / ADDRESS_FILE, address)
    return _Connection(store, (store.host, store.port), "")


def _connect_to_launcher(environment: Environment, timeout_s: float) -> _Connection:
    """Connect to the store at MASTER_ADDR and MASTER_PORT, which a launcher has set.

    Raises:
        RendezvousError: it cannot be reached.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        store: dist.Store = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))[0]
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {environment.rank} on {environment.node} cannot reach rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT): "
            f"{str(error).splitlines()[0]}",
            hint="unset MASTER_ADDR, or let it name the node of rank 0 as all nodes resolve it; see rank 0's log",
        ) from None
    # torchrun restarts workers against the same store; without a prefix they would read the keys of the last ones.
    store = dist.PrefixStore(f"restart-{environment.restart_count}", store)
    return _Connection(store, (host, int(port or 0)), address_of(host))


def _connect(
    environment: Environment, path: Path, deadline: float, timeout_s: float, stop_requested: Callable[[], bool]
) -> _Connection:
    """Connect to the store that rank 0 publishes.

    Raises:
        RendezvousError: the time is over.
        StopDuringStartError: a stop was requested before.
    """
    pauses = Pauses.of_rank(environment)
    failed = ""
    while True:
        address = look(path)
        if address is not None:
            try:
                return _connect_to(address["host"], address["port"], address["token"], timeout_s)
            except (OSError, dist.DistError) as error:
                by = interface_towards(address["host"])
                failed = f"{address['host']}:{address['port']}{f' by {by}' if by else ''}: {str(error).splitlines()[0]}"
        if stop_requested():
            raise StopDuringStartError
        if time.monotonic() > deadline:
            rank_0 = f"rank 0, expected on node {environment.expected_node(0)},"
            if failed:
                raise RendezvousError(
                    f"rank {environment.rank} on {environment.node}: {rank_0} cannot be reached at {failed}",
                    hint=NETWORK_HINT,
                )
            raise RendezvousError(
                f"rank {environment.rank} on {environment.node}: {rank_0} did not publish its address within "
                f"{timeout_s:.0f} s",
                hint="see rank 0's log",
                because_of_peer=True,
            )
        pauses.pause()


def _connect_to(host: str, port: int, token: str, timeout_s: float) -> _Connection:
    """Connect to the store with this token at an address.

    Raises:
        OSError, dist.DistError: it is not there.
    """
    with socket.create_connection((host, port), timeout=CONNECT_S) as probe:
        via = str(probe.getpeername()[0])
    store = dist.TCPStore(host, port, None, False, timedelta(seconds=CONNECT_S))
    if not store.check(["token"]) or store.get("token").decode() != token:
        raise ConnectionError("somebody else answers there")
    store.set_timeout(timedelta(seconds=timeout_s))
    return _Connection(store, (store.host, store.port), via)


# Who is there. Rank 0 waits for all, and tells the others by one word how that has ended: "" is good.

STOP = "stop"  # rank 0's word when a rank was told to stop before all had met


def _take_place(store: dist.Store, environment: Environment, via: str) -> None:
    """Say that this rank is there.

    Raises:
        EnvironmentMismatchError: another process is the same rank.
    """
    process = f"{os.getpid()}-{secrets.token_hex(4)}"
    place = {"machine": machine(), "via": via, "node": environment.node, "process": process}
    there = json.loads(store.compare_set(f"here/{environment.rank}", "", json.dumps(place)))
    if there != place:
        raise _wrong(store, f"rank {environment.rank} is there twice, on {there.get('node')} and on {environment.node}")


def _wrong(store: dist.Store, sentence: str) -> EnvironmentMismatchError:
    """Leave word for rank 0 of what is wrong with the numbers of the ranks, and return it as an error."""
    store.set("wrong", sentence)
    return EnvironmentMismatchError(f"preflight, ranks: {sentence}", hint=RANKS_HINT)


def _gather_presence(
    store: dist.Store,
    environment: Environment,
    deadline: float,
    timeout_s: float,
    stop_requested: Callable[[], bool],
) -> None:
    """Wait on rank 0 until every rank is there, and tell the others.

    Raises:
        EnvironmentMismatchError, RendezvousError, StopDuringStartError: as `meet`.
    """
    store.set("world_size", str(environment.world_size))
    ranks = range(environment.world_size)
    pauses = Pauses(LONGEST_PAUSE_S)
    while not store.check([f"here/{rank}" for rank in ranks]):
        missing = [rank for rank in ranks if not store.check([f"here/{rank}"])]
        error: SlurmtrainError | StopDuringStartError | None = None
        if stop_requested() or store.check(["told to stop"]):
            error = StopDuringStartError()
        elif store.check(["wrong"]):
            sentence = f"preflight, ranks: {store.get('wrong').decode()}"
            error = EnvironmentMismatchError(sentence, hint=RANKS_HINT)
        elif time.monotonic() > deadline:
            shown = ", ".join(f"{rank} (on {environment.expected_node(rank)})" for rank in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            error = RendezvousError(
                f"{len(missing)} of {environment.world_size} ranks did not arrive within {timeout_s:.0f} s: rank {shown}{more}",
                hint=MISSING_HINT,
                because_of_peer=True,
            )
        if error is not None:
            _tell_and_linger(store, error, present=[rank for rank in ranks if rank not in missing])
            raise error
        # store.wait would be the event, but cannot be interrupted by a stop and writes a warning at every timeout.
        pauses.pause()
    store.set("everybody", "")


def _tell_and_linger(store: dist.Store, error: Exception, *, present: list[int]) -> None:
    """Publish why rank 0 leaves, and give the ranks that are there time to read it, since the store ends with this process.

    srun ends with the largest exit code of all ranks, so a 78 among them would end a run that is worth another start: all leave
    by the same one.
    """
    word = STOP
    if isinstance(error, SlurmtrainError):
        word = json.dumps([isinstance(error, EnvironmentMismatchError), error.message])
    store.set("everybody", word)
    enough = time.monotonic() + GRACE_S
    heard = [f"heard/{rank}" for rank in present if rank != 0]
    pauses = Pauses(LONGEST_PAUSE_S)
    while heard and not store.check(heard) and time.monotonic() < enough:
        pauses.pause()


def _await_word(
    store: dist.Store, environment: Environment, timeout_s: float, stop_requested: Callable[[], bool]
) -> None:
    """Wait for rank 0's word that all ranks are there, or why not.

    Rank 0 alone knows how long it is worth while: the ranks start at different times, minutes apart where a node has to fetch
    an image first. It has published its address before this rank came, so its time is over before this rank's is.

    A rank that is told to stop passes that on instead of exiting: if it were gone when rank 0 has just counted it, the
    others would wait for it in their first collective.

    Raises:
        EnvironmentMismatchError, RendezvousError, StopDuringStartError: as `meet`.
    """
    pauses, deadline = Pauses(LONGEST_PAUSE_S), time.monotonic() + timeout_s + GRACE_S
    rank_0, own = f"rank 0 on {environment.expected_node(0)}", f"rank {environment.rank} on {environment.node}"
    try:
        while not store.check(["everybody"]):
            if stop_requested():
                store.set("told to stop", "")
            _check_size(store, environment, own)
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{own} has not heard from {rank_0} for {timeout_s + GRACE_S:.0f} s",
                    hint=MISSING_HINT,
                    because_of_peer=True,
                )
            pauses.pause()
        word = store.get("everybody").decode()
        try:
            _check_size(store, environment, own)
        finally:  # the last that this rank wants of the store: rank 0 may leave then, and the store with it
            store.set(f"heard/{environment.rank}", "")
    except dist.DistError:  # the store lives in rank 0
        if stop_requested():
            raise StopDuringStartError from None
        raise RendezvousError(
            f"{rank_0} exited before all ranks had connected", hint="see rank 0's log", because_of_peer=True
        ) from None
    if word == STOP:
        raise StopDuringStartError
    if word:
        no_retry, sentence = json.loads(word)
        if no_retry:
            raise PreflightError(sentence, hint=RANKS_HINT, told_all=True)
        raise RendezvousError(sentence, hint="see rank 0's log", because_of_peer=True)


def _check_size(store: dist.Store, environment: Environment, own: str) -> None:
    """Raise EnvironmentMismatchError if this rank and rank 0 were told different numbers of ranks."""
    size = int(store.get("world_size")) if store.check(["world_size"]) else environment.world_size
    if size != environment.world_size:
        raise _wrong(
            store, f"{own} was told that the job has {environment.world_size} ranks, and rank 0 that it has {size}"
        )


def _agree_on_interface(store: dist.Store, environment: Environment, via: str) -> str | None:
    """Return the network interface by which this rank reaches the others, and they reach it.

    A rank on rank 0's machine has reached it through the loopback, which no other machine can use. So rank 0 finds out
    through which of its addresses the others came, and the ranks beside it use the same interface.
    """
    if environment.rank == 0:
        known = [json.loads(store.get(f"here/{rank}")) for rank in range(environment.world_size)]
        strangers = [rank["via"] for rank in known if rank["machine"] != machine()]
        own = interface_towards(strangers[0]) if strangers else "lo"
        store.set("interface", json.dumps({"machine": machine(), "name": own, "everywhere": not strangers}))
    found = json.loads(store.get("interface"))  # waits until rank 0 has said so
    if found["everywhere"] or found["machine"] == machine():
        name: str | None = found["name"]
        return name
    return interface_towards(via)
