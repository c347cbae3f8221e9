"""The one source of the sbatch text: `submit`, its --dry-run and `render` print or pass on what `render_script` returns.

The text is a pure function of a config and some paths. The template is jobs/job.sbatch.j2; its renders for the shipped
clusters lie beside it as golden files.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from slurmtrain import __version__
from slurmtrain.choices import RequeueMode
from slurmtrain.config.fields import NodeRange
from slurmtrain.config.folders import shipped
from slurmtrain.config.frozen import SECRET_REFERENCE
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.config.secrets import path_of
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.launch.code_source import CodeSource, find_source, pythonpath_folders
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.runs.create import folder_of
from slurmtrain.slurm.command_environment import OF_LAUNCHERS, OF_QUERIES, OF_RANKS
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.system.node_copies import shared_interpreter

if TYPE_CHECKING:
    import jinja2

TEMPLATE = "job.sbatch.j2"
PLACEHOLDER_ID = "RUN_ID"  # stands for the run's id in a dry run, which creates nothing
# How the submitting shell reached SLURM, where a node has a configuration of its own; and what would change how bash works.
OF_SHELL = ("SLURM_CLUSTERS", "SBATCH_CLUSTERS", "SLURM_JWT", "POSIXLY_CORRECT")
EXCLUDED_MAX = 8  # nodes that one run may leave out; so many bad ones are not the nodes' fault
# A remark of the template, {#! why #}, is the reason of the lines after it. It is left out of the script; to explain the
# script, it is rendered between these letters, which no line has.
_REMARK = re.compile(r"\{#!\s*(.*?)\s*#\}", re.DOTALL)
_BEGIN, _END = "\x01", "\x02"
_templates: dict[bool, jinja2.Template] = {}  # compiled, with and without the reasons


def dry_run(config: Config, cwd: Path, source: CodeSource | None = None, *, explain: bool = False) -> str:
    """Return the script that `submit` would pass to sbatch. Nothing is created.

    Args:
        source: the code; None: that of `cwd`, as job.snapshot says.
        explain: keep the reasons that the template gives, for `_with_reasons`.
    """
    config = with_absolute_paths(config, cwd)
    source = source or find_source(config.job, cwd, config.cluster)
    run_dir = folder_of(Path(config.job.runs_dir), config.job.name) / PLACEHOLDER_ID
    paths = JobPaths([run_dir], source.workdir, shared_interpreter(), roots=source.roots, submit_dir=cwd)
    return render_script(config, paths, explain=explain)


def explained(config: Config, cwd: Path) -> list[Line]:
    """Return the lines of `dry_run`, each with the reason why it is there."""
    from slurmtrain.launch.srun import explained_srun

    config = with_absolute_paths(config, cwd)
    source = find_source(config.job, cwd, config.cluster)
    run_dir = folder_of(Path(config.job.runs_dir), config.job.name) / PLACEHOLDER_ID
    srun = explained_srun(config, run_dir, run_dir / "attempts" / "0001", run_dir / source.workdir)
    return [
        *_with_reasons(dry_run(config, cwd, source, explain=True)),
        Line("", ""),
        Line("# `supervise` starts the ranks with:", ""),
        *(Line(shlex.join(words), why) for words, why in srun),
    ]


def dry_manifest(config: Config, cwd: Path, *, placeholders: bool = False) -> str:
    """Return the manifest by which another engine runs a job. Nothing is created.

    Args:
        placeholders: let words stand for the image and the volume if the config has none.
    """
    from slurmtrain.launch.targets import manifest, warn_of_settings
    from slurmtrain.launch.targets.pod import PodRun

    warn_of_settings(config)
    config = with_absolute_paths(config, cwd)
    run = PodRun(folder_of(Path(config.job.runs_dir), config.job.name) / PLACEHOLDER_ID)
    return manifest(config, run, placeholders=placeholders)


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


def render_script(config: Config, paths: JobPaths, *, explain: bool = False) -> str:
    """Return the text that is passed to sbatch.

    Args:
        explain: keep the reasons that the template gives, for `_with_reasons`.
    """
    if explain not in _templates:
        import jinja2

        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # shell text, not HTML; every value goes through the filter `sh` or shlex.quote
        )
        environment.filters["sh"] = lambda value: shlex.quote(str(value))
        environment.filters["sh_secret"] = _quote_secret
        template = (shipped("jobs") / TEMPLATE).read_text()
        if explain:
            template = _REMARK.sub(lambda match: f"{_BEGIN}{match[1]}{_END}", template)
        _templates[explain] = environment.from_string(template)
    folders = [  # of each run, or absolute, as words of the script
        shlex.quote(folder) if folder.startswith("/") else '"$run_dir"/' + shlex.quote(folder)
        for folder in pythonpath_folders(paths.workdir, paths.roots)
    ]
    excluded: Sequence[str] = ()
    if config.cluster.exclude:
        with contextlib.suppress(EnvironmentMismatchError):  # a file of nodes, which only sbatch reads
            excluded = expand_nodelist(config.cluster.exclude)
    return _templates[explain].render(
        version=__version__,
        directives=explained_directives(config, paths),
        run_dirs=paths.run_dirs,
        pack=paths.pack,
        tasks=paths.tasks,
        setup=setup_lines(config.cluster),
        env=config.cluster.env,
        workdir=folders[0],
        pythonpath=":".join(folders),
        slurmtrain=f"{shlex.quote(paths.python)} -m slurmtrain",
        secret_files=[(name, path) for name, source in config.secrets.items() if (path := path_of(source)) is not None],
        mode=config.requeue.mode,
        of_shell=" ".join([*OF_SHELL, *OF_RANKS, *(f'"${{!{prefix}@}}"' for prefix in OF_LAUNCHERS)]),
        query_variables=" ".join(f'"${{!{prefix}@}}"' for prefix in OF_QUERIES),
        restart_delay_s=config.requeue.restart_delay_s,
        excluded_max=EXCLUDED_MAX + len(excluded),
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


def setup_lines(cluster: ClusterConfig) -> list[str]:
    """Return the lines for modules, then the user's lines, then the environment to activate: each may need the one before."""
    lines = [f"module load {shlex.quote(module)}" for module in cluster.modules] + list(cluster.setup)
    if cluster.venv:
        lines.append(f"source {shlex.quote(cluster.venv + '/bin/activate')}")
    if cluster.conda_env:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(cluster.conda_env)}"]
    return lines


# The #SBATCH lines: writing them with their reasons, reading them again, and what may override them.

# What variables of the person's shell decide where the config says nothing: who pays, and where the job runs.
OF_THE_SHELL = ("account", "partition", "qos", "reservation", "wckey")
# The person chooses the cluster, and exported variables are only added to (see submit_once.export_option).
_NO_OPTIONS = ("SBATCH_CLUSTERS", "SBATCH_EXPORT")


class Line(NamedTuple):
    """A line of the script, or a part of one, and why it is there; a comment explains itself, so its reason is empty."""

    text: str
    why: str


class JobPaths(Struct, frozen=True):
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
    cluster, mode = config.cluster, config.requeue.mode
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
    memory, memory_of_cpu, memory_of_gpu = (
        None if amount is None else f"{amount}G" if amount else "0"  # without a unit: all the memory of each node
        for amount in (cluster.mem_per_node_gb, cluster.mem_per_cpu_gb, cluster.mem_per_gpu_gb)
    )
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
            memory,
            "cluster.mem_per_node_gb" + ": 0 requests all memory of each node" * (cluster.mem_per_node_gb == 0),
        ),
        ("mem-per-cpu", memory_of_cpu, "cluster.mem_per_cpu_gb"),
        ("mem-per-gpu", memory_of_gpu, "cluster.mem_per_gpu_gb"),
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
            ((spare > 0 or elastic) and config.requeue.starts_in_place and paths.pack == 1) or None,
            "if a node fails, the job keeps its other nodes, which are enough to continue (requeue.in_place)",
        ),
        (
            "requeue",
            mode == RequeueMode.REQUEUE,
            f"requeue.mode={mode}: SLURM starts the job again after a preemption",
        ),
        ("no-requeue", mode != RequeueMode.REQUEUE, f"requeue.mode={mode}: SLURM must not start this job again"),
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


def _directive(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    if isinstance(value, list):
        value = ",".join(str(item) for item in value)
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


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
