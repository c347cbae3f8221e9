"""The one source of the sbatch text: `render`, `submit --dry-run` and `submit` all use what `render_script` returns.

The text is a pure function of a config and some paths. The template is jobs/job.sbatch.j2; its renders for the shipped
clusters lie beside it as golden files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slurmtrain import __version__
from slurmtrain.choices import ContainerKind, JobKind, RequeueMode
from slurmtrain.config.checks.sbatch import SBATCH_OPTIONS
from slurmtrain.config.compose import SECRET_REFERENCE
from slurmtrain.config.elastic import usable_sizes
from slurmtrain.config.launched_program import as_started, node_shape
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.config.secrets import path_of
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.launch.arrays import array_option
from slurmtrain.launch.import_paths import pythonpath_folders
from slurmtrain.resources import shipped
from slurmtrain.runs.attempt_dir import rank_log_name
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from slurmtrain.runs.sweep_dir import tasks_of
from slurmtrain.slurm.command_environment import OF_QUERIES
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.slurm.versions import (
    EXPEDITED_REQUEUE,
    SRUN_COMPARES_CPUS_PER_TASK,
    SRUN_FORGETS_CPUS_PER_TASK,
    STARTS_PREEMPTED_JOBS_ONCE_MORE,
    Version,
)

if TYPE_CHECKING:
    import jinja2

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

TEMPLATE = "job.sbatch.j2"
EXCLUDED_MAX = 8  # nodes that one run may leave out; so many bad ones are not the nodes' fault

# A rank must survive the signals of a preemption before its handlers are there. Dispositions that are "ignored"
# survive exec; `env --ignore-signal` would say the same, but needs coreutils 8.31.
SHIELDED = """bash -c 'trap "" USR2 TERM; exec "$@"' rank"""
# The same where nodes have copies of their own (cluster.stage): the file `use` of the node puts them first.
STAGED = (
    """bash -c 'trap "" USR2 TERM; case " $SLURMTRAIN_NOT_STAGED " in *" $SLURMD_NODENAME "*) ;; *) """
    """if [ -n "$SLURMTRAIN_STAGE" ]; then . "$SLURMTRAIN_STAGE/$SLURMD_NODENAME/use"; fi ;; esac; """
    """exec "${SLURMTRAIN_PYTHON:-$0}" "$@"'"""
)
CONTAINER_ENV = "--container-env="  # option of pyxis: names of variables that the host sets, not the image
OF_RANKS = (RUN_DIR_VARIABLE, ATTEMPT_VARIABLE, "OMP_NUM_THREADS", "PYTHONPATH")  # set by the script


# A remark of the template, {#! why #}, is the reason of the lines after it. It is left out of the script; to explain the
# script, it is rendered between these letters, which no line has.
_REMARK = re.compile(r"\{#!\s*(.*?)\s*#\}", re.DOTALL)
_BEGIN, _END = "\x01", "\x02"


class Line(NamedTuple):
    """A line of the script, or a part of one, and why it is there; a comment explains itself, so its reason is empty."""

    text: str
    why: str


@dataclass(frozen=True)
class JobPaths:
    """The paths that the script needs.

    Attributes:
        run_dirs: one run directory, or those of all array tasks.
        workdir: the working directory of the ranks, relative to each run directory ("code", "code/sub"), or absolute.
        roots: folders of the snapshot that modules are imported from, besides the working directory, relative to the
            snapshot.
        python: the interpreter that submits; the batch shell runs `finish-attempt` with it.
        parallelism: number of tasks of an array that may run at the same time; None: no limit.
        pack: number of runs that share a task.
        submit_dir: the folder of the command, to which paths in set-up lines are relative in every job of the run.
        choice: for a run with cluster.choices, the one that the job is of: it asks first whether another one has the run.
    """

    run_dirs: Sequence[Path]
    workdir: str
    python: str
    parallelism: int | None = None
    pack: int = 1
    roots: Sequence[str] = ()
    submit_dir: Path | None = None
    choice: str | None = None

    @property
    def tasks(self) -> int:
        return tasks_of(len(self.run_dirs), self.pack)


def render_script(config: Config, paths: JobPaths) -> str:
    """Return the text that is passed to sbatch."""
    return _render(config, paths, _environment().get_template(TEMPLATE))


def explain_script(
    config: Config, paths: JobPaths, version: Version | None = None, order: str | None = None
) -> list[Line]:
    """Return the lines of `render_script`, each with the reason why it is there.

    Args:
        version: the release of SLURM on the cluster; None: not known, and the reasons are those of all releases.
        order: how ranks are numbered over nodes there; see `slurm.topology`.
    """
    environment = _environment()
    environment.filters["words"] = lambda lines, between: between.join(
        f"{_BEGIN}{line.why}{_END}{line.text}" for line in lines
    )
    source = (shipped("jobs") / TEMPLATE).read_text()
    template = environment.from_string(_REMARK.sub(lambda match: f"{_BEGIN}{match[1]}{_END}", source))
    return _with_reasons(_render(config, paths, template, version, order))


def _with_reasons(marked: str) -> list[Line]:
    """Return the lines of a text in which reasons stand before the lines that they hold for, each until the next one."""
    lines, why = [], ""
    for line in marked.splitlines():
        text = ""
        for part in re.split(f"({_BEGIN}[^{_END}]*{_END})", line):
            if part.startswith(_BEGIN):
                why = part[1:-1]
            else:
                text += part
        if text.strip() or _BEGIN not in line:
            is_prose = not text.strip() or re.match(r"\s*#(?!SBATCH |!)", text) is not None
            lines.append(Line(text, "" if is_prose else why))
    return lines


def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("jobs")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell text, not HTML; every value goes through the filter `sh` or shlex.quote
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["sh_secret"] = _quote_secret
    environment.filters["words"] = lambda lines, between: between.join(line.text for line in lines)
    return environment


def _render(
    config: Config,
    paths: JobPaths,
    template: jinja2.Template,
    version: Version | None = None,
    order: str | None = None,
) -> str:
    started = as_started(config)
    variables = [*OF_RANKS, *config.cluster.env, *config.secrets]
    folders = [_in_script(folder) for folder in pythonpath_folders(paths.workdir, paths.roots)]
    once_more = STARTS_PREEMPTED_JOBS_ONCE_MORE.applies_to(version)
    return template.render(
        version=__version__,
        guard_why=", as 24.05 and later do after a preemption" if once_more else "",
        directives=explained_directives(config, paths, version, order),
        run_dirs=paths.run_dirs,
        pack=paths.pack,
        choice=paths.choice,
        tasks=paths.tasks,
        setup=setup_lines(config.cluster),
        env=config.cluster.env,
        threads=max(1, node_shape(config).threads // paths.pack),
        workdir=folders[0],
        pythonpath=":".join(folders),
        sizes=usable_sizes(config)[::-1] if config.cluster.node_range.elastic else [],
        tasks_per_node=started.cluster.tasks_per_node,
        srun=explained_srun(started.cluster, paths, variables, version=version),
        standby=config.requeue.standby_ranks,
        standby_srun=explained_srun(started.cluster, paths, variables, standby=True, version=version),
        ranks=config.world_size,
        slurmtrain=f"{shlex.quote(paths.python)} -m slurmtrain",
        secret_files=[(name, path) for name, source in config.secrets.items() if (path := path_of(source)) is not None],
        hooks=any((config.hooks.on_finish, config.hooks.on_failure, config.hooks.on_preemption)),
        mode=config.requeue.mode,
        in_place=config.requeue.starts_in_place,
        spare_nodes=config.cluster.spare_nodes,
        keeps_nodes=_keeps_nodes(config, paths),
        first_nodes=" ".join(srun_node_options(started.cluster)),
        query_variables=" ".join(f'"${{!{prefix}@}}"' for prefix in OF_QUERIES),
        restart_delay_s=config.requeue.restart_delay_s,
        excluded_max=EXCLUDED_MAX + _count_nodes(config.cluster.exclude),
        local_copies=config.checkpoint.local if config.job.kind in (JobKind.TRAIN, JobKind.COMMAND) else None,
        own_program=config.job.kind == JobKind.COMMAND,
        stage=config.cluster.stage,
        stage_folder=stage_folder(config.cluster),
        python=rank_python(started.cluster, paths),
    )


def _count_nodes(nodelist: str | None) -> int:
    """Count the nodes in a list that a person has given; a file of them, which only sbatch reads, counts as none."""
    try:
        return len(expand_nodelist(nodelist)) if nodelist else 0
    except EnvironmentMismatchError:
        return 0


def _in_script(folder: str) -> str:
    """Return a folder of each run, or an absolute one, as a word of the script."""
    return shlex.quote(folder) if folder.startswith("/") else '"$run_dir"/' + shlex.quote(folder)


def sbatch_directives(config: Config, paths: JobPaths) -> list[str]:
    """Return the #SBATCH lines, in the order in which a person reads them."""
    return [line.text for line in explained_directives(config, paths)]


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
        ("no-kill", _keeps_nodes(config, paths) or None),
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


def _folder_of_log(paths: JobPaths) -> Path:
    """Return the folder of the batch script's log. One in the run directory would say that the job has begun there."""
    if paths.choice is not None:
        return RunDir(paths.run_dirs[0]).choices / paths.choice
    return paths.run_dirs[0].parent if len(paths.run_dirs) > 1 else paths.run_dirs[0]


def _keeps_nodes(config: Config, paths: JobPaths) -> bool:
    """Return whether a job that has lost a node can go on with its others: there are spare ones, or fewer are enough."""
    enough = config.cluster.spare_nodes > 0 or config.cluster.node_range.elastic
    return enough and config.requeue.starts_in_place and paths.pack == 1


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


def _quote_secret(value: str) -> str:
    """Quote a value, in which `${oc.env:X}` becomes "$X": the job inherits the secret, and the script never holds it."""
    literals_and_names = SECRET_REFERENCE.split(value)
    words = [
        f'"${{{part}}}"' if index % 2 else shlex.quote(part)
        for index, part in enumerate(literals_and_names)
        if part or len(literals_and_names) == 1
    ]
    return "".join(words)


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


def setup_lines(cluster: ClusterConfig) -> list[str]:
    """Return the lines for modules, then the user's lines, then the environment to activate: each may need the one before."""
    lines = [f"module load {shlex.quote(module)}" for module in cluster.modules] + list(cluster.setup)
    if cluster.venv:
        lines.append(f"source {shlex.quote(cluster.venv + '/bin/activate')}")
    if cluster.conda_env:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(cluster.conda_env)}"]
    return lines


def srun_words(
    cluster: ClusterConfig, paths: JobPaths, variables: Sequence[str] = (), *, standby: bool = False
) -> list[str]:
    """Return the srun line, with a word or a pair of words per element; see `explained_srun`."""
    return [line.text for line in explained_srun(cluster, paths, variables, standby=standby)]


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
    logs = "${attempt_dir//%/%%}" if any("%" in str(run_dir) for run_dir in paths.run_dirs) else "$attempt_dir"
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
    mounts = ['"$run_dir:$run_dir"', *(shlex.quote(mount) for mount in container.mounts)]
    if paths.workdir.startswith("/"):
        mounts.append(shlex.quote(f"{paths.workdir}:{paths.workdir}"))
    own_args = "cluster.container.args: your arguments, unchanged"
    if container.kind == ContainerKind.PYXIS:
        lines += [
            Line(f"--container-image={shlex.quote(str(container.image))}", "cluster.container.image, run by pyxis"),
            Line("--container-mounts=" + ",".join(mounts), "the run directory, and cluster.container.mounts"),
            Line('--container-workdir="$PWD"', "otherwise the image would set the working directory"),
        ]
        own = [word for word in container.args if word.startswith(CONTAINER_ENV)]
        names = [*variables, *(name for word in own for name in word.removeprefix(CONTAINER_ENV).split(","))]
        if names:
            # Without it, the image's variables win: its PYTHONPATH, say, and the ranks would not run the snapshot.
            named = CONTAINER_ENV + ",".join(dict.fromkeys(filter(None, names)))
            lines.append(Line(named, "variables of this script that override those of the image"))
        lines += [Line(shlex.quote(word), own_args) for word in container.args if word not in own]
    srun_args = _without_output(cluster.srun_args) if standby else cluster.srun_args
    lines += [Line(shlex.quote(word), "cluster.srun_args: your arguments, unchanged") for word in srun_args]
    if container.kind == ContainerKind.APPTAINER:
        lines.append(Line("apptainer exec", "cluster.container.kind=apptainer"))
        lines += [Line(f"--bind {mount}", "the run directory, and cluster.container.mounts") for mount in mounts]
        lines.append(Line('--pwd "$PWD"', "otherwise the image would set the working directory"))
        lines += [Line(shlex.quote(word), own_args) for word in container.args]
        lines.append(Line(shlex.quote(str(container.image)), "cluster.container.image"))
    shielded = STAGED if cluster.stage.wanted else SHIELDED
    rank = f'{shielded} {rank_python(cluster, paths)} -u -m slurmtrain train "$run_dir"{" --standby" * standby}'
    lines.append(
        Line(
            rank,
            "the program of a rank (cluster.python, venv or conda_env); it ignores signals until Python can handle them",
        )
    )
    return lines


def _why_cpus_again(version: Version | None) -> str:
    """Return why srun gets the number of CPUs that sbatch has got already: each release has its own reason."""
    known = [each for each in (SRUN_FORGETS_CPUS_PER_TASK, SRUN_COMPARES_CPUS_PER_TASK) if each.applies_to(version)]
    if version is None:
        known = [SRUN_FORGETS_CPUS_PER_TASK, SRUN_COMPARES_CPUS_PER_TASK]
    of = [
        f"{f'before {_release(each.until)}' if each.until else f'since {_release(each.since)}'}, {each.what}"
        for each in known
    ]
    return "; ".join(["cluster.cpus_per_task, repeated for srun", *of])


def _release(version: Version) -> str:
    return f"{version[0]}.{version[1]:02d}"


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


def stage_folder(cluster: ClusterConfig) -> str:
    """Return the folder of a node under which its copies lie, as a word of the script."""
    if cluster.stage.dir is None:
        return '"${TMPDIR:-/tmp}"'
    variable, slash, below = cluster.stage.dir.partition("/")
    if not variable:
        return shlex.quote(cluster.stage.dir)
    return f'"${{{variable[1:]}:-/tmp}}"' + shlex.quote(slash + below) * bool(below)


def rank_python(cluster: ClusterConfig, paths: JobPaths) -> str:
    """Return the interpreter of the ranks.

    It is the config's, the activated environment's, the container's, or the submitting one.
    """
    if cluster.python:
        return shlex.quote(cluster.python)
    if cluster.venv or cluster.conda_env or cluster.container.kind:
        return "python"
    return shlex.quote(paths.python)
