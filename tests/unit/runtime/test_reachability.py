"""Why ranks could not meet: the node, the address, the interface, and whose fault it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmtrain.choices import FindingKind
from slurmtrain.errors import PreflightError, RendezvousError
from slurmtrain.runtime.preflight.findings import Fault
from slurmtrain.runtime.preflight.peer_ports import Unreached
from slurmtrain.runtime.preflight.peer_ports import error_of as error_of_ports
from slurmtrain.runtime.preflight.reachability import Answer, Unreachable, diagnose, error_of_reports, kind_of

NODES = ("n0", "n1", "n2", "n3")
LOST = Unreachable("n3", 12, "10.0.0.5", 41233, Answer.TIMED_OUT, "eth1", host_answers=False)


def test_a_node_that_alone_cannot_reach_rank_0_is_at_fault_and_left_out() -> None:
    (found,) = diagnose([LOST], {"n1", "n2"}, nodes=NODES)
    assert (found.kind, found.nodes, found.fault) == (FindingKind.INTERFACE, ("n3",), Fault.NODE)
    assert found.sentence == (
        "n3: cannot reach rank 0 at 10.0.0.5:41233 by eth1: timed out; expected: it can, as n1, n2"
    )
    error = error_of_reports([found])
    assert isinstance(error, PreflightError) and error.nodes == ("n3",)


def test_where_no_node_reaches_rank_0_the_config_is_at_fault_and_the_run_ends() -> None:
    found = diagnose([replace(LOST, node=node) for node in NODES[1:]], (), nodes=NODES)
    assert [(each.nodes, each.fault) for each in found] == [(("n1", "n2", "n3"), Fault.CONFIG)]
    error = error_of_reports(found)
    assert isinstance(error, PreflightError) and (error.nodes, error.exit_code) == ((), 78)


def test_between_two_nodes_nobody_is_blamed_and_the_run_is_tried_again() -> None:
    error = error_of_reports(diagnose([replace(LOST, node="n1")], (), nodes=NODES[:2]))
    assert isinstance(error, RendezvousError) and error.exit_code == 1
    assert "n1: cannot reach rank 0 at 10.0.0.5:41233 by eth1: timed out" in error.message


@pytest.mark.parametrize(
    ("answer", "host_answers", "rank_0_waits", "kind"),
    [
        (Answer.TIMED_OUT, True, True, FindingKind.BLOCKED_PORT),
        (Answer.NO_ROUTE, True, True, FindingKind.BLOCKED_PORT),  # how firewalld rejects
        (Answer.REFUSED, None, True, FindingKind.BLOCKED_PORT),
        (Answer.REFUSED, None, False, FindingKind.MASTER_ADDRESS),
        (Answer.TIMED_OUT, False, True, FindingKind.INTERFACE),
        (Answer.NO_ROUTE, False, True, FindingKind.INTERFACE),
        (Answer.UNRESOLVED, None, True, FindingKind.MASTER_ADDRESS),
        (Answer.STRANGER, None, True, FindingKind.MASTER_ADDRESS),
    ],
)
def test_the_answer_of_the_network_tells_what_is_wrong(
    answer: Answer, host_answers: bool | None, rank_0_waits: bool, kind: FindingKind
) -> None:
    found = replace(LOST, answer=answer, host_answers=host_answers)
    assert kind_of(found, rank_0_waits=rank_0_waits) == kind


# What is concluded where nodes do not reach each other at ports that the kernel chooses.
SIX_NODES = (*NODES, "n4", "n5")
UNREACHED = Unreached("n3", "n2", "10.0.0.3", 41233, Answer.TIMED_OUT, "eth1", alone=True, waited_s=10.0)


def test_a_single_node_that_is_not_reached_is_left_out_of_another_start() -> None:
    error = error_of_ports([UNREACHED], SIX_NODES)
    assert isinstance(error, PreflightError) and error.nodes == ("n3",)
    assert error.message.startswith(
        "preflight, blocked_port: n3: n2 cannot connect to it at 10.0.0.3:41233 by eth1: timed out after 10 s; expected: "
    )
    assert error.hint is not None and "net.ipv4.ip_local_port_range" in error.hint and "network_interface" in error.hint


def test_where_all_nodes_are_reached_there_is_no_error_and_where_most_are_not_no_other_start_would_help() -> None:
    assert error_of_ports([], SIX_NODES) is None
    error = error_of_ports([replace(UNREACHED, node=node, alone=False) for node in SIX_NODES], SIX_NODES)
    assert isinstance(error, PreflightError) and (error.nodes, error.exit_code) == ((), 78)
    assert "; the same of 5 more of 6 nodes; " in error.message


def test_between_two_groups_of_nodes_and_between_two_nodes_nobody_is_blamed() -> None:
    two_racks = [replace(UNREACHED, node="n3", alone=False), replace(UNREACHED, node="n0", before="n5", alone=False)]
    of_two = error_of_ports([replace(UNREACHED, node="n1", before="n0", alone=None)], ("n0", "n1"))
    for error in (error_of_ports(two_racks, SIX_NODES), of_two):
        assert isinstance(error, RendezvousError) and error.because_of_peer  # the node of rank 0 is not at fault either
    refused = error_of_ports([replace(UNREACHED, answer=Answer.REFUSED)], SIX_NODES)
    assert refused is not None and "by eth1: refused; expected" in refused.message
