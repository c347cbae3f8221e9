"""What is copied to the nodes of a job before its ranks start (cluster.stage): the plan, and what each node says of it.

They lie in attempts/NNNN/stage. The first node writes plan.json. Each node prints one line of JSON when it has copied or
failed; the batch script collects them in reports.jsonl, so that the node that judges them has written that file itself. Where
copies are required and some nodes have none, refused.json names these nodes for the outcome of the attempt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.system.files import read_json, write_json


@dataclass(frozen=True)
class Item:
    """Something that each node copies.

    Attributes:
        name: path of the copy in the node's folder: "code", "environment", "data/tokens".
        source: absolute path of the file or folder that the nodes share; of an environment, of its archive.
        size_bytes: size of the copy.
        digest: sha256 that the copy must have; None: it is not known, and the nodes are compared with each other.
    """

    name: str
    source: str
    size_bytes: int
    digest: str | None = None


@dataclass(frozen=True)
class Plan:
    """What is copied to which nodes, and how the ranks of a node find it.

    Attributes:
        nodes: names of all nodes of the job.
        imports: folders of the copy of the code that ranks import from, relative to the node's folder.
        workdir: folder of the copy of the code that stands for the one in which the ranks work; None: no code is copied.
        prefix: original folder of the environment, which its scripts name; None: no environment is copied.
        python: path of the interpreter in that folder.
        only_copies: modules beside the program are not imported from the shared folder.
    """

    items: tuple[Item, ...]
    nodes: tuple[str, ...]
    imports: tuple[str, ...] = ()
    workdir: str | None = None
    prefix: str | None = None
    python: str | None = None
    only_copies: bool = False

    @property
    def size_bytes(self) -> int:
        """The size of all copies of a node."""
        return sum(item.size_bytes for item in self.items)


LINE_BYTES = 1024  # in pieces of which SLURM passes on what a task prints; those of several nodes may come in any order
DIGEST_LETTERS = 16  # of a digest that is only compared with those of other nodes
DIGESTS_BYTES = 640  # of all digests of a report; more of them become one
ALL_COPIES = ""  # stands for the names of all items where their digests have become one


@dataclass(frozen=True)
class NodeReport:
    """What a node says when it has copied, or could not.

    Attributes:
        digests: sha256 of each copy, or the beginning of it, by the name of its item; or one of all, by ALL_COPIES.
        error: why there is no sound copy; None: there is one.
        in_memory: the copies take memory of the job.
    """

    node: str
    seconds: float = 0.0
    digests: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    in_memory: bool = False

    def line(self) -> str:
        """Return the report as one line of JSON of LINE_BYTES at most, so that no other node's words come into it.

        Nodes with the same items shorten their digests in the same way, and can be compared.
        """
        digests = {name: digest[:DIGEST_LETTERS] for name, digest in self.digests.items()}
        if self.error is not None:  # such copies are not compared
            digests = {}
        elif len(json.dumps(digests)) > DIGESTS_BYTES:
            whole = json.dumps(dict(self.digests), sort_keys=True).encode()
            digests = {ALL_COPIES: hashlib.sha256(whole).hexdigest()[:DIGEST_LETTERS]}
        values = {**asdict(self), "digests": digests}
        line = json.dumps(values) + "\n"
        for letters in reversed(range(len(self.error or ""))):
            if len(line) <= LINE_BYTES:
                break
            line = json.dumps({**values, "error": f"{str(self.error)[:letters]}..."}) + "\n"
        return line


def write_plan(attempt_dir: AttemptDir, plan: Plan) -> None:
    """Write plan.json."""
    attempt_dir.stage_dir.mkdir(exist_ok=True)
    write_json(_plan_file(attempt_dir), asdict(plan))


def read_plan(attempt_dir: AttemptDir) -> Plan | None:
    """Return the plan of an attempt; None if there is none."""
    found = read_json(_plan_file(attempt_dir))
    if found is None:
        return None
    items = tuple(Item(**each) for each in found.pop("items"))
    return Plan(items, tuple(found.pop("nodes")), tuple(found.pop("imports")), **found)


def read_reports(attempt_dir: AttemptDir) -> dict[str, NodeReport]:
    """Return the reports by node; lines that are not whole, such as those of a node that was killed, are left out."""
    try:
        lines = (attempt_dir.stage_dir / "reports.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    reports = [report for line in lines if (report := _report(line)) is not None]
    return {report.node: report for report in reports}


def write_refusal(attempt_dir: AttemptDir, plan: Plan, without: Sequence[str]) -> None:
    """Write which nodes have no sound copy, where copies are required."""
    write_json(attempt_dir.stage_dir / "refused.json", {"without": list(without), "nodes": len(plan.nodes)})


def refused_nodes(attempt_dir: AttemptDir) -> tuple[str, ...] | None:
    """Return the nodes at fault for the end of an attempt whose nodes have not all got copies; none if most have not.

    Then what is copied may be at fault.

    Returns:
        None if it has not ended for that reason, or has a single node, which is that of the batch script.
    """
    found = read_json(attempt_dir.stage_dir / "refused.json")
    if found is None or found["nodes"] < 2:
        return None
    return tuple(found["without"]) if 2 * len(found["without"]) <= found["nodes"] else ()


def progress(attempt_dir: AttemptDir) -> str | None:
    """Return how far the copying is, as in "copies code to its nodes: 3 of 16 have it"; None if it is over, or not wanted."""
    if not attempt_dir.stage_dir.is_dir():
        return None
    plan = read_plan(attempt_dir)
    if plan is None:
        return "prepares what its nodes get copies of"
    done = len(read_reports(attempt_dir))
    if done >= len(plan.nodes):
        return None
    names = ", ".join(item.name for item in plan.items)
    return f"copies {names} ({plan.size_bytes / 1e9:.1f} GB) to each of its nodes: {done} of {len(plan.nodes)} done"


def _report(line: str) -> NodeReport | None:
    try:
        values: Any = json.loads(line)
        return NodeReport(**values)
    except (ValueError, TypeError):
        return None


def _plan_file(attempt_dir: AttemptDir) -> Path:
    return attempt_dir.stage_dir / "plan.json"
