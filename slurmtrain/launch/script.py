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

from slurmtrain import __version__
from slurmtrain.choices import ContainerKind, JobKind, RequeueMode
from slurmtrain.config.compose import SECRET_REFERENCE
from slurmtrain.config.elastic import usable_sizes
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.config.secrets import path_of
from slurmtrain.config.validate import SBATCH_OPTIONS
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.launch.arrays import array_option
from slurmtrain.launch.import_paths import pythonpath_folders
from slurmtrain.resources import shipped
from slurmtrain.runs.attempt_dir import rank_log_name
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmtrain.runs.sweep_dir import tasks_of
from slurmtrain.slurm.client import OF_QUERIES
from slurmtrain.slurm.nodelist import expand_nodelist

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

EXCLUDED_MAX = 8  # nodes that one run may leave out; so many bad ones are not the nodes' fault

# A rank must survive the signals of a preemption before its handlers are there. Dispositions that are "ignored"
# survive exec; `env --ignore-signal` would say the same, but needs coreutils 8.31.
SHIELDED = """bash -c 'trap "" USR2 TERM; exec "$@"' rank"""
CONTAINER_ENV = "--container-env="  # option of pyxis: names of variables that the host sets, not the image
OF_RANKS = (RUN_DIR_VARIABLE, ATTEMPT_VARIABLE, "OMP_NUM_THREADS", "PYTHONPATH")  # set by the script


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
        return tasks_of(len(self.run_dirs), self.pack)


def render_script(config: Config, paths: JobPaths) -> str:
    """Return the text that is passed to sbatch."""
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
    folders = [_in_script(folder) for folder in pythonpath_folders(paths.workdir, paths.roots)]
    return environment.get_template("job.sbatch.j2").render(
        version=__version__,
        directives=sbatch_directives(config, paths),
        run_dirs=paths.run_dirs,
        pack=paths.pack,
        tasks=paths.tasks,
        setup=setup_lines(config.cluster),
        env=config.cluster.env,
        threads=max(1, config.cluster.cpus_per_task // paths.pack),
        workdir=folders[0],
        pythonpath=":".join(folders),
        sizes=usable_sizes(config)[::-1] if config.cluster.node_range.elastic else [],
        tasks_per_node=config.cluster.tasks_per_node,
        srun=srun_words(config.cluster, paths, [*OF_RANKS, *config.cluster.env, *config.secrets]),
        slurmtrain=f"{shlex.quote(paths.python)} -m slurmtrain",
        secret_files=[(name, path) for name, source in config.secrets.items() if (path := path_of(source)) is not None],
        hooks=any((config.hooks.on_finish, config.hooks.on_failure, config.hooks.on_preemption)),
        mode=config.requeue.mode,
        in_place=config.requeue.starts_in_place,
        spare_nodes=config.cluster.spare_nodes,
        keeps_nodes=_keeps_nodes(config, paths),
        first_nodes=" ".join(srun_node_options(config.cluster)),
        query_variables=" ".join(f'"${{!{prefix}@}}"' for prefix in OF_QUERIES),
        restart_delay_s=config.requeue.restart_delay_s,
        excluded_max=EXCLUDED_MAX + _count_nodes(config.cluster.exclude),
        local_copies=config.checkpoint.local if config.job.kind == JobKind.TRAIN else None,
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
    cluster, elastic = config.cluster, config.cluster.node_range.elastic
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
        ("array", array_option(paths.tasks, paths.parallelism)),
        ("dependency", _dependency(config)),
        # A dead node leaves the job its others.
        ("no-kill", _keeps_nodes(config, paths) or None),
        # Without --requeue a preempted job is cancelled before its first line runs, and a dead node ends it.
        ("requeue" if config.requeue.mode == RequeueMode.REQUEUE else "no-requeue", True),
        # A restart would truncate the log of the attempt before.
        ("open-mode", "append"),
        ("chdir", paths.submit_dir),
        ("output", _no_pattern(paths.run_dirs[0].parent if len(paths.run_dirs) > 1 else paths.run_dirs[0]) + f"/{log}"),
        *sorted((name, value) for name, value in cluster.sbatch.items() if name != "dependency"),
    ]
    return [text for name, value in options if (text := _directive(name, value))]


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


def srun_words(cluster: ClusterConfig, paths: JobPaths, variables: Sequence[str] = ()) -> list[str]:
    """Return the srun line, with a word or a pair of words per element.

    Args:
        variables: names of the variables that the script sets for the ranks.
    """
    container = cluster.container
    logs = "${attempt_dir//%/%%}" if any("%" in str(run_dir) for run_dir in paths.run_dirs) else "$attempt_dir"
    words = [
        "srun",
        f"--cpus-per-task={cluster.cpus_per_task}",
        "--kill-on-bad-exit=1",
        f"--wait={cluster.srun_wait_s}",
        *(["--overlap"] if paths.pack > 1 else []),
        *(['"${nodes_of_ranks[@]}"'] if cluster.spare_nodes or cluster.node_range.elastic else []),
        "--unbuffered",
        f'--output="{logs}/{rank_log_name("%t")}"',
    ]
    mounts = ['"$run_dir:$run_dir"', *(shlex.quote(mount) for mount in container.mounts)]
    if paths.workdir.startswith("/"):
        mounts.append(shlex.quote(f"{paths.workdir}:{paths.workdir}"))
    if container.kind == ContainerKind.PYXIS:
        words += [f"--container-image={shlex.quote(str(container.image))}", "--container-mounts=" + ",".join(mounts)]
        words.append('--container-workdir="$PWD"')  # otherwise the image's own
        own = [word for word in container.args if word.startswith(CONTAINER_ENV)]
        names = [*variables, *(name for word in own for name in word.removeprefix(CONTAINER_ENV).split(","))]
        # Without it, the image's variables win: its PYTHONPATH, say, and the ranks would not run the snapshot.
        words += [CONTAINER_ENV + ",".join(dict.fromkeys(filter(None, names)))] if names else []
        words += [shlex.quote(word) for word in container.args if word not in own]
    words += [shlex.quote(word) for word in cluster.srun_args]
    if container.kind == ContainerKind.APPTAINER:
        words += ["apptainer exec", *(f"--bind {mount}" for mount in mounts), '--pwd "$PWD"']
        words += [*(shlex.quote(word) for word in container.args), shlex.quote(str(container.image))]
    words.append(f'{SHIELDED} {rank_python(cluster, paths)} -u -m slurmtrain train "$run_dir"')
    return words


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
