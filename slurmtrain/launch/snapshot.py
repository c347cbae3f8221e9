"""The code that a job runs: which it is, from where its ranks import it, and the copy of it, the snapshot.

Editing the work tree while a job is pending or requeued changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from slurmtrain.choices import SnapshotMode
from slurmtrain.config.folders import PACKAGE, is_installed_copy, shipped
from slurmtrain.config.schema import ClusterConfig, JobConfig
from slurmtrain.errors import ConfigError
from slurmtrain.runs import lookup
from slurmtrain.runs.create import folder_of
from slurmtrain.runs.run_dir import DRILLS, RunDir
from slurmtrain.runs.software import CodeRecord, read_code_record, write_code_record
from slurmtrain.system.modes import folder_mode, forbid_others_to_write, inherit_group
from slurmtrain.system.process_facts import without_user

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
    if source.root is not None:
        files = _files_of(source, runs=Path.cwd() / job.runs_dir, target=target)
        if source.record is None:
            _check_size(files, source.root, job.snapshot_max_mb)
        copied = {str(file): os.path.join(source.root, file) for file in files}
    git = source.record or _git_state(source, copied)
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
    record = dataclasses.replace(git, files=contents, links=links)
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


def _git_state(source: CodeSource, files: Collection[str]) -> CodeRecord:
    """Return what git says of the code, without its files; of code that is not copied what it says soon.

    Raises:
        ConfigError: the code is git's, and git fails.
    """
    folder = source.root or Path(source.workdir)
    # Perhaps a work tree is so large that it runs in place for that.
    run = functools.partial(run_git, folder, patience_s=None if source.git else IN_PLACE_S)
    others = "--untracked-files=all" if source.git else "--untracked-files=no"
    status = run("status", "--porcelain=v2", "--branch", "--no-renames", "-z", others)
    if status.returncode == TIMED_OUT:
        return CodeRecord(run("rev-parse", "HEAD").stdout.strip() or None, dirty=None, diff=None)
    if status.returncode:
        if source.git:
            raise git_failed(folder, status)
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
    remote = run("config", "--get", "remote.origin.url").stdout.strip()
    state = CodeRecord(revision, dirty, branch, without_user(remote) if remote else None)
    if not dirty or revision is None:
        return state
    answer = run("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")
    diff = answer.stdout if answer.returncode == 0 and len(answer.stdout) <= LONGEST_DIFF else None
    return dataclasses.replace(state, diff=diff, untracked=tuple(untracked))


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


# Which code it is, found without copying.
#
# An editable install makes Python look into the live work tree: by a line in a .pth file, before which PYTHONPATH is
# searched, or by an import hook. The ranks' interpreter is asked for both; what they name is mapped into the snapshot, so
# that a job imports the same files from there, or refused.

# Of an import hook: is it asked before PYTHONPATH; its module; a name that it maps; the folder or file of that.
Hook = tuple[bool, str, str, str]
# Variables of git that do not say which repository is meant. All others are set within a hook or `git rebase --exec`.
KEPT_FOR_GIT = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_EXEC_PATH")
TIMED_OUT = 124
ASK_S = 60  # an interpreter on a slow file system takes seconds to start
# The search path of an interpreter, and the names that its import hooks map.
# setuptools keeps the mapping beside its hook, `editables` in its class, scikit-build-core in its instance.
IMPORTS = """
import json, sys
hooks, before = [], True
for finder in sys.meta_path:
    kind = finder if isinstance(finder, type) else type(finder)
    if kind.__name__ == "PathFinder":
        before = False
    if kind.__module__.startswith("_frozen_importlib"):
        continue
    places = [vars(sys.modules.get(kind.__module__)) if kind.__module__ in sys.modules else {}, vars(kind)]
    places.append(getattr(finder, "__dict__", {}))
    for place in places:
        for mapping in list(place.values()):
            if isinstance(mapping, dict):
                hooks += [
                    [before, kind.__module__, name, path]
                    for name, path in mapping.items()
                    if isinstance(name, str) and isinstance(path, str)
                ]
print(json.dumps([[each for each in sys.path if isinstance(each, str)], hooks]))
"""


@dataclass(frozen=True)
class CodeSource:
    """The folders that would be copied, found without copying: a dry run shows the same paths.

    Attributes:
        root: the folder that is copied; None: run in place.
        workdir: working directory of the ranks: "code", "code/sub" below the run directory, or an absolute path when
            run in place.
        roots: folders of the copy that the ranks import from, besides the working directory, relative to the copy.
        git: the files are those that git knows, or would.
        record: what is known of code that was a snapshot before, and which files it has; None: git is asked.
    """

    root: Path | None
    workdir: str
    git: bool = False
    roots: tuple[str, ...] = ()
    record: CodeRecord | None = None


def find_source(job: JobConfig, cwd: Path, cluster: ClusterConfig | None = None) -> CodeSource:
    """Decide what the snapshot is made of: the git work tree around `cwd`, `cwd` itself, or nothing.

    Args:
        cluster: has the ranks' interpreter, which is asked where it imports the work tree from; None: none is asked.

    Raises:
        ConfigError: there is a `.git`, but git cannot read it; or code of the work tree is imported in a way that no
            snapshot can replace. Running in place instead would silently break the promise that later edits change
            nothing.
    """
    source = CodeSource(None, str(cwd)) if job.snapshot != SnapshotMode.CWD else CodeSource(cwd, "code")
    if job.snapshot == SnapshotMode.AUTO:
        found, here = run_git(cwd, "rev-parse", "--show-toplevel"), cwd.resolve()
        if found.returncode == 0 and found.stdout.strip():
            root = Path(found.stdout.rstrip("\n"))
            source = CodeSource(root, str("code" / here.relative_to(root.resolve())), git=True)
        elif any((folder / ".git").exists() for folder in (here, *here.parents)):
            raise git_failed(here, found)
    interpreter = interpreter_of(cluster) if source.root is not None and cluster is not None else None
    if source.root is None or interpreter is None:
        return source
    return dataclasses.replace(source, roots=roots_below(source.root, *ask(interpreter)))


def interpreter_of(cluster: ClusterConfig) -> str | None:
    """Return the path of the ranks' interpreter as this machine sees it; None for one that cannot be asked here."""
    if cluster.container.kind:
        return None
    if cluster.python:
        return shutil.which(os.path.expanduser(cluster.python))
    environment = os.path.expanduser(cluster.venv or cluster.conda_env or "")
    if not environment:
        return sys.executable
    if cluster.venv or os.sep in environment:
        return shutil.which(os.path.join(environment, "bin", "python"))
    base = os.path.dirname(os.path.dirname(os.environ.get("CONDA_EXE", "")))
    folders = [*os.environ.get("CONDA_ENVS_PATH", "").split(":"), os.path.join(base, "envs") if base else ""]
    folders.append(os.path.expanduser("~/.conda/envs"))
    found = (shutil.which(os.path.join(folder, environment, "bin", "python")) for folder in folders if folder)
    return next((each for each in found if each), None)


def ask(interpreter: str) -> tuple[Sequence[str], Sequence[Hook]]:
    """Ask an interpreter, of any version, for its search path, and what its import hooks map; nothing if it does not answer."""
    try:
        # From the root, so that no entry of its path is relative to where it is asked.
        done = subprocess.run(
            [interpreter, "-c", IMPORTS], cwd="/", capture_output=True, text=True, timeout=ASK_S, check=True
        )
        path, hooks = json.loads(done.stdout.splitlines()[-1])  # a .pth file may have printed before
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return (), ()
    return path, [tuple(each) for each in hooks]


def roots_below(root: Path, path: Sequence[str], hooks: Sequence[Hook]) -> tuple[str, ...]:
    """Return the folders below `root` that modules are imported from, relative to it, in the interpreter's order.

    Raises:
        ConfigError: an import hook takes a module from there in a way that PYTHONPATH cannot stand in for.
    """
    found: list[PurePath] = []
    for entry in path:
        below = _below(root, entry)
        if below is None or not os.path.isdir(entry):
            continue
        if below.name.startswith("__editable__."):  # links to the work tree's files, which git does not track
            raise _cannot_be_mapped(root, entry, "setuptools' editable_mode=strict")
        found.append(below)
    for before, module, name, place in hooks:
        below = _below(root, place)
        if below is None:
            continue
        # The folder from which the name would be imported as this file; None when its files have other names.
        file = (
            below.parent if below.name == "__init__.py" else below.with_suffix("") if below.suffix == ".py" else below
        )
        parts = tuple(name.split("."))
        if before or file.parts[-len(parts) :] != parts:
            raise _cannot_be_mapped(root, place, f"the import hook {module}")
        found.append(PurePath(*file.parts[: -len(parts)]))
    return tuple(dict.fromkeys(str(each) for each in found if each != PurePath(".")))


def _below(root: Path, path: str) -> PurePath | None:
    """Return the path relative to `root`, with links resolved; None when it lies elsewhere, or in an environment."""
    real, top = os.path.realpath(path), os.path.realpath(root)
    if not os.path.isabs(path) or not Path(real).is_relative_to(top):
        return None
    below = Path(real).relative_to(top)
    # An environment inside the work tree holds copies of packages, not the project's own code.
    installed = {"site-packages", "dist-packages", os.path.basename(sysconfig.get_path("stdlib"))}
    return None if installed & {*below.parts} else below


def _cannot_be_mapped(root: Path, path: str, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is imported by {what}, so a job would run the work tree {root} at that time, not its snapshot",
        hint="install it so that a .pth file names its folder (`pip install -e . --config-settings editable_mode=compat` "
        "with setuptools), or run in place with job.snapshot=none",
    )


def pythonpath_folders(workdir: str, roots: Sequence[str]) -> Iterator[str]:
    """Yield the folders of a snapshot for PYTHONPATH, relative to the run directory, or absolute for a run in place."""
    yield from dict.fromkeys([workdir, "code", *(f"code/{root}" for root in roots)])


def run_git(folder: Path, *arguments: str, patience_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Ask git about a folder. The answer never raises: its exit code is `TIMED_OUT` if git took longer."""
    command = ["git", *arguments]
    try:
        # surrogateescape: a file name need not be UTF-8, and os functions take it back as it was.
        return subprocess.run(
            command,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name in KEPT_FOR_GIT or name[:4] != "GIT_"},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=patience_s,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", "git is not installed, or not in PATH")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, TIMED_OUT, "", f"git took longer than {patience_s} s")


def git_failed(folder: Path, answer: subprocess.CompletedProcess[str]) -> ConfigError:
    """Return the error for code that git does not let us copy."""
    words = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
    return ConfigError(
        f"the code in {folder} cannot be copied, because git failed: {words[0].removeprefix('fatal: ')}",
        hint=f"make `git -C {folder} status` work, or run in place with job.snapshot=none",
    )
