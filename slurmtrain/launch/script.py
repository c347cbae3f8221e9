"""The one source of the sbatch text: `submit`, its --dry-run and `render` print or pass on what `render_script` returns.

The text is a pure function of a config and some paths. The template is jobs/job.sbatch.j2; its renders for the shipped
clusters lie beside it as golden files.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain import __version__
from slurmtrain.config.folders import shipped
from slurmtrain.config.frozen import SECRET_REFERENCE
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.config.secrets import path_of
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.launch.code_source import CodeSource, find_source, pythonpath_folders
from slurmtrain.launch.directives import JobPaths, Line, explained_directives
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


def dry_run(config: Config, cwd: Path, source: CodeSource | None = None) -> str:
    """Return the script that `submit` would pass to sbatch. Nothing is created.

    Args:
        source: the code; None: that of `cwd`, as job.snapshot says.
    """
    config = with_absolute_paths(config, cwd)
    return render_script(config, _paths_of_a_dry_run(config, cwd, source))


def explained(config: Config, cwd: Path) -> list[Line]:
    """Return the lines of `dry_run`, each with the reason why it is there."""
    from slurmtrain.launch.srun import explained_srun

    config = with_absolute_paths(config, cwd)
    paths = _paths_of_a_dry_run(config, cwd)
    source = (shipped("jobs") / TEMPLATE).read_text()
    template = _environment().from_string(_REMARK.sub(lambda match: f"{_BEGIN}{match[1]}{_END}", source))
    run_dir = paths.run_dirs[0]
    srun = explained_srun(config, run_dir, run_dir / "attempts" / "0001", run_dir / paths.workdir)
    return [
        *_with_reasons(render_script(config, paths, template)),
        Line("", ""),
        Line("# `supervise` starts the ranks with:", ""),
        *(each.line for each in srun),
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


def _paths_of_a_dry_run(config: Config, cwd: Path, source: CodeSource | None = None) -> JobPaths:
    run_dir = folder_of(Path(config.job.runs_dir), config.job.name) / PLACEHOLDER_ID
    source = source or find_source(config.job, cwd, config.cluster)
    return JobPaths([run_dir], source.workdir, shared_interpreter(), roots=source.roots, submit_dir=cwd)


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
    return environment


def render_script(config: Config, paths: JobPaths, template: jinja2.Template | None = None) -> str:
    """Return the text that is passed to sbatch."""
    folders = [_in_script(folder) for folder in pythonpath_folders(paths.workdir, paths.roots)]
    excluded: Sequence[str] = ()
    if config.cluster.exclude:
        with contextlib.suppress(EnvironmentMismatchError):  # a file of nodes, which only sbatch reads
            excluded = expand_nodelist(config.cluster.exclude)
    return (template or _environment().get_template(TEMPLATE)).render(
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
