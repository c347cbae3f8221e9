"""The command line of srun that starts the ranks: the supervisor runs it, and `render --explain` shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurmtrain.choices import ContainerKind
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.runs.attempt_dir import rank_log_name
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmtrain.slurm.parse_values import PERCENT_SIGNS_READ_TWICE, Version, does

OF_RANKS = (RUN_DIR_VARIABLE, ATTEMPT_VARIABLE, "OMP_NUM_THREADS", "PYTHONPATH")  # what the supervisor sets for ranks
# A rank must survive the signals of a preemption before its handlers are there. Dispositions that are "ignored"
# survive exec; `env --ignore-signal` would say the same, but needs coreutils 8.31.
SHIELDED = """trap "" USR2 TERM; exec "$0" "$@\""""
# The same where nodes have copies of their own (cluster.stage): the file `use` of the node puts them first.
STAGED = (
    """trap "" USR2 TERM; use="$SLURMTRAIN_STAGE/$SLURMD_NODENAME/use"; if [ -f "$use" ]; then . "$use"; fi; """
    """exec "${SLURMTRAIN_PYTHON:-$0}" "$@\""""
)
CONTAINER_ENV = "--container-env="  # option of pyxis: names of variables that the host sets, not the image
_OWN_ARGS = "cluster.container.args: your arguments, unchanged"
Words = tuple[Sequence[str], str]  # words of the command line, and why they are there


def explained_srun(
    config: Config,
    run_dir: Path,
    attempt_dir: Path,
    workdir: Path,
    *,
    nodes: Sequence[str] = (),
    packed: bool = False,
    version: Version | None = None,
) -> list[Words]:
    """Return the words of srun's command line, each with its reason.

    Args:
        workdir: the working directory of the ranks.
        nodes: options that say on which of the job's nodes they run; (): on all.
        packed: several runs share the job.
        version: the release of SLURM on the cluster; None: not known.
    """
    cluster = config.cluster
    container = cluster.container
    words: list[Words] = [
        (["srun"], "starts one process per task: a rank"),
        (
            [f"--cpus-per-task={cluster.cpus_per_task}"],
            "cluster.cpus_per_task, repeated because srun ignores that of sbatch (before 23.11), or finds it in two variables",
        ),
        (["--kill-on-bad-exit=1"], "if a rank fails, srun ends the others, which would wait for it"),
        (
            [f"--wait={cluster.srun_wait_s}"],
            "cluster.srun_wait_s: srun kills ranks that are still alive this many seconds after the first one exited",
        ),
    ]
    if cluster.gpus_per_node and cluster.tasks_per_node > 1 and "distribution" not in cluster.sbatch:
        words.append(
            (
                ["--distribution=block:block"],
                "ranks fill one socket of a node after the other, as GPUs are numbered; by SLURM's default they alternate "
                "between sockets, which puts half of them far from their GPUs",
            )
        )
    if packed:
        words.append((["--overlap"], "runs beside other steps of this job, on the same CPUs and GPUs"))
    if not packed and not any(word.startswith("--mem") for word in cluster.srun_args):
        # Counted memory is given back late: after a crash, SLURM 22.05 refuses the next step ("Memory required by task is not
        # available"). What `--mem=0` takes is not counted (slurmctld's step_mgr.c, `_pick_step_nodes`).
        words.append((["--mem=0"], "all memory of the job, and none that must be given back before the next start"))
    if nodes:
        words.append((nodes, "the nodes on which the ranks run; the others are spare, or cannot divide the batch"))
    words.append((["--unbuffered"], "writes output at once, so that the last lines of a rank that dies are in its log"))
    log = f"{_no_pattern(attempt_dir, version)}/{rank_log_name('%t')}"
    words.append(([f"--output={log}"], "one log per rank, in the attempt's folder"))
    if container.kind == ContainerKind.PYXIS:
        words += _pyxis_options(config, cluster, run_dir, workdir)
    words += [([word], "cluster.srun_args: your arguments, unchanged") for word in cluster.srun_args]
    if container.kind == ContainerKind.APPTAINER:
        words += _apptainer_words(cluster, run_dir, workdir)
    shielded = ["bash", "-c", STAGED if cluster.stage.wanted else SHIELDED]
    rank = [rank_python(cluster), "-u", "-m", "slurmtrain", "train", str(run_dir)]
    why = "the program of a rank (cluster.python, venv or conda_env); it ignores signals until Python can handle them"
    return [*words, ([*shielded, *rank], why)]


def _no_pattern(folder: Path, version: Version | None) -> str:
    """Return a folder as srun takes it in the name of a file, where % begins a pattern."""
    return str(folder).replace("%", "%%%%" if does(version, PERCENT_SIGNS_READ_TWICE) else "%%")


def _mounts(cluster: ClusterConfig, run_dir: Path, workdir: Path) -> list[str]:
    """Return the folders of the host that a container has."""
    own = [] if workdir.is_relative_to(run_dir) else [f"{workdir}:{workdir}"]
    return [f"{run_dir}:{run_dir}", *cluster.container.mounts, *own]


def _pyxis_options(config: Config, cluster: ClusterConfig, run_dir: Path, workdir: Path) -> Iterator[Words]:
    container = cluster.container
    mounts = ",".join(_mounts(cluster, run_dir, workdir))
    yield ([f"--container-image={container.image}"], "cluster.container.image, run by pyxis")
    yield ([f"--container-mounts={mounts}"], "the run directory, and cluster.container.mounts")
    yield ([f"--container-workdir={workdir}"], "otherwise the image would set the working directory")
    own = [word for word in container.args if word.startswith(CONTAINER_ENV)]
    names = [*OF_RANKS, *config.cluster.env, *config.secrets]
    names += [name for word in own for name in word.removeprefix(CONTAINER_ENV).split(",")]
    # Without it, the image's variables win: its PYTHONPATH, say, and the ranks would not run the snapshot.
    named = CONTAINER_ENV + ",".join(dict.fromkeys(filter(None, names)))
    yield ([named], "variables of this job that override those of the image")
    for word in container.args:
        if word not in own:
            yield ([word], _OWN_ARGS)


def _apptainer_words(cluster: ClusterConfig, run_dir: Path, workdir: Path) -> Iterator[Words]:
    container = cluster.container
    yield (["apptainer", "exec"], "cluster.container.kind=apptainer")
    for mount in _mounts(cluster, run_dir, workdir):
        yield (["--bind", mount], "the run directory, and cluster.container.mounts")
    yield (["--pwd", str(workdir)], "otherwise the image would set the working directory")
    for word in container.args:
        yield ([word], _OWN_ARGS)
    yield ([str(container.image)], "cluster.container.image")


def srun_node_options(cluster: ClusterConfig, count: int, names: Sequence[str] = ()) -> list[str]:
    """Return the options by which srun starts ranks on so many of the job's nodes.

    Args:
        names: these nodes; (): of srun's choice.
    """
    named = [f"--nodelist={','.join(names)}"] if names else []
    each = [f"--ntasks-per-node={cluster.tasks_per_node}"] if cluster.node_range.elastic else []
    return [f"--nodes={count}", f"--ntasks={count * cluster.tasks_per_node}", *each, *named]


def rank_python(cluster: ClusterConfig) -> str:
    """Return the interpreter of the ranks: the config's, that of the environment or the container, or that of this process."""
    if cluster.python:
        return cluster.python
    return "python" if cluster.venv or cluster.conda_env or cluster.container.kind else sys.executable
