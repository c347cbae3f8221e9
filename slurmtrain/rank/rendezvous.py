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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.rank.addresses import (
    Pauses,
    RendezvousError,
    address_of,
    await_rank_0,
    bind_port,
    interface_towards,
    listening_address,
    machine,
)
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import write_json
from slurmtrain.system.signals import StopDuringStartError

ADDRESS_FILE = "rendezvous.json"  # in the attempt's folder, or the rendezvous folder of ranks that were started by hand
LONGEST_PAUSE_S = 0.5  # between two questions to the store, which lives in rank 0 and is asked by all
GRACE_S = 10  # ranks leave after rank 0 did, so that they can repeat what it says; it waits no longer for them
CONNECT_S = 5  # a stranger on a port must not hold a rank for long
MISSING_HINT = "their logs say why; cluster.rendezvous_timeout_s is the limit"
RANKS_HINT = "start all ranks with one srun, torchrun or `submit`; unset RANK, WORLD_SIZE and SLURM_* of another job"


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


class _Word(NamedTuple):
    """How rank 0's wait for all has ended, as it tells the others.

    Attributes:
        ending: MET, STOP, MISSING or WRONG; the last two with a sentence.
        world_size: the number of ranks that rank 0 was told.
        machine, interface: rank 0's machine, and the interface by which it is reached from there; None if it is not known.
    """

    ending: str
    sentence: str = ""
    world_size: int = 0
    machine: str = ""
    interface: str | None = None


MET, STOP, MISSING, WRONG = "met", "stop", "missing", "wrong"


def meet(
    environment: Environment, directory: Path, cluster: ClusterConfig, stop_requested: Callable[[], bool]
) -> Rendezvous:
    """Bring all ranks together: each says that it is there, rank 0 waits for all, and tells the others how that has ended.

    Args:
        directory: a directory that all ranks share and this attempt alone uses.
        cluster: says where rank 0 listens, and for how long it waits for the last rank. The others wait as long as it does.
        stop_requested: polled while waiting.

    Raises:
        RendezvousError: none of the ports is free, or ranks are missing; the message says which, and on which nodes.
        EnvironmentMismatchError: two processes are the same rank, or ranks have been told different numbers of ranks.
        StopDuringStartError: a stop was requested before all ranks were there.
    """
    timeout_s = cluster.rendezvous_timeout_s
    if environment.source == "torchrun":
        found = _connect_to_launcher(environment, timeout_s)
    elif environment.rank == 0:
        found = _publish(environment, directory, cluster)
    else:
        connect = partial(_connect_to, timeout_s=timeout_s)
        found = await_rank_0(directory / ADDRESS_FILE, environment, timeout_s, stop_requested, connect)
    store, rank = found.store, environment.rank
    place = {
        "machine": machine(),
        "via": found.via,
        "node": environment.node,
        "process": f"{os.getpid()}-{secrets.token_hex(4)}",
        "world_size": environment.world_size,
    }
    there = json.loads(store.compare_set(f"here/{rank}", "", json.dumps(place)))
    if there != place:
        sentence = f"rank {rank} is there twice, on {there.get('node')} and on {environment.node}"
        store.set(WRONG, sentence)
        raise _wrong(sentence)
    if rank == 0:
        word = _gather(store, environment, timeout_s, stop_requested)
    else:
        word = _await_word(store, environment, timeout_s, stop_requested)
    if word.ending == STOP:
        raise StopDuringStartError
    if word.ending == MISSING:
        raise RendezvousError(word.sentence, hint=MISSING_HINT, because_of_peer=True)
    if word.ending == WRONG and rank == 0:
        raise _wrong(word.sentence)
    if word.ending == WRONG:
        raise EnvironmentMismatchError(_wrong(word.sentence).message, hint=RANKS_HINT, told_all=True)
    if word.world_size != environment.world_size:  # this rank is none of those for which rank 0 has waited
        raise _wrong(_other_size(rank, place, word.world_size))
    # A rank on rank 0's machine has reached it through the loopback, which no other machine can use.
    interface = word.interface if word.machine == machine() else interface_towards(found.via)
    return Rendezvous(dist.PrefixStore("ranks", store), interface, found.address)


def _wrong(sentence: str) -> EnvironmentMismatchError:
    return EnvironmentMismatchError(f"preflight, ranks: {sentence}", hint=RANKS_HINT)


def _other_size(rank: int, place: dict[str, Any], size: int) -> str:
    told = f"rank {rank} on {place['node']} was told that the job has {place['world_size']} ranks"
    return f"{told}, and rank 0 that it has {size}"


# Rank 0's store.


def _publish(environment: Environment, directory: Path, cluster: ClusterConfig) -> _Connection:
    """Open the store on rank 0, and publish where it is.

    Raises:
        RendezvousError: none of the ports is free.
    """
    listens = listening_address(environment, cluster.network_interface)
    timeout = timedelta(seconds=cluster.rendezvous_timeout_s)
    with bind_port(listens, cluster.ports, environment.node) as listener:
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


def _connect_to(address: dict[str, Any], timeout_s: float) -> _Connection:
    """Connect to the store at the address that rank 0 has published.

    Raises:
        OSError: it is not there.
    """
    host, port = address["host"], address["port"]
    with socket.create_connection((host, port), timeout=CONNECT_S) as probe:
        via = str(probe.getpeername()[0])
    try:
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=CONNECT_S))
        ours = store.check(["token"]) and store.get("token").decode() == address["token"]
    except dist.DistError as error:
        raise ConnectionError(str(error)) from None
    if not ours:
        raise ConnectionError("somebody else answers there")
    store.set_timeout(timedelta(seconds=timeout_s))
    return _Connection(store, (store.host, store.port), via)


# Who is there.


def _gather(store: dist.Store, environment: Environment, timeout_s: float, stop_requested: Callable[[], bool]) -> _Word:
    """Wait on rank 0 until every rank is there, or is not going to be; tell the others, and return that.

    All leave by the same error: srun ends with the largest exit code of all ranks, so a 78 among them would end a run that is
    worth another start.
    """
    size, pauses, deadline = environment.world_size, Pauses(LONGEST_PAUSE_S), time.monotonic() + timeout_s
    places: dict[int, dict[str, Any]] = {}
    while True:
        for rank in [rank for rank in range(size) if rank not in places and store.check([f"here/{rank}"])]:
            places[rank] = json.loads(store.get(f"here/{rank}"))
        other = next((rank for rank, place in places.items() if place["world_size"] != size), None)
        if stop_requested() or store.check(["told to stop"]):
            word = _Word(STOP)
        elif other is not None:
            word = _Word(WRONG, _other_size(other, places[other], size))
        elif store.check([WRONG]):
            word = _Word(WRONG, store.get(WRONG).decode())
        elif len(places) == size:
            strangers = [place["via"] for place in places.values() if place["machine"] != machine()]
            own = interface_towards(strangers[0]) if strangers else "lo"
            word = _Word(MET, "", size, machine(), own)
        elif time.monotonic() > deadline:
            missing = [rank for rank in range(size) if rank not in places]
            shown = ", ".join(f"{rank} (on {environment.expected_node(rank)})" for rank in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            said = f"{len(missing)} of {size} ranks did not arrive within {timeout_s:.0f} s: rank {shown}{more}"
            word = _Word(MISSING, said)
        else:
            # store.wait would be the event, but cannot be interrupted by a stop and writes a warning at every timeout.
            pauses.pause()
            continue
        break
    store.set("everybody", json.dumps(word))
    heard = [f"heard/{rank}" for rank in places if rank != 0]
    # The store ends with this process, and the others have to read why it leaves.
    enough, pauses = time.monotonic() + GRACE_S, Pauses(LONGEST_PAUSE_S)
    while word.ending != MET and heard and not store.check(heard) and time.monotonic() < enough:
        pauses.pause()
    return word


def _await_word(
    store: dist.Store, environment: Environment, timeout_s: float, stop_requested: Callable[[], bool]
) -> _Word:
    """Wait for rank 0's word that all ranks are there, or why not.

    Rank 0 alone knows how long it is worth while: the ranks start at different times, minutes apart where a node has to fetch
    an image first. It has published its address before this rank came, so its time is over before this rank's is.

    A rank that is told to stop passes that on instead of exiting: if it were gone when rank 0 has just counted it, the
    others would wait for it in their first collective.

    Raises:
        RendezvousError, StopDuringStartError: as `meet`.
    """
    pauses, deadline = Pauses(LONGEST_PAUSE_S), time.monotonic() + timeout_s + GRACE_S
    rank_0, own = f"rank 0 on {environment.expected_node(0)}", f"rank {environment.rank} on {environment.node}"
    try:
        while not store.check(["everybody"]):
            if stop_requested():
                store.set("told to stop", "")
            if time.monotonic() > deadline:
                said = f"{own} has not heard from {rank_0} for {timeout_s + GRACE_S:.0f} s"
                raise RendezvousError(said, hint=MISSING_HINT, because_of_peer=True)
            pauses.pause()
        word = _Word(*json.loads(store.get("everybody")))
        store.set(f"heard/{environment.rank}", "")  # rank 0 may leave now, and the store with it
        return word
    except dist.DistError:  # the store lives in rank 0
        if stop_requested():
            raise StopDuringStartError from None
        said = f"{rank_0} exited before all ranks had connected"
        raise RendezvousError(said, hint="see rank 0's log", because_of_peer=True) from None
