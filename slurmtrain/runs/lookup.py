"""Find runs: under the runs folder, by id, by path, or the last one of this user."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from slurmtrain.errors import UsageError
from slurmtrain.runs.ownership import check_parts, foreign_link, is_own
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import user
from slurmtrain.system.paths import absolute, located


def is_sweep(folder: Path | str) -> bool:
    """Return whether a folder under the runs holds the points of one sweep."""
    return os.path.isfile(os.path.join(folder, "sweep.json"))  # not in a folder that cannot be read


def runs_root() -> Path:
    """Return where `submit` puts runs unless job.runs_dir says otherwise, and where verbs look.

    It is SLURMTRAIN_RUNS, else ./runs.
    """
    return Path(os.environ.get("SLURMTRAIN_RUNS") or "runs").expanduser()


def reference(run_dir: RunDir) -> str:
    """Return what a person types to mean this run: its id if the verbs find it, else its path."""
    found = run_dir.path.parent.parent == located(runs_root())
    return run_dir.id if found else shlex.quote(str(run_dir.path))


def all_runs(root: Path) -> list[RunDir]:
    """Return every run under `root`, oldest first.

    Hidden folders, which are being removed, and links of somebody else are left out.
    """
    found: list[tuple[str, RunDir]] = []
    for folder in _folders(absolute(root)):
        if foreign_link(folder):
            continue
        runs = (run for run in _folders(folder) if not run.name.startswith("."))
        own = [run for run in runs if os.access(os.path.join(run, "run.json"), os.R_OK) and not foreign_link(run)]
        place = Path(os.path.realpath(folder) if folder.is_symlink() else folder)
        found += [(run.name, RunDir(located(Path(run)) if run.is_symlink() else place / run.name)) for run in own]
    return [run_dir for _, run_dir in sorted(found, key=lambda pair: pair[0])]


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


def unreadable(root: Path) -> list[Path]:
    """Return the runs and sweeps under `root`, or whole folders of them, that belong to somebody else and are not readable."""
    found = []
    for folder in _visible_folders(root):
        if _closed(folder):
            found.append(Path(folder))
        elif not is_sweep(folder):
            found += [Path(run) for run in _visible_folders(folder) if _closed(run)]
    return sorted(found)


def _visible_folders(folder: Path | str) -> list[str]:
    return [entry.path for entry in _folders(folder) if not entry.name.startswith(".")]


def _closed(folder: Path | str) -> bool:
    if not os.access(folder, os.R_OK | os.X_OK):
        return True
    info = os.path.join(folder, "sweep.json" if is_sweep(folder) else "run.json")
    return not os.access(info, os.R_OK) and os.path.exists(info)


def refuse_unreadable(reference: str, root: Path) -> None:
    """Raise UsageError if what the person means exists and cannot be read."""
    named = Path(reference)
    for path in [named] if os.path.isdir(named) and _closed(named) else unreadable(root):
        if path == named or path.name.startswith(reference):
            raise _not_readable(path)


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
    runs = all_runs(root)
    if not runs:
        refuse_unreadable(reference, root)
        raise nothing_under(root, "runs")
    if reference == "last":
        own = [run for run in runs if is_own(run)]
        if not own:
            raise UsageError(f"none of the runs under {root.resolve()} is yours", hint=f"the latest is {runs[-1].id}")
        return own[-1]
    # Another user can give a run any id: a run whose id was typed in full comes first, then this user's own.
    by_id = [run for run in runs if run.id == reference] or [run for run in runs if run.id.startswith(reference)]
    matching = by_id if len(by_id) == 1 else [run for run in by_id if is_own(run)] or by_id
    if len(matching) == 1:
        check_parts(matching[0])
        return matching[0]
    if not matching:
        refuse_unreadable(reference, root)
        if called := [run.id for run in runs if run.path.parent.name == reference]:
            latest = ", ".join(called[-3:])
            if is_sweep(root / reference):
                raise UsageError(
                    f"{reference} is a sweep, and not a run",
                    hint=f"sweep status {reference} shows its points; the latest runs of it are: {latest}",
                )
            raise UsageError(
                f"no run's id begins with {reference!r}, which is the name of {len(called)} of them",
                hint=f"name one by its ID; the latest are: {latest}",
            )
        latest = ", ".join(run.id for run in runs[-3:])
        raise UsageError(f"no run's id begins with {reference!r}", hint=f"the latest are: {latest}")
    raise UsageError(
        f"{len(matching)} runs begin with {reference!r}",
        hint="write more of the ID: " + ", ".join(r.id for r in matching[:5]),
    )


def _not_readable(path: Path) -> UsageError:
    return UsageError(
        f"{path} cannot be read: it belongs to {user.in_words(path.stat().st_uid)}",
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
