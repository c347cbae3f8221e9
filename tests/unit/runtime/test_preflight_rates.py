"""Slow nodes and slow links are told apart, and named."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from slurmtrain.choices import FindingKind
from slurmtrain.config.schema import ClusterConfig, Config, PreflightConfig
from slurmtrain.runtime.preflight.findings import Fault, Finding, error_of
from slurmtrain.runtime.preflight.measure import Rates, ring_of, slow

NODES, TASKS = 8, 2


def rates(
    *, links: dict[tuple[str, str], float] | None = None, tflops: dict[int, float] | None = None, nodes: int = NODES
) -> Rates:
    """16 ranks on 8 nodes: 600 TFLOP/s each, and 45 GB/s between nodes (22.5 for each rank)."""
    ranks = range(nodes * TASKS)
    node_of = {rank: f"n{rank // TASKS}" for rank in ranks}
    sent = {}
    for rank, partner in ring_of([TASKS] * nodes).items():
        between = (min(node_of[rank], node_of[partner]), max(node_of[rank], node_of[partner]))
        sent[rank, partner] = (links or {}).get(between, 45.0) / TASKS
    return Rates(node_of, {rank: (tflops or {}).get(rank, 600.0) for rank in ranks}, 40.0, sent)


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")


def judged(found: Rates, config: Config | None = None, device: str = "cuda") -> list[Finding]:
    return slow(found, config or Config(), torch.device(device))


def on_cluster(**cluster: Any) -> Config:
    return Config(cluster=ClusterConfig(**cluster))


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, [each.sentence for each in found]
    return found[0]


def test_nothing_is_slow_where_all_are_alike() -> None:
    assert judged(rates()) == []


def test_a_slow_gpu_is_named_by_its_rank_and_its_node() -> None:
    found = only(judged(rates(tflops={7: 310.0})))
    assert (found.kind, found.nodes, found.ranks, found.fault) == (FindingKind.SLOW_NODE, ("n3",), (7,), Fault.NODE)
    assert found.sentence == "rank 7 on n3: computes 310 TFLOP/s; expected: 600, the median"
    assert not found.fatal


def test_a_slow_link_is_named_by_its_two_nodes_and_blames_neither() -> None:
    found = only(judged(rates(links={("n1", "n2"): 12.0})))
    assert (found.kind, found.pair, found.fatal) == (FindingKind.SLOW_LINK, ("n1", "n2"), False)
    assert found.sentence == "n1 and n2: 12 GB/s between them; expected: 45 GB/s, the median of all pairs of nodes"


def test_a_node_all_of_whose_links_are_slow_is_slow_itself_and_its_partners_are_not() -> None:
    links = {pair: 12.0 for pair in combinations([f"n{index}" for index in range(NODES)], 2) if "n4" in pair}
    found = only(judged(rates(links=links)))
    assert (found.kind, found.nodes) == (FindingKind.SLOW_NODE, ("n4",))
    assert "its network gives 12 GB/s to 2 other nodes; expected: 45 GB/s" in found.sentence


def test_a_slow_node_is_left_out_only_if_the_config_says_so() -> None:
    assert error_of(judged(rates(tflops={7: 310.0}))) is None
    error = error_of(judged(rates(tflops={7: 310.0}), Config(preflight=PreflightConfig(exclude_slow=True))))
    assert error is not None and error.nodes == ("n3",)


def test_rates_are_compared_with_what_the_clusters_file_states() -> None:
    assert judged(rates(), on_cluster(network_gb_per_s=50.0)) == []
    between = only(judged(rates(), on_cluster(network_gb_per_s=400.0)))
    assert between.kind == FindingKind.BELOW_STATED
    assert "45 GB/s between nodes, the median of all pairs; expected: at least 70% of 400 GB/s" in between.sentence


def test_gpus_that_are_all_slow_are_compared_with_their_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single node, or a whole partition at half of its clock, has no other rank to be compared with."""
    alone = Rates({0: "n0"}, {0: 250.0}, None, {})
    assert judged(alone, device="cpu") == judged(alone) == []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = only(judged(alone))
    assert (found.kind, found.nodes, found.fatal) == (FindingKind.BELOW_STATED, ("n0",), False)
    assert "computes 250 TFLOP/s, the median of all ranks; expected: at least 40% of 989.4 TFLOP/s" in found.sentence


def test_ranks_that_share_the_cpus_of_a_node_are_not_compared_with_each_other() -> None:
    assert judged(rates(tflops={7: 100.0}), device="cpu") == []
    assert only(judged(rates(tflops={6: 90.0, 7: 100.0}), device="cpu")).nodes == ("n3",)


def test_two_nodes_have_one_link_and_nothing_to_compare_it_with() -> None:
    two = rates(links={("n0", "n1"): 1.0}, nodes=2)
    assert judged(two) == []
    assert only(judged(two, on_cluster(network_gb_per_s=45.0))).kind == FindingKind.BELOW_STATED
