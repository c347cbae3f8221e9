"""The file that `probe` writes: what it says of recorded clusters, and that a config can be made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from slurmtrain.config.compose import compose
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import ConfigError
from slurmtrain.launch.cluster_file import ClusterFile, describe
from slurmtrain.launch.queue_check import check_request
from slurmtrain.slurm.facts import ClusterFacts, NodeGroup
from tests.support.recorded_slurm import CLUSTERS, facts_of


def described(name: str, **options: Any) -> ClusterFile:
    return describe(facts_of(name), **options)


def with_gpus(*groups: NodeGroup) -> ClusterFacts:
    """A recorded cluster whose default partition has these nodes instead."""
    facts = facts_of("alpha_24_11")
    return replace(facts, groups=groups)


def group(gpus: tuple[tuple[str, int], ...], count: int = 2, **others: Any) -> NodeGroup:
    return NodeGroup("gpu", count, count, cpus=64, threads=1, memory_mb=500_000, gpus=gpus, **others)


def memory_of(gpu_type: str, *features: str) -> tuple[object, bool]:
    """What the file says of the memory of a GPU, and whether it asks."""
    file = describe(with_gpus(group(((gpu_type, 4),), features=features)))
    entry = next(each for each in file.entries if each.field == "gpu_memory_gb")
    return entry.value, entry.question


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_file_of_every_recorded_partition_makes_a_config_whose_job_the_cluster_takes(
    name: str, project: Path
) -> None:
    facts = facts_of(name)
    known = set(ClusterConfig.__struct_fields__)
    for partition in facts.partitions:
        if partition.state != "UP":
            continue
        file = describe(facts, partition=partition.name)
        path = project / "conf" / "cluster" / f"{file.name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text())
        assert {each.field for each in file.entries} <= known
        config = compose([f"cluster={file.name}"])
        validate(config)
        assert yaml.safe_load(file.text()) == file.values
        assert not any(fatal for _, fatal in check_request(facts, config.cluster))


def test_a_job_gets_a_whole_node_of_the_most_frequent_kind_within_the_limits() -> None:
    file = described("alpha_22_05")
    assert file.name == "alpha"
    wanted = {
        "partition": "gpu",
        "account": "biology",
        "tasks_per_node": 4,
        "gpus_per_node": 4,
        "gpu_type": "a100",
        "gpu_memory_gb": 79,  # by the feature 80gb
        "cpus_per_task": 14,  # 60 CPUs that jobs can have, by four ranks, in whole cores of two threads
        "mem_per_node_gb": 0,
        "time_limit_min": 1440,
        "signal_lead_s": 300,
    }
    assert {name: file.values.get(name) for name in wanted} == wanted


def test_limits_of_a_partition_a_qos_and_an_account_bound_what_is_asked_for() -> None:
    debug = described("alpha_24_11", partition="debug")
    assert debug.name == "alpha-debug"
    wanted = {"tasks_per_node": 4, "cpus_per_task": 4, "mem_per_node_gb": 62, "time_limit_min": 5, "signal_lead_s": 60}
    assert {name: debug.values[name] for name in wanted} == wanted
    assert "gpu_type" not in debug.values  # SLURM has no types there
    assert debug.values["gpu_memory_gb"] == 45  # by the feature l40s, whose error correction takes a part
    high = described("alpha_22_05", account="physics", qos="high")
    assert (high.values["time_limit_min"], high.values["qos"]) == (240, "high")
    cpu = described("alpha_22_05", partition="cpu", account="physics")
    assert (cpu.values["nodes"], cpu.values["exclusive"], cpu.values["tasks_per_node"]) == (2, True, 1)
    mig = described("alpha_24_11", partition="mig").values  # parts of a GPU are used one by one, since NCCL joins none
    assert (mig["tasks_per_node"], mig["gpus_per_node"], mig["gpu_memory_gb"]) == (1, 1, 5)


@pytest.mark.parametrize(
    ("gpu_type", "features", "memory", "asked"),
    [
        ("h100", (), 79, False),
        ("a100", (), 39, True),  # sold with two amounts
        ("a100", ("ib", "gpu_80g"), 79, False),
        ("", ("v100", "32gb"), 31, False),
        ("a100_1g.5gb", (), 5, False),
        ("", (), None, True),
    ],
)
def test_the_memory_of_a_gpu_is_known_by_its_type_or_a_feature_or_it_is_a_question(
    gpu_type: str, features: tuple[str, ...], memory: object, asked: bool
) -> None:
    assert memory_of(gpu_type, *features) == (memory, asked)


def test_what_is_not_known_is_a_commented_question_and_said() -> None:
    file = described("alpha_22_05")
    text = file.text()
    assert "# modules: ..." in text and "`module avail` lists them" in text
    assert any(question.startswith("storage_gb_per_s:") for question in file.questions)
    silent = replace(facts_of("alpha_22_05"), associations=None)
    assert "# account: ..." in describe(silent).text()


def test_a_partition_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="no partition 'gpus'"):
        described("alpha_24_11", partition="gpus")
    with pytest.raises(ConfigError, match="no partitions"):
        describe(ClusterFacts())


def test_words_of_slurm_cannot_leave_their_comment() -> None:
    facts = facts_of("alpha_24_11")
    evil = replace(
        facts, config={**facts.config, "SLURM_VERSION": "24.11\nsetup: [evil]\x1b[2J", "KillWait": "5\ny: 1"}
    )
    file = describe(evil)
    assert yaml.safe_load(file.text()) == file.values
    assert "\x1b" not in file.text()
