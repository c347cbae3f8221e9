"""Remove runs that have ended. Nobody ever sees a run half removed, and everything that may still be wanted is kept.

Promise: a run is removed only when its own files and SLURM say that it has ended, nothing has happened to it since they
were asked, nobody reads its checkpoints, and no run that is still to come starts from them.

Deciding is separate from removing, so that a dry run shows the very same decisions.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.checkpoint.store import retention
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.status.state import RunState, RunStatus, states
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.ownership import is_own
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import disk_usage, is_mine
from slurmtrain.system.paths import located

# Nobody runs it any more.
ENDED = (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.PRUNED, RunStatus.FAILED, RunStatus.LOST)
# A local run has no attempt for a moment after it was prepared, and looks lost; so does one between two attempts.
QUIET_S = 600.0
REMOVED = ".removed-"  # a hidden name, which `all_runs` does not look into


@dataclass(frozen=True)
class Removal:
    """A run to remove, or what is left of one.

    Attributes:
        path: its folder.
        what: why it may be removed.
        size: bytes that are freed.
        fingerprint: facts that change when something happens to the run.
    """

    path: Path
    what: str
    size: int
    fingerprint: tuple[object, ...] = ()


@dataclass(frozen=True)
class PrunePlan:
    """The decision which runs to remove.

    Attributes:
        removals: folders to remove.
        stays: by run id, why a requested run is kept.
        states: state of each of this user's runs, as found.
    """

    removals: list[Removal]
    stays: dict[str, str]
    states: dict[str, RunState]


def plan(root: Path, *, now: float, words: Collection[str] = ENDED, older_than_s: float = 0.0) -> PrunePlan:
    """Decide which of this user's runs under `root` to remove, without changing anything.

    Args:
        now: unix time.
        words: states to remove, of `ENDED`.
        older_than_s: least number of seconds since their last change.
    """
    root = located(root)
    known = all_runs(root)
    runs = [run for run in known if is_own(run)]
    before = {run.path: fingerprint(run) for run in runs}
    evaluations = [each for run in runs for each in run.all_evaluations()]
    found = states([*known, *evaluations])
    evaluated = {each.path.parents[1] for each in evaluations if found[each].alive}
    sources = _sources([run for run in known if found[run].status not in ENDED])
    removals, stays = [], {}
    for run in runs:
        if found[run].status not in words or now - _changed(run) < older_than_s:
            continue
        reason = _reason_to_stay(run, root, found[run], now, sources)
        if reason is None and run.path in evaluated:
            reason = "an evaluation of it has not ended"
        if reason is not None:
            stays[run.id] = reason
        else:
            removals.append(Removal(run.path, found[run].status, disk_usage(run.path), before[run.path]))
    removals += [
        Removal(path, "left by a removal that was cut short", disk_usage(path))
        for path in sorted(root.glob(f"*/{REMOVED}*"))
        if os.path.isdir(path) and is_mine(path) and not path.is_symlink() and not path.parent.is_symlink()
    ]
    return PrunePlan(removals, stays, {run.id: found[run] for run in runs})


def _reason_to_stay(run: RunDir, root: Path, state: RunState, now: float, sources: Mapping[Path, str]) -> str | None:
    if run.path.parent.parent != root:
        return f"it is a link to {run.path}"
    linked = next((path for path in (run.attempts, run.checkpoints, run.evaluations) if path.is_symlink()), None)
    if linked is not None:
        return f"{linked.name} is a link to {os.path.realpath(linked)}, and slurmtrain removes nothing through a link"
    if state.queued_again:
        return f"job {state.job_id} is in the queue once more, though the run has ended"
    if state.status == RunStatus.LOST:  # no file says "lost": it is the state when nobody knows of the job
        if now - _changed(run) < QUIET_S:
            return f"it looks lost, but something happened to it {now - _changed(run):.0f} s ago: it may be starting"
        if run.info()["host"] != socket.gethostname():
            return (
                f"it looks lost from here, but was submitted on {run.info()['host']}, where another SLURM may have it"
            )
    if retention.in_use(run.checkpoints, now):
        return "somebody is reading its checkpoints"
    reader = next(
        (reader for source, reader in sources.items() if run.path.resolve() in (source, *source.parents)), None
    )
    return f"run {reader}, which has not ended, begins from its checkpoints" if reader is not None else None


def _sources(runs: Sequence[RunDir]) -> dict[Path, str]:
    """Return the checkpoints that runs which have not ended start from (checkpoint.restore_from), with the runs' ids."""
    found = {}
    for run in runs:
        try:
            source = run.config_values()["checkpoint"]["restore_from"]
            if source:
                path = os.path.join(run.info().get("submit_dir", ""), os.path.expanduser(str(source)))
                found[Path(os.path.realpath(path))] = run.id
        except (UnreadableRecordError, ValueError, TypeError, KeyError):
            continue
    return found


def fingerprint(run: RunDir) -> tuple[tuple[int, int, int] | None, ...]:
    """Return inode, size and time of what changes when a run is submitted, resumed, started, logs or gets a request."""
    files = (run.info_file, run.events_file, run.metrics_file, run.request_file)
    folders = (run.attempts, run.checkpoints, run.evaluations, *(run.attempt(n).path for n in run.attempt_numbers()))
    found: list[tuple[int, int, int] | None] = []
    for path in (*files, *folders):
        try:
            stamp = path.stat()
            found.append((stamp.st_ino, stamp.st_size, stamp.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def _changed(run: RunDir) -> float:
    """Return when something last happened to the run, in unix seconds."""
    return max((stamp[2] for stamp in fingerprint(run) if stamp is not None), default=0) / 1e9


def remove(removal: Removal, *, now: float) -> bool:
    """Remove a run: rename it first, then delete it. Return False, and keep it, if something has happened to it since.

    Raises:
        OSError: it could not be renamed, and is unchanged.
    """
    path = removal.path
    if path.name.startswith(REMOVED):
        shutil.rmtree(path, ignore_errors=True)
        return True
    run = RunDir(path)
    if fingerprint(run) != removal.fingerprint or retention.in_use(run.checkpoints, now):
        return False
    aside = path.with_name(f"{REMOVED}{path.name}-{secrets.token_hex(2)}")
    path.rename(aside)
    (aside / run.info_file.name).unlink(missing_ok=True)
    # Files that cannot be deleted right now, such as those still open over NFS, are left for the next time.
    shutil.rmtree(aside, ignore_errors=True)
    return True
