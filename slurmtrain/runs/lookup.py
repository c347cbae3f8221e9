"""Find runs and sweeps: under the runs folder, by id, by path, or the last one of this user."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slurmtrain.errors import UnreadableRecordError, UsageError
from slurmtrain.runs.create import run_id_at
from slurmtrain.runs.ownership import check_parts, foreign_link, is_own
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import user_in_words
from slurmtrain.system.paths import absolute, located, runs_root

if TYPE_CHECKING:
    from slurmtrain.runs.sweep_dir import Sweep

log = logging.getLogger(__name__)

Found = TypeVar("Found", RunDir, "Sweep")

SKEW_S = 60.0  # between the clock of this machine and that of a file server
_RUN_ID = re.compile(r"\d{8}-\d{6}-\d{3}")


def is_sweep(folder: os.PathLike[str] | str) -> bool:
    """Return whether a folder under the runs holds the points of one sweep."""
    return os.path.isfile(os.path.join(folder, "sweep.json"))  # not in a folder that cannot be read


def reference(run_dir: RunDir) -> str:
    """Return what a person types to mean this run: its id if the verbs find it, else its path."""
    found = run_dir.path.parent.parent == located(runs_root())
    return run_dir.id if found else shlex.quote(str(run_dir.path))


def all_runs(root: Path) -> list[RunDir]:
    """Return every run under `root`, oldest first: an id begins with the time, and for other names run.json has it.

    Hidden folders, which are being removed, links of somebody else, and what somebody else keeps unreadable are left out.
    """
    found: list[tuple[str, str, RunDir]] = []
    for folder in _folders(absolute(root)):
        if foreign_link(folder):
            continue
        place = Path(os.path.realpath(folder) if folder.is_symlink() else folder)
        for run in _folders(folder):
            name = run.name
            if not name.startswith(".") and os.access(os.path.join(run, "run.json"), os.R_OK) and not foreign_link(run):
                run_dir = RunDir(located(Path(run)) if run.is_symlink() else place / name)
                begun = name if _RUN_ID.match(name) else run_id_at(submitted_at(run_dir)[0])
                found.append((begun, name, run_dir))
    return [run_dir for *_, run_dir in sorted(found, key=lambda each: each[:2])]


def submitted_at(run_dir: RunDir | Sweep) -> tuple[float, bool]:
    """Return when a run was submitted, in unix seconds, and whether it is no copy of another one; 0 if nobody can say."""
    try:
        info = run_dir.info()
    except UnreadableRecordError:
        return 0.0, False
    return float(info.get("created", 0.0)), "copied_from" not in info


def last_own(found: Sequence[Found], what: str, root: Path) -> Found:
    """Return the run or sweep that `last` means: of this user's own, the one that was submitted last; not its copies.

    Raises:
        UsageError: all belong to others.
    """
    own = [each for each in found if is_own(each)]
    if not own:
        raise UsageError(f"none of the {what} under {root.resolve()} is yours", hint=f"the latest is {found[-1].id}")
    changed = {each: os.stat(each.info_file).st_mtime for each in own}
    last, latest = (0.0, False, ""), own[-1]
    for newest in sorted(own, key=changed.__getitem__, reverse=True):
        if changed[newest] + SKEW_S < last[0]:  # nor were the others submitted later than their run.json was written
            break
        created, is_original = submitted_at(newest)
        if (its := (created, is_original, newest.id)) >= last:
            last, latest = its, newest
    return latest


def _folders(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Return the folders in a folder, and links to folders; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if _is_folder(entry)]
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or to where nobody may look
        return False


def find(reference: str, root: Path) -> RunDir:
    """Return the run that a person means: an id, a unique prefix of one, a path, or "last", which is the last of their own.

    Raises:
        UsageError: none or several match.
    """
    path = Path(reference)
    if os.path.isfile(path / "run.json"):
        found = RunDir(located(path))
        check_parts(found)
        return found
    if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
        raise _not_readable(path)
    runs = all_runs(root)
    if not runs:
        raise nothing_under(root, "runs")
    if reference == "last":
        return last_own(runs, "runs", root)
    # Another user can give a run any id: a run whose id was typed in full comes first, then this user's own.
    by_id = [run for run in runs if run.id == reference] or [run for run in runs if run.id.startswith(reference)]
    matching = by_id if len(by_id) == 1 else [run for run in by_id if is_own(run)] or by_id
    if len(matching) > 1:  # a copy of a whole folder of runs has the same names
        matching = [run for run in matching if submitted_at(run)[1]] or matching
    if len(matching) == 1:
        check_parts(matching[0])
        return matching[0]
    if not matching:
        if called := [run.id for run in runs if run.path.parent.name == reference]:
            what = "sweep, and not a run" if is_sweep(root / reference) else "name of runs, and not an ID"
            hint = f"the latest IDs are: {', '.join(called[-3:])}; `status --name {reference}` lists all"
            raise UsageError(f"{reference!r} is a {what}", hint=hint)
        latest = ", ".join(run.id for run in runs[-3:])
        raise UsageError(f"no run's id begins with {reference!r}", hint=f"the latest are: {latest}")
    raise UsageError(
        f"{len(matching)} runs begin with {reference!r}",
        hint="write more of the ID; the latest are: " + ", ".join(run.id for run in matching[-5:]),
    )


def all_sweeps(root: Path) -> list[Sweep]:
    """Return every sweep under `root`, oldest first."""
    from slurmtrain.runs.sweep_dir import Sweep

    files = [file for file in root.glob("*/sweep.json") if os.access(file, os.R_OK)]
    dated = []
    for sweep in [Sweep(located(file.parent)) for file in files if not foreign_link(file.parent)]:
        try:
            dated.append((float(sweep.info()["created"]), sweep.id, sweep))
        except UsageError as error:
            log.warning("left out: %s", error.message)
    return [sweep for _, _, sweep in sorted(dated, key=lambda each: each[:2])]


def find_sweep(reference: str, root: Path) -> Sweep:
    """Return the sweep that a person means: its name, a part of it that no other has, a path, or "last".

    Raises:
        UsageError: none or several match.
    """
    from slurmtrain.runs.sweep_dir import Sweep

    if is_sweep(reference):
        return Sweep(located(Path(reference)))
    sweeps = all_sweeps(root)
    if not sweeps:
        raise nothing_under(root, "sweeps")
    if reference == "last":
        return last_own(sweeps, "sweeps", root)
    matching = [sweep for sweep in sweeps if sweep.id == reference] or [
        sweep for sweep in sweeps if reference in sweep.id
    ]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(sweep.id for sweep in (matching or sweeps)[-5:])
    if not matching:
        raise UsageError(f"no sweep is called {reference!r}", hint=f"the latest are: {names}")
    raise UsageError(
        f"{len(matching)} sweeps are called something like {reference!r}", hint=f"write more of the name: {names}"
    )


def _not_readable(path: Path) -> UsageError:
    return UsageError(
        f"{path} cannot be read: it belongs to {user_in_words(path.stat().st_uid)}",
        hint="ask the owner to share it: chmod -R g+rX",
    )


def nothing_under(root: Path, what: str) -> UsageError:
    """Return the error for a folder that holds no runs or sweeps, or that this user may not look into."""
    if os.path.isdir(root) and not os.access(root, os.R_OK | os.X_OK):
        return _not_readable(absolute(root))
    return UsageError(
        f"there are no {what} under {absolute(root)}",
        hint="change to the folder where you typed submit, or set SLURMTRAIN_RUNS to its runs folder",
    )
