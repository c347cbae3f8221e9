"""The copies of shared files on a rank's own node (cluster.stage): how a rank finds them, and how it finds its way back.

The variables are set for the ranks of a node by the file `use` in the node's folder; see `supervise.staging`. What a rank
submits, or starts for another node, must not name folders of this node.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

STAGED = "SLURMTRAIN_STAGE"  # the folder of this job on each node
COPIES = "SLURMTRAIN_COPIES"  # JSON: the originals of what is in $SLURMTRAIN_DATA; set on nodes that have copies
STAGED_PYTHON, SHARED_PYTHON = "SLURMTRAIN_PYTHON", "SLURMTRAIN_SHARED_PYTHON"
SHARED = "SLURMTRAIN_SHARED_"  # begins the variable that keeps what one of these was before
CHANGED = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONSAFEPATH")


def with_copies(values: Any, variables: Mapping[str, str] = os.environ) -> Any:
    """Return values of a config in which paths that lie in what was copied to this node are those of the copies."""
    if COPIES not in variables:
        return values
    return _replaced(values, json.loads(variables[COPIES]), PurePosixPath(variables["SLURMTRAIN_DATA"]))


def without_copies(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment as it was before the copies of this node were put first."""
    found = dict(variables)
    for name in CHANGED:
        before = found.pop(f"{SHARED}{name}", None)
        if before:
            found[name] = before
        elif before is not None:
            found.pop(name, None)
    for name in (COPIES, STAGED_PYTHON, SHARED_PYTHON, STAGED):
        found.pop(name, None)
    return found


def shared_interpreter(variables: Mapping[str, str] = os.environ) -> str:
    """Return the path of this process's interpreter for other nodes, which do not see the copy that a rank may run with."""
    staged = variables.get(STAGED_PYTHON)
    if staged is not None and SHARED_PYTHON in variables and sys.executable == staged:
        return variables[SHARED_PYTHON]
    return sys.executable


def _replaced(values: Any, originals: Sequence[str], copies: PurePosixPath) -> Any:
    if isinstance(values, Mapping):
        return {name: _replaced(value, originals, copies) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_replaced(value, originals, copies) for value in values]
    if not isinstance(values, str) or not values.startswith("/"):
        return values
    for original in map(PurePosixPath, originals):
        if PurePosixPath(values).is_relative_to(original):
            return str(copies / original.name / PurePosixPath(values).relative_to(original))
    return values
