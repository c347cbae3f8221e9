"""Accounts and QOS of a real slurmdbd: `submit` refuses what SLURM refuses, and lets through what SLURM starts.

By hand: `apt-get install slurmdbd mariadb-server-core mariadb-client-core`, then `pytest tests/slurm/test_accounts.py`. It is
skipped without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.launch.queue_check import check_request
from slurmtrain.launch.submit_once import RefusedError, SubmitLimitError, check, error_of
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.read_facts import read_facts
from slurmtrain.system.trust import own_user
from tests.slurm.test_drill import drill
from tests.support.accounts import ACCOUNT, HIGH, LOW
from tests.support.gloo import wait_until
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow

USER = own_user()
# What a job that could run now is waiting for only until the scheduler has looked at it.
NOT_YET = {"None", "Priority", "Resources", "BeginTime", ""}


def sacctmgr(cluster: Cluster, *words: str) -> None:
    cluster.run(["sacctmgr", "--immediate", *words])


@pytest.fixture(scope="module")
def accounts(accounting_sandbox: Cluster) -> Cluster:
    """The sandbox with more accounts and QOS: some that are none of this user's, and a partition that has a QOS of its own."""
    cluster = accounting_sandbox
    sacctmgr(cluster, "add", "qos", "small,theirs,ofpart")
    sacctmgr(cluster, "modify", "account", "root", "set", "QOS+=small")  # only such a QOS can be its default
    sacctmgr(cluster, "add", "account", "lab")
    sacctmgr(cluster, "add", "account", "team", "parent=lab")
    sacctmgr(cluster, "add", "account", "others")
    sacctmgr(cluster, "add", "user", USER, "account=team", f"QOS=normal,small,{LOW}", "DefaultQOS=normal")
    for name, its in (("plain", "normal,small"), ("odd", "small,theirs")):
        sacctmgr(cluster, "add", "account", name)
        sacctmgr(cluster, "add", "user", USER, f"account={name}", f"QOS={its}")
    conf = cluster.sandbox.slurm_conf
    conf.write_text(
        conf.read_text()
        + "PartitionName=withqos Nodes=ALL MaxTime=INFINITE QOS=ofpart\n"
        + f"PartitionName=chosen Nodes=ALL MaxTime=60 AllowAccounts={ACCOUNT} AllowQos=normal,{HIGH}\n"
        + "PartitionName=denied Nodes=ALL MaxTime=INFINITE DenyAccounts=team DenyQos=small\n"
    )
    cluster.run(["scontrol", "reconfigure"])
    return cluster


@dataclass(frozen=True)
class Case:
    """What is set in accounting, what a job asks for, and what SLURM is expected to do with it.

    Attributes:
        limits: each the words of `sacctmgr modify`, the last of which is NAME=VALUE, or NAME=TRES=VALUE.
        asks: fields of `ClusterConfig`.
        truth: "starts", "refused", or the beginning of the reason for which the job waits for ever.
    """

    name: str
    truth: str
    asks: dict[str, Any] = field(default_factory=dict)
    limits: Sequence[str] = ()


def qos(name: str, limit: str) -> str:
    return f"qos {name} set {limit}"


def mine(limit: str, account: str = ACCOUNT) -> str:
    return f"user {USER} where account={account} set {limit}"


def whole(limit: str, account: str = "lab") -> str:
    return f"account {account} set {limit}"


ROOTS_DEFAULT = whole("DefaultQOS=small", "root")
TEAM = {"account": "team"}
CASES = [
    Case("the defaults", "starts"),
    Case("an account by its name", "starts", {"account": ACCOUNT}),
    Case("names in other case", "starts", {"account": "TEAM", "qos": "Small"}),
    Case("an account that is not there", "refused", {"account": "nobody"}),
    Case("an account of others", "refused", {"account": "others"}),
    Case("a parent of one's account", "refused", {"account": "lab"}),
    Case("a QOS that is not there", "refused", {"qos": "nothing"}),
    Case("a QOS of others", "refused", {"qos": "theirs"}),
    Case("a QOS of another of one's accounts", "refused", {"qos": "small"}),
    Case("a QOS of the other account", "starts", {**TEAM, "qos": "small"}),
    Case("the QOS that preempts", "starts", {"qos": HIGH}),
    # Of accounts without a default QOS, or with that of one above.
    Case("no default", "QOSMaxWall", {"account": "plain"}, [qos("normal", "MaxWall=10")]),
    Case("no default, and not normal", "refused", {"account": "odd"}),
    Case("a QOS instead of no default", "starts", {"account": "odd", "qos": "small"}),
    Case("the root's default", "QOSMaxWall", {"account": "plain"}, [ROOTS_DEFAULT, qos("small", "MaxWall=10")]),
    Case("the root's default is free", "starts", {"account": "plain"}, [ROOTS_DEFAULT, qos("normal", "MaxWall=10")]),
    # Time limits: SLURM queues a longer job, and never starts it.
    Case("MaxWall of the QOS", "QOSMaxWall", {"time_limit_min": 11}, [qos(LOW, "MaxWall=10")]),
    Case("just within MaxWall", "starts", {"time_limit_min": 10}, [qos(LOW, "MaxWall=10")]),
    Case("another QOS with MaxWall", "starts", {"qos": HIGH, "time_limit_min": 11}, [qos(LOW, "MaxWall=10")]),
    # Limits of accounts; the QOS comes first.
    Case("MaxWall of one's own", "AssocMaxWall", {"time_limit_min": 11}, [mine("MaxWall=10")]),
    Case("the QOS gives more", "starts", {"time_limit_min": 11}, [mine("MaxWall=10"), qos(LOW, "MaxWall=20")]),
    Case("limits of another account", "starts", {**TEAM, "time_limit_min": 11}, [mine("MaxWall=10")]),
    Case("MaxWall inherited", "AssocMaxWall", {**TEAM, "time_limit_min": 11}, [whole("MaxWall=10")]),
    # Partitions with a QOS of their own, and such as take some accounts and QOS alone.
    Case("AllowQos without the default", "refused", {"partition": "chosen"}),
    Case("AllowQos and AllowAccounts", "starts", {"partition": "chosen", "qos": HIGH}),
    Case("AllowAccounts", "refused", {**TEAM, "partition": "chosen", "qos": "normal"}),
    Case("DenyAccounts", "refused", {**TEAM, "partition": "denied"}),
    Case("DenyQos", "refused", {**TEAM, "partition": "denied", "qos": "small"}),
    Case("not denied", "starts", {"partition": "denied"}),
    Case("MaxTime", "refused", {"partition": "chosen", "qos": HIGH, "time_limit_min": 61}),
    Case(
        "PartitionTimeLimit lifts MaxTime",
        "starts",
        {"partition": "chosen", "qos": HIGH, "time_limit_min": 61},
        [qos(HIGH, "Flags+=PartitionTimeLimit")],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def test_submit_refuses_what_slurm_refuses_or_never_starts_and_nothing_else(
    accounts: Cluster, case: Case, tmp_path: Path
) -> None:
    asked = ClusterConfig(**{"partition": "low", "time_limit_min": 20, **case.asks})
    script, refused = tmp_path / "job.sbatch", False
    script.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options_of(asked)), "true\n"]))
    try:
        for limit in case.limits:
            sacctmgr(accounts, "modify", *limit.split())
        found = check_request(facts_of(accounts), asked)
        try:
            check(script, SlurmClient(str(accounts.sandbox.slurm_conf)))
        except RefusedError:
            refused = True
        truth = truth_of(accounts, asked)
    finally:
        for limit in case.limits:
            words = limit.split()
            before, sign, value = words[-1].rpartition("=")
            undone = f"{before.replace('+', '-')}={value}" if "Flags" in before else f"{before}{sign}-1"
            sacctmgr(accounts, "modify", *words[:-1], undone)
    assert truth.startswith(case.truth), truth
    assert (refused or any(fatal for _, fatal in found)) == (case.truth != "starts"), (truth, found)


def facts_of(cluster: Cluster) -> ClusterFacts:
    facts = read_facts(lambda command: cluster.run(command).stdout, whole=False)  # however long an answer takes
    return facts


def options_of(asked: ClusterConfig) -> list[str]:
    options = [f"--partition={asked.partition}", f"--nodes={asked.nodes}", f"--time={asked.time_limit_min}"]
    options += [f"--ntasks-per-node={asked.tasks_per_node}", f"--cpus-per-task={asked.cpus_per_task}"]
    options += [f"--account={asked.account}"] if asked.account else []
    options += [f"--qos={asked.qos}"] if asked.qos else []
    options += [f"--gpus-per-node={asked.gpus_per_node}"] if asked.gpus_per_node else []
    return options + ([f"--mem={asked.mem_per_node_gb}G"] if asked.mem_per_node_gb else [])


def truth_of(cluster: Cluster, asked: ClusterConfig) -> str:
    """What SLURM does with such a job on an idle cluster: "starts", "refused: WORDS", or the reason for which it waits."""
    done = cluster.run(["sbatch", "--parsable", "-o", "/dev/null", *options_of(asked), "--wrap", "true"], check=False)
    if done.returncode != 0:
        return f"refused: {done.stderr.strip()}"
    job = done.stdout.strip()

    def state() -> tuple[str, str] | None:
        answer = cluster.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T|%r"]).stdout.strip()
        found, _, reason = answer.partition("|")
        ended = found in ("COMPLETED", "FAILED")
        return (found, reason) if ended or (found == "PENDING" and reason not in NOT_YET) else None

    found, reason = wait_until(state, "decided")
    if found == "PENDING":
        cluster.run(["scancel", job])
        return reason
    cluster.wait_for_nodes()
    return "starts"


def test_a_limit_on_submitted_jobs_that_is_reached_is_one_to_wait_for(accounts: Cluster) -> None:
    sacctmgr(accounts, "modify", *qos(LOW, "MaxSubmitJobsPerUser=1").split())
    try:
        first = accounts.run(["sbatch", "--parsable", "-H", "-o", "/dev/null", "--wrap", "true"]).stdout.strip()
        assert not any(fatal for _, fatal in check_request(facts_of(accounts), ClusterConfig(partition="low")))
        done = accounts.run(["sbatch", "-o", "/dev/null", "--wrap", "true"], check=False)
        assert isinstance(error_of(done.stderr, done.returncode), SubmitLimitError), done.stderr
    finally:
        sacctmgr(accounts, "modify", *qos(LOW, "MaxSubmitJobsPerUser=-1").split())
        accounts.run(["scancel", first])


def test_a_run_is_preempted_by_a_job_of_a_higher_qos_and_comes_back_with_the_same_bits(
    accounts: Cluster, tmp_path: Path
) -> None:
    sacctmgr(accounts, "modify", *qos(LOW, "GraceTime=300").split())
    try:
        code, ways, found = drill(accounts, tmp_path, "--ways", "preemption")  # of the default QOS
        assert (code, ways["preemption"]["result"]) == (0, "passed"), found
        assert (
            ways["preemption"]["comparison"]["same_bits"] and ways["preemption"]["time_s"] == 310
        )  # GraceTime and KillWait
        code, ways, found = drill(accounts, tmp_path, f"cluster.qos={HIGH}", "--ways", "preemption")
        assert (code, ways["preemption"]["result"]) == (75, "not tried")
        assert f"no QOS preempts QOS {HIGH}" in ways["preemption"]["sentence"]
        code, ways, found = drill(
            accounts, tmp_path, "cluster.account=team", f"cluster.qos={LOW}", "--ways", "preemption"
        )
        assert f"you may not use --qos={HIGH}" in ways["preemption"]["sentence"], found
    finally:
        sacctmgr(accounts, "modify", *qos(LOW, "GraceTime=10").split())
