"""What the ranks of an attempt leave on record when they fail or hang: each rank writes a file of its own.

Nothing has to be agreed on in the error path, so ranks record what each of them has seen. Which of these failures came
first, and on which node, is decided from all of them together, when the last rank has exited.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import EXIT_CONFIG, UnreadableRecordError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.slurm.environment import own_node_name
from slurmtrain.system import records
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.gpu import broken_gpus
from slurmtrain.system.records import COUNT, FLAG, NOTHING, TEXT, TEXTS, TIME

log = logging.getLogger(__name__)

_REQUIRED = {"rank": COUNT, "exit_code": COUNT, "sentence": TEXT, "time": TIME}
_OPTIONAL = {
    "because_of_peer": FLAG,
    "superseded": FLAG,
    "on_any_node": FLAG,
    "diverged": FLAG,
    "bad_nodes": TEXTS,
    "node": TEXT | NOTHING,
}


@dataclass(frozen=True)
class Failure:
    """What a rank says of its own failure.

    Attributes:
        because_of_peer: another rank had exited, and its failure came first.
        superseded: a newer incarnation of the run is at work, and this one may not commit any more.
        on_any_node: it is the same on every node, such as a checkpoint that does not fit the config.
        diverged: numbers of the training are not finite, or its loss has jumped.
        bad_nodes: nodes that cannot do what the job needs, as the checks before training have found.
    """

    exit_code: int
    sentence: str
    because_of_peer: bool = False
    superseded: bool = False
    on_any_node: bool = False
    diverged: bool = False
    bad_nodes: tuple[str, ...] = ()


def record_failure(attempt_dir: AttemptDir, rank: int, failure: Failure, *, when: float | None = None) -> None:
    """Record a rank's failure.

    Args:
        when: when it failed, in unix seconds; None: now.

    Raises:
        OSError: the record cannot be written.
    """
    record: dict[str, Any] = {
        "rank": rank,
        "exit_code": failure.exit_code,
        "sentence": failure.sentence,
        "because_of_peer": failure.because_of_peer,
    }
    if failure.superseded:
        record["superseded"] = True
    if failure.on_any_node:
        record["on_any_node"] = True
    if failure.diverged:
        record["diverged"] = True
    if failure.bad_nodes:
        record["bad_nodes"] = list(failure.bad_nodes)
    record |= {"node": own_node_name(), "time": time.time() if when is None else when}
    attempt_dir.write_record(attempt_dir.failure_file(rank), record)
    if failure.because_of_peer or failure.superseded or failure.on_any_node or failure.exit_code == EXIT_CONFIG:
        return
    # It takes a moment: the record above is there already.
    broken = broken_gpus(before=_broken_before(attempt_dir, own_node_name()))
    if broken is not None:
        write_json(attempt_dir.failure_file(rank), {**record, "sentence": f"{failure.sentence} ({broken})"})


def _broken_before(attempt_dir: AttemptDir, node: str | None) -> list[str] | None:
    """Return what the checks before training have seen to be broken on the GPUs of a node; None: they were not made there."""
    try:
        record = read_json(attempt_dir.preflight_file) or {}
    except UnreadableRecordError:
        return None
    nodes = record.get("nodes")
    its = [each for each in nodes if isinstance(each, dict)] if isinstance(nodes, list) else []
    said = [each.get("broken") for each in its if node is not None and each.get("node") == node]
    known = [words for words in said if isinstance(words, list)]
    return [each for words in known for each in words if isinstance(each, str)] if known else None


@dataclass(frozen=True)
class RankFailure:
    """The failure of a rank, as it is on record.

    Attributes:
        time: when it failed, in unix seconds.
        node: the rank's node, by SLURM's name; None if it is not known.
    """

    rank: int
    failure: Failure
    time: float
    node: str | None = None

    @property
    def sentence(self) -> str:
        return f"rank {self.rank}: {self.failure.sentence}"


@dataclass(frozen=True)
class Failures:
    """The failures of all ranks of an attempt that have left a record."""

    ranks: tuple[RankFailure, ...] = ()

    @classmethod
    def read(cls, attempt_dir: AttemptDir) -> Failures:
        """Read the records of all ranks. One that cannot be used is left out: the others tell what it would."""
        found = []
        for path in attempt_dir.failure_files():
            try:
                values = read_json(path) or {}
                records.check_fields(values, {**_REQUIRED, **_OPTIONAL}, path)
            except UnreadableRecordError as error:
                log.warning("a record of a failure is left out: %s", error.message)
                continue
            if values.keys() >= _REQUIRED.keys():  # else it is torn
                found.append(_of_values(values))
        return cls(tuple(found))

    def first(self, *, because_of_peer: bool = False) -> RankFailure | None:
        """Return the failure of the first rank that failed: by itself, or because another rank had exited."""
        chosen = [each for each in self.ranks if each.failure.because_of_peer == because_of_peer]
        # What a node was found unfit for tells more than what has followed from it.
        return min(chosen, key=lambda each: (not each.failure.bad_nodes, each.time), default=None)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes on which a rank failed by itself."""
        own = (each.node for each in self.ranks if not each.failure.because_of_peer)
        return tuple(dict.fromkeys(node for node in own if node))

    def unfit_nodes(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes that the checks before training have found unfit; none if that is most: then none is at fault.

        Args:
            nodes: those of the attempt; others are left out.
        """
        bad = tuple(dict.fromkeys(node for each in self.ranks for node in each.failure.bad_nodes if node in nodes))
        return bad if len(nodes) == 1 or 2 * len(bad) <= len(nodes) else ()


def _of_values(values: dict[str, Any]) -> RankFailure:
    failure = Failure(
        values["exit_code"],
        values["sentence"],
        because_of_peer=values.get("because_of_peer", False),
        superseded=values.get("superseded", False),
        on_any_node=values.get("on_any_node", False),
        diverged=values.get("diverged", False),
        bad_nodes=tuple(values.get("bad_nodes", ())),
    )
    return RankFailure(values["rank"], failure, values["time"], values.get("node"))


def record_hang(
    attempt_dir: AttemptDir, *, sentence: str, nodes: list[str], ranks: list[int], since: float | None = None
) -> None:
    """Record which ranks did not come to where the others waited; both lists are empty if all waited for each other.

    Args:
        since: when a rank got on for the last time, in unix seconds; None if it is not known.
    """
    record = {"sentence": sentence, "nodes": nodes, "ranks": ranks, "time": time.time()}
    write_json(attempt_dir.hang_file, record if since is None else {**record, "since": since})


@dataclass(frozen=True)
class Hang:
    """A hang that ended an attempt.

    Attributes:
        node: that of the ranks that did not come; None if all waited for each other, or these were on several nodes, so
            that it is no fault of one of them.
    """

    sentence: str
    node: str | None = None


def found_hang(attempt_dir: AttemptDir) -> Hang | None:
    """Return the hang that the watchdog has found in an attempt; None if it has found none."""
    found = read_json(attempt_dir.hang_file) or {}
    if not isinstance(found.get("sentence"), str):
        return None
    nodes = found.get("nodes") or []
    return Hang(found["sentence"], nodes[0] if len(nodes) == 1 else None)
