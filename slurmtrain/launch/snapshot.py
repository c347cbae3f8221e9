"""The copy of the code that the job runs: editing the work tree while a job is pending or requeued changes nothing."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from slurmtrain.config.folders import PACKAGE, is_installed_copy, shipped
from slurmtrain.config.schema import JobConfig
from slurmtrain.errors import ConfigError
from slurmtrain.launch.code_source import TIMED_OUT, CodeSource, git_failed, run_git
from slurmtrain.runs import lookup
from slurmtrain.runs.create import folder_of
from slurmtrain.runs.run_dir import DRILLS, RunDir
from slurmtrain.runs.software import CodeRecord, read_code_record, write_code_record
from slurmtrain.system.files import folder_mode, forbid_others_to_write, inherit_group
from slurmtrain.system.process_facts import without_user

Answer = subprocess.CompletedProcess[str]
IN_PLACE_S = 5.0  # seconds for git to say whether a work tree that is not copied has changes
LONGEST_DIFF = 1 << 20  # characters of a diff that is kept; the snapshot has the files, however much differs


def source_of_run(run_dir: RunDir) -> CodeSource:
    """Return the code of a run as it was submitted, without what its program has written beside it."""
    info, record = run_dir.info(), read_code_record(run_dir.code_record_file)
    workdir, roots = str(info["workdir"]), tuple(info.get("import_roots", ()))
    return CodeSource(None if workdir.startswith("/") else run_dir.code, workdir, roots=roots, record=record)


def take_snapshot(job: JobConfig, source: CodeSource, target: Path) -> CodeRecord:
    """Copy the code to `target`, and write what it is into the file beside it.

    Raises:
        ConfigError: it is larger than job.snapshot_max_mb (the message names the largest files), or git failed.
    """
    target.mkdir(mode=folder_mode(target.parent))
    copied: dict[str, str] = {}  # where from, by the path in the snapshot
    # Perhaps a work tree is so large that it runs in place for that.
    patience_s = None if source.git else IN_PLACE_S
    ask = functools.partial(run_git, source.root or Path(source.workdir), patience_s=patience_s)
    others = "--untracked-files=all" if source.git else "--untracked-files=no"
    questions = [
        ("status", "--porcelain=v2", "--branch", "--no-renames", "-z", others),
        ("config", "--get", "remote.origin.url"),
    ]
    with ThreadPoolExecutor(2) as beside:  # git answers these while it lists the files
        answers = [] if source.record else [beside.submit(ask, *words) for words in questions]
        if source.root is not None:
            files = _files_of(source, runs=Path.cwd() / job.runs_dir, target=target)
            if source.record is None:
                _check_size(files, source.root, job.snapshot_max_mb)
            copied = {str(file): os.path.join(source.root, file) for file in files}
    git = source.record or _git_state(source, copied, ask, *(each.result() for each in answers))
    (target.parent / source.workdir).mkdir(parents=True, exist_ok=True)  # a folder that git knows no files of
    if not is_installed_copy() and os.path.join("slurmtrain", "__main__.py") not in copied:
        # An editable install: this package's own code is a work tree, too.
        for folder, _, names in os.walk(PACKAGE):
            inside = os.path.join("slurmtrain", os.path.relpath(folder, PACKAGE))
            if os.path.basename(folder) != "__pycache__":
                copied |= {os.path.normpath(os.path.join(inside, name)): os.path.join(folder, name) for name in names}
        # A task of an array that is submitted again renders its own script.
        copied["slurmtrain/jobs/job.sbatch.j2"] = str(shipped("jobs") / "job.sbatch.j2")
    contents, links = _copy(copied, target)
    inherit_group(target)
    forbid_others_to_write(target)  # the modes of the files are those of the work tree
    record = replace(git, files=contents, links=links)
    write_code_record(target, record)
    return record


def _copy(copied: Mapping[str, str], target: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Copy files to their paths in the snapshot; return the digest of each file, and the target of each link, by path."""
    files, links = {}, {}
    for folder in {os.path.dirname(name) for name in copied}:
        os.makedirs(target / folder, exist_ok=True)
    for name, origin in sorted(copied.items()):
        destination = os.path.join(target, name)
        if os.path.islink(origin):
            links[name] = os.readlink(origin)
            os.symlink(links[name], destination)
            continue
        with open(origin, "rb") as file, open(destination, "wb") as copy:
            content = file.read()
            copy.write(content)
        shutil.copystat(origin, destination)
        files[name] = hashlib.sha256(content).hexdigest()
    return files, links


def _git_state(
    source: CodeSource, files: Collection[str], ask: Callable[..., Answer], status: Answer, remote: Answer
) -> CodeRecord:
    """Return what git says of the code, without its files; of code that is not copied what it says soon.

    Args:
        files: those that are copied.
        ask: asks git.
        status, remote: its answers, beside the list of files, on what has changed and on its `origin`.

    Raises:
        ConfigError: the code is git's, and git fails.
    """
    if status.returncode == TIMED_OUT:
        return CodeRecord(ask("rev-parse", "HEAD").stdout.strip() or None, dirty=None, diff=None)
    if status.returncode:
        if source.git:
            raise git_failed(source.root or Path(source.workdir), status)
        return CodeRecord()
    lines = [line for line in status.stdout.split("\0") if line]
    head = dict(line.split(" ", 2)[1:] for line in lines if line.startswith("# branch."))
    new = [line[2:] for line in lines if line.startswith("? ")]  # counts if it is copied
    untracked = [name for name in new if name in files]
    # What ends with a slash is a repository inside.
    dirty = bool(untracked) or any(line[0] not in "#?" or line.endswith("/") for line in lines)
    revision = None if head.get("branch.oid") == "(initial)" else head.get("branch.oid")
    branch = None if head.get("branch.head") == "(detached)" else head.get("branch.head")
    if not source.git and revision is None:
        return CodeRecord()
    url = remote.stdout.strip()
    state = CodeRecord(revision, dirty, branch, without_user(url) if url else None)
    if not dirty or revision is None:
        return state
    answer = ask("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")
    diff = answer.stdout if answer.returncode == 0 and len(answer.stdout) <= LONGEST_DIFF else None
    return replace(state, diff=diff, untracked=tuple(untracked))


def _files_of(source: CodeSource, runs: Path, target: Path) -> list[Path]:
    """Return the files to copy, relative to the root.

    Args:
        runs: the folder of all runs. Runs and sweeps in it are left out, other files are not: it may be the work tree
            itself.
        target: the folder of the copy.
    """
    assert source.root is not None
    root = source.root.resolve()
    if source.record is not None and source.record.files:
        names = [Path(name) for name in (*source.record.files, *source.record.links)]
        if outside := [name for name in names if name.is_absolute() or ".." in name.parts]:
            raise ConfigError(f"{root}: code.json beside it names {outside[0]}, which is not in it")
        return [name for name in names if os.path.lexists(root / name)]
    names = _files_in_git(root) if source.git else _visible_files(root, hidden=source.record is not None)
    runs, target = runs.resolve(), target.resolve()
    if runs.parent == folder_of(runs.parent.parent, DRILLS):  # the runs of a drill lie below those of the person
        runs = runs.parent.parent
    is_run = functools.cache(lambda folder: RunDir(folder).exists())
    is_sweep = functools.cache(lookup.is_sweep)

    def belongs_to_a_run(path: Path) -> bool:
        if target in path.parents or runs not in path.parents:
            return target in path.parents
        name, *below = path.relative_to(runs).parts
        if below and (name.startswith(".") or name.split("-")[0] == DRILLS or is_sweep(runs / name)):
            return True
        return len(below) > 1 and is_run(runs / name / below[0])

    return [name for name in names if not belongs_to_a_run(root / name)]


def _files_in_git(root: Path) -> list[Path]:
    """Return tracked files and untracked ones that are not ignored, also those of submodules and of clones inside."""
    listed = run_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed.returncode:
        raise git_failed(root, listed)
    files: list[Path] = []
    for name in filter(None, dict.fromkeys(listed.stdout.split("\0"))):  # a file in conflict is listed once a side
        path = root / name
        if path.is_file() or path.is_symlink():  # neither: deleted, but still tracked
            files.append(Path(name))
        elif (path / ".git").exists():  # to git, a repository inside is one entry; ls-files enters only tracked files
            files.extend(Path(name) / below for below in _files_in_git(path))
    return files


def _visible_files(root: Path, *, hidden: bool) -> list[Path]:
    names = (path.relative_to(root) for path in root.rglob("*") if path.is_file() or path.is_symlink())
    return [name for name in names if hidden or not any(part.startswith(".") for part in name.parts)]


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
