"""The srun line of the script, which starts the ranks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from slurmtrain.choices import ContainerKind
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.launch.script_parts import JobPaths, Line
from slurmtrain.runs.attempt_dir import rank_log_name
from slurmtrain.slurm.versions import SRUN_COMPARES_CPUS_PER_TASK, SRUN_FORGETS_CPUS_PER_TASK, Version, release

# A rank must survive the signals of a preemption before its handlers are there. Dispositions that are "ignored"
# survive exec; `env --ignore-signal` would say the same, but needs coreutils 8.31.
SHIELDED = """bash -c 'trap "" USR2 TERM; exec "$@"' rank"""
# The same where nodes have copies of their own (cluster.stage): the file `use` of the node puts them first.
STAGED = (
    """bash -c 'trap "" USR2 TERM; use="$SLURMTRAIN_STAGE/$SLURMD_NODENAME/use"; if [ -f "$use" ]; then . "$use"; fi; """
    """exec "${SLURMTRAIN_PYTHON:-$0}" "$@"'"""
)
CONTAINER_ENV = "--container-env="  # option of pyxis: names of variables that the host sets, not the image
_OWN_ARGS = "cluster.container.args: your arguments, unchanged"


def explained_srun(
    cluster: ClusterConfig,
    paths: JobPaths,
    variables: Sequence[str] = (),
    *,
    standby: bool = False,
    version: Version | None = None,
) -> list[Line]:
    """Return the srun line with a reason for each of its elements, a word or a pair of words.

    Args:
        variables: names of the variables that the script sets for the ranks.
        standby: for ranks that wait beside those that train; see `runtime/standby.py`.
        version: the release of SLURM on the cluster; None: not known.
    """
    container = cluster.container
    logs = "${attempt_dir//%/$slurmtrain_percent}" if has_percent_signs(paths) else "$attempt_dir"
    lines = [
        Line(
            "srun", "starts one process per task: a " + ("standby rank (requeue.standby_ranks)" if standby else "rank")
        ),
        Line(f"--cpus-per-task={cluster.cpus_per_task}", _why_cpus_again(version)),
        Line("--kill-on-bad-exit=1", "if a rank fails, srun ends the others, which would wait for it"),
        Line(
            f"--wait={cluster.srun_wait_s}",
            "cluster.srun_wait_s: srun kills ranks that are still alive this many seconds after the first one exited",
        ),
    ]
    if cluster.gpus_per_node and cluster.tasks_per_node > 1 and "distribution" not in cluster.sbatch:
        lines.append(
            Line(
                "--distribution=block:block",
                "ranks fill one socket of a node after the other, as GPUs are numbered; by SLURM's default they alternate "
                "between sockets, which puts half of them far from their GPUs",
            )
        )
    if paths.pack > 1 or standby:
        lines.append(Line("--overlap", "runs beside other steps of this job, on the same CPUs and GPUs"))
    if standby:
        lines.append(Line("--mem=0", "shares all memory of the job, instead of reserving memory of its own"))
    if cluster.spare_nodes or cluster.node_range.elastic:
        lines.append(Line('"${nodes_of_ranks[@]}"', "the nodes on which the ranks run, chosen above"))
    lines.append(
        Line("--unbuffered", "writes output at once, so that the last lines of a rank that dies are in its log")
    )
    if not standby:  # each opens its log itself
        lines.append(Line(f'--output="{logs}/{rank_log_name("%t")}"', "one log per rank, in the attempt's folder"))
    if container.kind == ContainerKind.PYXIS:
        lines += _pyxis_options(cluster, paths, variables)
    srun_args = _without_output(cluster.srun_args) if standby else cluster.srun_args
    lines += [Line(shlex.quote(word), "cluster.srun_args: your arguments, unchanged") for word in srun_args]
    if container.kind == ContainerKind.APPTAINER:
        lines += _apptainer_words(cluster, paths)
    shielded = STAGED if cluster.stage.wanted else SHIELDED
    rank = f'{shielded} {rank_python(cluster, paths)} -u -m slurmtrain train "$run_dir"{" --standby" * standby}'
    lines.append(
        Line(
            rank,
            "the program of a rank (cluster.python, venv or conda_env); it ignores signals until Python can handle them",
        )
    )
    return lines


def has_percent_signs(paths: JobPaths) -> bool:
    """Return whether the path of a run directory has a %, which begins a pattern in SLURM's names of files."""
    return any("%" in str(run_dir) for run_dir in paths.run_dirs)


def _mounts(cluster: ClusterConfig, paths: JobPaths) -> list[str]:
    """Return the folders of the host that a container has, as words of the script."""
    mounts = ['"$run_dir:$run_dir"', *(shlex.quote(mount) for mount in cluster.container.mounts)]
    if paths.workdir.startswith("/"):
        mounts.append(shlex.quote(f"{paths.workdir}:{paths.workdir}"))
    return mounts


def _pyxis_options(cluster: ClusterConfig, paths: JobPaths, variables: Sequence[str]) -> list[Line]:
    container = cluster.container
    lines = [
        Line(f"--container-image={shlex.quote(str(container.image))}", "cluster.container.image, run by pyxis"),
        Line(
            "--container-mounts=" + ",".join(_mounts(cluster, paths)), "the run directory, and cluster.container.mounts"
        ),
        Line('--container-workdir="$PWD"', "otherwise the image would set the working directory"),
    ]
    own = [word for word in container.args if word.startswith(CONTAINER_ENV)]
    names = [*variables, *(name for word in own for name in word.removeprefix(CONTAINER_ENV).split(","))]
    if names:
        # Without it, the image's variables win: its PYTHONPATH, say, and the ranks would not run the snapshot.
        named = CONTAINER_ENV + ",".join(dict.fromkeys(filter(None, names)))
        lines.append(Line(named, "variables of this script that override those of the image"))
    return lines + [Line(shlex.quote(word), _OWN_ARGS) for word in container.args if word not in own]


def _apptainer_words(cluster: ClusterConfig, paths: JobPaths) -> list[Line]:
    container = cluster.container
    return [
        Line("apptainer exec", "cluster.container.kind=apptainer"),
        *(
            Line(f"--bind {mount}", "the run directory, and cluster.container.mounts")
            for mount in _mounts(cluster, paths)
        ),
        Line('--pwd "$PWD"', "otherwise the image would set the working directory"),
        *(Line(shlex.quote(word), _OWN_ARGS) for word in container.args),
        Line(shlex.quote(str(container.image)), "cluster.container.image"),
    ]


def _why_cpus_again(version: Version | None) -> str:
    """Return why srun gets the number of CPUs that sbatch has got already: each release has its own reason."""
    known = [each for each in (SRUN_FORGETS_CPUS_PER_TASK, SRUN_COMPARES_CPUS_PER_TASK) if each.applies_to(version)]
    if version is None:
        known = [SRUN_FORGETS_CPUS_PER_TASK, SRUN_COMPARES_CPUS_PER_TASK]
    of = [
        f"{f'before {release(each.until)}' if each.until else f'since {release(each.since)}'}, {each.what}"
        for each in known
    ]
    return "; ".join(["cluster.cpus_per_task, repeated for srun", *of])


def _without_output(words: Sequence[str]) -> list[str]:
    """Return arguments of srun without those that say where output goes: the script reads that of waiting ranks itself."""
    kept, of_output = [], False
    for word in words:
        if of_output:  # its value
            of_output = False
        elif word in ("-o", "-e", "--output", "--error"):
            of_output = True
        elif not word.startswith(("-o", "-e", "--output=", "--error=")):
            kept.append(word)
    return kept


def srun_node_options(cluster: ClusterConfig, nodes: Sequence[str] = ()) -> list[str]:
    """Return the options by which srun starts ranks on some of the job's nodes.

    Args:
        nodes: these nodes; (): as many as the config says, of srun's choice.
    """
    count = len(nodes) or cluster.node_range.most
    named = [f"--nodelist={','.join(nodes)}"] if nodes else []
    each = [f"--ntasks-per-node={cluster.tasks_per_node}"] if cluster.node_range.elastic else []
    return [f"--nodes={count}", f"--ntasks={count * cluster.tasks_per_node}", *each, *named]


def rank_python(cluster: ClusterConfig, paths: JobPaths) -> str:
    """Return the interpreter of the ranks.

    It is the config's, the activated environment's, the container's, or the submitting one.
    """
    if cluster.python:
        return shlex.quote(cluster.python)
    if cluster.venv or cluster.conda_env or cluster.container.kind:
        return "python"
    return shlex.quote(paths.python)
