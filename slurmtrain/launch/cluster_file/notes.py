"""What SLURM does on a cluster, and what else a person should know of it: a sentence or two each."""

from __future__ import annotations

from collections.abc import Sequence

from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.launch.cluster_file.words import group_words, listed
from slurmtrain.launch.login_node import Folder, LoginNode
from slurmtrain.slurm.facts import ClusterFacts, NodeGroup, Partition
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.slurm.parse_values import parse_duration
from slurmtrain.slurm.preemption import NOT_AT_ALL, preemption_of
from slurmtrain.slurm.versions import STARTS_PREEMPTED_JOBS_ONCE_MORE, release


def notes_of(
    facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None, login: LoginNode
) -> tuple[str, ...]:
    """Return what else a person should know, a sentence or two each."""
    groups = facts.nodes_of(partition.name)
    found = [_versions(facts, groups), preemption_note(facts, partition, account, qos), _requeue_note(facts)]
    if len(groups) > 1:
        found.append("Nodes of this partition: " + "; ".join(map(group_words, groups)) + ".")
    others = [each for each in facts.partitions if each.name != partition.name]
    if others:
        found.append(
            f"Other partitions: {listed(_partition_words(facts, each) for each in others)}. `probe --partition NAME` "
            "writes a file for one."
        )
    found += [_topology_note(facts), _job_limits_note(facts), _containers_note(facts, login)]
    found += [_folder_note(each) for each in login.folders]
    if facts.silent:
        found.append(f"Not known, since these commands gave no answer: {'; '.join(facts.silent)}.")
    return tuple(each for each in found if each)


def _versions(facts: ClusterFacts, groups: Sequence[NodeGroup]) -> str:
    text = f"SLURM {facts.config.get('SLURM_VERSION', 'of unknown version')}."
    older = {each.version for each in groups if each.version is not None} - {facts.version}
    if older:
        text += f" Its nodes run {listed(release(each) for each in sorted(older))}."
    return text


def preemption_note(facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None) -> str:
    """Say what happens to a job of this partition that is preempted, and how long it has."""
    found = preemption_of(facts, partition, account=account, qos=qos)
    mode, grace_s, of = found.mode, found.grace_s, found.of
    if facts.config.get("PreemptType", "") in NOT_AT_ALL or mode in ("", "OFF"):
        return "Jobs of this partition are not preempted."
    if "SUSPEND" in mode:
        return "A preempted job is suspended on its nodes and goes on later: nothing is saved, and it is not requeued."
    then = {"REQUEUE": "is requeued", "CANCEL": "is cancelled by SLURM"}.get(mode, f"ends ({mode})")
    kill_wait = parse_duration(facts.config.get("KillWait", ""))
    has_signal = "send_user_signal" in (
        facts.config.get("PreemptParameters", "") + facts.config.get("SlurmctldParameters", "")
    )
    signal = "the early signal (USR2)" if has_signal else "SIGTERM"
    first = (
        f"it gets {signal} {grace_s:.0f} s (GraceTime of {of}) before its end"
        if grace_s
        else f"it gets no warning (GraceTime of {of} is 0)"
    )
    more = " more" if grace_s else ""
    rest = f", and has {kill_wait:.0f} s{more} (KillWait) from the last SIGTERM on" if kill_wait is not None else ""
    tight = " A save has to fit into that, else the last regular checkpoint counts: checkpoint.every_minutes." * (
        (grace_s or 0) + (kill_wait or 0) < 60
    )
    once_more = (
        " After a preemption such a job ends as PREEMPTED although its run has finished; for `submit --after` set "
        "requeue=chain or requeue=resubmit."
        if mode == "CANCEL" and STARTS_PREEMPTED_JOBS_ONCE_MORE.applies_to(facts.version)
        else ""
    )
    return f"A preempted job {then}: {first}{rest}.{tight} slurmtrain requeues it itself.{once_more}"


def _requeue_note(facts: ClusterFacts) -> str:
    if facts.config.get("JobRequeue") == "0":
        return (
            "SLURM requeues no job that does not ask for it (JobRequeue=0); slurmtrain's jobs ask. Where the cluster "
            "forbids it, requeue=chain or requeue=resubmit needs no requeue."
        )
    return ""


def _topology_note(facts: ClusterFacts) -> str:
    sizes = switch_sizes(facts.switches)
    if not sizes:
        return ""
    kind = facts.config.get("TopologyPlugin", "").removeprefix("topology/")
    part = "block" if kind == "block" else "leaf switch"
    return f"Nodes are in {len(sizes)} groups (topology/{kind}); the largest {part} has {max(sizes)} nodes."


def switch_sizes(text: str) -> tuple[int, ...]:
    """Return the number of nodes of each leaf switch or block in `scontrol show topology`."""
    sizes = []
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields.get("Level", "0") == "0" and fields.get("Nodes") and {"SwitchName", "BlockName"} & fields.keys():
            try:
                sizes.append(len(expand_nodelist(fields["Nodes"])))
            except EnvironmentMismatchError:
                continue
    return tuple(sizes)


def _job_limits_note(facts: ClusterFacts) -> str:
    size = facts.config.get("MaxArraySize", "")
    text = f"An array has at most {int(size) - 1} as its largest index (MaxArraySize)." if size.isdigit() else ""
    if not facts.keeps_accounts:
        return text + " There is no accounting database, so no limits by account or QOS, and no `sacct`."
    if not facts.enforces("associations"):
        return text + " Accounting is kept, and limits nothing (AccountingStorageEnforce)."
    return text


def _containers_note(facts: ClusterFacts, login: LoginNode) -> str:
    there = [*(["pyxis"] if facts.pyxis else []), *login.containers]
    mpi = f" srun --mpi takes {listed(facts.mpi_types)}." if facts.mpi_types else ""
    return f"Containers: {listed(there) if there else 'none found on this machine'}.{mpi}"


def _folder_note(folder: Folder) -> str:
    if folder.mount is None:
        return f"What {folder.called} lies on is not known: {folder.path}."
    words = f"{folder.called} ({folder.path}) is on {folder.mount.kind}"
    if folder.write_mb_per_s is not None:
        words += f"; one process wrote about {folder.write_mb_per_s:.0f} MB/s there, roughly"
    if folder.mount.shared is False:
        words += ". That kind is this machine's own: do compute nodes see it?"
        words += " Runs have to be on a shared one (job.runs_dir)" * (not folder.called.startswith("$"))
    elif folder.mount.shared is None:
        words += ". Whether compute nodes see it is not known"
    return words[0].upper() + words[1:].removesuffix("?") + ("?" if words.endswith("?") else ".")


def _partition_words(facts: ClusterFacts, partition: Partition) -> str:
    groups = facts.nodes_of(partition.name)
    gpus = sorted({name or "GPUs" for group in groups for name, _ in group.gpus})
    count = sum(group.count for group in groups)
    what = f"{count} node{'s' * (count != 1)}" + (f" with {'/'.join(gpus)}" if gpus else "")
    return f"{partition.name} ({what})"
