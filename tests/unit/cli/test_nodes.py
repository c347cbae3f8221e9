"""The verb nodes: what it lists, and what a person blames or forgives by hand."""

from __future__ import annotations

import time

import pytest

from slurmtrain.slurm.node_ledger import NodeEvent, NodeRecord, append_to_ledger, ledger_file, read_ledger
from slurmtrain.slurm.nodelist import expand_nodelist
from tests.support.commands import refusal
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import printed, shown

pytestmark = pytest.mark.usefixtures("project", "slurm")


def on_record(*records: NodeRecord, cluster: str = "big") -> None:
    append_to_ledger(ledger_file(cluster), records)


def crash(node: str, attempt: int, run: str = "run") -> NodeRecord:
    said = "rank 0: OSError: /data is not there"
    return NodeRecord(time.time() - 60, node, NodeEvent.CRASH, run, attempt, said, lasted_s=1.4, proven=True)


def test_the_list_says_what_is_left_out_for_how_long_and_why() -> None:
    assert printed("nodes", "list") == "no incidents are recorded for any node\n"
    on_record(crash("n3", 1), crash("n3", 2), crash("n4", 1, "other"))
    on_record(NodeRecord(time.time() - 30 * 3600, "n1", NodeEvent.HARDWARE, "old", 1), cluster="small")
    rows = [line.split("   ") for line in printed("nodes", "list").splitlines()[2:]]
    assert [[cell.strip() for cell in row if cell.strip()][:4] for row in rows] == [
        ["big", "n3", "for 23 h 59 min", "crashed 2 attempts in 1 s"],
        ["big", "n4", "no", "crashed 1 attempt in 1 s"],
    ]
    first, second = shown("nodes", "list")
    assert (first["node"], first["records"][1]["attempt"], second["until"]) == ("n3", 2, None)


def test_a_person_blames_a_node_and_forgives_it(slurm: FakeSlurm) -> None:
    slurm.command("scontrol", 'echo "ClusterName = big"')
    slurm.command("sinfo", 'echo "n3"')
    assert "n3 is left out of the next starts of your runs on big until" in printed(
        "nodes", "blame", "n3", "--reason", "its disk is full"
    )
    assert shown("nodes", "forgive", "n3") == {"cluster": "big", "node": "n3", "said": "n3 is forgiven on big"}
    printed("nodes", "forgive", "--all")
    found = [(each.event, each.node, each.said) for each in read_ledger(ledger_file("big"))]
    assert found == [("by hand", "n3", "its disk is full"), ("forgiven", "n3", ""), ("forgiven", "*", "")]


def test_new_runs_leave_out_a_blamed_node_until_it_is_forgiven(slurm: FakeSlurm) -> None:
    def excluded(*words: str) -> list[str]:
        printed("+cluster=a100x4", "cluster.nodes=1", *words, "submit")
        return expand_nodelist(slurm.jobs[-1]["excluded"])

    printed("nodes", "blame", "n2", "--reason", "its disk is full")
    assert excluded("cluster.exclude=n1") == ["n1", "n2"]
    (left_out,) = shown("status", "last")["left_out"]
    assert (left_out["node"], left_out["why"]) == ("n2", "blamed by hand: its disk is full")
    printed("nodes", "forgive", "--all")
    assert excluded("cluster.exclude=n1") == ["n1"]


def test_without_slurm_a_person_names_the_cluster(slurm: FakeSlurm) -> None:
    slurm.fail("scontrol")
    assert "--cluster NAME" in refusal("nodes", "blame", "n3", code=1)
    printed("nodes", "blame", "n3", "--cluster", "big")
