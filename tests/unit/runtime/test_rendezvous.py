"""How long ranks wait for each other: rank 0 decides, by its own clock, and the others wait as long as it gets on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from slurmtrain.choices import FindingKind
from slurmtrain.errors import RendezvousError
from slurmtrain.runtime.leaving import failure_of
from slurmtrain.runtime.preflight.findings import Fault, Finding
from slurmtrain.runtime.preflight.reachability import error_of_reports
from slurmtrain.runtime.rendezvous import _await_word, _gather_presence
from slurmtrain.runtime.shared_file_wait import Pauses
from slurmtrain.runtime.told_error import error_of_word, word_of
from slurmtrain.slurm.environment import Environment

LIMIT_S = 300.0


class Clock:
    """A clock that only pauses move on, and what happens at which time."""

    def __init__(self, store: dist.Store, events: dict[float, tuple[str, str]], rank_0_looks_until: float = 0.0):
        self.now, self._store, self._events, self._looks_until = 0.0, store, dict(events), rank_0_looks_until

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now <= self._looks_until:
            self._store.set("looks", str(self.now))
        for at in [at for at in self._events if at <= self.now]:
            self._store.set(*self._events.pop(at))

    @property
    def pauses(self) -> Pauses:
        return Pauses(0.5, self.sleep)


def of_rank(rank: int) -> Environment:
    nodes = ("n0", "n1", "n2")
    return Environment("slurm", rank=rank, world_size=3, node_rank=rank, nodes=nodes, tasks_per_node=(1, 1, 1))


def new_store() -> dist.Store:
    store: dist.Store = dist.HashStore()
    store.set("world_size", "3")
    return store


def wait(store: dist.Store, clock: Clock) -> None:
    _await_word(store, of_rank(1), LIMIT_S, lambda: False, clock=clock.read, pauses=clock.pauses)


def test_a_rank_waits_as_long_as_rank_0_although_it_has_come_long_before_it() -> None:
    """Rank 0 began 200 s late, and so its own limit ends at 500 s; the last rank comes at 400 s."""
    store = new_store()
    clock = Clock(store, {400.0: ("everybody", "")}, rank_0_looks_until=400.0)
    wait(store, clock)
    assert clock.now >= 400.0 and store.check(["heard/1"])


@pytest.mark.parametrize(("looks_until", "did"), [(0.0, "did not come"), (100.0, "did not get on")])
def test_a_rank_gives_up_when_rank_0_does_not_get_on_and_leaves_word_for_it(looks_until: float, did: str) -> None:
    store = new_store()
    clock = Clock(store, {}, rank_0_looks_until=looks_until)
    with pytest.raises(RendezvousError, match=f"rank 0 on n0 {did}.* for 3[12][0-9] s"):
        wait(store, clock)
    assert LIMIT_S + looks_until < clock.now < LIMIT_S + looks_until + 20
    # Rank 0 was only held up. It must not begin with a rank that has left.
    store.set("here/2", "{}")
    store.set("here/0", "{}")
    for rank in range(3):
        store.set(f"heard/{rank}", "")
    clock = Clock(store, {})
    told: dict[str, Any] = {"clock": clock.read, "pauses": clock.pauses}
    with pytest.raises(RendezvousError, match="rank 1 on n1 has left: rank 0 on n0 did not"):
        _gather_presence(store, of_rank(0), LIMIT_S, LIMIT_S, lambda: False, None, **told)
    with pytest.raises(RendezvousError, match="rank 1 on n1 has left"):  # as all the others are told
        wait(store, Clock(store, {}))


NOBODYS = Finding(FindingKind.BLOCKED_PORT, ("n1",), "cannot reach rank 0", "it can", True, Fault.CONFIG)


OF_TWO, OF_A_NODE = replace(NOBODYS, nodes=("n1", "n2")), replace(NOBODYS, fault=Fault.NODE)


@pytest.mark.parametrize(("findings", "nodes"), [([NOBODYS], ()), ([OF_TWO], ()), ([OF_A_NODE], ("n1",))])
def test_all_ranks_leave_with_the_exit_code_of_rank_0_and_nobodys_node_is_blamed_but_by_it(
    findings: list[Finding], nodes: tuple[str, ...]
) -> None:
    """One 78 among them would end a run that is to be tried again."""
    error = error_of_reports(findings)
    assert error is not None
    first, other = failure_of(error, 0), failure_of(error_of_word(word_of(error)), 1)
    assert (other.exit_code, other.sentence) == (first.exit_code, first.sentence)
    assert first.exit_code == (1 if findings == [NOBODYS] else 78)
    assert (first.bad_nodes, other.bad_nodes) == (nodes, ())
    assert other.because_of_peer and first.because_of_peer == (first.exit_code == 1)
