"""The command line of srun, by which the supervisor starts the ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.choices import ContainerKind
from slurmtrain.config.launched_program import as_started
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.runs.attempt_dir import rank_log_name
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmtrain.slurm.versions import PERCENT_SIGNS_READ_TWICE, Version

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


def srun_words(
    config: Config,
    run_dir: Path,
    attempt_dir: Path,
    workdir: Path,
    *,
    nodes: Sequence[str] = (),
    packed: bool = False,
    standby: bool = False,
    version: Version | None = None,
) -> list[str]:
    """Return the command line of srun.

    Args:
        workdir: the working directory of the ranks.
        nodes: options that say on which of the job's nodes they run; (): on all.
        packed: several runs share the job.
        standby: for ranks that wait beside those that train; see `runtime/standby.py`.
        version: the release of SLURM on the cluster; None: not known.
    """
    cluster = as_started(config).cluster
    container = cluster.container
    words = [
        "srun",
        # Repeated, because srun ignores that of sbatch (before 23.11), or finds it in two variables.
        f"--cpus-per-task={cluster.cpus_per_task}",
        "--kill-on-bad-exit=1",  # if a rank fails, srun ends the others, which would wait for it
        f"--wait={cluster.srun_wait_s}",  # ranks that are still alive this long after the first one exited are killed
    ]
    if cluster.gpus_per_node and cluster.tasks_per_node > 1 and "distribution" not in cluster.sbatch:
        # Ranks fill one socket of a node after the other, as GPUs are numbered; by SLURM's default they alternate between
        # sockets, which puts half of them far from their GPUs.
        words.append("--distribution=block:block")
    if packed or standby:
        words.append("--overlap")  # runs beside other steps of this job, on the same CPUs and GPUs
    if not packed and not any(word.startswith("--mem") for word in cluster.srun_args):
        # All memory of the job. Counted memory is given back late: after a crash, SLURM 22.05 refuses the next step ("Memory
        # required by task is not available"). What `--mem=0` takes is not counted (slurmctld's step_mgr.c,
        # `_pick_step_nodes`).
        words.append("--mem=0")
    words += nodes  # the others are spare, or cannot divide the batch
    words.append("--unbuffered")  # so that the last lines of a rank that dies are in its log
    if not standby:  # each opens its log itself
        # In the name of a file, % begins a pattern.
        folder = str(attempt_dir).replace("%", "%%%%" if PERCENT_SIGNS_READ_TWICE.applies_to(version) else "%%")
        words.append(f"--output={folder}/{rank_log_name('%t')}")
    # A container has the run directory, cluster.container.mounts, and the working directory of a run in place.
    mounts = [f"{run_dir}:{run_dir}", *container.mounts]
    mounts += [] if workdir.is_relative_to(run_dir) else [f"{workdir}:{workdir}"]
    if container.kind == ContainerKind.PYXIS:
        words += [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"]
        words.append(f"--container-workdir={workdir}")
        own = [word for word in container.args if word.startswith(CONTAINER_ENV)]
        names = [*OF_RANKS, *config.cluster.env, *config.secrets]
        names += [name for word in own for name in word.removeprefix(CONTAINER_ENV).split(",")]
        # Without it, the image's variables win: its PYTHONPATH, say, and the ranks would not run the snapshot.
        words.append(CONTAINER_ENV + ",".join(dict.fromkeys(filter(None, names))))
        words += [word for word in container.args if word not in own]
    words += cluster.srun_args
    if standby:
        words.append("--output=all")  # the supervisor reads what they print until they begin
    if container.kind == ContainerKind.APPTAINER:
        words += ["apptainer", "exec", *(word for mount in mounts for word in ("--bind", mount))]
        words += ["--pwd", str(workdir), *container.args, str(container.image)]
    # It ignores signals until Python can handle them.
    words += ["bash", "-c", STAGED if cluster.stage.wanted else SHIELDED]
    return [*words, rank_python(cluster), "-u", "-m", "slurmtrain", "train", str(run_dir), *["--standby"] * standby]


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
