"""What is concluded where nodes do not reach each other at ports that the kernel chooses."""

from __future__ import annotations

from dataclasses import replace

from slurmtrain.errors import PreflightError, RendezvousError
from slurmtrain.runtime.preflight.peer_ports import Unreached, error_of
from slurmtrain.runtime.preflight.reachability import Answer

NODES = ("n0", "n1", "n2", "n3", "n4", "n5")
LOST = Unreached("n3", "n2", "10.0.0.3", 41233, Answer.TIMED_OUT, "eth1", alone=True, waited_s=10.0)


def test_where_all_nodes_are_reached_there_is_no_error() -> None:
    assert error_of([], NODES) is None


def test_a_single_node_that_is_not_reached_is_left_out_of_another_start() -> None:
    error = error_of([LOST], NODES)
    assert isinstance(error, PreflightError) and error.nodes == ("n3",)
    assert error.message.startswith(
        "preflight, blocked_port: n3: n2 cannot connect to it at 10.0.0.3:41233 by eth1: timed out after 10 s; expected: "
    )
    assert error.hint is not None and "net.ipv4.ip_local_port_range" in error.hint and "network_interface" in error.hint


def test_where_most_nodes_are_not_reached_no_other_start_would_help() -> None:
    error = error_of([replace(LOST, node=node, alone=False) for node in NODES], NODES)
    assert isinstance(error, PreflightError) and (error.nodes, error.exit_code) == ((), 78)
    assert "; the same of 5 more of 6 nodes; " in error.message


def test_between_two_groups_of_nodes_and_between_two_nodes_nobody_is_blamed() -> None:
    two_racks = [replace(LOST, node="n3", alone=False), replace(LOST, node="n0", before="n5", alone=False)]
    of_two = error_of([replace(LOST, node="n1", before="n0", alone=None)], ("n0", "n1"))
    for error in (error_of(two_racks, NODES), of_two):
        assert isinstance(error, RendezvousError) and error.because_of_peer  # the node of rank 0 is not at fault either
    refused = error_of([replace(LOST, answer=Answer.REFUSED)], NODES)
    assert refused is not None and "by eth1: refused; expected" in refused.message
