"""What submit says before it queues a job that does not suit the cluster; the facts are those of recorded clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurmtrain.config.schema import ClusterConfig, ContainerConfig
from slurmtrain.errors import ConfigError
from slurmtrain.launch.queue_check.finding import Finding, raise_fatal
from slurmtrain.launch.queue_check.request import check_request, with_choices_of_the_shell
from slurmtrain.slurm.facts import Account, ClusterFacts, Limits
from slurmtrain.slurm.topology import order_of_ranks
from tests.support.recorded_slurm import CLUSTERS, facts_of

ALPHA = facts_of("alpha_22_05")
WITHOUT_ACCOUNTS = facts_of("alpha_24_11")
ROOM: dict[str, Any] = {
    "tasks_per_node": 4,
    "cpus_per_task": 15,
    "gpus_per_node": 4,
    "gpu_type": "a100",
    "mem_per_node_gb": 0,
}


def findings(facts: ClusterFacts = ALPHA, **fields: Any) -> list[Finding]:
    return check_request(facts, ClusterConfig(**{**ROOM, **fields}), user_id=1000)


def fatal(facts: ClusterFacts = ALPHA, **fields: Any) -> Finding:
    """The one finding that a request has, which is fatal."""
    (found,) = findings(facts, **fields)
    assert found.fatal
    return found


def test_a_request_that_suits_the_cluster_has_no_findings() -> None:
    assert findings() == []
    assert findings(nodes=2, account="physics", qos="high", time_limit_min=240) == []
    assert findings(nodes="2-9", gpu_type="A100") == []  # SLURM's types have no case
    assert findings(partition="cpu", nodes=2, gpus_per_node=0, gpu_type=None, tasks_per_node=8, cpus_per_task=16) == []


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_every_cluster_has_a_small_job_may_have(name: str) -> None:
    facts = facts_of(name)
    small = ClusterConfig(time_limit_min=5)
    assert [each for each in check_request(facts, small) if each.fatal] == []


def test_a_cluster_of_which_nothing_is_known_refuses_no_job() -> None:
    assert findings(ClusterFacts(), partition="nowhere", nodes=10**4) == []


def test_a_partition_that_is_not_there_is_named_with_those_that_are() -> None:
    found = fatal(partition="gpus")
    assert "cluster.partition=gpus" in found.message
    assert "gpu" in found.hint
    without_default = replace(ALPHA, partitions=tuple(replace(each, default=False) for each in ALPHA.partitions))
    assert "no default partition" in fatal(without_default).message


def test_of_several_partitions_one_that_can_run_the_job_is_enough() -> None:
    assert findings(partition="mig,gpu") == []
    assert fatal(partition="mig,cpu").field == "cluster.gpus_per_node"


def test_a_partition_that_starts_no_jobs_is_said() -> None:
    assert "State=INACTIVE" in findings(partition="closed")[0].message
    down = replace(ALPHA, partitions=tuple(replace(each, state="DOWN") for each in ALPHA.partitions))
    (found,) = findings(down)
    assert not found.fatal  # the job waits until it is up again


def changed(name: str, **fields: Any) -> ClusterFacts:
    """The cluster with a partition that is otherwise."""
    partitions = (replace(each, **fields) if each.name == name else each for each in ALPHA.partitions)
    return replace(ALPHA, partitions=tuple(partitions))


def test_a_partition_that_is_drained_takes_no_jobs_unless_another_gets_them() -> None:
    found = fatal(changed("gpu", state="DRAIN"))
    assert "State=DRAIN" in found.message
    instead = findings(changed("gpu", state="DRAIN", alternate="urgent"), account="physics")
    assert [each.message for each in instead] == [
        "partition gpu accepts no jobs at present (State=DRAIN), and SLURM puts them into urgent (Alternate)"
    ]
    assert not instead[0].fatal
    first, *_ = findings(changed("gpu", state="INACTIVE", alternate="mig"), account="physics")
    assert (first.fatal, first.field) == (True, "cluster.gpus_per_node")  # it has no such GPUs
    first, *_ = findings(changed("gpu", state="INACTIVE", alternate="closed"), account="physics")
    assert (first.message, first.fatal) == ("partition gpu starts no jobs at present (State=INACTIVE)", True)
    assert findings(changed("gpu", alternate="mig"), account="physics") == []  # it takes jobs itself


def test_the_alternate_of_an_alternate_takes_the_jobs_and_a_circle_takes_none() -> None:
    """As slurmctld looks for one."""
    gpu = changed("gpu", state="DRAIN", alternate="closed")

    def closed_gives_to(name: str) -> ClusterFacts:
        partitions = (replace(each, alternate=name) if each.name == "closed" else each for each in gpu.partitions)
        return replace(gpu, partitions=tuple(partitions))

    (found,) = findings(closed_gives_to("urgent"), account="physics")
    assert "SLURM puts them into urgent (Alternate)" in found.message and not found.fatal
    for name in ("gpu", "closed", "nowhere", ""):
        assert "partition gpu starts no jobs" in fatal(closed_gives_to(name), account="physics").message


def test_a_time_limit_above_that_of_the_partition_is_refused_with_the_most_that_it_gives() -> None:
    found = fatal(WITHOUT_ACCOUNTS, time_limit_min=2881)
    assert "cluster.time_limit_min=2881" in found.message
    assert "cluster.time_limit_min=2880" in found.hint
    assert findings(WITHOUT_ACCOUNTS, time_limit_min=2880) == []


def test_a_qos_that_may_lift_the_partitions_limits_makes_them_a_warning() -> None:
    assert ALPHA.qos is not None
    lifting = replace(ALPHA, qos=tuple(replace(each, flags=frozenset({"partitiontimelimit"})) for each in ALPHA.qos))
    found = [each for each in findings(lifting, account="physics", time_limit_min=2881) if "MaxTime" in each.message]
    assert [each.fatal for each in found] == [False]
    silent = replace(ALPHA, qos=None, associations=None)
    assert [each.fatal for each in findings(silent, time_limit_min=2881)] == [False]


def test_the_number_of_nodes_is_compared_with_the_partitions_limits_and_with_what_there_is() -> None:
    small = {"gpu_type": None, "cpus_per_task": 4, "tasks_per_node": 1, "mem_per_node_gb": None}
    assert "MaxNodes" in fatal(WITHOUT_ACCOUNTS, partition="debug", nodes=2, time_limit_min=5, **small).message
    no_gpus = {**small, "gpus_per_node": 0}
    assert "MinNodes" in fatal(WITHOUT_ACCOUNTS, partition="cpu", nodes=1, **no_gpus).message
    found = fatal(WITHOUT_ACCOUNTS, nodes=4, spare_nodes=1)
    assert found.message.startswith("only 4 nodes of partition gpu have a100:4 on a node")


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"gpu_type": "h100"}, "cluster.gpus_per_node", "no node of partition gpu has h100:4"),
        ({"gpus_per_node": 5, "tasks_per_node": 5, "cpus_per_task": 1}, "cluster.gpus_per_node", "a100:5"),
        ({"cpus_per_task": 16}, "cluster.cpus_per_task", "64 CPUs on a node"),
        ({"mem_per_node_gb": 512}, "cluster.mem_per_node_gb", "512 GB of memory"),
        ({"mem_per_node_gb": None, "mem_per_gpu_gb": 200}, "cluster.mem_per_node_gb", "800 GB of memory"),
        ({"constraint": "h100"}, "cluster.constraint", "the feature 'h100'"),
    ],
)
def test_what_no_node_has_is_named_with_what_they_have(fields: dict[str, Any], field: str, words: str) -> None:
    found = fatal(WITHOUT_ACCOUNTS, **fields)
    assert found.field == field
    assert words in found.message
    assert found.hint


def test_what_nodes_have_only_one_by_one_is_not_there_together() -> None:
    # v100 are in nodes of 257,000 MB, the others have a100.
    found = fatal(WITHOUT_ACCOUNTS, gpu_type="v100", cpus_per_task=1, mem_per_node_gb=400)
    assert "v100:4" in found.message
    assert "400 GB" in found.message
    assert "2 x 40 CPUs, 250 GB, gpu:v100:8" in found.hint


def test_a_limit_of_the_partition_on_what_a_job_has_of_a_node_counts() -> None:
    request: dict[str, Any] = {"partition": "debug", "gpu_type": None, "time_limit_min": 5, "mem_per_node_gb": 62}
    assert "20 CPUs" in fatal(WITHOUT_ACCOUNTS, **request, cpus_per_task=5).message
    request |= {"cpus_per_task": 4}
    assert findings(WITHOUT_ACCOUNTS, **request) == []
    # sbatch takes it, and it waits: MaxMemPerLimit.
    found = fatal(WITHOUT_ACCOUNTS, **{**request, "mem_per_node_gb": 0})
    assert "all memory of a node, 128000 MB, and partition debug gives it 64000" in found.message
    assert found.hint == "set at most cluster.mem_per_node_gb=62"


def test_nodes_that_may_still_join_refuse_no_job() -> None:
    cloud = replace(WITHOUT_ACCOUNTS, config={**WITHOUT_ACCOUNTS.config, "SlurmctldParameters": "cloud_dns"})
    (found,) = findings(cloud, nodes=50)
    assert not found.fatal


def test_nodes_in_a_cloud_that_are_powered_down_and_not_listed_refuse_no_job() -> None:
    partitions = tuple(replace(each, nodes=100) for each in WITHOUT_ACCOUNTS.partitions)
    (found,) = findings(replace(WITHOUT_ACCOUNTS, partitions=partitions), nodes=50)
    assert not found.fatal
    suspends = replace(WITHOUT_ACCOUNTS, config={**WITHOUT_ACCOUNTS.config, "SuspendProgram": "/usr/sbin/off"})
    (found,) = findings(suspends, nodes=50)
    assert not found.fatal


def test_the_partition_of_a_reservation_is_not_known_here_and_refuses_no_job() -> None:
    without_default = replace(ALPHA, partitions=tuple(replace(each, default=False) for each in ALPHA.partitions))
    assert findings(without_default, reservation="course", nodes=99) == []
    assert "not one of your accounts" in fatal(without_default, reservation="course", account="chemistry").message


def test_of_a_list_of_qos_slurm_takes_one_that_suits() -> None:
    assert findings(account="physics", qos="high,secret", nodes=3) == []


def test_without_a_default_a_job_gets_the_qos_normal_and_is_refused_if_that_is_none_of_ones_own() -> None:
    assert ALPHA.associations is not None

    def without_default(*qos: str) -> ClusterFacts:
        several = tuple(replace(each, qos=qos, default_qos="") for each in ALPHA.associations or ())
        return replace(ALPHA, associations=several)

    found = fatal(without_default("normal", "high"), account="physics", time_limit_min=2881)
    assert "MaxTime" in found.message
    found = fatal(without_default("debug", "high"), account="physics", time_limit_min=20)
    assert found.message == "cluster.qos is not set, and your account physics may not use normal, which a job then gets"
    assert found.hint == "set cluster.qos to one of: debug, high"
    assert findings(without_default("debug", "high"), account="physics", qos="high", time_limit_min=20) == []


def test_limits_of_a_qos_in_percent_are_no_amounts() -> None:
    assert ALPHA.qos is not None
    relative = tuple(replace(each, flags=each.flags | {"relative"}) for each in ALPHA.qos)
    assert fatal(account="physics", qos="high", nodes=3, time_limit_min=240).field == "cluster.nodes"
    assert findings(replace(ALPHA, qos=relative), account="physics", qos="high", nodes=3, time_limit_min=240) == []


def with_qos(name: str, flags: tuple[str, ...] = (), factor: float | None = None, **limits: Any) -> ClusterFacts:
    """The cluster with a QOS that is otherwise."""
    assert ALPHA.qos is not None
    changes: dict[str, Any] = {"flags": frozenset(flags), "limits": Limits(**limits), "limit_factor": factor}
    return replace(ALPHA, qos=tuple(replace(each, **changes) if each.name == name else each for each in ALPHA.qos))


def test_a_qos_multiplies_the_amounts_of_accounts_and_those_of_no_qos() -> None:
    """LimitFactor, by sacctmgr(1)."""
    assert "a job 12" in fatal(account="physics", nodes=4).message
    assert findings(with_qos("normal", factor=2.0), account="physics", nodes=4) == []
    found = fatal(with_qos("normal", factor=0.5), account="physics", nodes=2)
    assert "(all of its jobs together), times 0.5 (LimitFactor of its QOS) gives a job 6" in found.message
    assert "account biology, times 1.1 (LimitFactor" in fatal(with_qos("normal", factor=1.1), nodes=4).message
    doubled = with_qos("high", ("denyonlimit",), 2.0, tres={"gres/gpu": 8})
    assert "QOS high gives a job 8" in fatal(doubled, account="physics", qos="high", nodes=3).message


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"tres_min": {"gres/gpu": 480}}, "account physics gives a job 480 of them x minutes"),
        ({"tres_per_node": {"gres/gpu": 3}}, "on each node, and account physics gives it 3"),
        ({"wall_min": 60}, "more than account physics gives a job, 60"),
        ({"counts": {"running jobs of a user": 0}}, "account physics lets no job through"),
        ({"tres": {"gres/gpu": 2}}, "account physics, times 2 (LimitFactor of its QOS) gives a job 4"),
    ],
)
def test_a_qos_multiplies_amounts_of_jobs_alone_and_only_those_are_said_to_be(
    limits: dict[str, Any], words: str
) -> None:
    """By slurmctld's acct_policy.c, which multiplies MaxTRES and GrpTRES, but no minutes and nothing on one node."""
    facts = with_qos("normal", factor=2.0)
    assert facts.associations is not None
    associations = tuple(replace(each, limits=Limits(**limits)) for each in facts.associations)
    found = fatal(replace(facts, associations=associations), account="physics", nodes=2, time_limit_min=61)
    assert words in found.message


def test_a_job_below_a_least_amount_is_refused_by_denyonlimit_alone() -> None:
    """Otherwise SLURM takes it, and compares what it gets, which can be more."""
    for flags, certain in (((), False), (("denyonlimit",), True)):
        (found,) = findings(with_qos("normal", flags, least_tres={"cpu": 10**6}), account="physics")
        assert "wants at least 1000000" in found.message and found.fatal == certain


def test_a_time_limit_that_slurm_may_shorten_is_refused_by_denyonlimit_alone() -> None:
    for flags, certain in (((), False), (("denyonlimit",), True)):
        facts = with_qos("normal", flags, wall_min=60)
        (found,) = findings(facts, account="physics", time_limit_min=120, sbatch={"time-min": 30})
        assert "QOS normal gives a job, 60" in found.message and found.fatal == certain
        assert fatal(facts, account="physics", time_limit_min=120)
    scaled = with_qos("normal", ("usagefactorsafe",), wall_min=60)
    assert [each.fatal for each in findings(scaled, account="physics", time_limit_min=120)] == [False]


@pytest.mark.parametrize(("words", "limited"), [("CR_CORE", False), ("CR_CPU_MEMORY", True), ("(null)", False)])
def test_memory_that_is_everybodys_is_compared_with_what_nodes_have_for_mem_alone(words: str, limited: bool) -> None:
    """Slurm.conf(5), SelectTypeParameters: --mem then leaves out nodes that have less, and nothing else limits a job."""
    facts = replace(WITHOUT_ACCOUNTS, config={**WITHOUT_ACCOUNTS.config, "SelectTypeParameters": words})
    assert "512 GB" in fatal(facts, mem_per_node_gb=512).message
    for memory in ({"mem_per_gpu_gb": 200}, {"mem_per_cpu_gb": 20}):
        assert bool(findings(facts, mem_per_node_gb=None, **memory)) == limited
    own = tuple(replace(each, allocates="CR_Core_Memory") for each in facts.partitions)
    assert findings(replace(facts, partitions=own), mem_per_node_gb=None, mem_per_gpu_gb=200)
    config = {**ALPHA.config, "SelectTypeParameters": words}
    small = replace(with_qos("normal", tres={"mem": 1024}), config=config)
    assert [each.fatal for each in findings(small, account="physics", mem_per_node_gb=2)] == [limited]


def test_memory_for_each_gpu_is_not_compared_with_the_most_that_a_partition_gives_of_a_node() -> None:
    small: dict[str, Any] = {"partition": "debug", "gpu_type": None, "time_limit_min": 5, "cpus_per_task": 4}
    (found,) = findings(WITHOUT_ACCOUNTS, **small, mem_per_node_gb=None, mem_per_gpu_gb=20)
    assert "MaxMemPerNode" in found.message and not found.fatal


def test_what_another_cluster_of_a_federation_may_take_is_not_refused() -> None:
    for federation in ("Federation: all", None):
        for fields in ({"partition": "nowhere"}, {"gpu_type": "h100"}, {"account": "chemistry"}):
            assert {each.fatal for each in findings(replace(ALPHA, federation=federation), **fields)} == {False}


def test_the_partition_of_an_association_has_no_case() -> None:
    assert ALPHA.associations is not None
    upper = tuple(replace(each, name="GPU") if each.name == "gpu" else each for each in ALPHA.partitions)
    groups = tuple(replace(each, partition="GPU") if each.partition == "gpu" else each for each in ALPHA.groups)
    only = tuple(replace(each, partition="gpu") for each in ALPHA.associations)
    facts = replace(ALPHA, partitions=upper, groups=groups, associations=only)
    assert findings(facts, partition="GPU", account="physics") == []


def test_limits_of_an_account_refuse_no_job_where_its_qos_is_not_known() -> None:
    """Which may lift them: one lost answer of sacctmgr is enough."""
    assert [
        each for each in findings(replace(ALPHA, qos=None), time_limit_min=10**6) if "account" in each.message
    ] == []


def test_what_the_config_leaves_open_is_that_of_the_shell() -> None:
    variables = {"SBATCH_PARTITION": "urgent", "SBATCH_ACCOUNT": "chemistry", "SBATCH_QOS": ""}
    found = with_choices_of_the_shell(ClusterConfig(account="physics"), variables)
    assert (found.partition, found.account, found.qos) == ("urgent", "physics", None)
    for value, shared in (("", True), ("yes", True), ("1", True), ("0", False), ("no", False)):
        found = with_choices_of_the_shell(ClusterConfig(**{**ROOM, "cpus_per_task": 20}), {"SBATCH_OVERCOMMIT": value})
        assert (check_request(WITHOUT_ACCOUNTS, found) == []) == shared


def with_topology(kind: str, version: str = "24.11.7", **more: str) -> ClusterFacts:
    return replace(ALPHA, config={**ALPHA.config, "TopologyPlugin": kind, "SLURM_VERSION": version, **more})


def test_switches_and_segments_are_for_networks_that_slurm_knows() -> None:
    assert findings(with_topology("topology/tree"), switches=1) == []
    assert findings(with_topology("topology/block"), segment=1) == []
    (flat,) = findings(with_topology("topology/flat"), switches=1)
    assert "switches=1 does nothing here" in flat.message and "this cluster knows no topology" in flat.message
    (tree,) = findings(with_topology("topology/tree"), segment=1)
    assert "is for topology/block, and this cluster has topology/tree" in tree.message
    assert not flat.fatal and not tree.fatal
    assert "SLURM 22.05 has no segments" in fatal(with_topology("topology/tree", "22.05.8"), segment=1).message
    # Since 25.05, topology.yaml may have topologies of which TopologyPlugin says nothing.
    assert findings(with_topology("topology/flat", "25.05.9"), segment=1) == []
    assert order_of_ranks(with_topology("topology/flat", "25.05.9").config) is None


@pytest.mark.parametrize(
    ("kind", "parameter", "words"),
    [
        ("topology/tree", "SwitchAsNodeRank", "switch by switch (TopologyParam=SwitchAsNodeRank)"),
        (
            "topology/tree",
            "(null)",
            "need not follow the switches of topology/tree: with TopologyParam=SwitchAsNodeRank",
        ),
        ("topology/block", "RoutePart,BlockAsNodeRank", "block by block"),
        ("topology/block", "", "need not follow the blocks of topology/block"),
        ("topology/default", "", "SLURM knows no topology"),
        ("topology/3d_torus", "", "SLURM's order of nodes (topology/3d_torus)"),
    ],
)
def test_the_order_of_ranks_is_that_of_slurms_nodes_and_said(kind: str, parameter: str, words: str) -> None:
    assert words in str(order_of_ranks({"TopologyPlugin": kind, "TopologyParam": parameter}))
    assert order_of_ranks({}) is None


def test_nodes_that_do_not_work_now_are_a_warning() -> None:
    down = replace(WITHOUT_ACCOUNTS, groups=tuple(replace(each, usable=0) for each in WITHOUT_ACCOUNTS.groups))
    (found,) = findings(down)
    assert not found.fatal
    assert "0 of the nodes" in found.message


def test_an_account_that_is_not_the_persons_is_refused_with_those_that_are() -> None:
    found = fatal(account="chemistry")
    assert "cluster.account=chemistry" in found.message
    assert "physics" in found.hint
    assert findings(WITHOUT_ACCOUNTS, account="chemistry") == []


def test_a_partition_takes_only_its_accounts_and_its_qos() -> None:
    # The default account is another: a warning, since it may be below physics.
    (found,) = findings(partition="urgent")
    assert not found.fatal
    assert "account biology" in found.message
    assert "it takes: physics" in found.hint
    assert findings(partition="urgent", account="physics") == []
    # The account may, the partition does not.
    assert "cluster.qos=debug" in fatal(qos="debug", time_limit_min=30).message
    assert "may not use it" in fatal(qos="secret").message
    assert "no such QOS" in fatal(qos="hihg").message
    assert "high" in fatal(qos="hihg").hint


def test_accounts_and_qos_are_compared_as_accounting_does_without_case_and_allowing_before_denying() -> None:
    assert (
        findings(changed("gpu", allowed_accounts=("Physics",), denied_accounts=("physics",)), account="physics") == []
    )
    (found,) = findings(changed("gpu", denied_accounts=("PHYSICS",)), account="physics")
    assert "does not accept account physics" in found.message and found.hint == "it takes: biology"
    denied = changed("gpu", allowed_qos=None, denied_qos=("Normal",))
    found = next(each for each in findings(denied, account="physics") if each.field == "cluster.qos")
    assert "your default QOS normal: partition gpu does not accept it" in found.message


def test_limits_of_a_qos_come_before_those_of_an_account() -> None:
    found = fatal(account="physics", qos="high", nodes=3, time_limit_min=240)
    assert found.message == "the job asks for 12 GPUs, and QOS high gives a job 8"
    assert found.hint == "set at most cluster.nodes=2"
    found = fatal(time_limit_min=1441)
    assert "account biology gives a job, 1440" in found.message
    assert "QOS high gives a job, 240" in fatal(qos="high", time_limit_min=1440).message


def test_what_all_jobs_of_an_account_may_have_together_bounds_one_job() -> None:
    found = fatal(account="physics", nodes=4)
    assert "16 GPUs" in found.message
    assert "account physics (all of its jobs together) gives a job 12" in found.message
    assert found.hint == "set at most cluster.nodes=3"


def test_accounts_above_the_persons_own_bound_a_job_too_and_the_least_counts() -> None:
    assert ALPHA.associations is not None
    for own, above, whose in ((None, 8, "science"), (12, 8, "science"), (4, 8, "physics"), (None, None, "root")):
        line = tuple(
            Account(name, parent, {} if most is None else {"gres/gpu": most})
            for name, parent, most in (("physics", "science", own), ("science", "root", above), ("root", "", 12))
        )
        associations = tuple(replace(each, accounts=line) for each in ALPHA.associations)
        found = fatal(replace(ALPHA, associations=associations), account="physics", nodes=4)
        assert f"account {whose} (all of its jobs together)" in found.message


def limited(qos: str, **limits: Any) -> ClusterFacts:
    """The cluster with a QOS that has these limits instead of its own."""
    assert ALPHA.qos is not None
    found = (replace(each, limits=Limits(**limits)) if each.name == qos else each for each in ALPHA.qos)
    return replace(ALPHA, qos=tuple(found))


def test_a_hint_is_in_the_unit_of_its_field() -> None:
    found = fatal(limited("normal", tres={"mem": 65536}), account="physics", mem_per_node_gb=100)
    assert found.message == "the job asks for 102400 MB of memory, and QOS normal gives a job 65536"
    assert found.hint == "set at most cluster.mem_per_node_gb=64"
    assert fatal(limited("normal", tres={"cpu": 30}), account="physics").hint == "set at most cluster.cpus_per_task=7"
    assert (
        fatal(limited("normal", tres_per_node={"cpu": 3}), account="physics").hint
        == "set a smaller cluster.cpus_per_task"
    )


def test_a_job_that_names_no_memory_has_the_default_which_is_limited_too() -> None:
    no_memory: dict[str, Any] = {"account": "physics", "mem_per_node_gb": None}
    facts = limited("normal", tres={"mem": 239999})  # DefMemPerCPU=4000, and 60 CPUs
    found = fatal(facts, **no_memory)
    assert "the job asks for 240000 MB of memory" in found.message
    others: list[dict[str, Any]] = [
        {"default_memory_mb": 1000},
        {"default_memory_per_cpu_mb": 1000},
        {"default_memory_mb": 0},
    ]
    for fields in others:
        partitions = tuple(replace(each, **fields) for each in facts.partitions)
        assert findings(replace(facts, partitions=partitions), **no_memory) == []


def test_what_an_account_may_have_in_a_qos_bounds_one_job() -> None:
    found = fatal(limited("normal", account_tres={"gres/gpu": 8}), account="physics", nodes=3)
    assert found.message == "the job asks for 12 GPUs, and QOS normal gives a job 8"


def test_gpu_minutes_of_a_job_are_bounded_and_a_shorter_job_may_run() -> None:
    facts = limited("normal", tres_min={"gres/gpu": 480})
    found = fatal(facts, account="physics", nodes=2, time_limit_min=61)
    assert found.message == "the job asks for 8 GPUs for 61 min, and QOS normal gives a job 480 of them x minutes"
    assert found.hint.startswith("set at most cluster.time_limit_min=60;")
    assert findings(facts, account="physics", nodes=2, time_limit_min=60) == []
    assert "ask for less" in fatal(limited("normal", tres_min={"gres/gpu": 3}), account="physics").hint
    scaled = with_qos("normal", ("usagefactorsafe",), tres_min={"gres/gpu": 480})
    assert [each.fatal for each in findings(scaled, account="physics", nodes=2, time_limit_min=61)] == [False]


def test_who_allows_no_job_at_all_is_named_and_who_allows_some_is_not() -> None:
    found = fatal(limited("normal", counts={"submitted jobs of a user": 0}), account="physics")
    assert found.message == "QOS normal lets no job through: it allows 0 submitted jobs of a user"
    assert findings(limited("normal", counts={"running jobs of a user": 1}), account="physics") == []
    assert ALPHA.associations is not None
    closed = tuple(
        replace(each, accounts=(Account("physics", "root"), Account("root", counts={"running jobs of all": 0})))
        for each in ALPHA.associations
    )
    assert fatal(replace(ALPHA, associations=closed), account="physics").message.startswith(
        "account root (all of its jobs"
    )
    # A QOS sets this limit instead of the account.
    lifted = replace(limited("normal", counts={"running jobs of all": 9}), associations=closed)
    assert findings(lifted, account="physics") == []


@pytest.mark.parametrize("what", ["running jobs", "submitted jobs"])
def test_a_number_of_jobs_of_a_qos_for_each_user_or_each_account_holds_instead_of_an_associations_own(
    what: str,
) -> None:
    """By slurmctld's acct_policy.c: MaxJobs where neither MaxJobsPU nor MaxJobsPA is set, and so for MaxSubmit."""
    assert ALPHA.associations is not None
    none = Limits(counts={f"{what} of a user": 0})
    closed = tuple(replace(each, limits=none) for each in ALPHA.associations)

    def found(**counts: int) -> list[Finding]:
        of_qos = {f"{what} of {whose}": number for whose, number in counts.items()}
        facts = limited("normal", counts={name.replace("_", " "): number for name, number in of_qos.items()})
        return findings(replace(facts, associations=closed), account="physics")

    (refused,) = found()
    assert refused.fatal
    assert refused.message == f"account physics lets no job through: it allows 0 {what} of a user"
    assert [each.message for each in found(all=5)] == [refused.message]  # another limit
    assert found(a_user=5) == found(an_account=5) == found(a_user=5, an_account=5) == []
    assert [each.message for each in found(an_account=0)] == [
        f"QOS normal lets no job through: it allows 0 {what} of an account"
    ]


def test_a_limit_on_what_this_cluster_does_not_count_refuses_no_job() -> None:
    """QOS belong to all clusters of a database, and slurmctld looks only at what its AccountingStorageTRES names."""
    qos = tuple(
        replace(each, limits=Limits(tres={"gres/gpu": 1, "gres/gpu:a100": 1, "node": 9})) for each in ALPHA.qos or ()
    )
    limited = replace(ALPHA, qos=qos)
    assert [each.fatal for each in findings(limited, nodes=1, qos="normal")] == [True, True]
    for counted in ("cpu,mem,energy,node,billing,fs/disk,vmem,pages", "cpu,mem,node,gres/shard"):
        elsewhere = replace(limited, config={**limited.config, "AccountingStorageTRES": counted})
        assert findings(elsewhere, nodes=1, qos="normal") == []
    untyped = replace(limited, config={**limited.config, "AccountingStorageTRES": "cpu,mem,node,gres/gpu"})
    assert "4 GPUs, and" in fatal(untyped, nodes=1, qos="normal").message


def test_limits_that_are_only_kept_on_record_refuse_no_job() -> None:
    kept = replace(ALPHA, config={**ALPHA.config, "AccountingStorageEnforce": "none"})
    assert findings(kept, account="chemistry", qos="high", nodes=3, time_limit_min=2000) == []


def test_somebody_without_an_account_is_told_so() -> None:
    assert "no account for you" in fatal(replace(ALPHA, associations=())).message


def test_a_partition_of_other_groups_is_a_warning_since_the_controller_looks_groups_up_itself() -> None:
    closed = tuple(replace(each, allowed_groups=("staff", "guests")) for each in ALPHA.partitions)
    cluster = ClusterConfig(**ROOM)
    (found,) = check_request(replace(ALPHA, partitions=closed), cluster, groups={"students"}, user_id=1000)
    assert not found.fatal
    assert "staff, guests" in found.message
    assert check_request(replace(ALPHA, partitions=closed), cluster, groups={"staff"}, user_id=1000) == []
    assert check_request(replace(ALPHA, partitions=closed), cluster, groups={"students"}, user_id=0) == []


def test_a_partition_of_root_or_of_a_reservation_refuses_others() -> None:
    closed = replace(ALPHA, partitions=tuple(replace(each, root_only=True) for each in ALPHA.partitions))
    assert "RootOnly" in fatal(closed).message
    of_slurm = replace(closed, config={**closed.config, "SlurmUser": "slurm(1000)"})
    assert findings(of_slurm) == []  # slurmctld lets its own user do what root may
    (found,) = check_request(closed, ClusterConfig(**ROOM))  # whose number is not known
    assert not found.fatal
    reserved = replace(ALPHA, partitions=tuple(replace(each, needs_reservation=True) for each in ALPHA.partitions))
    assert fatal(reserved).field == "cluster.reservation"
    assert findings(reserved, reservation="friday") == []


def test_where_a_plugin_may_change_what_a_job_asks_for_nothing_is_certain() -> None:
    judged = replace(WITHOUT_ACCOUNTS, config={**WITHOUT_ACCOUNTS.config, "JobSubmitPlugins": "lua"})
    for fields in ({"partition": "nowhere"}, {"time_limit_min": 10**5}, {"gpu_type": "h100"}):
        assert [each.fatal for each in findings(judged, **fields)] == [False]


def test_ranks_that_are_told_to_share_cpus_may_be_more_than_there_are() -> None:
    shared = {"cpus_per_task": 20, "sbatch": {"overcommit": True}}
    assert findings(WITHOUT_ACCOUNTS, **shared) == []
    few = with_qos("normal", tres={"cpu": 79})
    assert "80 CPUs" in findings(few, account="physics", cpus_per_task=20)[-1].message
    assert [each for each in findings(few, account="physics", **shared) if each.fatal] == []


def test_pyxis_is_looked_for_where_an_image_is_to_be_run_by_it() -> None:
    container = ContainerConfig(kind="pyxis", image="a.sqsh")  # type: ignore[arg-type]
    facts = replace(ALPHA, pyxis=False)
    (found,) = findings(facts, container=container)
    assert not found.fatal
    assert findings(replace(ALPHA, pyxis=None), container=container) == []


def test_all_that_is_fatal_is_said_at_once_and_the_rest_is_returned_as_warnings() -> None:
    with pytest.raises(ConfigError) as error:
        raise_fatal(findings(account="chemistry", nodes=99))
    assert "chemistry" in error.value.message
    assert "the job needs 99" in error.value.message
    assert raise_fatal([Finding("a", "it may wait", "be patient", fatal=False)]) == ["it may wait; be patient"]
