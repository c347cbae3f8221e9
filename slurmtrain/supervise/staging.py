"""Copies of the code, the environment and data on the local disk of each node (cluster.stage), made before the ranks start.

The supervisor packs the environment into a tar once; then one step of srun's copies on each node. The ranks of a node begin
with the file `use` in its folder: lines of shell that put the copies first. It is written last, so a node on which anything
failed has none, and its ranks use the shared folders.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slurmtrain.choices import JobKind
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, SlurmtrainError
from slurmtrain.launch.code_source import pythonpath_folders
from slurmtrain.launch.srun import rank_python
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system.files import make_own_folder, temporary_beside
from slurmtrain.system.node_copies import CHANGED, COPIES, SHARED, SHARED_PYTHON, STAGED, STAGED_PYTHON

log = logging.getLogger(__name__)

ASK_S = 300
OF_CONDA_ALONE = ("./pkgs", "./envs", "./conda-bld")  # downloads and other environments, in conda's base environment
QUESTION = "import os, sys; print(sys.prefix); print(os.path.abspath(sys.executable))"
# What each node runs. A folder in /tmp may be somebody else's. A folder of a job that has ended without removing it goes; one
# that is younger than an hour may be that of a job that has started since SLURM was asked. The copied interpreter has to
# start, which it does not on a disk that forbids to run programs.
COPY = """
job=$1 live=$2 code=$3 archive=$4 prefix=$5 python=$6 point=$7 use=$8; shift 8
top=${job%/*} own=$job/$SLURMD_NODENAME
trap 'echo "$SLURMD_NODENAME uses the shared folders instead of copies (cluster.stage)" >&2; rm -rf -- "$own"' EXIT
set -e -o pipefail
umask 077
mkdir -p -- "$job"
if [ -L "$top" ] || [ ! -O "$top" ] || [ "$(find "$top" -prune -perm /022)" ]; then
  echo "$top is not a folder that only its owner, $(id -un), can write to" >&2; exit 1
fi
[ -z "$live" ] || find "$top" -mindepth 1 -maxdepth 1 -name "$(basename "${job%-*}")-*" -mmin +60 | while read -r old; do
  case " $live " in *" ${old##*-} "*) ;; *) rm -rf -- "$old" ;; esac
done || true # find fails where another job removes such a folder meanwhile
rm -rf -- "$own"
mkdir -p -- "$own/code" "$own/environment" "$own/data"
[ -z "$code" ] || tar -C "$code" --exclude=__pycache__ -c . | tar -C "$own/code" -x
[ -z "$archive" ] || tar -C "$own/environment" -xf "$archive"
[ -z "$archive" ] || "$own/environment/$python" -I -c "$point" "$prefix/" "$own/environment/"
for source; do cp -RL --preserve=timestamps -- "$source" "$own/data/"; done
printf %s "$use" >"$own/use.tmp"
mv -- "$own/use.tmp" "$own/use"
trap - EXIT
"""
# Lets the scripts of a copied environment start its interpreter; they name that of the original.
POINT = """
import pathlib, sys
prefix, copy = sys.argv[1:]
for script in pathlib.Path(copy, "bin").iterdir():
    content = script.read_bytes() if script.is_file() and not script.is_symlink() else b""
    if content.startswith(b"#!"):
        script.write_bytes(content.replace(prefix.encode(), copy.encode()))
"""


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
    wanted, workdir = config.cluster.stage, run_dir.workdir
    data = run_dir.attempt(number).path / "stage" / "data"
    data.mkdir(parents=True)
    for source in wanted.data:
        (data / Path(source).name).symlink_to(source)
    job = f"{os.environ.get('SLURM_CLUSTER_NAME', 'cluster')}-{os.environ['SLURM_JOB_ID']}"
    folder = f"{_local_folder(wanted.dir)}/slurmtrain-stage-{os.getuid()}/{job}"
    prefix, python, archive = Path(), "", ""
    try:
        if wanted.environment:
            prefix, python = _environment_of(rank_python(config.cluster))
            archive = str(archive_of(prefix, run_dir.environments))
    except (SlurmtrainError, OSError, subprocess.SubprocessError) as error:
        log.warning("all nodes use the shared folders instead of copies (cluster.stage): %s", error)
        return {}
    jobs = SlurmClient().glance(["squeue", "--me", "--noheader", "--format=%A"], within_s=ASK_S) or ""
    code, use = str(run_dir.code) * wanted.code, "\n".join(_use(run_dir, config, prefix, python))
    words = [folder, " ".join(jobs.split()), code, archive, str(prefix), python, POINT, use, *wanted.data]
    copying = beside(["bash", "-c", COPY, "copy", *words])
    for seconds, end in ((60 * wanted.limit_min, copying.terminate), (60, copying.kill)):
        try:
            copying.wait(seconds)
            break
        except subprocess.TimeoutExpired:
            log.warning("the copying was ended after %d min (cluster.stage.limit_min)", wanted.limit_min)
            end()
    copying.wait()
    return {STAGED: folder, "SLURMTRAIN_CODE": str(workdir), "SLURMTRAIN_DATA": str(data)}


def _local_folder(wanted: str | None) -> str:
    """Return the folder of a node under which its copies lie; cluster.stage.dir may begin with a variable of the job."""
    name, slash, below = (wanted or "$TMPDIR").partition("/")
    return f"{os.environ.get(name[1:]) or '/tmp'}{slash}{below}" if name else str(wanted)


def _use(run_dir: RunDir, config: Config, prefix: Path, python: str) -> Iterator[str]:
    """Yield the lines by which the ranks of a node use its copies.

    Args:
        python: the interpreter of the copied environment, relative to it; "": none is copied.
    """
    yield 'own="$SLURMTRAIN_STAGE/$SLURMD_NODENAME"'
    yield from (f'export {SHARED}{name}="${name}"' for name in CHANGED)
    if config.cluster.stage.code:
        info = run_dir.info()
        folders = [
            f'"$own"/{shlex.quote(each)}' for each in pythonpath_folders(info["workdir"], info.get("import_roots", ()))
        ]
        yield f'export SLURMTRAIN_CODE={folders[0]} PYTHONPATH={":".join(folders)}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        # `python -m` would import from the working directory first, which nodes share.
        if config.job.kind != JobKind.COMMAND:
            yield "export PYTHONSAFEPATH=1"
    if python:
        yield 'export VIRTUAL_ENV="$own/environment" PATH="$own/environment/bin:$PATH"'
        yield f'export {STAGED_PYTHON}="$own/environment"/{shlex.quote(python)}'
        yield f"export {SHARED_PYTHON}={shlex.quote(str(prefix / python))}"
    if config.cluster.stage.data:
        yield f'export SLURMTRAIN_DATA="$own/data" {COPIES}={shlex.quote(json.dumps(config.cluster.stage.data))}'


def archive_of(prefix: Path, folder: Path) -> Path:
    """Return the tar of an environment, packed now if there is none of what it is today.

    It is named by a digest of the names, sizes and times of the environment's files. Each environment has one.

    Args:
        folder: the folder of archives that all nodes see.

    Raises:
        ConfigError: others can write to the folder.
        OSError, subprocess.SubprocessError: something cannot be read, or there is no room for the archive.
    """
    if not make_own_folder(folder, closed=0o022):
        raise ConfigError(
            f"{folder} holds archives whose code is run, but you are not the only one who can write to it"
        )
    # Each import of a module may compile it, which changes the times of folders, too.
    left_out = [word for path in (*OF_CONDA_ALONE, "*/__pycache__") for word in ("-path", path, "-prune", "-o")]
    find = ["find", ".", *left_out, "!", "-type", "d", "-printf", r"%p %s %m %T@\0"]
    files = sorted(subprocess.run(find, cwd=prefix, stdout=subprocess.PIPE, check=True).stdout.split(b"\0"))
    of_prefix, digest = (hashlib.sha256(each).hexdigest()[:16] for each in (os.fsencode(prefix), b"".join(files)))
    archive = folder / f"{of_prefix}-{digest}.tar"
    if archive.exists():
        return archive
    temporary = temporary_beside(archive)
    try:
        pack = ["tar", "-C", str(prefix), *(f"--exclude={path}" for path in OF_CONDA_ALONE), "-cf", str(temporary), "."]
        if subprocess.run(pack).returncode not in (0, 1):  # 1: a file was compiled or removed meanwhile
            raise ConfigError(f"cluster.stage.environment: {prefix} cannot be packed")
        for before in folder.glob(f"{of_prefix}-*.tar"):
            before.unlink(missing_ok=True)
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)
    return archive


def _environment_of(python: str) -> tuple[Path, str]:
    """Return the folder of an interpreter's environment, and the path of the interpreter in it. The interpreter is asked."""
    answer = subprocess.run([python, "-c", QUESTION], stdout=subprocess.PIPE, text=True, timeout=ASK_S, check=True)
    prefix, executable = map(Path, answer.stdout.splitlines()[:2])
    own = (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()
    if not own or not executable.is_relative_to(prefix):
        raise ConfigError(
            f"cluster.stage.environment: {executable} is the interpreter of no virtual or conda environment",
            hint="name one by cluster.venv, cluster.conda_env or cluster.python",
        )
    return prefix, str(executable.relative_to(prefix))
