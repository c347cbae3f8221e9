"""The checks before training: what differs between ranks and nodes is found by its name, and on the node it is on."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from slurmtrain.choices import FindingKind, JobKind
from slurmtrain.config.compose import compose
from slurmtrain.config.schema import ClusterConfig, Config, JobConfig, PreflightConfig
from slurmtrain.rank.preflight import facts as readers
from slurmtrain.rank.preflight.compare import Fault, Finding, Gathered, compare, error_of
from slurmtrain.rank.preflight.facts import MISSING, NodeFacts, RankFacts
from slurmtrain.rank.preflight.measure import Rates, slow
from slurmtrain.system.gpu import GpuFacts

NODES, RANKS_OF_NODE = 8, 4
CONFIG = Config(cluster=ClusterConfig(gpus_per_node=4, cpus_per_task=8, tasks_per_node=4))
MANIFEST = "is a folder whose manifest.json has the digest d1"
SOUND_GPUS = tuple(GpuFacts(index, "H100", 85.0, 0.6, (), 0, False, False, "") for index in range(4))
VERSIONS = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "nccl": "2.27.5",
    "driver": "550.54",
    "numpy": "2.1.0",
    "rich": "13.0",
    "GPU": "H100",
}
SAME = {"versions": VERSIONS, "code": {"config.yaml": "has cafe"}, "data": {"/data/tokens": MANIFEST}}


def sound_node(index: int) -> NodeFacts:
    return NodeFacts(
        same=SAME,
        disks={"/runs/r": "", "/tmp": ""},
        clock_ahead_s=0.2 - index * 0.01,
        gpus=SOUND_GPUS,
        folder_after_s=0.02,
    )


def sound_rank(index: int) -> RankFacts:
    node, local = divmod(index, RANKS_OF_NODE)
    return RankFacts(
        index,
        f"n{node}",
        node_rank=node,
        pid=4000 + index,
        gpus_seen=4,
        cpus=tuple(range(8 * local, 8 * local + 8)),
        of_node=sound_node(node) if local == 0 else None,
    )


SOUND = Gathered([sound_rank(index) for index in range(NODES * RANKS_OF_NODE)], "/runs/r")


def with_node(change: dict[str, Any], *nodes: str, facts: Gathered = SOUND) -> Gathered:
    changed = [
        replace(each, of_node=replace(each.of_node, **change)) if each.of_node and each.node in nodes else each
        for each in facts.ranks
    ]
    return replace(facts, ranks=changed)


def with_rank(change: dict[str, Any], *ranks: int) -> Gathered:
    return replace(SOUND, ranks=[replace(each, **change) if each.rank in ranks else each for each in SOUND.ranks])


def on_nodes(number: int) -> Gathered:
    return replace(SOUND, ranks=SOUND.ranks[: number * RANKS_OF_NODE])


def shared(kind: str, **changes: str) -> dict[str, Any]:
    """What a node shares with the others, some of which is different."""
    return {"same": {**SAME, kind: {**SAME[kind], **changes}}}


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, [each.sentence for each in found]
    return found[0]


def gpus(change: dict[str, Any]) -> dict[str, Any]:
    """The GPUs of a node, the last of which is changed."""
    return {"gpus": (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], **change))}


UNKNOWN = replace(
    SOUND, ranks=[RankFacts(each.rank, each.node, of_node=each.of_node and NodeFacts()) for each in SOUND.ranks]
)
UNKNOWN_ON_N3 = replace(SOUND, ranks=[*SOUND.ranks[:12], *UNKNOWN.ranks[12:16], *SOUND.ranks[16:]])
OTHER_PROGRAM = {"used_gb": 40.0, "processes": (77,)}
ALL = [*SOUND.nodes]
IN_SLICES = {"gpus": (replace(SOUND_GPUS[0], sliced=True, used_gb=70.0, processes=(1,)),)}
OF_OTHER_JOBS = {"gpus": tuple(replace(each, ecc_errors=3, used_gb=70.0, processes=(1,)) for each in 2 * SOUND_GPUS)}
IGNORED = PreflightConfig(ignore=[FindingKind.GPU_BROKEN, FindingKind.CLOCK])
NOTHING_WRONG: dict[str, tuple[Gathered, Config]] = {
    "all is well": (SOUND, CONFIG),
    "nothing could be read": (UNKNOWN, CONFIG),
    "nothing could be read on one node": (UNKNOWN_ON_N3, CONFIG),
    "ranks may use the whole machine": (with_rank({"cpus": None}, *range(32)), CONFIG),
    "ranks of the job are on the GPU": (with_node(gpus({"used_gb": 30.0, "processes": (4012, 4013)}), "n3"), CONFIG),
    "other programs of the job are on the GPU": (
        with_node(gpus(OTHER_PROGRAM), "n3"),
        structs.replace(CONFIG, job=JobConfig(kind=JobKind.COMMAND)),
    ),
    "other jobs have slices of the GPU": (with_node(IN_SLICES, "n3"), CONFIG),
    "other jobs have GPUs of the node": (with_node(OF_OTHER_JOBS, "n3"), CONFIG),
    "a text of the config is no path": (with_node(shared("data", **{"/no_think": MISSING}), *ALL), CONFIG),
    "no GPU was asked for": (with_node({"gpus": None, "driver_error": "none"}, "n3"), Config(cluster=ClusterConfig())),
    "a package is installed on one node": (with_node(shared("versions", debugpy="1.8"), "n0"), CONFIG),
    "the config says to ignore it": (
        with_node({**gpus({"ecc_errors": 2, "needs": None, "remap_pending": None}), "clock_ahead_s": -999.9}, "n3"),
        structs.replace(CONFIG, preflight=IGNORED),
    ),
}


@pytest.mark.parametrize("name", NOTHING_WRONG)
def test_nothing_is_found_where(name: str) -> None:
    assert compare(*NOTHING_WRONG[name]) == []


# Of a model before Ampere, which remaps nothing, with a driver that does not say what it needs.
OLD_GPU = {"ecc_errors": 2, "remap_pending": None, "remap_failed": None, "needs": None}
# What is wrong on n3 -> kind, whether training must not begin, words of the sentence.
ON_A_NODE: list[tuple[dict[str, Any], str, bool, str]] = [
    ({"gpus": SOUND_GPUS[:3]}, "gpu_missing", True, "3 GPUs are visible; expected: 4"),
    ({"gpus": ()}, "gpu_missing", True, "0 GPUs are visible"),
    (
        {"gpus": None, "driver_error": "Driver/library version mismatch"},
        "gpu_driver",
        False,  # since torch sees GPUs
        "Driver/library version mismatch",
    ),
    (gpus(OLD_GPU), "gpu_broken", True, "GPU 3 has 2 uncorrectable ECC errors"),
    (gpus({"remap_failed": True}), "gpu_broken", True, "cannot be remapped"),
    (gpus({"needs": "a reset"}), "gpu_broken", True, "GPU 3 needs a reset after an error (Xid)"),
    (gpus({"slowed_by": ("heat (hardware)",)}), "gpu_slowed", False, "slowed by heat"),
    (gpus(OTHER_PROGRAM), "gpu_busy", True, "40.0 GB in use, by processes that are none of this job (77)"),
    (shared("versions", torch="2.12.0"), "versions", True, "torch 2.12.0; expected: torch 2.13.0, as on most of the"),
    (shared("versions", driver="535.1"), "versions", False, "driver 535.1"),
    (shared("versions", GPU="H100, H200"), "versions", False, "GPU H100, H200; expected: GPU H100"),
    (shared("versions", numpy="1.26.0", rich="12.0"), "versions", True,
     "numpy 1.26.0, rich 12.0; expected: numpy 2.1.0, rich 13.0"),
    (shared("versions", rich="12.0"), "versions", False, "rich 12.0; expected: rich 13.0"),
    (shared("code", **{"config.yaml": "has beef"}), "code", True, "config.yaml has beef; expected: config.yaml has cafe"),
    (shared("data", **{"/data/tokens": MISSING}), "data", True, f"/data/tokens is missing; expected: /data/tokens {MANIFEST}"),
    (shared("data", **{"/data/tokens": "is a file of 7 bytes"}), "data", True, "/data/tokens is a file of 7 bytes"),
    ({"clock_ahead_s": 299.9}, "clock", False, "its clock is 299.9 s ahead of that of n0; expected: at most 5 s"),
    ({"clock_ahead_s": -10.0}, "clock", False, "behind"),
    ({"disks": {"/runs/r": "", "/tmp": "has 0 GB left"}}, "disk_full", True, "/tmp has 0 GB left"),
    ({"disks": {"/runs/r": "has room for 12 more files", "/tmp": ""}}, "disk_full", True,
     "/runs/r has room for 12 more files"),
    ({"disks": {"/runs/r": "cannot be written: it is mounted read-only"}}, "disk_full", True,
     "/runs/r cannot be written: it is mounted read-only"),
    ({"folder_after_s": None}, "shared_folder", True, "does not see in 30 s what rank 0 has written"),
    ({"folder_after_s": 9.5}, "shared_folder", False, "has seen 9.5 s late"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "fatal", "words"), ON_A_NODE)
def test_what_is_wrong_on_one_node_is_found_by_its_name_and_blamed_on_that_node(
    change: dict[str, Any], kind: str, fatal: bool, words: str
) -> None:
    found = only(compare(with_node(change, "n3"), CONFIG))
    assert (found.kind, found.nodes, found.fatal, found.fault) == (kind, ("n3",), fatal, Fault.NODE)
    assert found.sentence.startswith("n3: ")
    assert words in found.sentence
    assert found.advice
    error = error_of([found])
    assert (error.nodes if error is not None else None) == (("n3",) if fatal else None)


@pytest.mark.parametrize(("change", "kind", "fatal", "words"), [each for each in ON_A_NODE if each[2]])
def test_what_is_wrong_on_all_nodes_alike_is_no_nodes_fault_and_ends_the_run(
    change: dict[str, Any], kind: str, fatal: bool, words: str
) -> None:
    everywhere = with_node(change, *ALL)
    found = [each for each in compare(everywhere, CONFIG) if each.kind == kind]
    if kind in ("versions", "code", "data"):  # what all nodes share is right
        assert found == []
    elif kind in ("gpu_broken", "gpu_busy"):  # eight broken GPUs are eight broken GPUs
        assert {each.fault for each in found} == {Fault.NODE}
    elif found[0].fatal:
        assert {each.fault for each in found} == {Fault.CONFIG}
        error = error_of(found)
        assert error is not None and error.nodes == () and error.exit_code == 78


def test_what_is_wrong_with_one_rank_is_found_by_its_name_and_its_node() -> None:
    for change, kind, fatal, words in (
        ({"gpus_seen": 0}, "gpu_missing", True, "rank 13 on n3: no GPU is visible; expected: 4"),
        ({"cpus": (0, 1)}, "cpus", False, "n3: its 4 ranks may run on 24 CPUs, and need 32; expected: 8 for each rank"),
    ):
        found = only(compare(with_rank(change, 13), CONFIG))
        assert (found.kind, found.nodes, found.fatal) == (kind, ("n3",), fatal)
        assert words in found.sentence


@pytest.mark.parametrize(
    ("change", "kind", "blamed"),
    [
        (shared("versions", torch="2.12.0"), "versions", ["n0", "n1"]),  # nobody knows which of the two is right
        (shared("data", **{"/data/tokens": "is a file of 7 bytes"}), "data", ["n0", "n1"]),
        (shared("data", **{"/data/tokens": MISSING}), "data", ["n1"]),  # what is missing is never right
    ],
)
def test_between_two_nodes_that_differ_nobody_is_blamed_unless_one_lacks_something(
    change: dict[str, Any], kind: str, blamed: list[str]
) -> None:
    found = compare(with_node(change, "n1", facts=on_nodes(2)), CONFIG)
    assert {(each.kind, each.fault) for each in found} == {(kind, Fault.CONFIG if len(blamed) > 1 else Fault.NODE)}
    assert sorted(node for each in found for node in each.nodes) == blamed


def test_a_node_that_sees_no_gpu_is_blamed_even_if_it_is_the_only() -> None:
    found = only(compare(with_node({"gpus": ()}, "n0", facts=on_nodes(1)), CONFIG))
    error = error_of([found])
    assert error is not None and error.nodes == ("n0",)


def test_a_full_shared_folder_is_no_nodes_fault() -> None:
    full = {"disks": {"/runs/r": "has 0.01 GB left", "/tmp": ""}}
    for number in (1, 2, 8):
        found = only(compare(with_node(full, *ALL, facts=on_nodes(number)), CONFIG))
        assert (found.kind, found.fatal, found.fault) == (FindingKind.DISK_FULL, True, Fault.CONFIG)


def test_a_driver_that_does_not_answer_ends_a_training_where_no_rank_sees_a_gpu() -> None:
    facts = with_rank({"gpus_seen": 0}, 12, 13, 14, 15)
    broken = with_node({"gpus": None, "driver_error": "GPU is lost"}, "n3", facts=facts)
    found = [each for each in compare(broken, CONFIG) if each.kind == FindingKind.GPU_DRIVER]
    assert only(found).fatal and only(found).nodes == ("n3",)


def test_gpus_that_slurm_shows_only_to_other_ranks_are_not_missing() -> None:
    # Each rank is shown its own, or its two; the only rank of the fourth sees all.
    for gpus, ranks, asked, missing in ((1, 4, 4, 0), (2, 2, 4, 0), (3, 4, 4, 1), (7, 1, 8, 1), (0, 4, 4, 1)):
        facts = replace(SOUND, ranks=[replace(each, cpus=None) for each in SOUND.ranks[:ranks]])
        facts = with_node({"gpus": tuple(GpuFacts(index) for index in range(gpus))}, "n0", facts=facts)
        found = compare(facts, structs.replace(CONFIG, cluster=structs.replace(CONFIG.cluster, gpus_per_node=asked)))
        assert [each.kind for each in found] == [FindingKind.GPU_MISSING] * missing, gpus


def test_errors_in_memory_that_is_out_of_use_since_are_a_warning() -> None:
    warnings: tuple[dict[str, Any], ...] = (
        {},
        {"needs": None},
        # Contained: the driver has taken that memory out of use, and programs may start again before the reset.
        {"remap_pending": True, "needs": None},
        {"remap_pending": True, "needs": "to be drained and reset", "needs_later": True},
        {"remap_pending": None, "remap_failed": None},  # no rows to remap, and nothing is needed
    )
    for change in (*warnings, {"needs": "a reset"}):
        found = only(compare(with_node(gpus({"ecc_errors": 2, **change}), "n3"), CONFIG))
        assert (found.kind, found.fatal) == (FindingKind.GPU_BROKEN, change not in warnings)


# The readers.


def test_files_and_folders_of_data_are_told_apart_by_size_and_manifest(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "shard.bin").write_bytes(b"x" * 1000)
        assert readers.look_at(folder) == "is a folder without a manifest"
        (folder / "manifest.json").write_text("{}")
    assert readers.look_at(one) == readers.look_at(other)
    (other / "manifest.json").write_text("[]")
    assert readers.look_at(one) != readers.look_at(other)
    assert readers.look_at(one / "shard.bin") == "is a file of 1000 bytes"
    assert readers.look_at(tmp_path / "none") == MISSING
    assert readers.look_at(one / "shard.bin" / "deeper") == MISSING


def test_a_folder_that_is_nearly_full_is_found(tmp_path: Path) -> None:
    assert readers.disk_problem(tmp_path, 0.0) == ""
    assert "GB left" in readers.disk_problem(tmp_path, 1e12)


# Slow nodes and slow links are told apart, and named.


TASKS = 2  # of a node


def rates(
    *,
    links: dict[tuple[str, str], float] | None = None,
    tflops: dict[int, float] | None = None,
    nodes: int = NODES,
) -> Rates:
    """16 ranks on 8 nodes: 600 TFLOP/s each, and 45 GB/s between neighbours."""
    ranks = range(nodes * TASKS)
    ring = {(f"n{min(pair)}", f"n{max(pair)}") for pair in ((index, (index + 1) % nodes) for index in range(nodes))}
    between = {pair: (links or {}).get(pair, 45.0) for pair in sorted(ring)}
    return Rates(
        {rank: f"n{rank // TASKS}" for rank in ranks},
        {rank: (tflops or {}).get(rank, 600.0) for rank in ranks},
        40.0,
        between,
    )


def judged(found: Rates, *overrides: str, device: str = "cuda") -> list[Finding]:
    return list(slow(found, compose(["cluster=a100x4", *overrides]), torch.device(device)))


def test_a_slow_gpu_is_named_by_its_rank_and_its_node() -> None:
    found = only(judged(rates(tflops={7: 310.0})))
    assert (found.kind, found.nodes, found.ranks, found.fault) == (FindingKind.SLOW_NODE, ("n3",), (7,), Fault.NODE)
    assert found.sentence == "rank 7 on n3: computes 310 TFLOP/s; expected: 600, the median"
    assert not found.fatal


def test_a_slow_link_is_named_by_its_two_nodes_and_blames_neither() -> None:
    found = only(judged(rates(links={("n1", "n2"): 12.0})))
    assert (found.kind, found.nodes, found.fatal) == (FindingKind.SLOW_LINK, ("n1", "n2"), False)
    assert found.sentence == "n1, n2: 12 GB/s between them; expected: 45 GB/s, the median of all pairs of nodes"


def test_a_node_all_of_whose_links_are_slow_is_slow_itself_and_its_partners_are_not() -> None:
    links = {pair: 12.0 for pair in combinations([f"n{index}" for index in range(NODES)], 2) if "n4" in pair}
    found = only(judged(rates(links=links)))
    assert (found.kind, found.nodes) == (FindingKind.SLOW_NODE, ("n4",))
    assert "its network gives 12 GB/s to its neighbours; expected: 45 GB/s" in found.sentence


def test_a_slow_node_is_left_out_only_if_the_config_says_so() -> None:
    assert error_of(judged(rates(tflops={7: 310.0}))) is None
    error = error_of(judged(rates(tflops={7: 310.0}), "preflight.exclude_slow=true"))
    assert error is not None and error.nodes == ("n3",)


def test_links_that_are_all_slower_than_the_clusters_file_says_are_a_network_that_is_not_used() -> None:
    assert judged(rates(), "cluster.network_gb_per_s=50") == []
    found = only(judged(rates(), "cluster.network_gb_per_s=400"))
    assert (found.kind, found.fatal, len(found.nodes)) == (FindingKind.SLOW_NETWORK, False, NODES)
    assert "45 GB/s between two nodes, the median; expected: at least 70% of 400 GB/s" in found.sentence
