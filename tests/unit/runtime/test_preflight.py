"""The checks before training: what differs between ranks and nodes is found by its name, and on the node it is on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight import readers
from slurmtrain.runtime.preflight.compare import Expected, compare
from slurmtrain.runtime.preflight.facts import (
    MISSING,
    FolderFacts,
    GatheredFacts,
    Message,
    NodeFacts,
    RankFacts,
    gathered,
)
from slurmtrain.runtime.preflight.findings import Fault, Finding, error_of
from slurmtrain.system.gpu import GpuFacts

NODES, RANKS_OF_NODE = 8, 4
EXPECTED = Expected(world_size=NODES * RANKS_OF_NODE, shared="/runs/r", gpus_per_node=4, cpus_per_task=8)
MANIFEST = "a folder whose manifest.json has the digest d1"
SOUND_GPUS = tuple(GpuFacts(index, "H100", 85.0, 0.6, (), 0, False, False, "") for index in range(4))


def sound_node(index: int) -> NodeFacts:
    return NodeFacts(
        node=f"n{index}",
        rank=RANKS_OF_NODE * index,
        versions={"python": "3.11.7", "torch": "2.13.0", "nccl": "2.27.5", "driver": "550.54"},
        packages={"torch": "2.13.0", "numpy": "2.1.0", "rich": "13.0"},
        code={"slurmtrain/errors.py": "aaaa", "code/train.py": "bbbb"},
        config_hash="cafe",
        paths={"/data/tokens": MANIFEST},
        disks={"/runs/r": "", "/tmp": ""},
        clock=(-0.2 + index * 0.01, 0.2 + index * 0.01),
        gpus=SOUND_GPUS,
        folder=FolderFacts(0.02, limit_s=30),
    )


def sound_rank(index: int) -> RankFacts:
    local = index % RANKS_OF_NODE
    return RankFacts(
        index,
        f"n{index // RANKS_OF_NODE}",
        node_rank=index // RANKS_OF_NODE,
        local_rank=local,
        pid=4000 + index,
        world_size=EXPECTED.world_size,
        gpus_seen=4,
        cpus=tuple(range(8 * local, 8 * local + 8)),
        variables={"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "8"},
    )


SOUND = GatheredFacts(
    tuple(sound_rank(index) for index in range(EXPECTED.world_size)), tuple(sound_node(index) for index in range(NODES))
)


def with_node(change: dict[str, Any], *nodes: str, facts: GatheredFacts = SOUND) -> GatheredFacts:
    changed = tuple(replace(each, **change) if each.node in nodes else each for each in facts.nodes)
    return replace(facts, nodes=changed)


def with_rank(change: dict[str, Any], *ranks: int) -> GatheredFacts:
    return replace(SOUND, ranks=tuple(replace(each, **change) if each.rank in ranks else each for each in SOUND.ranks))


def on_nodes(number: int) -> GatheredFacts:
    names = {f"n{index}" for index in range(number)}
    return GatheredFacts(
        tuple(replace(each, world_size=number * RANKS_OF_NODE) for each in SOUND.ranks if each.node in names),
        tuple(each for each in SOUND.nodes if each.node in names),
    )


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, [each.sentence for each in found]
    return found[0]


def gpus(change: dict[str, Any]) -> dict[str, Any]:
    """The GPUs of a node, the last of which is changed."""
    return {"gpus": (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], **change))}


UNKNOWN = GatheredFacts(
    tuple(RankFacts(each.rank, each.node, world_size=each.world_size) for each in SOUND.ranks),
    tuple(NodeFacts(each.node, each.rank) for each in SOUND.nodes),
)
UNKNOWN_ON_N3 = GatheredFacts(
    (*SOUND.ranks[:12], *UNKNOWN.ranks[12:16], *SOUND.ranks[16:]),
    (*SOUND.nodes[:3], UNKNOWN.nodes[3], *SOUND.nodes[4:]),
)
OTHER_PROGRAM = {"used_gb": 40.0, "processes": (77,)}
ALL = [each.node for each in SOUND.nodes]
MORE_CODE = {"slurmtrain/errors.py": "aaaa", "code/train.py": "bbbb", "slurmtrain/slurm/client.py": "cccc"}
IN_SLICES = {"gpus": (replace(SOUND_GPUS[0], sliced=True, used_gb=70.0, processes=(1,)),)}
OF_OTHER_JOBS = {"gpus": tuple(replace(each, ecc_errors=3, used_gb=70.0, processes=(1,)) for each in 2 * SOUND_GPUS)}
NOTHING_WRONG: dict[str, tuple[GatheredFacts, dict[str, Any]]] = {
    "all is well": (SOUND, {}),
    "nothing could be read": (UNKNOWN, {}),
    "nothing could be read on one node": (UNKNOWN_ON_N3, {}),
    "ranks may use the whole machine": (with_rank({"cpus": None}, *range(32)), {}),
    "a node came late, or was held up": (with_node({"clock": (-10.0, 100.0)}, "n3"), {}),
    "ranks of the job are on the GPU": (with_node(gpus({"used_gb": 30.0, "processes": (4012, 4013)}), "n3"), {}),
    "other programs of the job are on the GPU": (with_node(gpus(OTHER_PROGRAM), "n3"), {"alone": False}),
    "other jobs have slices of the GPU": (with_node(IN_SLICES, "n3"), {}),
    "other jobs have GPUs of the node": (with_node(OF_OTHER_JOBS, "n3"), {}),
    "a text of the config is no path": (with_node({"paths": {"/no_think": MISSING}}, *ALL), {}),
    "no GPU was asked for": (with_node({"gpus": None, "driver_error": "none"}, "n3"), {"gpus_per_node": 0}),
    "rank 0 has loaded more modules": (with_node({"code": MORE_CODE}, "n0"), {}),
    "the config says to ignore it": (
        with_node({**gpus({"ecc_errors": 2}), "clock": (-1000.0, -999.9)}, "n3"),
        {"ignored": (FindingKind.GPU_BROKEN, FindingKind.CLOCK)},
    ),
}


@pytest.mark.parametrize("name", NOTHING_WRONG)
def test_nothing_is_found_where(name: str) -> None:
    facts, expected = NOTHING_WRONG[name]
    assert compare(facts, replace(EXPECTED, **expected)) == []


def test_nodes_of_the_same_name_are_told_apart_by_their_numbers() -> None:
    """Eight containers of one image, started by torchrun: each calls itself by the name of its host."""
    sent = []
    for node in SOUND.nodes:
        number = int(node.node[1:])
        node = replace(
            node, node="trainer", packages={**(node.packages or {}), "torch": "2.12.0" if number == 5 else "2.13.0"}
        )
        for rank in SOUND.ranks[node.rank : node.rank + RANKS_OF_NODE]:
            own = replace(rank, node="trainer", node_rank=number)
            sent.append(Message(own, node if rank.local_rank == 0 else None))
    facts = gathered(map(Message.decode, (each.encode() for each in sent)), unseen=[3])
    packages, folder = compare(facts, EXPECTED)
    assert packages.sentence == "trainer (node 5): torch 2.12.0; expected: torch 2.13.0, as on most of the others"
    assert folder.where == "trainer (node 3)" and facts.ranks[-1].node == "trainer (node 7)"
    assert len({each.node for each in facts.nodes}) == NODES


def test_a_package_that_computes_nothing_ends_no_training() -> None:
    # Ranks with two releases of one of these do not understand each other. The last is how nightly builds of torch call it.
    fatal = ("nvidia-nccl-cu12", "nvidia-cublas", "pytorch-triton")
    looks_on = ("nvidia-ml-py", "nvidia-nvtx-cu12", "nvidia-cuda-cupti-cu12", "nvidia-bfcl")
    for package in (*fatal, *looks_on):
        everywhere = with_node({"packages": {package: "2"}}, *ALL)
        found = only(compare(with_node({"packages": {package: "1"}}, "n3", facts=everywhere), EXPECTED))
        assert (found.kind, found.nodes, found.fatal) == (FindingKind.PACKAGES, ("n3",), package in fatal)


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
    (gpus({"used_gb": 40.0, "processes": (77,)}), "gpu_busy", True,
     "40.0 GB in use, by processes that are none of this job (77)"),
    ({"versions": {"python": "3.11.7", "torch": "2.12.0", "nccl": "2.27.5", "driver": "550.54"}}, "versions", True,
     "torch 2.12.0; expected: torch 2.13.0, as on most of the others"),
    ({"versions": {"python": "3.11.7", "torch": "2.13.0", "nccl": "2.27.5", "driver": "535.1"}}, "versions", False,
     "driver 535.1"),
    ({"packages": {"torch": "2.13.0", "numpy": "1.26.0", "rich": "12.0"}}, "packages", True,
     "numpy 1.26.0, rich 12.0; expected: numpy 2.1.0, rich 13.0"),
    ({"packages": {"torch": "2.13.0", "numpy": "2.1.0"}}, "packages", False, "rich none; expected: rich 13.0"),
    ({"code": {"slurmtrain/errors.py": "aaaa", "code/train.py": "0000"}}, "code", True,
     "code/train.py has other contents"),
    ({"config_hash": "beef"}, "config", True, "its config.yaml has the digest beef; expected"),
    ({"paths": {"/data/tokens": MISSING}}, "data_missing", True, "/data/tokens is not there"),
    ({"paths": {"/data/tokens": "a folder whose manifest.json has the digest d2"}}, "data_differs", True,
     f"/data/tokens is a folder whose manifest.json has the digest d2; expected: /data/tokens is {MANIFEST}"),
    ({"clock": (299.9, 300.3)}, "clock", False, "its clock is 299.9 s ahead; expected: at most 5 s"),
    ({"clock": (-10.2, -10.0)}, "clock", False, "behind"),
    ({"disks": {"/runs/r": "", "/tmp": "has 0 GB left"}}, "disk_full", True, "/tmp has 0 GB left"),
    ({"disks": {"/runs/r": "has room for 12 more files", "/tmp": ""}}, "disk_full", True,
     "/runs/r has room for 12 more files"),
    ({"disks": {"/runs/r": "cannot be written: it is mounted read-only"}}, "disk_full", True,
     "/runs/r cannot be written: it is mounted read-only"),
    ({"folder": FolderFacts(None, limit_s=30)}, "shared_folder", True, "does not see in 30 s what rank 0 has written"),
    ({"folder": FolderFacts(None, stale=True, limit_s=30)}, "shared_folder", True,
     "sees what the run directory held before"),
    ({"folder": FolderFacts(9.5, limit_s=30)}, "shared_folder", False, "has seen 9.5 s late"),
    ({"folder": FolderFacts(None, error="Read-only file system", limit_s=30)}, "shared_folder", True,
     "cannot write into the run directory: Read-only file system"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "fatal", "words"), ON_A_NODE)
def test_what_is_wrong_on_one_node_is_found_by_its_name_and_blamed_on_that_node(
    change: dict[str, Any], kind: str, fatal: bool, words: str
) -> None:
    found = only(compare(with_node(change, "n3"), EXPECTED))
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
    found = [each for each in compare(everywhere, EXPECTED) if each.kind == kind]
    shared = ("versions", "packages", "code", "config", "data_differs", "data_missing")
    if kind in shared:  # what all nodes share is right
        assert found == []
    elif kind in ("gpu_broken", "gpu_busy"):  # eight broken GPUs are eight broken GPUs
        assert {each.fault for each in found} == {Fault.NODE}
    elif found[0].fatal:
        assert {each.fault for each in found} == {Fault.CONFIG}
        error = error_of(found)
        assert error is not None and error.nodes == () and error.exit_code == 78


# What is wrong with rank 13, which is on n3.
OF_A_RANK: list[tuple[dict[str, Any], str, bool, str]] = [
    ({"world_size": 16}, "ranks", True, "rank 13 on n3: it was told that the job has 16 ranks; expected: 32"),
    ({"rank": 14}, "ranks", True, "rank 14 on n3: 2 processes are rank 14; expected: one"),
    ({"gpus_seen": 0}, "gpu_missing", True, "rank 13 on n3: no GPU is visible; expected: 4"),
    ({"cpus": (0, 1)}, "cpus", False, "rank 13 on n3: it may run on 2 CPUs; expected: 8"),
    ({"variables": {"NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "8"}}, "variables", False,
     "rank 13 on n3: NCCL_ALGO is Tree; expected: Ring, as for most ranks"),
    ({"variables": {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "8", "NCCL_P2P_DISABLE": "1"}}, "variables", False,
     "n3: NCCL_P2P_DISABLE=1 is set"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "fatal", "words"), OF_A_RANK)
def test_what_is_wrong_with_one_rank_is_found_by_its_name_and_its_node(
    change: dict[str, Any], kind: str, fatal: bool, words: str
) -> None:
    found = only(compare(with_rank(change, 13), EXPECTED))
    assert (found.kind, found.nodes, found.fatal) == (kind, ("n3",), fatal)
    assert words in found.sentence


def test_ranks_that_are_all_bound_to_the_same_core_are_found() -> None:
    found = compare(with_rank({"cpus": (0,)}, 12, 13, 14, 15), EXPECTED)
    assert "4 ranks share CPU 0; expected: CPUs of their own" in "\n".join(each.sentence for each in found)


def test_between_two_nodes_that_differ_nobody_is_blamed() -> None:
    two = replace(EXPECTED, world_size=8)
    older = with_node({"versions": {"torch": "2.12.0"}}, "n1", facts=on_nodes(2))
    found = [each for each in compare(older, two) if each.fatal]
    assert {each.fault for each in found} == {Fault.CONFIG}
    assert {node for each in found for node in each.nodes} == {"n0", "n1"}
    apart = only(compare(with_node({"clock": (60.0, 60.1)}, "n1", facts=on_nodes(2)), two))
    assert apart.sentence == "n0, n1: their clocks are 59.8 s apart; expected: at most 5 s (preflight.clock_offset_s)"


def test_a_node_that_sees_no_gpu_is_blamed_even_if_it_is_the_only_one() -> None:
    alone = with_node({"gpus": ()}, "n0", facts=on_nodes(1))
    found = only(compare(alone, replace(EXPECTED, world_size=4)))
    error = error_of([found])
    assert error is not None and error.nodes == ("n0",)


def test_a_full_shared_folder_is_no_nodes_fault() -> None:
    full = {"disks": {"/runs/r": "has 0.01 GB left", "/tmp": ""}}
    for number in (1, 2, 8):
        facts = on_nodes(number)
        of_all = with_node(full, *(each.node for each in facts.nodes), facts=facts)
        found = only(compare(of_all, replace(EXPECTED, world_size=number * RANKS_OF_NODE)))
        assert (found.kind, found.fatal, found.fault) == (FindingKind.DISK_FULL, True, Fault.CONFIG)


def test_a_driver_that_does_not_answer_ends_a_training_where_no_rank_sees_a_gpu() -> None:
    facts = with_rank({"gpus_seen": 0}, 12, 13, 14, 15)
    broken = with_node({"gpus": None, "driver_error": "GPU is lost"}, "n3", facts=facts)
    found = [each for each in compare(broken, EXPECTED) if each.kind == FindingKind.GPU_DRIVER]
    assert only(found).fatal and only(found).nodes == ("n3",)


@pytest.mark.parametrize(
    ("gpus", "ranks", "asked", "missing"),
    [
        (1, 4, 4, False),  # each rank is shown its own
        (2, 2, 4, False),  # each rank is shown its two
        (3, 4, 4, True),
        (7, 1, 8, True),  # a launcher, which sees all
        (0, 4, 4, True),
    ],
)
def test_gpus_that_slurm_shows_only_to_other_ranks_are_not_missing(
    gpus: int, ranks: int, asked: int, missing: bool
) -> None:
    facts = on_nodes(1)
    facts = replace(facts, ranks=tuple(replace(each, world_size=ranks) for each in facts.ranks[:ranks]))
    facts = with_node({"gpus": tuple(GpuFacts(index) for index in range(gpus))}, "n0", facts=facts)
    found = compare(facts, replace(EXPECTED, world_size=ranks, gpus_per_node=asked))
    assert [each.kind for each in found] == [FindingKind.GPU_MISSING] * missing


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
        found = only(compare(with_node(gpus({"ecc_errors": 2, **change}), "n3"), EXPECTED))
        assert (found.kind, found.fatal) == (FindingKind.GPU_BROKEN, change not in warnings)


def test_a_hundred_nodes_with_the_same_fault_are_one_finding() -> None:
    found = only(compare(with_node({"folder": FolderFacts(9.5)}, "n1", "n2", "n5"), EXPECTED))
    assert found.nodes == ("n1", "n2", "n5")


def test_a_fault_of_the_config_comes_before_that_of_a_node_since_no_other_node_would_mend_it() -> None:
    node = Finding(FindingKind.GPU_BROKEN, ("n3",), "x", "y", True, Fault.NODE)
    config = Finding(FindingKind.CODE, ("n0", "n1"), "x", "y", True, Fault.CONFIG)
    error = error_of([node, config])
    assert error is not None and error.nodes == () and "preflight, code: n0, n1" in error.message
    assert "and 1 more: gpu_broken" in error.message


# The readers.


def test_files_and_folders_of_data_are_told_apart_by_size_and_manifest(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "shard.bin").write_bytes(b"x" * 1000)
        assert readers.look_at(folder) == "a folder without a manifest"
        (folder / "manifest.json").write_text("{}")
    assert readers.look_at(one) == readers.look_at(other)
    (other / "manifest.json").write_text("[]")
    assert readers.look_at(one) != readers.look_at(other)
    assert readers.look_at(one / "shard.bin") == "a file of 1000 bytes"
    assert readers.look_at(tmp_path / "none") == MISSING
    assert readers.look_at(one / "shard.bin" / "deeper") == MISSING


def test_a_folder_that_is_nearly_full_is_found(tmp_path: Path) -> None:
    assert readers.disk_problem(tmp_path, 0.0) == ""
    assert "GB left" in readers.disk_problem(tmp_path, 1e12)
