"""The copy of the code that the job runs: editing the work tree while a job is pending or requeued changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.choices import SnapshotMode
from slurmtrain.config.schema import JobConfig
from slurmtrain.errors import ConfigError
from slurmtrain.launch.import_paths import ask, roots_below
from slurmtrain.resources import PACKAGE, is_installed_copy, shipped
from slurmtrain.runs import lookup
from slurmtrain.runs.code_record import CodeRecord, write_code_record
from slurmtrain.runs.create import folder_of
from slurmtrain.runs.run_dir import DRILLS, ENVIRONMENTS, PREPARING, RunDir
from slurmtrain.system.modes import folder_mode, forbid_others_to_write, inherit_group
from slurmtrain.system.paths import absolute
from slurmtrain.system.process_facts import without_user

# Variables that make git look elsewhere than around the current folder, as within a hook or `git rebase --exec`: those
# of `git rev-parse --local-env-vars`, and two more.
OF_ANOTHER_REPOSITORY = frozenset(
    """GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_CEILING_DIRECTORIES GIT_COMMON_DIR GIT_CONFIG GIT_CONFIG_COUNT
    GIT_CONFIG_PARAMETERS GIT_DIR GIT_GRAFT_FILE GIT_IMPLICIT_WORK_TREE GIT_INDEX_FILE GIT_INTERNAL_SUPER_PREFIX
    GIT_LITERAL_PATHSPECS GIT_NAMESPACE GIT_NO_REPLACE_OBJECTS GIT_OBJECT_DIRECTORY GIT_PREFIX GIT_REPLACE_REF_BASE
    GIT_SHALLOW_FILE GIT_WORK_TREE""".split()
)
IN_PLACE_S = 5.0  # seconds for git to say whether a work tree that is not copied has changes
UNTRACKED = "?"  # what `git ls-files -t` puts before such a file
OWN_BUNDLE = re.compile(r".+-\d{8}-\d{6}-[0-9a-f]{5}\.tar(\.gz)?")  # the name that `runs bundle` gives
GENERATOR = b'<meta name="generator" content="slurmtrain">'
HEAD_BYTES = 2048  # of a page; the mark is among its first lines
LONGEST_DIFF = 1 << 20  # characters of a diff that is kept; the snapshot has the files, however much differs


@dataclass(frozen=True)
class Snapshot:
    """The copy that was made.

    Attributes:
        workdir: working directory of the ranks: "code", "code/sub" below the run directory, or an absolute path when
            run in place.
        revision: git commit, or None outside of git.
        dirty: whether the work tree differed from that commit; None: git did not say.
        roots: folders of the copy that the ranks import from, besides the working directory, relative to the copy.
        branch: git branch, or None.
        remote: URL of git's remote `origin`, without user and password, or None.
    """

    workdir: str
    revision: str | None = None
    dirty: bool | None = False
    roots: tuple[str, ...] = ()
    branch: str | None = field(default=None, compare=False)
    remote: str | None = field(default=None, compare=False)

    @property
    def in_place(self) -> bool:
        return self.workdir.startswith("/")


@dataclass(frozen=True)
class CodeSource:
    """The folders that would be copied, found without copying: a dry run shows the same paths.

    Attributes:
        root: the folder that is copied; None: run in place.
        workdir, roots: as in `Snapshot`.
        record: what is known of code that comes out of a bundle, of which every file is copied; None: git is asked.
        bundle: what run.json says of that bundle.
    """

    root: Path | None
    workdir: str
    git: bool = False
    roots: tuple[str, ...] = ()
    record: CodeRecord | None = None
    bundle: Mapping[str, Any] | None = None


def find_source(job: JobConfig, cwd: Path, interpreter: str | None = None) -> CodeSource:
    """Decide what the snapshot is made of: the git work tree around `cwd`, `cwd` itself, or nothing.

    Args:
        interpreter: the ranks' interpreter, which is asked where it imports the work tree from; None: it cannot be
            asked.

    Raises:
        ConfigError: there is a `.git`, but git cannot read it; or code of the work tree is imported in a way that no
            snapshot can replace. Running in place instead would silently break the promise that later edits change
            nothing.
    """
    source = _find_folders(job, cwd)
    if source.root is None or interpreter is None:
        return source
    return dataclasses.replace(source, roots=roots_below(source.root, ask(interpreter)))


def _find_folders(job: JobConfig, cwd: Path) -> CodeSource:
    if job.snapshot == SnapshotMode.AUTO:
        found = _run_git(cwd, "rev-parse", "--show-toplevel")
        if found.returncode == 0 and found.stdout.strip():
            root = Path(found.stdout.rstrip("\n"))
            below = cwd.resolve().relative_to(root.resolve())
            return CodeSource(root, "code" if below == Path(".") else f"code/{below}", git=True)
        here = cwd.resolve()
        if any((folder / ".git").exists() for folder in (here, *here.parents)):
            raise _git_failed(here, found)
    if job.snapshot == SnapshotMode.CWD:
        return CodeSource(cwd, "code")
    return CodeSource(None, str(cwd))


def top_folder(cwd: Path) -> Path:
    """Return the folder whose code is sent to another machine: the git work tree around `cwd`, else `cwd`."""
    return _find_folders(JobConfig(), cwd).root or cwd


def files_to_send(cwd: Path, max_mb: int) -> list[Path]:
    """Return the files of `top_folder(cwd)` that are sent to another machine, relative to it: those of a snapshot.

    Raises:
        ConfigError: they are larger than that, or git failed.
    """
    root = top_folder(cwd)
    source = dataclasses.replace(_find_folders(JobConfig(), cwd), root=root)
    files = _files_of(source, runs=absolute(str(lookup.runs_root()), cwd), target=root / "no such folder")
    _check_size(files, root, max_mb)
    return files


def take_snapshot(job: JobConfig, source: CodeSource, target: Path) -> Snapshot:
    """Copy the code to `target`, and write what it is into the file beside it: see `CodeRecord`.

    Raises:
        ConfigError: it is larger than job.snapshot_max_mb (the message names the largest files), or git failed.
    """
    target.mkdir(mode=folder_mode(target.parent))
    files: list[Path] = []
    if source.root is not None:
        runs = Path(job.runs_dir)
        if source.record is not None:
            files = [
                path.relative_to(source.root) for path in source.root.rglob("*") if path.is_file() or path.is_symlink()
            ]
        else:
            files = _files_of(source, runs=runs if runs.is_absolute() else Path.cwd() / runs, target=target)
            _check_size(files, source.root, job.snapshot_max_mb)
        for file in files:
            destination = target / file
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source.root / file, destination, follow_symlinks=False)
    git = source.record or _git_state(source, set(files))
    (target.parent / source.workdir).mkdir(parents=True, exist_ok=True)  # a folder that git knows no files of
    if not is_installed_copy() and not (target / "slurmtrain" / "__main__.py").exists():
        # An editable install: this package's own code is a work tree, too.
        shutil.copytree(PACKAGE, target / "slurmtrain", ignore=shutil.ignore_patterns("__pycache__"))
        template = Path("jobs") / "job.sbatch.j2"  # a task of an array that is submitted again renders its own script
        (target / "slurmtrain" / "jobs").mkdir()
        shutil.copy2(shipped("jobs") / template.name, target / "slurmtrain" / template)
    inherit_group(target)
    forbid_others_to_write(target)  # the modes of the files are those of the work tree
    contents, links = _contents(target)
    write_code_record(target, dataclasses.replace(git, files=contents, links=links))
    return Snapshot(source.workdir, git.revision, git.dirty, source.roots, git.branch, git.remote)


def _git_state(source: CodeSource, files: set[Path]) -> CodeRecord:
    """Return what git says of the code, without its files; of code that is not copied what it says soon.

    Raises:
        ConfigError: the code is git's, and git fails.
    """
    folder = source.root or Path(source.workdir)
    # Of a work tree without a commit there is no HEAD.
    revision = _run_git(folder, "rev-parse", "--verify", "--quiet", "HEAD").stdout.strip() or None
    dirty: bool | None
    if source.git:
        said = _git(folder, "status", "--porcelain", "-z", "--untracked-files=all")
        # An untracked file counts if it is copied; an untracked name that ends in a slash is a repository inside.
        dirty = any(
            not line.startswith("?? ") or line.endswith("/") or Path(line[3:]) in files
            for line in filter(None, said.split("\0"))
        )
    elif revision is None:
        return CodeRecord()
    else:  # perhaps a work tree so large that it runs in place for that
        answer = _run_git(folder, "status", "--porcelain", "--untracked-files=no", patience_s=IN_PLACE_S)
        dirty = bool(answer.stdout) if answer.returncode == 0 else None
    branch = _run_git(folder, "symbolic-ref", "--short", "--quiet", "HEAD").stdout.strip() or None
    remote = _run_git(folder, "config", "--get", "remote.origin.url").stdout.strip() or None
    state = CodeRecord(revision, dirty, branch, None if remote is None else without_user(remote))
    if dirty is None:
        return dataclasses.replace(state, diff=None)
    if not dirty or revision is None:
        return state
    patience_s = None if source.git else IN_PLACE_S
    words = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")
    answer = _run_git(folder, *words, patience_s=patience_s)
    diff = answer.stdout if answer.returncode == 0 and len(answer.stdout) <= LONGEST_DIFF else None
    others = _run_git(folder, "ls-files", "-z", "--others", "--exclude-standard").stdout.split("\0") if files else []
    untracked = tuple(name for name in others if Path(name) in files)
    return dataclasses.replace(state, diff=diff, untracked=untracked)


def _contents(target: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the digest of each file of a snapshot, and the target of each link, by path."""
    files, links = {}, {}
    for folder, folders, names in os.walk(target):
        for name in [*folders, *names]:
            path = Path(folder) / name
            inside = str(path.relative_to(target))
            if path.is_symlink():
                links[inside] = os.readlink(path)
            elif name in names:
                files[inside] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(files.items())), dict(sorted(links.items()))


def _files_of(source: CodeSource, runs: Path, target: Path) -> list[Path]:
    """Return the files to copy, relative to the root.

    Args:
        runs: the folder of all runs. Runs and sweeps in it are left out, other files are not: it may be the work tree
            itself.
        target: the folder of the copy.
    """
    assert source.root is not None
    root = source.root.resolve()
    names = _files_in_git(root) if source.git else _visible_files(root)
    runs, target = runs.resolve(), target.resolve()
    if runs.parent == folder_of(runs.parent.parent, DRILLS):  # the runs of a drill lie below those of the person
        runs = runs.parent.parent
    apart = {PREPARING, DRILLS, *(folder_of(runs, name).name for name in (PREPARING, DRILLS))}
    known: dict[Path, bool] = {}

    def belongs_to_a_run(path: Path) -> bool:
        if target in path.parents:
            return True
        if runs not in path.parents:
            return False
        name, *below = path.relative_to(runs).parts
        if name in apart or (below and is_one(runs / name, lookup.is_sweep)):
            return True
        if below and name.startswith(ENVIRONMENTS):  # gigabytes that no code needs
            return True
        return len(below) > 1 and is_one(runs / name / below[0], lambda folder: RunDir(folder).exists())

    def is_one(folder: Path, ask: Callable[[Path], bool]) -> bool:
        if folder not in known:
            known[folder] = ask(folder)
        return known[folder]

    return [name for name in names if not belongs_to_a_run(root / name)]


def _files_in_git(root: Path) -> list[Path]:
    """Return tracked files and untracked ones that are not ignored, also those of submodules and of clones inside.

    Untracked bundles and reports are no code; those that somebody has committed are meant to be there.
    """
    listed = _git(root, "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard")
    files: list[Path] = []
    for entry in dict.fromkeys(listed.split("\0")):  # a file in conflict is listed once a side
        tag, name = entry[:1], entry[2:]
        path = root / name
        if not name or (tag == UNTRACKED and _is_own_output(path)):
            continue
        if path.is_file() or path.is_symlink():  # neither: deleted, but still tracked
            files.append(Path(name))
        elif (path / ".git").exists():  # to git, a repository inside is one entry; ls-files enters only tracked files
            files.extend(Path(name) / below for below in _files_in_git(path))
    return files


def _visible_files(root: Path) -> list[Path]:
    names = (path.relative_to(root) for path in root.rglob("*") if path.is_file() or path.is_symlink())
    visible = (name for name in names if not any(part.startswith(".") for part in name.parts))
    return [name for name in visible if not _is_own_output(root / name)]


def _is_own_output(path: Path) -> bool:
    """Return whether a file is a bundle of `runs bundle`, by its name, or a page of `report`, by its content."""
    if path.suffix != ".html":
        return OWN_BUNDLE.fullmatch(path.name) is not None
    try:
        with path.open("rb") as file:
            return GENERATOR in file.read(HEAD_BYTES)
    except OSError:
        return False


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


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of git.

    Raises:
        ConfigError: it failed.
    """
    answer = _run_git(folder, *arguments)
    if answer.returncode != 0:
        raise _git_failed(folder, answer)
    return answer.stdout


def _run_git(folder: Path, *arguments: str, patience_s: float | None = None) -> subprocess.CompletedProcess[str]:
    command = ["git", *arguments]
    if shutil.which("git") is None:
        return subprocess.CompletedProcess(command, 127, "", "git is not installed, or not in PATH")
    try:
        # surrogateescape: a file name need not be UTF-8, and os functions take it back as it was.
        return subprocess.run(
            command,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name not in OF_ANOTHER_REPOSITORY},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=patience_s,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"git took longer than {patience_s} s")


def _git_failed(folder: Path, answer: subprocess.CompletedProcess[str]) -> ConfigError:
    words = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
    return ConfigError(
        f"the code in {folder} cannot be copied, because git failed: {words[0].removeprefix('fatal: ')}",
        hint=f"make `git -C {folder} status` work, or run in place with job.snapshot=none",
    )
