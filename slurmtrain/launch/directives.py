"""The #SBATCH lines of the script: writing them with their reasons, reading them again, and what may override them.

Also what the parts of the script share: the paths that it needs, and a line of it with its reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurmtrain.choices import RequeueMode
from slurmtrain.config.launched_program import as_started
from slurmtrain.config.ranges import NodeRange
from slurmtrain.config.schema import Config

# What variables of the person's shell decide where the config says nothing: who pays, and where the job runs.
OF_THE_SHELL = ("account", "partition", "qos", "reservation", "wckey")
# The person chooses the cluster, and exported variables are only added to (see submit_once.export_option).
_NO_OPTIONS = ("SBATCH_CLUSTERS", "SBATCH_EXPORT")


class Line(NamedTuple):
    """A line of the script, or a part of one, and why it is there; a comment explains itself, so its reason is empty."""

    text: str
    why: str


class Words(NamedTuple):
    """Words of a command line, and why they are there."""

    words: Sequence[str]
    why: str

    @property
    def line(self) -> Line:
        return Line(shlex.join(self.words), self.why)


@dataclass(frozen=True)
class JobPaths:
    """The paths that the script needs.

    Attributes:
        run_dirs: one run directory, or those of all array tasks.
        workdir: the working directory of the ranks, relative to each run directory ("code", "code/sub"), or absolute.
        roots: folders of the snapshot that modules are imported from, besides the working directory, relative to the
            snapshot.
        python: the interpreter that submits; the supervisor of the job runs with it.
        parallelism: number of tasks of an array that may run at the same time; None: no limit.
        pack: number of runs that share a task.
        submit_dir: the folder of the command, to which paths in set-up lines are relative in every job of the run.
    """

    run_dirs: Sequence[Path]
    workdir: str
    python: str
    parallelism: int | None = None
    pack: int = 1
    roots: Sequence[str] = ()
    submit_dir: Path | None = None

    @property
    def tasks(self) -> int:
        return -(-len(self.run_dirs) // self.pack)


def explained_directives(config: Config, paths: JobPaths) -> list[Line]:
    """Return the #SBATCH lines with their reasons, in the order in which a person reads them."""
    cluster, mode = as_started(config).cluster, config.requeue.mode
    nodes, spare = cluster.node_range, cluster.spare_nodes
    elastic = nodes.elastic
    gpus = f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else cluster.gpus_per_node
    runs = f"{paths.pack} runs" if paths.pack > 1 else "one run"
    at_once = f"; at most {paths.parallelism} tasks run at a time" if paths.parallelism else ""
    limit = f"%{paths.parallelism}" if paths.parallelism and paths.parallelism < paths.tasks else ""
    # A log in the run directory would say that the job has begun there.
    logs = paths.run_dirs[0].parent if len(paths.run_dirs) > 1 else paths.run_dirs[0]
    waits = cluster.sbatch.get("dependency")
    conditions = [*(waits if isinstance(waits, list) else [waits]), "singleton" if config.job.singleton else None]
    preempted = "without it, SLURM cancels a job that is preempted before its first line runs"
    may_requeue = f": {preempted}, and ends the job if a node fails"
    must_not_requeue = (
        ": SLURM does not start the job again"
        if mode == RequeueMode.OFF
        else ": another job continues the run, so SLURM must not start this one again"
    )
    wait = "" if cluster.switches_wait_min is None else f"@{cluster.switches_wait_min}"
    options: list[tuple[str, object, str]] = [
        ("job-name", config.job.name, "job.name: the name of the job in squeue"),
        ("partition", cluster.partition, "cluster.partition"),
        ("account", cluster.account, "cluster.account"),
        ("qos", cluster.qos, "cluster.qos"),
        (
            "nodes",
            NodeRange(nodes.least + spare, nodes.most + spare),
            "cluster.nodes" + (f" + cluster.spare_nodes={spare}" if spare else ""),
        ),
        # A job of a range never has more nodes than tasks, and sbatch counts the tasks of the least nodes (seen on 22.05). So a
        # node has one task that has all of the CPUs, and srun divides them.
        (
            "ntasks-per-node",
            None if elastic else cluster.tasks_per_node,
            "cluster.tasks_per_node: each task is a rank",
        ),
        (
            "cpus-per-task",
            cluster.cpus_per_task * (cluster.tasks_per_node if elastic else 1),
            "cluster.cpus_per_task"
            + " x cluster.tasks_per_node: with a range of nodes, each node has one task, whose CPUs srun divides among ranks"
            * elastic,
        ),
        (
            "gpus-per-node",
            gpus or None,
            "cluster.gpus_per_node and cluster.gpu_type; not --gpus-per-task, with which a rank would see only its own GPU, "
            "and NCCL could not use the links between GPUs",
        ),
        (
            "mem",
            _gigabytes(cluster.mem_per_node_gb),
            "cluster.mem_per_node_gb" + ": 0 requests all memory of each node" * (cluster.mem_per_node_gb == 0),
        ),
        ("mem-per-cpu", _gigabytes(cluster.mem_per_cpu_gb), "cluster.mem_per_cpu_gb"),
        ("mem-per-gpu", _gigabytes(cluster.mem_per_gpu_gb), "cluster.mem_per_gpu_gb"),
        ("time", cluster.time_limit_min, "cluster.time_limit_min, in minutes: the limit of each job, not of the run"),
        (
            "signal",
            f"USR2@{cluster.signal_lead_s}" if cluster.signal_lead_s else None,
            "cluster.signal_lead_s: SLURM warns the ranks with SIGUSR2 this many seconds before the time limit, or up to 60 s "
            "earlier, so that they save; with B: it would warn only this shell",
        ),
        ("constraint", cluster.constraint, "cluster.constraint"),
        ("reservation", cluster.reservation, "cluster.reservation"),
        ("exclude", cluster.exclude, "cluster.exclude"),
        ("exclusive", cluster.exclusive, "cluster.exclusive: no other job runs on these nodes"),
        (
            "switches",
            f"{cluster.switches}{wait}" if cluster.switches is not None else None,
            "cluster.switches"
            + ", and cluster.switches_wait_min: after this wait, SLURM takes any nodes"
            * bool(cluster.switches_wait_min),
        ),
        (
            "segment",
            cluster.segment,
            "cluster.segment: SLURM allocates nodes in groups of this size, each within one block",
        ),
        (
            "array",
            f"0-{paths.tasks - 1}{limit}" if paths.tasks > 1 else None,
            f"{paths.tasks} tasks, each with {runs} of the sweep{at_once}",
        ),
        (
            "dependency",
            ",".join(str(condition) for condition in conditions if condition) or None,
            "what the job waits for: --after, job.singleton, cluster.sbatch.dependency",
        ),
        (
            "no-kill",
            keeps_nodes(config, paths) or None,
            "if a node fails, the job keeps its other nodes, which are enough to continue (requeue.in_place)",
        ),
        ("requeue", mode == RequeueMode.REQUEUE, f"requeue.mode={mode}{may_requeue}"),
        ("no-requeue", mode != RequeueMode.REQUEUE, f"requeue.mode={mode}{must_not_requeue}"),
        ("open-mode", "append", "otherwise a restarted job would overwrite the log of its earlier attempts"),
        ("chdir", paths.submit_dir, "the folder where you ran submit; paths in set-up lines are relative to it"),
        (
            "output",
            # In SLURM's file name patterns, %% means % (`man sbatch`, filename pattern; seen on 22.05).
            f"{str(logs).replace('%', '%%')}/{'slurm-%A_%a.log' if paths.tasks > 1 else 'slurm-%j.log'}",
            "the output of this shell and of the set-up; each rank has its own log",
        ),
        *(
            (name, value, f"cluster.sbatch.{name}: your option, unchanged")
            for name, value in sorted(cluster.sbatch.items())
            if name != "dependency"
        ),
    ]
    return [Line(text, why) for name, value, why in options if (text := _directive(name, value))]


def keeps_nodes(config: Config, paths: JobPaths) -> bool:
    """Return whether a job that has lost a node can go on with its others: there are spare ones, or fewer are enough."""
    enough = config.cluster.spare_nodes > 0 or config.cluster.node_range.elastic
    return enough and config.requeue.starts_in_place and paths.pack == 1


def _directive(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    if isinstance(value, list):
        value = ",".join(str(item) for item in value)
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def _gigabytes(amount: int | None) -> str | None:
    """Format an amount of memory. `man sbatch`: --mem=0, without a unit, is all the memory of each node."""
    return None if amount is None else f"{amount}G" if amount else "0"


def directive(script: str, name: str) -> str | None:
    """Return the value of an #SBATCH line of a script, or None when it has none."""
    for line in script.splitlines():
        if line.startswith(f"#SBATCH --{name}="):
            return shlex.split(line)[1].partition("=")[2]
    return None


def set_aside(script: str, variables: Mapping[str, str]) -> list[str]:
    """Return the variables of sbatch that are ignored: it would prefer them to the options of the script."""
    found = []
    for name, value in variables.items():
        if name.startswith("SBATCH_") and name not in _NO_OPTIONS:
            option = name.removeprefix("SBATCH_").lower()
            if option not in OF_THE_SHELL or directive(script, option) not in (None, value):
                found.append(name)
    return found


def without_past(script: str) -> str:
    """Return the script of a run that is submitted once more, without what it first waited for.

    SLURM may have forgotten those jobs.
    """
    waits = directive(script, "dependency")
    if waits is None:
        return script
    line = "#SBATCH --dependency=singleton\n" if "singleton" in waits.split(",") else ""
    return "".join(
        line if each.startswith("#SBATCH --dependency=") else each for each in script.splitlines(keepends=True)
    )
