"""The checks before training: what differs between ranks and nodes is found by its name, and on the node it is on."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from slurmtrain.choices import FindingKind
from slurmtrain.errors import RendezvousError
from slurmtrain.runtime.preflight import readers
from slurmtrain.runtime.preflight.compare import compare
from slurmtrain.runtime.preflight.comparisons.machine import count_of
from slurmtrain.runtime.preflight.exchange import Exchange
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import (
    DiskFacts,
    FolderFacts,
    GatheredFacts,
    GpuFacts,
    Message,
    NodeFacts,
    PathFacts,
    RankFacts,
    gathered,
)
from slurmtrain.runtime.preflight.findings import ADVICE, Fault, Finding, error_of
from slurmtrain.runtime.preflight.gpus import NoAnswerError, read_gpus
from slurmtrain.runtime.preflight.shared_folder import WORD, SharedFolder
from slurmtrain.runtime.preflight.waiting import begin
from slurmtrain.runtime.shared_file_wait import Pauses
from slurmtrain.system.signals import StopDuringStartError

NODES, RANKS_OF_NODE = 8, 4
EXPECTED = Expected(
    world_size=NODES * RANKS_OF_NODE, gpus_per_node=4, cpus_per_task=8, mem_per_node_gb=500, shared=("/runs/r",)
)
SOUND_GPUS = tuple(
    GpuFacts(index, "H100", 85.0, 0.6, (), 0, False, False, "") for index in range(EXPECTED.gpus_per_node)
)


def sound_node(index: int) -> NodeFacts:
    return NodeFacts(
        node=f"n{index}",
        rank=RANKS_OF_NODE * index,
        versions={"python": "3.11.7", "torch": "2.13.0", "nccl": "2.27.5", "driver": "550.54"},
        packages={"torch": "2.13.0", "numpy": "2.1.0", "rich": "13.0"},
        code={"slurmtrain/errors.py": "aaaa", "code/train.py": "bbbb"},
        config_hash="cafe",
        paths={"/data/tokens": PathFacts("folder", 1 << 30, "d1", "l1")},
        disks={"/runs/r": DiskFacts(900.0, 10**9), "/tmp": DiskFacts(50.0, 10**7)},
        clock=(1000.0 + index * 0.01, 1000.2 + index * 0.01),
        gpus=SOUND_GPUS,
        memory_gb=900.0,
        interface="ib0",
        interface_mbit=400_000,
        network="10.0.0.0/16",
        folder=FolderFacts(0.02, limit_s=30),
        variables={},
    )


def sound_rank(index: int) -> RankFacts:
    local = index % RANKS_OF_NODE
    return RankFacts(
        rank=index,
        node=f"n{index // RANKS_OF_NODE}",
        local_rank=local,
        pid=4000 + index,
        world_size=EXPECTED.world_size,
        device=f"cuda:{local}",
        gpus_seen=4,
        cpus=f"{8 * local}-{8 * local + 7}",
        cpus_of_machine=64,
        numa_nodes=(0,),
        gpu_numa_node=0,
        packages="abc",
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


def test_nothing_is_found_where_all_is_well() -> None:
    assert compare(SOUND, EXPECTED) == []


def test_a_fact_that_could_not_be_read_is_no_finding() -> None:
    unknown = NodeFacts("n3", 12)
    nodes = tuple(unknown if each.node == "n3" else each for each in SOUND.nodes)
    ranks = tuple(
        RankFacts(each.rank, each.node, world_size=each.world_size) if each.node == "n3" else each
        for each in SOUND.ranks
    )
    assert compare(GatheredFacts(ranks, nodes), EXPECTED) == []
    nothing = GatheredFacts(
        tuple(RankFacts(each.rank, each.node, world_size=each.world_size) for each in SOUND.ranks),
        tuple(NodeFacts(each.node, each.rank) for each in SOUND.nodes),
    )
    assert compare(nothing, EXPECTED) == []


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


@pytest.mark.parametrize(
    ("package", "fatal"),
    [
        ("nvidia-nccl-cu12", True),  # ranks with two releases of it do not understand each other
        ("nvidia-cublas", True),
        ("pytorch-triton", True),  # as nightly builds of torch call it
        ("nvidia-ml-py", False),  # looks at GPUs
        ("nvidia-nvtx-cu12", False),  # names parts of profiles
        ("nvidia-cuda-cupti-cu12", False),
        ("nvidia-bfcl", False),
    ],
)
def test_a_package_that_computes_nothing_ends_no_training(package: str, fatal: bool) -> None:
    everywhere = with_node({"packages": {package: "2"}}, *(each.node for each in SOUND.nodes))
    found = only(compare(with_node({"packages": {package: "1"}}, "n3", facts=everywhere), EXPECTED))
    assert (found.kind, found.nodes, found.fatal) == (FindingKind.PACKAGES, ("n3",), fatal)


# Of a model before Ampere, which remaps nothing, with a driver that does not say what it needs.
BROKEN_GPU = (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], ecc_errors=2, remap_pending=None, remap_failed=None, needs=None))
# What is wrong on n3 -> kind, whether training must not begin, words of the sentence.
ON_A_NODE: list[tuple[dict[str, Any], FindingKind, bool, str]] = [
    ({"gpus": SOUND_GPUS[:3]}, FindingKind.GPU_MISSING, True, "3 GPUs are visible; expected: 4"),
    ({"gpus": ()}, FindingKind.GPU_MISSING, True, "0 GPUs are visible"),
    (
        {"gpus": None, "driver_error": "Driver/library version mismatch"},
        FindingKind.GPU_DRIVER,
        False,  # since torch sees GPUs
        "Driver/library version mismatch",
    ),
    ({"gpus": BROKEN_GPU}, FindingKind.GPU_BROKEN, True, "GPU 3 has 2 uncorrectable ECC errors"),
    (
        {"gpus": (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], remap_failed=True))},
        FindingKind.GPU_BROKEN,
        True,
        "cannot be remapped",
    ),
    (
        {"gpus": (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], needs="a reset"))},
        FindingKind.GPU_BROKEN,
        True,
        "GPU 3 needs a reset after an error (Xid)",
    ),
    (
        {"gpus": (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], slowed_by=("heat (hardware)",)))},
        FindingKind.GPU_SLOWED,
        False,
        "slowed by heat",
    ),
    (
        {"gpus": (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], used_gb=40.0, processes=(77,)))},
        FindingKind.GPU_BUSY,
        True,
        "40.0 GB in use, by processes that are none of this job (77)",
    ),
    (
        {"versions": {"python": "3.11.7", "torch": "2.12.0", "nccl": "2.27.5", "driver": "550.54"}},
        FindingKind.VERSIONS,
        True,
        "torch 2.12.0; expected: torch 2.13.0, as on most of the others",
    ),
    (
        {"versions": {"python": "3.11.7", "torch": "2.13.0", "nccl": "2.27.5", "driver": "535.1"}},
        FindingKind.VERSIONS,
        False,
        "driver 535.1",
    ),
    (
        {"packages": {"torch": "2.13.0", "numpy": "1.26.0", "rich": "12.0"}},
        FindingKind.PACKAGES,
        True,
        "numpy 1.26.0, rich 12.0; expected: numpy 2.1.0, rich 13.0",
    ),
    (
        {"packages": {"torch": "2.13.0", "numpy": "2.1.0"}},
        FindingKind.PACKAGES,
        False,
        "rich none; expected: rich 13.0",
    ),
    (
        {"code": {"slurmtrain/errors.py": "aaaa", "code/train.py": "0000"}},
        FindingKind.CODE,
        True,
        "code/train.py has other contents",
    ),
    ({"config_hash": "beef"}, FindingKind.CONFIG, True, "its config.yaml has the digest beef; expected"),
    ({"paths": {"/data/tokens": PathFacts("missing")}}, FindingKind.DATA_MISSING, True, "/data/tokens is not there"),
    (
        {"paths": {"/data/tokens": PathFacts("folder", 1 << 30, "d2")}},
        FindingKind.DATA_DIFFERS,
        True,
        "/data/tokens is a folder with the digest d2; expected: /data/tokens is a folder with the digest d1",
    ),
    (
        {"paths": {"/data/tokens": PathFacts("folder", 1 << 20, "d1", "l2")}},
        FindingKind.DATA_DIFFERS,
        False,  # files may just be coming
        "the names and sizes in /data/tokens have the digest l2",
    ),
    ({"clock": (1300.0, 1300.2)}, FindingKind.CLOCK, False, "its clock is 299.9 s ahead; expected: at most 5 s"),
    ({"clock": (990.0, 990.2)}, FindingKind.CLOCK, False, "behind"),
    (
        {"disks": {"/runs/r": DiskFacts(900.0), "/tmp": DiskFacts(0.0)}},
        FindingKind.DISK_FULL,
        True,
        "/tmp has 0 GB left; expected: at least 0.05 GB",
    ),
    (
        {"disks": {"/runs/r": DiskFacts(900.0, 12), "/tmp": DiskFacts(9.0)}},
        FindingKind.DISK_FULL,
        True,
        "/runs/r has room for 12 more files",
    ),
    (
        {"disks": {"/runs/r": DiskFacts(900.0, error="it is mounted read-only")}},
        FindingKind.DISK_FULL,
        True,
        "/runs/r cannot be written: it is mounted read-only",
    ),
    ({"memory_gb": 100.0}, FindingKind.MEMORY, False, "100 GB of memory are available; expected: 500 GB"),
    ({"variables": {"NCCL_P2P_DISABLE": "1"}}, FindingKind.VARIABLES, False, "NCCL_P2P_DISABLE=1 is set"),
    (
        {"interface": "eno1", "network": "192.168.0.0/24"},
        FindingKind.INTERFACE,
        False,
        "its network interface is eno1 (192.168.0.0/24); expected: ib0",
    ),
    ({"interface_mbit": 100_000}, FindingKind.NETWORK_SPEED, False, "runs at 100 Gbit/s; expected: 400 Gbit/s"),
    (
        {"folder": FolderFacts(None, limit_s=30)},
        FindingKind.SHARED_FOLDER,
        True,
        "does not see in 30 s what rank 0 has written",
    ),
    (
        {"folder": FolderFacts(None, stale=True, limit_s=30)},
        FindingKind.SHARED_FOLDER,
        True,
        "sees what the run directory held before",
    ),
    ({"folder": FolderFacts(9.5, limit_s=30)}, FindingKind.SHARED_FOLDER, False, "has seen 9.5 s late"),
    (
        {"folder": FolderFacts(None, error="Read-only file system", limit_s=30)},
        FindingKind.SHARED_FOLDER,
        True,
        "cannot write into the run directory: Read-only file system",
    ),
]


@pytest.mark.parametrize(("change", "kind", "fatal", "words"), ON_A_NODE)
def test_what_is_wrong_on_one_node_is_found_by_its_name_and_blamed_on_that_node(
    change: dict[str, Any], kind: FindingKind, fatal: bool, words: str
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
    change: dict[str, Any], kind: FindingKind, fatal: bool, words: str
) -> None:
    everywhere = with_node(change, *(each.node for each in SOUND.nodes))
    found = [each for each in compare(everywhere, EXPECTED) if each.kind == kind]
    differs = {
        FindingKind.VERSIONS,
        FindingKind.PACKAGES,
        FindingKind.CODE,
        FindingKind.CONFIG,
        FindingKind.DATA_DIFFERS,
    }
    if kind in differs or kind == FindingKind.DATA_MISSING:  # what all nodes share is right
        assert found == []
    elif kind in (FindingKind.GPU_BROKEN, FindingKind.GPU_BUSY):  # eight broken GPUs are eight broken GPUs
        assert {each.fault for each in found} == {Fault.NODE}
    elif found[0].fatal:
        assert {each.fault for each in found} == {Fault.CONFIG}
        error = error_of(found)
        assert error is not None and error.nodes == () and error.exit_code == 78


# What is wrong with rank 13, which is on n3.
OF_A_RANK: list[tuple[dict[str, Any], FindingKind, bool, str]] = [
    ({"world_size": 16}, FindingKind.RANKS, True, "rank 13 on n3: it was told that the job has 16 ranks; expected: 32"),
    ({"rank": 14}, FindingKind.RANKS, True, "rank 14 on n3: 2 processes are rank 14; expected: one"),
    ({"gpus_seen": 0}, FindingKind.GPU_MISSING, True, "rank 13 on n3: no GPU is visible; expected: 4"),
    (
        {"differs": {"torch": "2.11.0"}},
        FindingKind.PACKAGES,
        True,
        "rank 13 on n3: torch 2.11.0; expected: torch 2.13.0, as the other ranks of that node",
    ),
    ({"cpus": "0-1"}, FindingKind.CPUS, False, "rank 13 on n3: it may run on 2 CPUs; expected: 8"),
    (
        {"numa_nodes": (1,)},
        FindingKind.NUMA,
        False,
        "rank 13 on n3: may run on the socket of NUMA node 1 only; expected: that of node 0, where its GPU is",
    ),
    (
        {"variables": {"NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "8"}},
        FindingKind.VARIABLES,
        False,
        "rank 13 on n3: NCCL_ALGO is Tree; expected: Ring, as for most ranks",
    ),
]


@pytest.mark.parametrize(("change", "kind", "fatal", "words"), OF_A_RANK)
def test_what_is_wrong_with_one_rank_is_found_by_its_name_and_its_node(
    change: dict[str, Any], kind: FindingKind, fatal: bool, words: str
) -> None:
    found = only(compare(with_rank(change, 13), EXPECTED))
    assert (found.kind, found.nodes, found.fatal) == (kind, ("n3",), fatal)
    assert words in found.sentence


def test_ranks_that_are_all_bound_to_the_same_core_are_found() -> None:
    found = compare(with_rank({"cpus": "0"}, 12, 13, 14, 15), EXPECTED)
    assert "4 ranks share CPU 0; expected: CPUs of their own" in "\n".join(each.sentence for each in found)


def test_a_rank_that_may_use_the_whole_machine_is_not_bound() -> None:
    whole = {"cpus": "0-1", "cpus_of_machine": 2}
    assert compare(with_rank(whole, *range(EXPECTED.world_size)), EXPECTED) == []


def test_between_two_nodes_that_differ_nobody_is_blamed() -> None:
    two = replace(EXPECTED, world_size=8)
    older = with_node({"versions": {"torch": "2.12.0"}}, "n1", facts=on_nodes(2))
    found = [each for each in compare(older, two) if each.fatal]
    assert {each.fault for each in found} == {Fault.CONFIG}
    assert {node for each in found for node in each.nodes} == {"n0", "n1"}
    apart = only(compare(with_node({"clock": (1060.0, 1060.1)}, "n1", facts=on_nodes(2)), two))
    assert apart.sentence == "n0, n1: their clocks are 59.8 s apart; expected: at most 5 s (preflight.clock_offset_s)"


def test_a_node_that_sees_no_gpu_is_blamed_even_if_it_is_the_only_one() -> None:
    alone = with_node({"gpus": ()}, "n0", facts=on_nodes(1))
    found = only(compare(alone, replace(EXPECTED, world_size=4)))
    error = error_of([found])
    assert error is not None and error.nodes == ("n0",)


def test_a_full_shared_folder_is_no_nodes_fault() -> None:
    full = {"disks": {"/runs/r": DiskFacts(0.01), "/tmp": DiskFacts(5.0)}}
    for number in (1, 2, 8):
        facts = on_nodes(number)
        found = only(
            compare(
                with_node(full, *(each.node for each in facts.nodes), facts=facts),
                replace(EXPECTED, world_size=number * RANKS_OF_NODE),
            )
        )
        assert (found.kind, found.fatal, found.fault) == (FindingKind.DISK_FULL, True, Fault.CONFIG)


def test_a_process_that_was_held_up_between_the_two_looks_at_its_clock_has_no_wrong_clock() -> None:
    assert compare(with_node({"clock": (990.0, 1100.0)}, "n3"), EXPECTED) == []


def test_a_rank_of_the_job_is_no_foreign_process_on_a_gpu() -> None:
    own = (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], used_gb=30.0, processes=(4012, 4013)))
    assert compare(with_node({"gpus": own}, "n3"), EXPECTED) == []


def test_other_programs_of_the_same_job_may_be_on_its_gpus() -> None:
    shared = (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], used_gb=40.0, processes=(77,)))
    assert compare(with_node({"gpus": shared}, "n3"), replace(EXPECTED, alone=False)) == []


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


def test_slices_of_a_gpu_are_not_counted_and_gpus_of_other_jobs_are_not_judged() -> None:
    sliced = (replace(SOUND_GPUS[0], sliced=True, used_gb=70.0, processes=(1,)),)  # by other jobs, in slices of theirs
    assert compare(with_node({"gpus": sliced}, "n3"), EXPECTED) == []
    eight = tuple(replace(each, ecc_errors=3, used_gb=70.0, processes=(1,)) for each in (*SOUND_GPUS, *SOUND_GPUS))
    assert compare(with_node({"gpus": eight}, "n3"), EXPECTED) == []


@pytest.mark.parametrize(
    "change",
    [
        {"ecc_errors": 2},
        {"ecc_errors": 2, "needs": None},
        # Contained: the driver has taken that memory out of use, and programs may start again before the reset.
        {"ecc_errors": 2, "remap_pending": True, "needs": None},
        {"ecc_errors": 2, "remap_pending": True, "needs": "to be drained and reset", "needs_later": True},
        {"ecc_errors": 2, "remap_pending": None, "remap_failed": None},  # no rows to remap, and nothing is needed
    ],
)
def test_errors_in_memory_that_is_out_of_use_since_are_a_warning(change: dict[str, Any]) -> None:
    mended = (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], **change))
    found = only(compare(with_node({"gpus": mended}, "n3"), EXPECTED))
    assert (found.kind, found.fatal) == (FindingKind.GPU_BROKEN, False)


def test_an_error_of_memory_after_which_a_gpu_needs_a_reset_ends_a_training() -> None:
    gpus = (*SOUND_GPUS[:3], replace(SOUND_GPUS[3], ecc_errors=2, needs="a reset"))
    found = only(compare(with_node({"gpus": gpus}, "n3"), EXPECTED))
    assert (found.fatal, found.value) == (True, "GPU 3 needs a reset after an error (Xid)")


def test_nodes_may_name_one_network_differently_and_have_networks_of_their_own() -> None:
    assert compare(with_node({"interface": "enp1s0"}, "n3"), EXPECTED) == []
    assert compare(with_node({"network": "10.1.0.0/16"}, "n3"), EXPECTED) == []


def test_a_text_that_is_no_path_is_not_missing() -> None:
    nowhere = {"paths": {"/no_think": PathFacts("missing")}}
    assert compare(with_node(nowhere, *(each.node for each in SOUND.nodes)), EXPECTED) == []


def test_no_gpu_is_missed_where_none_was_asked_for() -> None:
    cpu = replace(EXPECTED, gpus_per_node=0)
    assert compare(with_node({"gpus": None, "driver_error": "none"}, "n3"), cpu) == []


def test_modules_that_only_rank_0_has_loaded_are_not_compared() -> None:
    more = {"slurmtrain/errors.py": "aaaa", "code/train.py": "bbbb", "slurmtrain/slurm/client.py": "cccc"}
    assert compare(with_node({"code": more}, "n0"), EXPECTED) == []


def test_a_hundred_nodes_with_the_same_fault_are_one_finding() -> None:
    found = only(compare(with_node({"interface_mbit": 10_000}, "n1", "n2", "n5"), EXPECTED))
    assert found.nodes == ("n1", "n2", "n5")


def test_what_the_config_says_to_ignore_is_neither_told_nor_fatal() -> None:
    broken = with_node({"gpus": BROKEN_GPU, "clock": (0.0, 0.1)}, "n3")
    ignored = (FindingKind.GPU_BROKEN, FindingKind.CLOCK)
    assert compare(broken, replace(EXPECTED, ignored=ignored)) == []


def test_a_fault_of_the_config_comes_before_that_of_a_node_since_no_other_node_would_mend_it() -> None:
    node = Finding(FindingKind.GPU_BROKEN, ("n3",), "x", "y", True, Fault.NODE)
    config = Finding(FindingKind.CODE, ("n0", "n1"), "x", "y", True, Fault.CONFIG)
    error = error_of([node, config])
    assert error is not None and error.nodes == () and "preflight, code: n0, n1" in error.message
    assert "and 1 more: gpu_broken" in error.message


def test_every_kind_of_finding_says_what_to_do() -> None:
    assert set(ADVICE) == set(FindingKind)


# The messages.


def test_facts_come_through_a_message_as_they_were() -> None:
    for rank, node in ((SOUND.ranks[0], SOUND.nodes[0]), (SOUND.ranks[1], None)):
        message = Message(rank, node)
        assert Message.decode(message.encode()) == message


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"rank": 3}', '{"rank": {"rank": 1}}', "nonsense"])
def test_a_message_that_holds_no_facts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Message.decode(text)


def test_facts_of_a_newer_version_lose_only_what_is_not_known() -> None:
    values = json.loads(Message(SOUND.ranks[0]).encode())
    values["rank"]["colour"] = "blue"
    assert Message.decode(json.dumps(values)).rank == SOUND.ranks[0]


def test_4096_ranks_are_compared_in_less_than_ten_seconds() -> None:
    import time

    nodes = [replace(sound_node(index), packages={f"p{n}": "1.0" for n in range(300)}) for index in range(512)]
    nodes[77] = replace(nodes[77], versions={"torch": "2.12.0"})
    sent = [
        Message(
            replace(sound_rank(index), node=f"n{index // 8}", local_rank=index % 8, world_size=4096),
            nodes[index // 8] if index % 8 == 0 else None,
        ).encode()
        for index in range(4096)
    ]
    began = time.process_time()
    found = compare(gathered(map(Message.decode, sent)), replace(EXPECTED, world_size=4096))
    assert time.process_time() - began < 10
    assert [(each.kind, each.nodes) for each in found if each.fatal] == [(FindingKind.VERSIONS, ("n77",))]


# The readers.


class Error(Exception):
    pass


def library(**answers: Any) -> Any:
    """A pynvml with two GPUs. An answer that is an exception is raised."""

    def answer(value: Any) -> Callable[..., Any]:
        def give(*_: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return give

    known: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetName": b"H100",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80e9, used=1e9),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=9)],
        "nvmlDeviceGetFieldValues": recovery_action(0),
        "nvmlDeviceGetMigMode": (0, 0),
        **answers,
    }
    constants = {"NVML_SUCCESS": 0, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 230}
    return SimpleNamespace(NVMLError=Error, **constants, **{name: answer(value) for name, value in known.items()})


def recovery_action(number: int, code: int = 0) -> Any:
    """What nvmlDeviceGetFieldValues returns for one field."""
    return [SimpleNamespace(fieldId=230, nvmlReturn=code, value=SimpleNamespace(uiVal=number))]


def test_nvml_is_read_into_facts() -> None:
    found = read_gpus({}, library())
    assert found is not None and len(found) == 2
    assert found[0] == GpuFacts(0, "H100", 80.0, 1.0, (9,), 0, False, False, "", False, (), False)


def test_a_driver_that_is_too_old_to_say_what_a_gpu_needs_says_nothing() -> None:
    not_supported = recovery_action(0, code=3)
    for answer in (not_supported, Error("Not Supported")):
        found = read_gpus({}, library(nvmlDeviceGetFieldValues=answer))
        assert found is not None and found[0].needs is None
    older = library()
    del older.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    found = read_gpus({}, older)
    assert found is not None and found[0].needs is None


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"nvmlDeviceGetTotalEccErrors": 7}, {"ecc_errors": 7}),
        ({"nvmlDeviceGetRemappedRows": (0, 3, 1, 1)}, {"remap_pending": True, "remap_failed": True}),
        ({"nvmlDeviceGetFieldValues": recovery_action(1)}, {"needs": "a reset", "needs_later": False}),
        (
            {"nvmlDeviceGetFieldValues": recovery_action(4)},
            {"needs": "to be drained and reset", "needs_later": True},
        ),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x48}, {"slowed_by": ("a hardware slowdown", "heat (hardware)")}),
        ({"nvmlDeviceGetTotalEccErrors": Error("Not Supported")}, {"ecc_errors": None}),
    ],
)
def test_what_speaks_against_a_gpu_is_read(answers: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read_gpus({}, library(**answers))
    assert found is not None
    assert {name: getattr(found[0], name) for name in expected} == expected


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_a_driver_that_does_not_answer_is_told_in_its_own_words(broken: str) -> None:
    with pytest.raises(NoAnswerError, match="Driver/library version mismatch"):
        read_gpus({}, library(**{broken: Error("Driver/library version mismatch")}))


def test_where_nvml_cannot_be_asked_nothing_is_known_of_the_gpus() -> None:
    missing = Error("NVML Shared Library Not Found")
    missing.value = 12  # type: ignore[attr-defined]
    assert read_gpus({}, library(nvmlInit=missing)) is None


def test_files_and_folders_of_data_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "shard.bin").write_bytes(b"x" * 100_000)
        (folder / "manifest.json").write_text("{}")
    assert readers.look_at(one) == readers.look_at(other)
    (other / "manifest.json").write_text("[]")
    assert readers.look_at(one) != readers.look_at(other)
    assert readers.look_at(one / "shard.bin").size_bytes == 100_000
    (other / "shard.bin").write_bytes(b"x" * 99_999 + b"y")
    assert readers.look_at(one / "shard.bin") != readers.look_at(other / "shard.bin")
    assert readers.look_at(tmp_path / "none") == PathFacts("missing")
    assert readers.look_at(one / "shard.bin" / "deeper") == PathFacts("missing")


def test_packages_are_told_by_the_folders_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "torch-2.12.0.dist-info").mkdir()
    before = readers.packages_digest([str(tmp_path)])
    (tmp_path / "torch-2.12.0.dist-info").rename(tmp_path / "torch-2.13.0.dist-info")
    assert readers.packages_digest([str(tmp_path)]) != before
    (tmp_path / "torch-2.13.0.dist-info").rename(tmp_path / "torch-2.12.0.dist-info")
    assert readers.packages_digest([str(tmp_path), "/nowhere"]) == before


def test_a_file_system_that_counts_no_space_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: nothing)
    assert readers.look_at_disk(tmp_path) == DiskFacts(None, None, None)


def test_a_reader_that_hangs_is_left_alone_and_its_fact_is_not_known() -> None:
    import threading
    import time

    never = threading.Event()
    reader = begin(never.wait)
    assert readers.end(reader, "a fact", time.monotonic() + 0.05) is None
    never.set()
    assert readers.end(begin(lambda: 1 / 0), "a fact", time.monotonic() + 5) is None


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"NCCL_SOCKET_IFNAME": "=lo"}, []),
        ({"NCCL_SOCKET_IFNAME": "l"}, []),
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, []),
        ({"NCCL_SOCKET_IFNAME": "=ib7"}, ["NCCL_SOCKET_IFNAME"]),
        ({"GLOO_SOCKET_IFNAME": "ib7"}, ["GLOO_SOCKET_IFNAME"]),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ["CUDA_LAUNCH_BLOCKING"]),
        ({"CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, []),
    ],
)
def test_variables_that_slow_training_down_or_name_no_network_are_found(
    variables: dict[str, str], found: list[str]
) -> None:
    assert list(readers.left_over(variables, gpus=True)) == found


def test_a_rank_is_near_all_numa_nodes_of_its_socket(tmp_path: Path) -> None:
    """Two sockets that are divided in two each, and a fifth node that has memory only."""
    for node, cpus in enumerate(("0-3", "4-7", "8-11", "12-15", "")):
        folder = tmp_path / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for cpu in range(16):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu // 8}\n")
    assert readers.numa_nodes_of({5, 6}, tmp_path) == (0, 1)
    assert readers.numa_nodes_of({12}, tmp_path) == (2, 3)
    assert readers.numa_nodes_of({7, 8}, tmp_path) == (0, 1, 2, 3)
    assert readers.numa_nodes_of({99}, tmp_path) is None
    (tmp_path / "cpu/cpu4/topology/physical_package_id").unlink()
    assert readers.numa_nodes_of({5}, tmp_path) is None


def test_lists_of_cpus_are_read_and_written_as_the_kernel_does() -> None:
    assert readers.as_list([8, 0, 1, 2, 3]) == "0-3,8"
    assert readers.members("0-3,8") == {0, 1, 2, 3, 8}
    assert count_of("0-3,8") == 5
    assert count_of("nonsense") is None


# The shared folder.


class NoPause(Pauses):
    def __init__(self, clock: list[float]):
        super().__init__()
        self._clock = clock

    def pause(self) -> None:
        self._clock[0] += 1.0


def folder(path: Path, **changes: Any) -> SharedFolder:
    clock = [0.0]
    return dataclasses.replace(
        SharedFolder(path, "token", clock=lambda: clock[0], pauses=lambda: NoPause(clock)),
        **changes,
    )


def test_a_node_sees_what_rank_0_has_written(tmp_path: Path) -> None:
    assert folder(tmp_path / "preflight").write(WORD) is None
    assert folder(tmp_path / "preflight").look(None) == FolderFacts(0.0, limit_s=30.0)


def test_a_node_with_a_folder_of_its_own_or_one_that_is_stale_does_not(tmp_path: Path) -> None:
    assert folder(tmp_path / "mine").look(None) == FolderFacts(None, limit_s=30.0)
    stale = folder(tmp_path, read=lambda _: "of before")
    assert stale.look(None) == FolderFacts(None, stale=True, limit_s=30.0)


def test_how_late_a_node_sees_it_is_told(tmp_path: Path) -> None:
    answers = iter(["", "", "", "token"])
    assert folder(tmp_path, read=lambda _: next(answers)).look(None).seen_after_s == 3.0


def test_rank_0_names_the_nodes_whose_files_it_does_not_see(tmp_path: Path) -> None:
    shared = folder(tmp_path)
    shared.write("node-1")
    assert shared.missing(["node-1"]) == ()
    assert shared.missing(["node-1", "node-2"]) == ("node-2",)


def test_a_folder_that_cannot_be_written_is_told_in_the_kernels_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert folder(tmp_path / "file" / "preflight").write(WORD) == "Not a directory"


def exchanges(timeout_s: float, stop_requested: Callable[[], bool] = lambda: False) -> list[Exchange]:
    first = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stores = [first, *(dist.TCPStore("127.0.0.1", first.port, None, False) for _ in range(2))]
    return [Exchange(store, rank, 3, timeout_s, stop_requested) for rank, store in enumerate(stores)]


def test_all_ranks_meet_and_the_one_that_does_not_come_is_named() -> None:
    ranks = exchanges(60)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda rank: rank.meet("clock"), ranks)) == [None] * 3
    ranks = exchanges(0.01)
    ranks[1].send("facts", "mine")
    with pytest.raises(RendezvousError, match="1 of 2 ranks did not report their facts within 0 s: rank 2"):
        ranks[0].collect("facts", [1, 2])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_one_that_hangs_hears_that_it_is_to_stop(rank: int) -> None:
    began = time.monotonic()
    ranks = exchanges(3600, stop_requested=lambda: time.monotonic() > began + 0.1)
    with pytest.raises(StopDuringStartError):
        ranks[rank].meet("clock")
