"""The ledger of nodes: what went wrong on which node of a cluster, for one person, and which nodes that speaks against.

Records are lines of JSON in ${XDG_STATE_HOME:-~/.local/state}/slurmtrain/nodes/CLUSTER.jsonl. Jobs on several nodes append to
it at the same time, through a lock where the file system has one; torn and foreign lines are left out. It may be missing or
read-only on compute nodes: then what a run's own attempts have recorded is all that counts.

`blamed_nodes` decides; it is a pure function from records to nodes. In doubt the node is not at fault: what a run crashes with
on two different nodes is the program's fault, and a fast crash counts against a node for other runs only once that run has
trained on another node.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.system import files, records
from slurmtrain.system.records import Count, Number, Time, typed_or_none
from slurmtrain.system.redaction import redact
from slurmtrain.system.texts import roughly

FAST_S = 60.0  # an attempt that crashes sooner, without progress, speaks against its node
SAID_LENGTH = 200  # characters that are kept of what a rank said
READ_BYTES = 1 << 20  # read from the end of the ledger: about 4,000 records
LOCK_S = 5.0  # longest wait for another writer, which takes milliseconds
ALL = "*"  # stands for all nodes in a record of forgiveness
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
CLUSTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")
# Words of drivers, CUDA and the kernel about broken hardware. They count on any number of nodes.
HARDWARE = re.compile(
    r"uncorrectable|\becc error|\bxid\b|fallen off the bus|fell off the bus|"
    r"unable to determine the device handle|hardware (?:stack )?error|nvlink error|"
    r"system not yet initialized",
    re.IGNORECASE,
)
BUS_ERROR = re.compile(r"\bbus error\b|\bSIGBUS\b", re.IGNORECASE)
# Words after which the node is not at fault: too little memory was asked for, somebody has killed the rank, or it has only
# noticed that another one is gone.
NOT_THE_NODE = re.compile(
    r"out of memory|oom[-_ ]?kill|out_of_memory|memoryerror|\bkilled\b|sigkill|signal 9\b|"
    r"connection (?:reset|closed|refused|aborted)|broken pipe|remote (?:worker|process|peer)|timed out",
    re.IGNORECASE,
)


class NodeEvent(StrEnum):
    """The kind of a record."""

    CRASH = "fast crash"
    HARDWARE = "hardware"
    HANG = "hang"
    BAD_START = "could not start"  # on that node, though the run has trained before
    LOST = "lost"  # SLURM said that the node failed
    BY_HAND = "by hand"
    FORGIVEN = "forgiven"  # by hand: what was recorded before does not count any more


SOFT = (NodeEvent.CRASH, NodeEvent.HANG, NodeEvent.LOST)  # a program can cause them, too
FAULTS = (*SOFT, NodeEvent.HARDWARE, NodeEvent.BAD_START, NodeEvent.BY_HAND)


@dataclass(frozen=True)
class NodeRecord:
    """One record of the ledger.

    Attributes:
        time: unix seconds.
        node: node that it is about; `ALL` in a record of forgiveness.
        run, attempt: id of the run and number of its attempt; empty and 0 for what a person has typed.
        said: what the failing rank said, or the person's reason, without secrets and short.
        lasted_s: seconds from the beginning of the attempt to its end; None if not known.
        proven: the run has trained on another node, so its program works.
    """

    time: Time
    node: Annotated[str, msgspec.Meta(pattern=rf"^({NODE_NAME.pattern}|\*|)\Z")]
    event: NodeEvent
    run: str = ""
    attempt: Count = 0
    said: str = ""
    lasted_s: Number | None = None
    proven: bool = False


@dataclass(frozen=True)
class BlamePolicy:
    """The part of the config that decides which nodes are left out.

    Attributes:
        threshold: requeue.blame_threshold; 0: no ledger is kept or read.
        expiry_s: requeue.blame_expiry_h, in seconds.
    """

    threshold: int = 2
    expiry_s: float = 24 * 3600.0


@dataclass(frozen=True)
class Blamed:
    """A node that is to be left out, or that a job leaves out.

    Attributes:
        why: what counts against it: "crashed 2 attempts in 1 s".
        until: unix seconds at which so many records will have expired that it is not blamed any more.
        by_hand: a person has blamed it.
    """

    node: str
    why: str
    until: Time
    by_hand: bool = False

    def sentence(self, now: float) -> str:
        """Say which node it is, why, and for how long: "n3 (crashed 2 attempts in 1 s, forgotten in 23 h)"."""
        when = f"forgotten in {roughly(self.until - now)}" if self.until > now else "forgotten by now"
        return f"{self.node} ({self.why}, {when})"


PHRASES = {
    NodeEvent.CRASH: "crashed {attempts}",
    NodeEvent.HARDWARE: "broken hardware in {attempts}: {said}",
    NodeEvent.HANG: "hung in {attempts}",
    NodeEvent.BAD_START: "could not start {attempts}",
    NodeEvent.LOST: "failed in {attempts}",
    NodeEvent.BY_HAND: "blamed by hand: {said}",
}


def why_blamed(against: Iterable[NodeRecord]) -> str:
    """Say what records count against a node: "crashed 2 attempts in 1 s"."""
    by_event: dict[NodeEvent, list[NodeRecord]] = defaultdict(list)
    for record in against:
        by_event[record.event].append(record)
    return ", ".join(_phrase(event, found) for event, found in by_event.items())


def _phrase(event: NodeEvent, found: Sequence[NodeRecord]) -> str:
    attempts = "1 attempt" if len(found) == 1 else f"{len(found)} attempts"
    said = next((record.said for record in reversed(found) if record.said), "")
    phrase = PHRASES[event].format(attempts=attempts, said=said[:80]).removesuffix(": ")
    seconds = max(record.lasted_s or 0.0 for record in found)
    return f"{phrase} in {max(1.0, seconds):.0f} s" if event is NodeEvent.CRASH and seconds < FAST_S else phrase


def blamed_nodes(
    found: Iterable[NodeRecord], policy: BlamePolicy, *, now: float, run: str | None = None
) -> list[Blamed]:
    """Return the nodes that are to be left out of the next start, by name.

    Evidence counts 1, broken hardware 2, and a node is blamed when its count within the expiry has reached the threshold. A
    node that a person has blamed, or on which this run could not start though it has trained before, is blamed at once.

    Args:
        found: records of the ledger and of the run's own attempts, in any order; the same one may be there twice.
        run: id of the run that is to start: what has happened to it counts even if nothing else shows that the node is at
            fault. None: what counts for a run that has not begun.
    """
    recent = (each for each in sorted(found, key=lambda each: each.time) if now - each.time < policy.expiry_s)
    live = _without_twins(recent)
    forgiven = {each.node: each.time for each in live if each.event is NodeEvent.FORGIVEN}
    nodes_alike: dict[tuple[str, str], set[str]] = defaultdict(set)  # by run and words, on which nodes
    for each in live:
        if each.event in SOFT:
            nodes_alike[each.run, alike(each)].add(each.node)
    by_node: dict[str, list[tuple[NodeRecord, int]]] = defaultdict(list)
    for each in live:
        since_forgiven = max(forgiven.get(each.node, 0.0), forgiven.get(ALL, 0.0)) < each.time
        on_many = len(nodes_alike[each.run, alike(each)]) > 1
        counts = _weight(each, policy, own=bool(each.run) and each.run == run, on_many=on_many)
        if counts and since_forgiven:
            by_node[each.node].append((each, counts))
    result = []
    for node, against in sorted(by_node.items()):
        total, records = 0, [each for each, _ in against]
        for each, counts in reversed(against):
            total += counts
            if total >= max(1, policy.threshold):
                by_hand = any(record.event is NodeEvent.BY_HAND for record in records)
                result.append(Blamed(node, why_blamed(records), each.time + policy.expiry_s, by_hand))
                break
    return result


def _without_twins(found: Iterable[NodeRecord]) -> list[NodeRecord]:
    """Return the records without second ones of the same attempt and node: the ledger has one, and the run itself, too."""
    kept: dict[tuple[object, ...], NodeRecord] = {}
    for each in found:
        key = (each.run, each.attempt, each.node, each.event) if each.run else (each.time, each.node, each.event)
        if key not in kept or each.proven:
            kept[key] = each
    return list(kept.values())


def _weight(each: NodeRecord, policy: BlamePolicy, *, own: bool, on_many: bool) -> int:
    """Return how much a record counts against its node.

    Args:
        own: it is of the run that is to start.
        on_many: a run has ended in this way on several nodes, so that its program is at fault.
    """
    if each.event is NodeEvent.BAD_START and own:
        return max(1, policy.threshold)
    if policy.threshold == 0:
        return 0
    if each.event in SOFT:
        return int((own or each.proven) and not on_many)
    return {NodeEvent.BY_HAND: policy.threshold, NodeEvent.HARDWARE: 2, NodeEvent.BAD_START: 1}.get(each.event, 0)


def alike(record: NodeRecord) -> str:
    """Return what a rank said without what differs between nodes and attempts: numbers, addresses, the node's name."""
    text = record.said.replace(record.node, "#") if record.node else record.said
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", re.sub(r"^rank \d+: ", "", text)).lower()


def short(text: str) -> str:
    """Return what a rank said in one line for the ledger: without secrets, and not too long."""
    line = " ".join(redact(text).split())
    return line if len(line) <= SAID_LENGTH else f"{line[: SAID_LENGTH - 3]}..."


# Functions that read and write the ledger.


def state_folder() -> Path:
    """Return the folder of the ledgers of this person, one for each cluster.

    Raises:
        OSError: there is no home directory.
    """
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise OSError(errno.ENOENT, "there is no home directory") from None
    return home / "slurmtrain" / "nodes"


def ledger_file(cluster: str) -> Path:
    """Return the ledger of a cluster, by SLURM's ClusterName.

    Raises:
        OSError: there is no home directory, or the name cannot be that of a file.
    """
    if CLUSTER_NAME.fullmatch(cluster) is None:
        raise OSError(errno.EINVAL, "its name cannot be that of a file", cluster)
    return state_folder() / f"{cluster}.jsonl"


def is_kept() -> bool:
    """Return whether this person has a ledger of any cluster."""
    try:
        return any(state_folder().glob("*.jsonl"))
    except OSError:
        return False


def read_ledger(path: Path) -> list[NodeRecord]:
    """Return the records of a ledger, oldest first; none if there is no file of this user's that can be read."""
    try:
        if not files.is_mine(path):
            return []
        lines = records.read_tail(path, READ_BYTES).splitlines()
    except UnreadableRecordError:
        return []
    found = (typed_or_none(NodeRecord, records.parse(line)) for line in lines if line.endswith(b"}"))
    return [each for each in found if each is not None]


def append_to_ledger(path: Path, new: Iterable[NodeRecord]) -> None:
    """Append records to a ledger, and make it if need be.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with records.locked(path, at_most_s=LOCK_S):
        for each in new:
            records.append_line(path, json.dumps(asdict(each)) + "\n")
