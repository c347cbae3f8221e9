"""The ledger of nodes: which nodes records speak against, and a file that many jobs append to at the same time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from slurmtrain.slurm.node_ledger import (
    ALL,
    BlamePolicy,
    NodeEvent,
    NodeRecord,
    append_to_ledger,
    blamed_nodes,
    read_ledger,
)

NOW = 1_000_000.0
HOUR = 3600.0
POLICY = BlamePolicy(threshold=2, expiry_s=24 * HOUR)


def crash(
    node: str, attempt: int, *, run: str = "a", said: str = "rank 0: ValueError: no", ago: float = 10, **more: object
) -> NodeRecord:
    return NodeRecord(NOW - ago, node, NodeEvent.CRASH, run, attempt, said, lasted_s=1.0, **more)  # type: ignore[arg-type]


def other(
    event: NodeEvent, node: str = "n3", attempt: int = 1, *, run: str = "a", ago: float = 10, said: str = ""
) -> NodeRecord:
    return NodeRecord(NOW - ago, node, event, run, attempt, said)


def names(*found: NodeRecord, run: str | None = "a", now: float = NOW, policy: BlamePolicy = POLICY) -> list[str]:
    return [each.node for each in blamed_nodes(found, policy, now=now, run=run)]


TWICE = [crash("n3", 1, ago=30), crash("n3", 2, ago=20)]
ALIKE = [crash("n3", 1, said="rank 0: step 17 at 0x7f01 on n3"), crash("n3", 2, said="rank 4: step 9 at 0xaa on n3")]
ON_ANOTHER = crash("n12", 3, said="rank 1: step 1 at 0xbc on n12")
# Somebody tries a program again and again, and SLURM gives it the first idle node each time.
TRIED_AGAIN = [crash("n0", 1, run=run, said=f"{run}: a bug") for run in "abcdef"]


@pytest.mark.parametrize(
    ("found", "run", "left_out"),
    [
        pytest.param([crash("n3", 1)], "a", [], id="one crash"),
        pytest.param(TWICE, "a", ["n3"], id="two crashes"),
        pytest.param([crash("n3", 1)] * 2 + [crash("n3", 1, proven=True)], "a", [], id="one that ledger and run have"),
        pytest.param(ALIKE, "a", ["n3"], id="the same two times"),
        pytest.param([*ALIKE, ON_ANOTHER], "a", [], id="the same on another node: the program's own"),
        pytest.param([*ALIKE, replace(ON_ANOTHER, said="else")], "a", ["n3"], id="something else on another node"),
        pytest.param(TWICE, "b", [], id="another run, of whose program nothing is known"),
        pytest.param([replace(each, proven=True) for each in TWICE], "b", ["n3"], id="another run, proven"),
        pytest.param(TRIED_AGAIN, "g", [], id="the programs of many runs"),
    ],
)
def test_which_nodes_crashes_speak_against(found: list[NodeRecord], run: str, left_out: list[str]) -> None:
    assert names(*found, run=run) == left_out


@pytest.mark.parametrize(
    ("event", "times", "for_own", "for_others"),
    [
        (NodeEvent.HARDWARE, 1, True, True),  # counts twice
        (NodeEvent.BY_HAND, 1, True, True),
        (NodeEvent.BAD_START, 1, True, False),  # the run has trained before
        (NodeEvent.BAD_START, 2, True, True),
        (NodeEvent.HANG, 1, False, False),
        (NodeEvent.HANG, 2, True, False),
        (NodeEvent.LOST, 2, True, False),
    ],
)
def test_what_counts_how_much(event: NodeEvent, times: int, for_own: bool, for_others: bool) -> None:
    found = [other(event, attempt=number + 1) for number in range(times)]
    assert (names(*found) == ["n3"], names(*found, run="b") == ["n3"]) == (for_own, for_others)


def test_a_person_forgives_a_node_or_all_and_what_comes_later_counts_again() -> None:
    found = [crash("n3", 1, ago=50), crash("n3", 2, ago=40), other(NodeEvent.BY_HAND, "n4", run="", ago=40)]
    assert names(*found) == ["n3", "n4"]
    assert names(*found, other(NodeEvent.FORGIVEN, "n3", run="", ago=30)) == ["n4"]
    forgiven = [*found, other(NodeEvent.FORGIVEN, ALL, run="", ago=30)]
    assert names(*forgiven) == []
    assert names(*forgiven, crash("n3", 3, ago=20), crash("n3", 4, ago=10)) == ["n3"]


def test_a_threshold_of_0_leaves_out_only_a_node_on_which_this_run_could_not_start() -> None:
    off = BlamePolicy(threshold=0)
    assert names(crash("n3", 1), crash("n3", 2), other(NodeEvent.BY_HAND, "n4", run=""), policy=off) == []
    assert names(other(NodeEvent.BAD_START), policy=off) == ["n3"]


# The file.


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append_to_ledger(path, [crash("n3", 1)])
    whole = path.read_text()
    spoiled = ({"time": "now"}, {"node": "n3,n4"}, {"node": "--all"}, {"run": 7})
    foreign = ["[]", "7", '{"event": "no such"}']
    foreign += [json.dumps({**asdict(crash("n3", 2)), **values}) for values in spoiled]
    path.write_text(whole + "\n".join(foreign) + "\n" + whole[:20])
    append_to_ledger(path, [crash("n4", 2)])
    assert read_ledger(path) == [crash("n3", 1), crash("n4", 2)]


def test_the_ledger_of_somebody_else_or_a_link_is_not_read(tmp_path: Path) -> None:
    append_to_ledger(tmp_path / "real.jsonl", [crash("n3", 1)])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    assert read_ledger(tmp_path / "link.jsonl") == []
    assert read_ledger(tmp_path / "missing" / "ledger.jsonl") == []
