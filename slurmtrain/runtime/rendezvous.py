"""Rendezvous of the ranks: rank 0 binds a free port and publishes its address, the others read it and connect.

A port computed from the job id collides when two steps share a node and lies in the range from which the kernel hands
out ports; a host name taken from the node list need not resolve. A published address has neither problem. The file lies
in the attempt's directory, so no rank of an older incarnation can be met by mistake; a token proves it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from slurmtrain.errors import EnvironmentMismatchError, RendezvousError, SlurmtrainError
from slurmtrain.runtime.addresses import address_of, bind_port, interface_towards, listening_address, machine
from slurmtrain.runtime.preflight import reachability
from slurmtrain.runtime.preflight.reachability import Answer
from slurmtrain.runtime.shared_file_wait import Pauses, Published
from slurmtrain.runtime.told_error import error_of_word, word_of
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.signals import StopDuringStartError

ADDRESS_FILE = "rendezvous.json"  # in the attempt's folder, or the rendezvous folder of ranks that were started by hand
LONGEST_PAUSE_S = 0.5  # between two questions to the store, which lives in rank 0 and is asked by all
GRACE_S = 10  # ranks leave after rank 0 did, so that they can repeat what it says; it waits no longer for them
CONNECT_S = 5  # a stranger on a port must not hold a rank for long
REPORT_AFTER_S = 10.0  # without a connection, before a node tells rank 0 so by the folder that they share
LOOK_FOR_REPORTS_S = 5.0
LOOK_AT_RANK_0_S = 5.0  # all ranks ask the store, which lives in one process
REPORTED_S = 20.0  # that every missing node must have reported for, before rank 0 waits no longer
STOP = "stop"  # rank 0's word when a rank was told to stop before all had met
PREFLIGHT = "preflight, "  # how a sentence begins about what a node, or the config, is at fault for
MISSING_HINT = "their logs say why; cluster.rendezvous_timeout_s is the limit"


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
        PreflightError: nodes cannot reach rank 0, and it is known whose fault that is.
        EnvironmentMismatchError: two processes are the same rank, or ranks have been told different numbers of ranks.
        StopDuringStartError: a stop was requested before all ranks were there.
    """
    deadline = time.monotonic() + timeout_s
    published = Published(directory / ADDRESS_FILE, environment)
    missing: _Missing | None = None
    try:
        if environment.source == "torchrun":
            found = _connect_to_launcher(environment, timeout_s)
        elif environment.rank == 0:
            found = _publish(environment, directory, interface, ports, timeout_s)
            missing = _Missing(directory, environment)
            if environment.local_world_size > 1:
                published.look()  # hands it on to the ranks beside this one
        else:
            found = _connect(environment, directory, published, deadline, timeout_s, stop_requested)
        _take_place(found.store, environment, found.via)
        if environment.rank == 0:
            _gather_presence(found.store, environment, deadline, timeout_s, stop_requested, missing)
        else:
            _await_word(found.store, environment, timeout_s, stop_requested)
    finally:
        published.forget()
    ours = _agree_on_interface(found.store, environment, found.via)
    return Rendezvous(dist.PrefixStore("ranks", found.store), ours, found.address)


class _Connection(NamedTuple):
    """A connection to rank 0's store: its host and port, and the address by which it is reached; "" on rank 0 itself."""

    store: dist.Store
    address: tuple[str, int]
    via: str


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
    address = {"hosts": [listens], "here": listens, "port": store.port, "machine": machine(), "token": token}
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
        answer = reachability.knock(host, int(port)) if host and port.isdigit() else Answer.CONNECTED
        if answer is Answer.CONNECTED:  # it answers now, or the variables are not there, which torch says itself
            raise RendezvousError(str(error).splitlines()[0], hint="see rank 0's log") from None
        found = reachability.look_into(environment.node, environment.rank, host, int(port), answer)
        kind = reachability.kind_of(found, rank_0_waits=False)
        raise RendezvousError(
            f"preflight, {kind}: rank {environment.rank} on {environment.node} {found.sentence} (MASTER_ADDR, MASTER_PORT)",
            hint=reachability.advice(kind, environment.node),
        ) from None
    # torchrun restarts workers against the same store; without a prefix they would read the keys of the last ones.
    store = dist.PrefixStore(f"restart-{environment.restart_count}", store)
    return _Connection(store, (host, int(port or 0)), address_of(host))


def _connect(
    environment: Environment,
    directory: Path,
    published: Published,
    deadline: float,
    timeout_s: float,
    stop_requested: Callable[[], bool],
) -> _Connection:
    """Connect to the store that rank 0 publishes, and tell rank 0 by the shared folder if that does not work.

    Raises:
        RendezvousError: the time is over.
        StopDuringStartError: a stop was requested before.
    """
    pauses = Pauses()
    failures: dict[str, _NoStoreError] = {}
    first_failed: float | None = None
    reported: reachability.Unreachable | None = None
    while True:
        address = published.look()
        if address is not None:
            for host in [address.get("here", "127.0.0.1")] if address["machine"] == machine() else address["hosts"]:
                try:
                    return _connect_to(host, address["port"], address["token"], timeout_s)
                except _NoStoreError as error:
                    failures[host] = error
                now = time.monotonic()
                first_failed = now if first_failed is None else first_failed
                if reported is None and (now - first_failed >= min(REPORT_AFTER_S, timeout_s / 3) or now > deadline):
                    answer = failures[host].answer
                    reported = reachability.look_into(environment.node, environment.rank, host, address["port"], answer)
                    if environment.local_rank == 0:
                        with contextlib.suppress(OSError):
                            reachability.report(directory, environment.node_rank, reported)
        if stop_requested():
            raise StopDuringStartError
        # What a node has reported is for rank 0 to judge, which knows of the others.
        if time.monotonic() > deadline + (GRACE_S if reported is not None else 0):
            raise _not_connected(environment, failures, reported, timeout_s)
        pauses.pause()


class _NoStoreError(Exception):
    """Rank 0's store is not to be had at an address: what is wrong there, and how the connection has ended."""

    def __init__(self, why: str, answer: Answer):
        super().__init__(why)
        self.answer = answer


def _connect_to(host: str, port: int, token: str, timeout_s: float) -> _Connection:
    """Connect to the store with this token at an address.

    Raises:
        _NoStoreError: it is not there.
    """
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as probe:
            via = str(probe.getpeername()[0])
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=CONNECT_S))
        ours = store.check(["token"]) and store.get("token").decode() == token
    except (OSError, dist.DistError) as error:
        answer = reachability.answer_of(error) if isinstance(error, OSError) else Answer.STRANGER
        raise _NoStoreError(str(error).splitlines()[0], answer) from None
    if not ours:
        raise _NoStoreError("somebody else answers there", Answer.STRANGER)
    store.set_timeout(timedelta(seconds=timeout_s))
    return _Connection(store, (store.host, store.port), via)


def _not_connected(
    environment: Environment,
    failures: Mapping[str, _NoStoreError],
    reported: reachability.Unreachable | None,
    timeout_s: float,
) -> RendezvousError:
    """Return the error of a rank that has not found rank 0's store in time."""
    rank = f"rank {environment.rank} on {environment.node}: rank 0, expected on node {environment.expected_node(0)},"
    if not failures:
        return RendezvousError(
            f"{rank} did not publish its address within {timeout_s:.0f} s",
            hint="see rank 0's log",
            because_of_peer=True,
        )
    by = f" by {reported.interface}" if reported is not None and reported.interface else ""
    tried = "; ".join(f"{host}: {why}" for host, why in failures.items())
    return RendezvousError(
        f"{rank} cannot be reached{by} ({tried})",
        hint="see rank 0's log; cluster.network_interface names the network to use",
    )


def _gather_presence(
    store: dist.Store,
    environment: Environment,
    deadline: float,
    timeout_s: float,
    stop_requested: Callable[[], bool],
    absent: _Missing | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    pauses: Pauses | None = None,
) -> None:
    """Wait on rank 0 until every rank is there, and tell the others."""
    store.set("world_size", str(environment.world_size))
    ranks = range(environment.world_size)
    pauses = pauses or Pauses(LONGEST_PAUSE_S)
    looks = 0
    error: SlurmtrainError | None
    while True:
        store.set("looks", str(looks := looks + 1))  # by which the others see that this rank gets on
        missing = (
            [] if store.check([f"here/{r}" for r in ranks]) else [r for r in ranks if not store.check([f"here/{r}"])]
        )
        if store.check(["gave up"]):  # one that was counted is gone
            error = RendezvousError(store.get("gave up").decode(), hint=MISSING_HINT, because_of_peer=True)
            _tell_and_linger(store, word_of(error), present=[r for r in ranks if r not in missing])
            raise error
        if not missing:
            store.set("everybody", "")
            break
        if stop_requested() or store.check(["told to stop"]):
            _tell_and_linger(store, STOP, present=[r for r in ranks if r not in missing])
            raise StopDuringStartError
        if store.check(["wrong"]):
            error = EnvironmentMismatchError(f"{PREFLIGHT}{store.get('wrong').decode()}", hint=RANKS_HINT)
            _tell_and_linger(store, word_of(error), present=[r for r in ranks if r not in missing])
            raise error
        late = clock() > deadline
        error = absent.error(missing, late=late) if absent is not None else None
        if late and error is None:
            error = RendezvousError(
                _who_is_missing(missing, environment, timeout_s), hint=MISSING_HINT, because_of_peer=True
            )
        if error is not None:
            _tell_and_linger(store, word_of(error), present=[r for r in ranks if r not in missing])
            raise error
        # store.wait would be the event, but cannot be interrupted by a stop and writes a warning at every timeout.
        pauses.pause()


RANKS_HINT = "start all ranks with one srun, torchrun or `submit`; unset RANK, WORLD_SIZE and SLURM_* of another job"


def _take_place(store: dist.Store, environment: Environment, via: str) -> None:
    """Say that this rank is there.

    Raises:
        EnvironmentMismatchError: another process is the same rank.
    """
    place = {
        "machine": machine(),
        "via": via,
        "node": environment.node,
        "process": f"{os.getpid()}-{secrets.token_hex(4)}",
    }
    mine = json.dumps(place)
    there = store.compare_set(f"here/{environment.rank}", "", mine).decode()
    if there == mine:
        return
    other = json.loads(there).get("node", "another node")
    word = f"ranks: rank {environment.rank} is there twice, on {other} and on {environment.node}"
    store.set("wrong", word)
    raise EnvironmentMismatchError(f"{PREFLIGHT}{word}", hint=RANKS_HINT)


class _Missing:
    """Finds out on rank 0 why ranks do not come, from what their nodes have reported in the folder that all share."""

    def __init__(self, directory: Path, environment: Environment):
        self._directory, self._environment = directory, environment
        self._looked = time.monotonic()
        self._complete_since: float | None = None
        self._published = read_json(directory / ADDRESS_FILE)

    def error(self, missing: list[int], *, late: bool) -> SlurmtrainError | None:
        """Return why no rank of `missing` will come; None while some may, or if nothing is known.

        Args:
            late: the time for them is over.
        """
        now = time.monotonic()
        if not late and now < self._looked + LOOK_FOR_REPORTS_S:
            return None
        self._looked, environment = now, self._environment
        published = read_json(self._directory / ADDRESS_FILE)
        if published is not None and self._published is not None and published["token"] != self._published["token"]:
            word = "ranks: another process is rank 0, too, and has published its own address"
            return EnvironmentMismatchError(f"{PREFLIGHT}{word}", hint=RANKS_HINT)
        found = reachability.reports(self._directory)
        nodes = {environment.expected_node(rank) for rank in missing}
        complete = nodes <= {each.node for each in found}
        self._complete_since = (self._complete_since or now) if complete else None
        if not late and (self._complete_since is None or now - self._complete_since < REPORTED_S):
            return None
        reached = {node for node in environment.nodes if node not in nodes}
        first = environment.node
        order = (first, *(node for node in environment.nodes if node != first))
        return reachability.error_of_reports(
            reachability.diagnose([each for each in found if each.node in nodes], reached, nodes=order)
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


def _await_word(
    store: dist.Store,
    environment: Environment,
    timeout_s: float,
    stop_requested: Callable[[], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
    pauses: Pauses | None = None,
) -> None:
    """Wait for rank 0's word that all ranks are there, or why not.

    Rank 0 alone knows how long it is worth while: the ranks start at different times, minutes apart where a node has to fetch
    an image first. So a rank gives up only if rank 0 itself does not get on for `timeout_s` seconds, and leaves word of that.

    A rank that is told to stop passes that on instead of exiting: if it were gone when rank 0 has just counted it, the
    others would wait for it in their first collective.
    """
    pauses = pauses or Pauses(LONGEST_PAUSE_S)
    looks, looked_at = None, clock()
    look_again = looked_at
    try:
        while not store.check(["everybody"]):
            if stop_requested():
                store.set("told to stop", "")
            if store.check(["world_size"]) and int(store.get("world_size").decode()) != environment.world_size:
                store.set("wrong", _other_size(environment, int(store.get("world_size").decode())))
            if clock() >= look_again:
                found, look_again = (store.get("looks") if store.check(["looks"]) else None), clock() + LOOK_AT_RANK_0_S
                if found != looks:
                    looks, looked_at = found, clock()
            if clock() > looked_at + timeout_s + GRACE_S:
                did = "did not come" if looks is None else "did not get on while it waited for the others"
                word = f"rank 0 on {environment.expected_node(0)} {did} for {clock() - looked_at:.0f} s"
                store.set("gave up", f"rank {environment.rank} on {environment.node} has left: {word}")
                raise RendezvousError(word, hint=MISSING_HINT, because_of_peer=True)
            pauses.pause()
        word = store.get("everybody").decode()
        store.set(f"heard/{environment.rank}", "")
        size = int(store.get("world_size").decode()) if word == "" else environment.world_size
    except dist.DistError:  # the store lives in rank 0
        if stop_requested():
            raise StopDuringStartError from None
        raise RendezvousError(
            f"rank 0 on {environment.expected_node(0)} exited before all ranks had connected",
            hint="see rank 0's log",
            because_of_peer=True,
        ) from None
    if word == STOP:
        raise StopDuringStartError
    if size != environment.world_size:
        raise EnvironmentMismatchError(f"{PREFLIGHT}{_other_size(environment, size)}", hint=RANKS_HINT)
    if word:
        raise error_of_word(word)


def _other_size(environment: Environment, size: int) -> str:
    return (
        f"ranks: rank {environment.rank} on {environment.node} was told that the job has {environment.world_size} ranks, and "
        f"rank 0 that it has {size}"
    )


def _tell_and_linger(store: dist.Store, word: str, *, present: list[int]) -> None:
    """Publish rank 0's word, and give the ranks that are there time to read it, since the store ends with this process."""
    store.set("everybody", word)
    enough = time.monotonic() + GRACE_S
    heard = [f"heard/{rank}" for rank in present if rank != 0]
    pauses = Pauses(LONGEST_PAUSE_S)
    while heard and not store.check(heard) and time.monotonic() < enough:
        pauses.pause()


def _who_is_missing(missing: list[int], environment: Environment, timeout_s: float) -> str:
    shown = ", ".join(f"{rank} (on {environment.expected_node(rank)})" for rank in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return (
        f"{len(missing)} of {environment.world_size} ranks did not arrive within {timeout_s:.0f} s: rank {shown}{more}"
    )
