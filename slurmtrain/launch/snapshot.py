"""The copy of the code that the job runs: editing the work tree while a job is pending or requeued changes nothing."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.config.schema import JobConfig
from slurmtrain.errors import ConfigError
from slurmtrain.resources import PACKAGE, is_installed_copy


@dataclass(frozen=True)
class Snapshot:
    """What was copied.

    Attributes:
        workdir: where the ranks run: "code", "code/sub" below the run directory, or an absolute path when run in place.
        revision: git commit, or None outside of git.
        dirty: the work tree differed from that commit.
    """

    workdir: str
    revision: str | None = None
    dirty: bool = False

    @property
    def in_place(self) -> bool:
        return self.workdir.startswith("/")


@dataclass(frozen=True)
class Source:
    """What would be copied, found out without copying: a dry run shows the same paths.

    Attributes:
        root: the folder that is copied; None: run in place.
        workdir: as in `Snapshot`.
    """

    root: Path | None
    workdir: str
    git: bool = False


def find_source(job: JobConfig, cwd: Path) -> Source:
    """Decide what the snapshot is made of: the git work tree around `cwd`, `cwd` itself, or nothing."""
    top = _git(cwd, "rev-parse", "--show-toplevel") if job.snapshot == "auto" else None
    if top:
        root = Path(top.strip())
        below = cwd.resolve().relative_to(root.resolve())
        return Source(root, "code" if below == Path(".") else f"code/{below}", git=True)
    if job.snapshot == "cwd":
        return Source(cwd, "code")
    return Source(None, str(cwd.resolve()))


def take_snapshot(job: JobConfig, source: Source, target: Path) -> Snapshot:
    """Copy the code to `target`.

    Raises:
        ConfigError: it is larger than job.snapshot_max_mb; the message names the largest files.
    """
    target.mkdir(mode=0o700)
    revision, dirty = None, False
    if source.root is not None:
        files = _files_of(source, runs=Path(job.runs_dir))
        _check_size(files, source.root, job.snapshot_max_mb)
        for file in files:
            destination = target / file
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source.root / file, destination, follow_symlinks=False)
        if source.git:
            revision = (_git(source.root, "rev-parse", "HEAD") or "").strip() or None
            dirty = bool(_git(source.root, "status", "--porcelain"))
    (target.parent / source.workdir).mkdir(parents=True, exist_ok=True)  # a folder that git knows no files of
    if not is_installed_copy() and not (target / "slurmtrain" / "__main__.py").exists():
        # An editable install: this package's own code is a work tree, too.
        shutil.copytree(PACKAGE, target / "slurmtrain", ignore=shutil.ignore_patterns("__pycache__"))
    return Snapshot(source.workdir, revision, dirty)


def _files_of(source: Source, runs: Path) -> list[Path]:
    """Files to copy, relative to the root: in git, tracked ones and untracked ones that are not ignored."""
    assert source.root is not None
    root = source.root
    if source.git:
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
        names = [Path(name) for name in dict.fromkeys(listed.split("\0")) if name]
    else:
        names = [
            path.relative_to(root)
            for path in root.rglob("*")
            if not any(part.startswith(".") for part in path.relative_to(root).parts)
        ]
    runs = runs if runs.is_absolute() else Path.cwd() / runs
    files = []
    for name in names:
        path = root / name
        if runs.resolve() in path.resolve().parents or not (path.is_file() or path.is_symlink()):
            continue  # other runs; deleted but still tracked; submodules are folders to git
        files.append(name)
    return files


def _check_size(files: list[Path], root: Path, max_mb: int) -> None:
    sizes = {file: (root / file).lstat().st_size for file in files}
    total_mb = sum(sizes.values()) / 1e6
    if total_mb > max_mb:
        largest = sorted(sizes, key=lambda file: sizes[file], reverse=True)[:3]
        named = ", ".join(f"{file} ({sizes[file] / 1e6:.0f} MB)" for file in largest)
        raise ConfigError(
            f"the work tree {root} has {total_mb:.0f} MB to copy, more than job.snapshot_max_mb={max_mb}; the largest: {named}",
            hint="add data to .gitignore, raise job.snapshot_max_mb, or run in place with job.snapshot=none",
        )


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        # surrogateescape: a file name need not be UTF-8, and os functions take it back as it was.
        answer = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, errors="surrogateescape", check=False
        )
    except FileNotFoundError:
        return None
    return answer.stdout if answer.returncode == 0 else None
