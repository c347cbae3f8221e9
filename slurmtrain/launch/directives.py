"""The #SBATCH lines of the script: writing them with their reasons, reading them again, and what may override them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.choices import RequeueMode
from slurmtrain.config.checks.sbatch import SBATCH_OPTIONS
from slurmtrain.config.launched_program import as_started
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.launch.arrays import array_option
from slurmtrain.launch.script_parts import JobPaths, Line
from slurmtrain.slurm.versions import EXPEDITED_REQUEUE, Version

# Fields whose value matters even if the script has no line for it: no GPUs, no warning, a single job, no array.
_ALWAYS_DECIDED = (
    "cluster.gpus_per_node",
    "cluster.cpus_per_task",
    "cluster.exclusive",
    "cluster.tasks_per_node",
    "cluster.signal_lead_s",
    "requeue.mode",
    "the run directory",
    "slurmtrain itself",
)
# Options in the environment (sbatch/opt.c, 22.05 to 26.05) whose name is not that of the variable.
_OPTIONS_OF_VARIABLES = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_REQ_SWITCH": "switches",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WAIT4SWITCH": "switches",
}
# The person chooses the cluster, and exported variables are only added to (see submit_once.export_option).
_LEFT_TO_THE_SHELL = ("SBATCH_CLUSTERS", "SBATCH_EXPORT")


def explained_directives(
    config: Config, paths: JobPaths, version: Version | None = None, order: str | None = None
) -> list[Line]:
    """Return the #SBATCH lines with their reasons, in the order in which a person reads them."""
    cluster, elastic = as_started(config).cluster, config.cluster.node_range.elastic
    gpus = f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else cluster.gpus_per_node
    log = "slurm-%A_%a.log" if paths.tasks > 1 else "slurm-%j.log"
    options: list[tuple[str, object]] = [
        ("job-name", config.job.name),
        ("partition", cluster.partition),
        ("account", cluster.account),
        ("qos", cluster.qos),
        ("nodes", cluster.node_range.larger(cluster.spare_nodes)),
        # A job of a range never has more nodes than tasks, and sbatch counts the tasks of the least nodes (seen on 22.05). So a
        # node has one task that has all of the CPUs, and srun divides them.
        ("ntasks-per-node", None if elastic else cluster.tasks_per_node),
        ("cpus-per-task", cluster.cpus_per_task * (cluster.tasks_per_node if elastic else 1)),
        ("gpus-per-node", gpus or None),
        ("mem", _gigabytes(cluster.mem_per_node_gb)),
        ("mem-per-cpu", _gigabytes(cluster.mem_per_cpu_gb)),
        ("mem-per-gpu", _gigabytes(cluster.mem_per_gpu_gb)),
        ("time", cluster.time_limit_min),
        ("signal", f"USR2@{cluster.signal_lead_s}" if cluster.signal_lead_s else None),
        ("constraint", cluster.constraint),
        ("reservation", cluster.reservation),
        ("exclude", cluster.exclude),
        ("exclusive", cluster.exclusive),
        ("switches", _switches(cluster)),
        ("segment", cluster.segment),
        ("array", array_option(paths.tasks, paths.parallelism)),
        ("dependency", _dependency(config)),
        # A dead node leaves the job its others.
        ("no-kill", keeps_nodes(config, paths) or None),
        # Without --requeue a preempted job is cancelled before its first line runs, and a dead node ends it.
        ("requeue" if config.requeue.mode == RequeueMode.REQUEUE else "no-requeue", True),
        # A restart would truncate the log of the attempt before.
        ("open-mode", "append"),
        ("chdir", paths.submit_dir),
        ("output", _no_pattern(_folder_of_log(paths)) + f"/{log}"),
        *sorted((name, value) for name, value in cluster.sbatch.items() if name != "dependency"),
    ]
    reasons = reasons_of_options(config, paths, version)
    if order is not None:
        reasons["nodes"] += f"; {order}"
    return [
        Line(text, reasons.get(name, f"cluster.sbatch.{name}: your option, unchanged"))
        for name, value in options
        if (text := _directive(name, value))
    ]


def reasons_of_options(config: Config, paths: JobPaths, version: Version | None) -> dict[str, str]:
    """Return why each option of sbatch that this script sets by itself is there, by its name."""
    cluster, mode = config.cluster, config.requeue.mode
    elastic = cluster.node_range.elastic
    spare = f" + cluster.spare_nodes={cluster.spare_nodes}" if cluster.spare_nodes else ""
    expedited = (
        "; not --requeue=expedite (25.11), with which SLURM holds the job after every requeue that no failed node causes"
        if EXPEDITED_REQUEUE.applies_to(version)
        else ""
    )
    runs = f"{paths.pack} runs" if paths.pack > 1 else "one run"
    return {
        "job-name": "job.name: the name of the job in squeue",
        "partition": "cluster.partition",
        "account": "cluster.account",
        "qos": "cluster.qos",
        "nodes": f"cluster.nodes{spare}",
        "ntasks-per-node": "cluster.tasks_per_node: each task is a rank",
        "cpus-per-task": "cluster.cpus_per_task"
        + (
            " x cluster.tasks_per_node: with a range of nodes, each node has one task, whose CPUs srun divides among ranks"
            if elastic
            else ""
        ),
        "gpus-per-node": "cluster.gpus_per_node and cluster.gpu_type; not --gpus-per-task, with which a rank would see only "
        "its own GPU, and NCCL could not use the links between GPUs",
        "mem": "cluster.mem_per_node_gb"
        + (": 0 requests all memory of each node" if cluster.mem_per_node_gb == 0 else ""),
        "mem-per-cpu": "cluster.mem_per_cpu_gb",
        "mem-per-gpu": "cluster.mem_per_gpu_gb",
        "time": "cluster.time_limit_min, in minutes: the limit of each job, not of the run",
        "signal": "cluster.signal_lead_s: SLURM warns the ranks with SIGUSR2 this many seconds before the time limit, or up to "
        "60 s earlier, so that they save; with B: it would warn only this shell",
        "constraint": "cluster.constraint",
        "reservation": "cluster.reservation",
        "exclude": "cluster.exclude",
        "switches": "cluster.switches"
        + (
            ", and cluster.switches_wait_min: after this wait, SLURM takes any nodes"
            if cluster.switches_wait_min
            else ""
        ),
        "segment": "cluster.segment: SLURM allocates nodes in groups of this size, each within one block",
        "exclusive": "cluster.exclusive: no other job runs on these nodes",
        "array": f"{paths.tasks} tasks, each with {runs} of the sweep"
        + (f"; at most {paths.parallelism} tasks run at a time" if paths.parallelism else ""),
        "dependency": "what the job waits for: --after, job.singleton, cluster.sbatch.dependency",
        "no-kill": "if a node fails, the job keeps its other nodes, which are enough to continue (requeue.in_place)",
        "requeue": f"requeue.mode={mode}: without it, SLURM cancels a job that is preempted before its first line runs, and "
        f"ends the job if a node fails{expedited}",
        "no-requeue": f"requeue.mode={mode}: "
        + (
            "SLURM does not start the job again"
            if mode == RequeueMode.OFF
            else "another job continues the run, so SLURM must not start this one again"
        ),
        "open-mode": "otherwise a restarted job would overwrite the log of its earlier attempts",
        "chdir": "the folder where you ran submit; paths in set-up lines are relative to it",
        "output": "the output of this shell and of the set-up; each rank has its own log",
    }


def keeps_nodes(config: Config, paths: JobPaths) -> bool:
    """Return whether a job that has lost a node can go on with its others: there are spare ones, or fewer are enough."""
    enough = config.cluster.spare_nodes > 0 or config.cluster.node_range.elastic
    return enough and config.requeue.starts_in_place and paths.pack == 1


def _folder_of_log(paths: JobPaths) -> Path:
    """Return the folder of the batch script's log. One in the run directory would say that the job has begun there."""
    return paths.run_dirs[0].parent if len(paths.run_dirs) > 1 else paths.run_dirs[0]


def _no_pattern(path: Path) -> str:
    """Escape a folder for SLURM's file name patterns, where %% means %.

    (`man sbatch`, filename pattern; seen on 22.05.)
    """
    return str(path).replace("%", "%%")


def _dependency(config: Config) -> str | None:
    """Return everything that the job waits for, separated by commas: all of it has to be met."""
    given = config.cluster.sbatch.get("dependency")
    conditions = [*(given if isinstance(given, list) else [given]), "singleton" if config.job.singleton else None]
    return ",".join(str(condition) for condition in conditions if condition) or None


def _directive(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    if isinstance(value, list):
        value = ",".join(str(item) for item in value)
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def _switches(cluster: ClusterConfig) -> str | None:
    """Format what switches are asked for. `man sbatch`: --switches=COUNT[@MINUTES]."""
    if cluster.switches is None:
        return None
    return f"{cluster.switches}" + (f"@{cluster.switches_wait_min}" if cluster.switches_wait_min is not None else "")


def _gigabytes(amount: int | None) -> str | None:
    """Format an amount of memory. `man sbatch`: --mem=0, without a unit, is all the memory of each node."""
    return None if amount is None else f"{amount}G" if amount else "0"


def directive(script: str, name: str) -> str | None:
    """Return the value of an #SBATCH line of a script, or None when it has none."""
    for line in script.splitlines():
        if line.startswith(f"#SBATCH --{name}="):
            return shlex.split(line)[1].partition("=")[2]
    return None


def set_aside(script: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that would override the script, each with what decides in its place.

    For instance "SBATCH_TIMELIMIT" -> "cluster.time_limit_min": sbatch prefers options from the environment to those of
    the script. Options that the script has no line for, such as an account if the config names none, are left to the
    person's variables.
    """
    lines = {match[1]: match[2] for match in re.finditer(r"^#SBATCH --([a-z0-9-]+)(?:=(.*))?$", script, re.MULTILINE)}
    fields = {SBATCH_OPTIONS.get(option) or f"cluster.sbatch.{option}" for option in lines}
    memory = {"cluster.mem_per_node_gb", "cluster.mem_per_cpu_gb", "cluster.mem_per_gpu_gb"}
    if fields & memory:  # sbatch takes one of them only
        fields |= memory
    found = {}
    for name, value in variables.items():
        if not name.startswith("SBATCH_") or name in _LEFT_TO_THE_SHELL:
            continue
        option = _OPTIONS_OF_VARIABLES.get(name) or name.removeprefix("SBATCH_").lower().replace("_", "-")
        field = SBATCH_OPTIONS.get(option) or f"cluster.sbatch.{option}"
        if option in ("gres", "tres-per-task") and "gpu" in value:
            field = "cluster.gpus_per_node"
        if option == "cpus-per-gpu":
            field = "cluster.cpus_per_task"
        same = lines.get(option) is not None and shlex.split(lines[option]) == [value]
        if (field in fields or field in _ALWAYS_DECIDED) and not same:
            found[name] = field
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
