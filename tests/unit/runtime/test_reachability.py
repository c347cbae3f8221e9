"""Why ranks could not meet: the node, the address, the interface, and whose fault it is."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from slurmtrain.choices import FindingKind
from slurmtrain.errors import PreflightError, RendezvousError
from slurmtrain.runtime.preflight.findings import Fault
from slurmtrain.runtime.preflight.reachability import (
    Answer,
    Unreachable,
    answer_of,
    diagnose,
    error_of_reports,
    kind_of,
    knock,
    look_into,
    report,
    reports,
)

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


def test_a_node_that_came_after_it_had_reported_is_no_finding() -> None:
    assert diagnose([LOST], {"n1", "n2", "n3"}, nodes=NODES) == []
    assert error_of_reports([]) is None


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


def test_errors_of_the_kernel_are_told_apart() -> None:
    assert answer_of(socket.gaierror("unknown")) is Answer.UNRESOLVED
    assert answer_of(ConnectionRefusedError()) is Answer.REFUSED
    assert answer_of(TimeoutError()) is Answer.TIMED_OUT
    assert answer_of(OSError(errno.EHOSTUNREACH, "No route to host")) is Answer.NO_ROUTE


def test_a_port_is_knocked_at() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert knock("127.0.0.1", port) is Answer.REFUSED
        listener.listen()
        assert knock("127.0.0.1", port) is Answer.CONNECTED
    found = look_into("n1", 4, "127.0.0.1", port, Answer.REFUSED)
    assert found == Unreachable("n1", 4, "127.0.0.1", port, "refused", "lo")
    assert found.sentence == f"cannot reach rank 0 at 127.0.0.1:{port} by lo: refused"


def test_rank_0_reads_what_nodes_report_and_leaves_out_what_is_no_report(tmp_path: Path) -> None:
    report(tmp_path, 3, LOST)
    (tmp_path / "unreachable-4.json").write_text('{"node": "n4; rm", "rank": 1}')
    (tmp_path / "unreachable-5.json").write_text("[]")
    (tmp_path / "unreachable-6.json").write_text('{"node": "n6"')
    assert reports(tmp_path) == [LOST]
    assert reports(tmp_path / "none") == []
