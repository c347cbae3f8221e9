"""Slow nodes and slow links are told apart, and named."""

from __future__ import annotations

from itertools import combinations

from slurmtrain.choices import FindingKind
from slurmtrain.planner.peaks import BF16, peak_of
from slurmtrain.runtime.preflight.findings import Fault, Finding, error_of
from slurmtrain.runtime.preflight.measure import Rates, Stated, rings_of, slow

NODES, TASKS = 8, 2


def rates(
    *,
    links: dict[tuple[str, str], float] | None = None,
    tflops: dict[int, float] | None = None,
    pairs: dict[tuple[int, int], float] | None = None,
    nodes: int = NODES,
) -> Rates:
    """16 ranks on 8 nodes: 600 TFLOP/s each, 45 GB/s between nodes (22.5 for each rank), 300 GB/s within."""
    ranks = range(nodes * TASKS)
    node_of = {rank: f"n{rank // TASKS}" for rank in ranks}
    sent = {}
    for ring in rings_of([TASKS] * nodes):
        for rank, partner in ring.items():
            between = (min(node_of[rank], node_of[partner]), max(node_of[rank], node_of[partner]))
            within = (min(rank, partner), max(rank, partner))
            sent[rank, partner] = (pairs or {}).get(within, 300.0)
            if between[0] != between[1]:
                sent[rank, partner] = (links or {}).get(between, 45.0) / TASKS
    return Rates(node_of, {rank: (tflops or {}).get(rank, 600.0) for rank in ranks}, 40.0, sent)


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, [each.sentence for each in found]
    return found[0]


def test_nothing_is_slow_where_all_are_alike() -> None:
    assert slow(rates(), Stated()) == []


def test_a_slow_gpu_is_named_by_its_rank_and_its_node() -> None:
    found = only(slow(rates(tflops={7: 310.0}), Stated()))
    assert (found.kind, found.nodes, found.ranks, found.fault) == (FindingKind.SLOW_NODE, ("n3",), (7,), Fault.NODE)
    assert found.sentence == "rank 7 on n3: computes 310 TFLOP/s; expected: 600, the median"
    assert not found.fatal


def test_a_slow_link_is_named_by_its_two_nodes_and_blames_neither() -> None:
    found = only(slow(rates(links={("n1", "n2"): 12.0}), Stated()))
    assert (found.kind, found.pair, found.fatal) == (FindingKind.SLOW_LINK, ("n1", "n2"), False)
    assert found.sentence == "n1 and n2: 12 GB/s between them; expected: 45 GB/s, the median of all pairs of nodes"


def test_a_node_all_of_whose_links_are_slow_is_slow_itself_and_its_partners_are_not() -> None:
    links = {pair: 12.0 for pair in combinations([f"n{index}" for index in range(NODES)], 2) if "n4" in pair}
    found = only(slow(rates(links=links), Stated()))
    assert (found.kind, found.nodes) == (FindingKind.SLOW_NODE, ("n4",))
    assert "its network gives 12 GB/s to 4 other nodes; expected: 45 GB/s" in found.sentence


def test_a_slow_node_is_left_out_only_if_the_config_says_so() -> None:
    assert error_of(slow(rates(tflops={7: 310.0}), Stated())) is None
    error = error_of(slow(rates(tflops={7: 310.0}), Stated(excludes=True)))
    assert error is not None and error.nodes == ("n3",)


def test_two_gpus_of_a_node_without_a_fast_link_are_named() -> None:
    one = only(slow(rates(pairs={(6, 7): 20.0}), Stated()))
    assert (one.kind, one.nodes, one.ranks) == (FindingKind.SLOW_LINK, ("n3",), (6, 7))
    assert "20 GB/s between ranks 6 and 7; expected: 300 GB/s" in one.sentence


def test_rates_are_compared_with_what_the_clusters_file_states() -> None:
    assert slow(rates(), Stated(link_gb_per_s=400.0, network_gb_per_s=50.0)) == []
    between, within = slow(rates(), Stated(link_gb_per_s=900.0, network_gb_per_s=400.0))
    assert between.kind == within.kind == FindingKind.BELOW_STATED
    assert "45 GB/s between nodes, the median of all pairs; expected: at least 70% of 400 GB/s" in between.sentence
    assert "300 GB/s within a node" in within.sentence and "cluster.gpu_link_gb_per_s" in within.sentence


def test_gpus_that_are_all_slow_are_compared_with_their_data_sheet() -> None:
    """A single node, or a whole partition at half of its clock, has no other rank to be compared with."""
    alone = Rates({0: "n0"}, {0: 250.0}, None, {})
    assert slow(alone, Stated()) == slow(alone, Stated(peak=peak_of("NVIDIA A100-SXM4-80GB", BF16))) == []
    found = only(slow(alone, Stated(peak=peak_of("NVIDIA H100 80GB HBM3", BF16))))
    assert (found.kind, found.nodes, found.fatal) == (FindingKind.BELOW_STATED, ("n0",), False)
    assert "computes 250 TFLOP/s, the median of all ranks; expected: at least 40% of 989.4 TFLOP/s" in found.sentence


def test_ranks_that_share_the_cpus_of_a_node_are_not_compared_with_each_other() -> None:
    assert slow(rates(tflops={7: 100.0}), Stated(shares_cpus=True)) == []
    whole = only(slow(rates(tflops={6: 90.0, 7: 100.0}), Stated(shares_cpus=True)))
    assert whole.nodes == ("n3",)


def test_two_nodes_have_one_link_and_nothing_to_compare_it_with() -> None:
    two = rates(links={("n0", "n1"): 1.0}, nodes=2)
    assert slow(two, Stated()) == []
    assert only(slow(two, Stated(network_gb_per_s=45.0))).kind == FindingKind.BELOW_STATED
