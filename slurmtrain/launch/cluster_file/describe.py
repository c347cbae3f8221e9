"""The file for one partition of a cluster."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Sequence

from slurmtrain.errors import ConfigError
from slurmtrain.launch.cluster_file.content import ClusterFile, Entry
from slurmtrain.launch.cluster_file.shape import Shape, shape_entries, shape_of, within
from slurmtrain.launch.cluster_file.words import DAY_MIN, in_words, listed
from slurmtrain.launch.login_node import LoginNode
from slurmtrain.planner.gpus import gpu_of
from slurmtrain.slurm.facts import ClusterFacts, NodeGroup, Partition
from slurmtrain.slurm.job_limits import Bound, Limit, association_of, bounds_of, qos_of, wall_limit

LEAD_S = 300


def describe(
    facts: ClusterFacts,
    login: LoginNode,
    *,
    partition: str | None = None,
    name: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    slurm_conf: str | None = None,
    taken: Collection[str] = (),
    version: str = "",
) -> ClusterFile:
    """Return the file for one partition of a cluster.

    Args:
        partition: its name; None: the default one, or if there is none, the one with the most GPUs or CPUs.
        name: of the file; None: made of SLURM's names of the cluster and, unless it is the default one, the partition.
        account, qos: what the jobs are to be submitted with; None: SLURM's defaults.
        slurm_conf: path of a slurm.conf to use instead of the machine's own.
        taken: names that the file cannot have.
        version: of this package, for the first line.

    Raises:
        ConfigError: there is no such partition, or no node in it.
    """
    chosen = choose_partition(facts, partition)
    groups = facts.nodes_of(chosen.name)
    if not groups:
        raise ConfigError(f"partition {chosen.name!r} has no nodes that sinfo shows", hint="probe --partition NAME")
    bounds = bounds_of(facts, chosen, account, qos)
    shape = shape_of(facts, chosen, groups, bounds)
    entries = [
        *_where(facts, chosen, account, qos, slurm_conf),
        *shape_entries(chosen, shape, groups),
        *_time(chosen, bounds),
        *_network(shape, groups),
        *_software(facts, login),
        *_storage(login),
    ]
    file_name = name or name_of(facts, chosen, taken)
    title = (
        f"Cluster {facts.name}, partition {chosen.name}: written by `python -m slurmtrain probe` of slurmtrain {version}. "
        f"Use it: python -m slurmtrain +cluster={file_name} submit. Has the cluster changed since? "
        f"python -m slurmtrain probe --check {file_name}"
    )
    return ClusterFile(file_name, chosen.name, title, tuple(entries))


def choose_partition(facts: ClusterFacts, name: str | None) -> Partition:
    """Return a partition by name, the default one, or if there is none, the one with the most GPUs or CPUs.

    Raises:
        ConfigError: there is no such partition.
    """
    known = ", ".join(each.name for each in facts.partitions)
    if not facts.partitions:
        raise ConfigError("SLURM reports no partitions", hint="`scontrol show partition` says why")
    found = facts.partition(name)
    if found is not None:
        return found
    if name is not None:
        raise ConfigError(f"there is no partition {name!r} on this cluster", hint=f"there are: {known}")
    amounts = {
        each.name: (
            sum(group.count * group.gpu_count for group in facts.nodes_of(each.name)),
            sum(group.count * group.cpus for group in facts.nodes_of(each.name)),
        )
        for each in facts.partitions
    }
    return max(facts.partitions, key=lambda each: amounts[each.name])


def name_of(facts: ClusterFacts, partition: Partition, taken: Collection[str]) -> str:
    """Return the name of the file: SLURM's of the cluster, with that of a partition that is not the default one."""
    cluster, its = (re.sub(r"[^A-Za-z0-9_.-]+", "-", each).strip("-.") for each in (facts.name, partition.name))
    plain = cluster or "cluster"
    return plain if partition.default and plain not in taken else f"{plain}-{its}"


def _where(
    facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None, slurm_conf: str | None
) -> Iterable[Entry]:
    if slurm_conf is not None:
        yield Entry("slurm_conf", slurm_conf, "the one that was probed, instead of the machine's own")
    why = "the default one" if partition.default else "the one that was asked for"
    if not any(each.default for each in facts.partitions):
        why = "no partition is the default one"
    yield Entry("partition", partition.name, f"{why}; there are {listed(each.name for each in facts.partitions)}")
    yield from _account(facts, partition, account)
    association = association_of(facts, account, partition.name)
    if qos is not None:
        yield Entry("qos", qos, "the one that was asked for")
    elif facts.enforces("qos") and association is not None and len(association.qos) > 1:
        its = qos_of(facts, association, None)
        usable = [each for each in association.qos if partition.takes_qos(each)]
        if partition.allowed_qos is not None and (its is None or not partition.takes_qos(its.name)) and usable:
            yield Entry("qos", usable[0], f"the partition takes {listed(partition.allowed_qos)} alone (AllowQos)")
        elif its is not None and not partition.takes_qos(its.name) and usable:
            yield Entry("qos", usable[0], f"the partition does not take {its.name}, your default one (DenyQos)")
        else:
            default = f"; it is {its.name} unless you name one" if its is not None else ""
            yield Entry("qos", None, f"Which QOS? You may use {listed(usable)}{default}", question=True)


def _account(facts: ClusterFacts, partition: Partition, account: str | None) -> Iterable[Entry]:
    if account is not None:
        yield Entry("account", account, "the one that was asked for")
        return
    if facts.associations is None:
        if facts.keeps_accounts:
            yield Entry("account", None, "Which account do your jobs count for? sacctmgr did not say", question=True)
        elif "none" not in facts.config.get("JobSubmitPlugins", "none").replace("(null)", "none"):
            why = (
                f"Does it have to be named? A plugin judges jobs (JobSubmitPlugins={facts.config['JobSubmitPlugins']})"
            )
            yield Entry("account", None, why, question=True)
        return
    mine = list(dict.fromkeys(each.account for each in facts.associations if each.partition in ("", partition.name)))
    usable = [each for each in mine if partition.takes_account(each)]
    if not mine:
        why = f"Which one? Accounting knows none of yours for partition {partition.name}; ask who runs the cluster"
        yield Entry("account", None, why, question=True)
    elif facts.default_account in usable and len(usable) > 1:
        yield Entry("account", facts.default_account, f"your default one; yours are {listed(usable)} (sacctmgr)")
    elif usable:
        only = "the only one of yours" if len(mine) == 1 else "yours that may run in this partition"
        yield Entry("account", usable[0], f"{only} (sacctmgr)")
    else:
        takes = (
            f": ask for one of {listed(partition.allowed_accounts)}"
            if partition.allowed_accounts
            else " (DenyAccounts)"
        )
        why = f"The partition takes none of yours ({listed(mine)}){takes}"
        yield Entry("account", None, why, question=True)


def _time(partition: Partition, bounds: Sequence[Bound]) -> Iterable[Entry]:
    limits = [wall_limit(bounds)]
    if partition.max_time_min is not None:
        limits.append(Limit(partition.max_time_min, f"MaxTime of partition {partition.name}"))
    minutes, limit = within(DAY_MIN, *limits)
    minutes = max(1, minutes)
    most = min((each.most for each in limits if each is not None), default=None)
    why = (
        limit.of if limit else "a day" + (f"; {in_words(most)} are allowed" if most else "; the cluster sets no limit")
    )
    yield Entry("time_limit_min", minutes, why)
    lead = min(LEAD_S, max(0, minutes * 60 - 60) // 4)
    yield Entry("signal_lead_s", lead, "one step and one save have to fit; `submit` says so if they did not before")


def _network(shape: Shape, groups: Sequence[NodeGroup]) -> Iterable[Entry]:
    addresses = [each.address for each in groups if each.address]
    if addresses and all(map(_is_loopback, addresses)):
        yield Entry("network_interface", "lo", f"all of its nodes are this machine (NodeAddr={addresses[0]})")
    gpu = next((found for word in (shape.gpu_type, *shape.group.features) if (found := gpu_of(word))), None)
    if shape.gpus and (gpu is None or gpu.network_gb_per_s is None):
        why = "How fast is a node's network, all its adapters together, one way? `plan` needs it (8 of 400 Gbit/s: 400)"
        yield Entry("network_gb_per_s", None, why, question=True)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _software(facts: ClusterFacts, login: LoginNode) -> Iterable[Entry]:
    if login.modules:
        shown = f" There are {listed(login.module_names)}" if login.module_names else ""
        why = f"Which modules does your code need, CUDA, say?{shown}"
        yield Entry("modules", list(login.module_names[:1]) or None, why, question=True)
    kind = "pyxis" if facts.pyxis else "apptainer" if {"apptainer", "singularity"} & {*login.containers} else None
    if kind is not None:
        found = "srun takes --container-image" if facts.pyxis else f"this machine has {listed(login.containers)}"
        why = f"Do you train in an image? {found}; container: {{kind: {kind}, image: ...}}"
        yield Entry("container", None, why, question=True)


def _storage(login: LoginNode) -> Iterable[Entry]:
    why = "What do all nodes together write to the file system of the checkpoints? `plan` and checkpoint.auto use it"
    if login.write_mb_per_s is not None:
        why += f". One process here wrote {login.write_mb_per_s:.0f} MB/s, roughly"
    yield Entry("storage_gb_per_s", None, why, question=True)
