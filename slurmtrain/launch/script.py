"""The one source of the sbatch text: `render`, `submit --dry-run` and `submit` all use what `render_script` returns.

The text is a pure function of a config and some paths. The template is jobs/job.sbatch.j2; its renders for the shipped
clusters lie beside it as golden files.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from slurmtrain import __version__
from slurmtrain.choices import JobKind
from slurmtrain.config.elastic import usable_sizes
from slurmtrain.config.frozen import SECRET_REFERENCE
from slurmtrain.config.launched_program import as_started, node_shape
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.config.secrets import path_of
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.launch.directives import explained_directives, keeps_nodes
from slurmtrain.launch.import_paths import pythonpath_folders
from slurmtrain.launch.script_parts import JobPaths, Line
from slurmtrain.launch.srun import explained_srun, has_percent_signs, rank_python, srun_node_options
from slurmtrain.resources import shipped
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmtrain.slurm.command_environment import OF_QUERIES
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.slurm.versions import PERCENT_SIGNS_READ_TWICE, STARTS_PREEMPTED_JOBS_ONCE_MORE, Version

if TYPE_CHECKING:
    import jinja2

TEMPLATE = "job.sbatch.j2"
EXCLUDED_MAX = 8  # nodes that one run may leave out; so many bad ones are not the nodes' fault
OF_RANKS = (RUN_DIR_VARIABLE, ATTEMPT_VARIABLE, "OMP_NUM_THREADS", "PYTHONPATH")  # set by the script
# A remark of the template, {#! why #}, is the reason of the lines after it. It is left out of the script; to explain the
# script, it is rendered between these letters, which no line has.
_REMARK = re.compile(r"\{#!\s*(.*?)\s*#\}", re.DOTALL)
_BEGIN, _END = "\x01", "\x02"


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
        keeps_nodes=keeps_nodes(config, paths),
        first_nodes=" ".join(srun_node_options(started.cluster)),
        query_variables=" ".join(f'"${{!{prefix}@}}"' for prefix in OF_QUERIES),
        restart_delay_s=config.requeue.restart_delay_s,
        excluded_max=EXCLUDED_MAX + _count_nodes(config.cluster.exclude),
        local_copies=config.checkpoint.local if config.job.kind in (JobKind.TRAIN, JobKind.COMMAND) else None,
        percent_twice_since="{}{:02}".format(*PERCENT_SIGNS_READ_TWICE.since) if has_percent_signs(paths) else None,
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


def stage_folder(cluster: ClusterConfig) -> str:
    """Return the folder of a node under which its copies lie, as a word of the script."""
    if cluster.stage.dir is None:
        return '"${TMPDIR:-/tmp}"'
    variable, slash, below = cluster.stage.dir.partition("/")
    if not variable:
        return shlex.quote(cluster.stage.dir)
    return f'"${{{variable[1:]}:-/tmp}}"' + shlex.quote(slash + below) * bool(below)
