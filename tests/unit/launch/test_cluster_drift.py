"""What `probe --check` finds when a cluster is no longer as its file says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.launch.cluster_file.describe import describe
from slurmtrain.launch.cluster_file.drift import Drift, Kind, drift, observed_in
from slurmtrain.launch.login_node import LoginNode
from slurmtrain.slurm.facts import ClusterFacts
from tests.support.recorded_slurm import CLUSTERS, facts_of

LOGIN = LoginNode()


def differences(facts: ClusterFacts, before: ClusterFacts, **edited: object) -> list[Drift]:
    """Those of a file that was written of the cluster as it was before, and edited since."""
    file = describe(before, LOGIN)
    cluster = ClusterConfig(**{**file.values, **edited})  # type: ignore[arg-type]
    fresh = describe(facts, LOGIN, account=cluster.account, qos=cluster.qos)
    return drift(facts, cluster, file.text(), fresh, user_id=1000)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_that_is_as_it_was_has_not_drifted(name: str) -> None:
    assert differences(facts_of(name), facts_of(name)) == []


def test_a_shorter_time_limit_that_refuses_the_files_jobs_comes_first() -> None:
    before = facts_of("alpha_24_11")
    now = replace(before, partitions=tuple(replace(each, max_time_min=60) for each in before.partitions))
    first, *others = differences(now, before)
    assert (first.kind, first.field) == (Kind.REFUSED, "cluster.time_limit_min")
    assert [each.message for each in others] == ["time limit was 2 d, and is 1 h"]


def test_a_grace_time_that_is_gone_is_said_with_what_it_means() -> None:
    before = facts_of("alpha_24_11")
    now = replace(
        before,
        partitions=tuple(replace(each, grace_s=0.0, preempt_mode="CANCEL") for each in before.partitions),
        config={**before.config, "KillWait": "5 sec"},
    )
    found = {each.field: each for each in differences(now, before)}
    assert found.keys() == {"GraceTime", "KillWait", "PreemptMode"}
    assert found["GraceTime"].message == "GraceTime was 60 s, and is 0 s"
    assert "every_minutes" in found["GraceTime"].hint
    assert {each.kind for each in found.values()} == {Kind.CHANGED}


def test_new_nodes_another_slurm_and_new_limits_are_said() -> None:
    before = facts_of("alpha_22_05")
    assert before.qos is not None
    groups = tuple(replace(each, count=each.count + 1) for each in before.groups)
    now = replace(before, groups=groups, config={**before.config, "SLURM_VERSION": "24.11.7"})
    assert {each.field for each in differences(now, before)} == {"nodes", "SLURM"}
    unlimited = replace(before, config={**before.config, "AccountingStorageEnforce": "none"})
    assert any("limits of account biology was none" in each.message for each in differences(before, unlimited))


def test_a_value_that_the_cluster_contradicts_is_said_and_a_persons_choice_is_not() -> None:
    facts = facts_of("alpha_24_11")
    assert differences(facts, facts, time_limit_min=30, cpus_per_task=2, nodes=2, signal_lead_s=60) == []
    (found,) = differences(facts, facts, gpu_memory_gb=39)
    assert found.message == "the file has gpu_memory_gb: 39, and probe finds 79"


def test_what_is_not_known_now_is_no_drift() -> None:
    before = facts_of("alpha_22_05")
    now = replace(before, associations=None, qos=None)
    assert [each for each in differences(now, before) if each.field in ("accounts", "QOS")] == []


def test_a_file_by_hand_is_compared_by_its_fields_alone() -> None:
    facts = facts_of("alpha_24_11")
    cluster = ClusterConfig(partition="gpu", gpus_per_node=4, tasks_per_node=4, gpu_type="h100")
    found = drift(facts, cluster, "partition: gpu\n", describe(facts, LOGIN), user_id=1000)
    assert [each.field for each in found] == ["cluster.gpus_per_node"]
    assert found[0].kind == Kind.REFUSED
    assert observed_in("partition: gpu\n") == {}
