"""Find out whose a job is by the token in its comment.

SLURM uses the same id twice: its ids begin anew on a cluster that is set up again, as a sandbox is, and after MaxJobId.
A job id that a run noted long ago may be another run's job by now.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs.lookup import is_sweep
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import read_json

TOKEN_PREFIX = "slurmtrain:"


def named_in(comment: Sequence[str]) -> list[str]:
    """Return the submitters that the words of a comment name: the id of a run, or "sweep-" and the token of a sweep."""
    tokens = [word.removeprefix(TOKEN_PREFIX) for word in comment if word.startswith(TOKEN_PREFIX)]
    return [name for name, colon, _ in (token.rpartition(":") for token in tokens) if colon]


def submitter(run_dir: RunDir) -> str:
    """Return the name by which the jobs of a run are found: its id, with a mark if it began as a copy of another run."""
    mark = (read_json(run_dir.info_file) or {}).get("copy")
    return f"{run_dir.id}~{mark}" if mark else run_dir.id


def names_of(run_dir: RunDir) -> list[str]:
    """Return the names under which jobs of a run are submitted: its own, and that of its sweep."""
    folder = run_dir.path.parent
    if not is_sweep(folder):
        return [submitter(run_dir)]
    try:
        info = read_json(folder / "sweep.json") or {}
    except UnreadableRecordError:
        info = {}
    return [submitter(run_dir), f"sweep-{info.get('token')}"]


def is_anothers(comment: Sequence[str], names: Collection[str]) -> bool:
    """Return whether a comment names another run or sweep as the submitter; False for a comment without a token."""
    named = named_in(comment)
    return bool(named) and not any(name in names for name in named)
