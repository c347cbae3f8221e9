"""Copies of the code, the environment and data on the local disk of each node (cluster.stage), made before the ranks start.

The supervisor packs the environment into a tar once; then one process on each node copies. The ranks of a node begin
with the file `use` in its folder: lines of shell that put the copies first. It is written last, so a node on which anything
failed has none, and its ranks use the shared folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slurmtrain.choices import JobKind
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, SlurmtrainError
from slurmtrain.launch.srun import rank_python
from slurmtrain.runs.code_record import read_code_record
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_node_name, own_restart_count
from slurmtrain.system.files import replace_file, temporary_beside
from slurmtrain.system.modes import make_own_folder, open_parent
from slurmtrain.system.node_copies import CHANGED, COPIES, SHARED, SHARED_PYTHON, STAGED_PYTHON

log = logging.getLogger(__name__)

FOLDER = "SLURMTRAIN_STAGE"  # the variable that names the folder of this job on each node
FAILURES = (SlurmtrainError, OSError, tarfile.TarError)
KEPT_DAYS = 14  # an archive that no job has used for so long is removed when another one is made
LEFT_AFTER_S = (
    3600  # a folder that is younger may be that of a job that has started since SLURM was asked for live jobs
)
OF_A_JOB = re.compile(
    r"(?P<cluster>.+)-(?P<job>\d+)-\d+"
)  # the name of a job's folder, which the batch script gives it
COMPILED = "__pycache__"
OF_CONDA_ALONE = (
    "pkgs",
    "envs",
    "conda-bld",
)  # downloads and other environments at the top of conda's base environment
QUESTION = "import os, sys; print(sys.prefix); print(os.path.abspath(sys.executable))"
ASK_S = 300


def stage(
    run_dir: RunDir, config: Config, number: int, beside: Callable[[Sequence[str]], subprocess.Popen[bytes]]
) -> dict[str, str]:
    """Copy what cluster.stage names to each node of this job, and return variables by which the ranks find the copies.

    Done once before the first ranks start: no node joins later. A signal to stop ends srun and with it the copying; the ranks
    ask SLURM about it when they start.

    Args:
        number: the attempt.
        beside: starts a process on each node.
    """
    wanted, workdir = config.cluster.stage, run_dir.path / run_dir.info()["workdir"]
    data = run_dir.attempt(number).path / "stage" / "data"
    data.mkdir(parents=True)
    for source in wanted.data:
        (data / Path(source).name).symlink_to(source)
    restarts, cluster = own_restart_count(), os.environ.get("SLURM_CLUSTER_NAME", "cluster")
    folder = (
        f"{_local_folder(wanted.dir)}/slurmtrain-stage-{os.getuid()}/{cluster}-{os.environ['SLURM_JOB_ID']}-{restarts}"
    )
    python = rank_python(config.cluster)
    archive: list[str] = []
    if wanted.environment:
        try:
            archive = ["--archive", str(archive_of(python, run_dir.environments))]
        except FAILURES as error:
            log.warning("all nodes use the shared folders instead of copies (cluster.stage): %s", _words(error))
            return {}
    jobs = SlurmClient().glance(["squeue", "--me", "--noheader", "--format=%A"], within_s=ASK_S) or ""
    words = ["--stage-to", folder, "--python", python, *archive, "--live", " ".join(jobs.split())]
    copying = beside([sys.executable, "-m", "slurmtrain", "supervise", str(run_dir.path), *words])
    for seconds, end in ((60 * wanted.limit_min, copying.terminate), (60, copying.kill)):
        try:
            copying.wait(seconds)
            break
        except subprocess.TimeoutExpired:
            log.warning("the copying was ended after %d min (cluster.stage.limit_min)", wanted.limit_min)
            end()
    copying.wait()
    return {FOLDER: folder, "SLURMTRAIN_CODE": str(workdir), "SLURMTRAIN_DATA": str(data)}


def _local_folder(wanted: str | None) -> str:
    """Return the folder of a node under which its copies lie; cluster.stage.dir may begin with a variable of the job."""
    name, slash, below = (wanted or "$TMPDIR").partition("/")
    return f"{os.environ.get(name[1:]) or '/tmp'}{slash}{below}" if name else str(wanted)


def stage_this_node(run_dir: RunDir, folder: Path, python: str, archive: str | None, live: Sequence[str]) -> int:
    """Make the copies of this node in the folder of its job, and return the exit code; see `stage_node`."""
    node = own_node_name() or socket.gethostname()
    try:
        config = load_frozen(run_dir.config_file, with_secrets=False)
        packed = Path(archive) if archive else None
        stage_node(run_dir, config, folder / node, python=python, archive=packed, live=live)
    except FAILURES as error:
        log.warning("%s uses the shared folders instead of copies (cluster.stage): %s", node, _words(error))
        return 1
    return 0


def _words(error: Exception) -> str:
    if isinstance(error, SlurmtrainError):
        return error.message
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def archive_of(python: str, folder: Path) -> Path:
    """Return the tar of the environment of an interpreter, packed now if there is none of what it is today.

    It is named by a digest of the names, sizes and times of the environment's files, and by the sha256 of its own content.

    Args:
        folder: the folder of archives that all nodes see.

    Raises:
        ConfigError: the interpreter has no environment that can be copied, or others can write to the folder.
        OSError: something cannot be read, or there is no room for the archive.
    """
    prefix, _ = _environment_of(python)
    if not make_own_folder(folder, closed=0o022):
        raise ConfigError(
            f"{folder} holds archives whose code is run, but you are not the only one who can write to it"
        )
    key = hashlib.sha256(str(prefix).encode())
    paths = list(_paths(prefix))
    for path in paths:
        if COMPILED not in path.parts:  # each import of a module may add to it
            found = path.lstat()
            key.update(
                f"{path}\0{found.st_size}\0{found.st_mode}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape")
            )
    name = key.hexdigest()[:32]
    for archive in folder.glob(f"{name}-*.tar"):
        os.utime(archive)
        return archive
    for archive in folder.glob("*.tar"):
        with contextlib.suppress(OSError):
            if archive.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                archive.unlink()
    temporary = temporary_beside(folder / name, ".tar")
    try:
        with tarfile.open(temporary, "x", format=tarfile.PAX_FORMAT) as tar:
            for path in paths:
                with contextlib.suppress(FileNotFoundError) if COMPILED in path.parts else contextlib.nullcontext():
                    member = tar.gettarinfo(path, os.path.relpath(path, prefix))
                    if member.issym():
                        member.linkname = _link_in_copies(path, prefix)
                    if member.isreg():
                        with path.open("rb") as content:
                            tar.addfile(member, content)
                    else:
                        tar.addfile(member)
        archive = folder / f"{name}-{_sha256(temporary)}.tar"
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)
    return archive


def stage_node(
    run_dir: RunDir, config: Config, own: Path, *, python: str, archive: Path | None, live: Sequence[str]
) -> None:
    """Make the copies of a node. If that fails, nothing of them is left.

    Args:
        own: the folder of this node in that of the job, `TOP/slurmtrain-stage-UID/CLUSTER-JOB-RESTARTS/NODE`.
        python: what starts the ranks' interpreter.
        archive: the tar of its environment; None: it is not copied.
        live: this user's jobs in the queue; folders of others are removed. (): not known, and nothing is removed.

    Raises:
        ConfigError: a copy is not what it should be, or others could replace the folder.
        OSError, tarfile.TarError: something cannot be read or written.
    """
    job = own.parent
    if not make_own_folder(job.parent, closed=0o022):
        raise ConfigError(f"{job.parent} is not a folder that only its owner, user {os.getuid()}, can write to")
    if (parent := open_parent(job.parent)) is not None:
        raise ConfigError(f"others can write to {parent}, which has no sticky bit, and could replace {job.parent}")
    _remove_left_over(job, live)
    own.mkdir(parents=True)
    try:
        lines = [f'export {SHARED}{name}="${name}"' for name in CHANGED]
        if config.cluster.stage.code:
            lines += _copy_code(run_dir, own / "code", only_copies=config.job.kind != JobKind.COMMAND)
        if archive is not None:
            lines += _copy_environment(archive, own / "environment", python)
        copies = {source: own / "data" / Path(source).name for source in config.cluster.stage.data}
        for source, copy in copies.items():
            copy.parent.mkdir(exist_ok=True)
            shutil.copytree(source, copy) if Path(source).is_dir() else shutil.copy2(source, copy)
        if copies:
            lines.append(f"export SLURMTRAIN_DATA={shlex.quote(str(own / 'data'))}")
            lines.append(
                f"export {COPIES}={shlex.quote(json.dumps({source: str(copies[source]) for source in copies}))}"
            )
        (own / "use.tmp").write_text("".join(f"{line}\n" for line in lines))
        (own / "use.tmp").replace(own / "use")
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)  # a full disk is not left full
        raise


def _copy_code(run_dir: RunDir, copy: Path, *, only_copies: bool) -> Iterator[str]:
    """Copy the snapshot and compare its digests, and yield the lines by which ranks import from the copy."""
    info, record = run_dir.info(), read_code_record(run_dir.code_record_file)
    shutil.copytree(run_dir.code, copy, symlinks=True, ignore=shutil.ignore_patterns(COMPILED))
    for name, digest in record.files.items() if record is not None else ():
        if COMPILED not in Path(name).parts and _sha256(copy / name) != digest:
            raise ConfigError(f"{name} of the code differs from that of the snapshot")
    folders = [info["workdir"], "code", *(f"code/{root}" for root in info.get("import_roots", ()))]
    imports = ":".join(dict.fromkeys(str(copy.parent / each) for each in folders))
    yield f'export PYTHONPATH={shlex.quote(imports)}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    yield f"export SLURMTRAIN_CODE={shlex.quote(str(copy.parent / info['workdir']))}"
    if only_copies:  # `python -m` would import from the working directory first, which nodes share
        yield "export PYTHONSAFEPATH=1"


def _copy_environment(archive: Path, copy: Path, python: str) -> Iterator[str]:
    """Unpack an environment and compare its digest, and yield the lines by which ranks use the copy."""
    if _sha256(archive) != archive.stem.rpartition("-")[2]:
        raise ConfigError(f"{archive} is damaged: its digest is not the one in its name")
    with tarfile.open(archive) as tar:
        tar.extractall(copy, filter="tar")
    prefix, executable = _environment_of(python)
    _point_to(prefix, copy)
    staged = copy / executable
    yield f'export PATH={shlex.quote(str(staged.parent))}:"$PATH" VIRTUAL_ENV={shlex.quote(str(copy))}'
    yield f"export {STAGED_PYTHON}={shlex.quote(str(staged))}"
    yield f"export {SHARED_PYTHON}={shlex.quote(str(prefix / executable))}"


def _environment_of(python: str) -> tuple[Path, str]:
    """Return the folder of an interpreter's environment, and the path of the interpreter in it. The interpreter is asked."""
    try:
        answer = subprocess.run([python, "-c", QUESTION], capture_output=True, text=True, timeout=ASK_S, check=True)
        prefix, executable = answer.stdout.splitlines()[:2]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"cluster.stage.environment: {python} cannot be asked for its folder: {error}") from None
    own = (Path(prefix) / "pyvenv.cfg").is_file() or (Path(prefix) / "conda-meta").is_dir()
    if not own or not Path(executable).is_relative_to(prefix):
        raise ConfigError(
            f"cluster.stage.environment: {executable} is the interpreter of no virtual or conda environment",
            hint="name one by cluster.venv, cluster.conda_env or cluster.python",
        )
    return Path(prefix), os.path.relpath(executable, prefix)


def _paths(prefix: Path) -> Iterator[Path]:
    """Yield the files and links of an environment, without what only conda itself uses."""

    def stop(error: OSError) -> None:
        raise error  # without the folder, the copies would lack packages

    for folder, folders, names in os.walk(prefix, onerror=stop):
        if Path(folder) == prefix and (prefix / "conda-meta").is_dir():
            folders[:] = [name for name in folders if name not in OF_CONDA_ALONE]
        folders.sort()
        for name in sorted([*names, *(each for each in folders if os.path.islink(os.path.join(folder, each)))]):
            yield Path(folder, name)


def _link_in_copies(path: Path, prefix: Path) -> str:
    """Return where a link leads in any copy of an environment: within it to the copy's own file, else to the original."""
    leads_to, real = os.path.normpath(path.parent / os.readlink(path)), os.path.realpath(path)
    for name, folder in ((leads_to, path.parent), (real, path.parent.resolve())):
        if Path(name).is_relative_to(prefix if name == leads_to else prefix.resolve()):
            return os.path.relpath(name, folder)
    return real


def _point_to(prefix: Path, copy: Path) -> None:
    """Let the scripts of a copy start the interpreter of the copy; they name that of `prefix`."""
    for script in list((copy / "bin").iterdir()):
        if script.is_symlink() or not script.is_file():
            continue
        with script.open("rb") as file:
            if file.read(2) != b"#!":
                continue
        head, rest = script.read_bytes()[:4096], script.read_bytes()[4096:]
        changed = head.replace(f"{prefix}/".encode(), f"{copy}/".encode())
        replace_file(script, changed + rest, mode=stat.S_IMODE(script.stat().st_mode), durable=False)


def _remove_left_over(job: Path, live: Sequence[str]) -> None:
    """Remove the folders of earlier starts of this job, and of this cluster's jobs that have ended without removing them."""
    own = OF_A_JOB.fullmatch(job.name)
    for path in job.parent.iterdir():
        other = OF_A_JOB.fullmatch(path.name)
        if own is None or other is None or other["cluster"] != own["cluster"] or path.name == job.name:
            continue
        with contextlib.suppress(FileNotFoundError):  # another job removes it
            old = path.stat().st_mtime < time.time() - LEFT_AFTER_S
            if other["job"] == own["job"] or (live and old and other["job"] not in live):
                shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
