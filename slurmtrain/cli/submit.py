"""submit, and the code that submitting a run, a grid and a search have in common."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from slurmtrain.choices import Backend, JobKind
from slurmtrain.cli.arguments import PROGRAM
from slurmtrain.cli.json_output import emit
from slurmtrain.config.compose import Composer
from slurmtrain.config.folders import search_folders
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.errors import UsageError
from slurmtrain.launch.checks import check
from slurmtrain.report.page.units import plural
from slurmtrain.system.paths import current_folder, runs_root

if TYPE_CHECKING:
    from slurmtrain.launch.code_source import CodeSource
    from slurmtrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    """Submit a run or, with -m, a sweep; return the exit code."""
    if arguments.multirun:
        from slurmtrain.cli import multirun

        return multirun.submit(arguments)
    for option, given in (("--array-parallelism", arguments.array_parallelism), ("--again", arguments.again)):
        if given:
            raise UsageError(f"{option} is for sweeps", hint="add -m, and choices: -m key=1,2 submit")
    cwd, after, overrides = current_folder(), arguments.after, arguments.overrides
    source: CodeSource | None = None
    folder = cwd
    if arguments.origin is None:
        config, dims = compose_and_validate(arguments)
    else:
        from slurmtrain.cli.stop import say_which
        from slurmtrain.launch.changes import config_from
        from slurmtrain.launch.snapshot import source_of_run
        from slurmtrain.runs import lookup

        if arguments.config_name != "config":
            raise UsageError("--from takes a whole config, so there is nothing to compose from --config-name")
        origin = lookup.find(arguments.origin, runs_root())
        say_which(arguments.origin, origin)
        config, dims = config_from(origin, overrides, cwd, config_dir=arguments.config_dir)
        if (found := source_of_run(origin)).root is not None:
            source, folder = found, origin.workdir
        overrides = [*origin.info()["overrides"], *overrides]
    # A dry run queues nothing, and may be used on another machine.
    check(config, dims, folder, later=after is not None, look_at_files=not arguments.dry_run)
    local = config.cluster.backend == Backend.LOCAL
    if after is not None:
        from slurmtrain.launch.dependencies import starting_after

        config = starting_after(config, after)
    if arguments.dry_run:
        from slurmtrain.launch.script import dry_manifest, dry_run

        pods = config.cluster.backend == Backend.KUBERNETES
        print(dry_manifest(config, cwd) if pods else dry_run(config, cwd, source), end="")
        log.info("this job has %s", size_of(config))
        return 0
    if local:
        from slurmtrain.launch.submit import preparing

        with preparing(config, overrides, cwd, source) as run_dir:
            pass
        return _run_here(run_dir, config)
    from slurmtrain.control.submitting import submit_run

    run_dir, job_id = submit_run(config, overrides, cwd, source)
    say_submitted(run_dir, job_id, config, as_json=arguments.json)
    if arguments.json or not arguments.follow:
        return 0
    from slurmtrain.cli.logs import follow_to_the_end

    return follow_to_the_end(run_dir)


def _run_here(run_dir: RunDir, config: Config) -> int:
    from slurmtrain.control.stop import claimed_alone
    from slurmtrain.supervise.platforms.local import run_local

    print(f"run {run_dir.id} in {run_dir.path}", flush=True)
    # Without the claim, `resume` in another shell could take a slow start, or a hook between two attempts, for the run's end.
    with claimed_alone(run_dir):
        code = run_local(run_dir)
    if code == 0 and config.job.kind == JobKind.TRAIN:
        longer = f"resume last train.steps=+{config.train.steps}"
        print(f"try next:\n{next_steps('status last', 'report last', longer, 'help')}")
    return code


def compose_and_validate(arguments: argparse.Namespace) -> tuple[Config, ParallelDims]:
    """Return the config of a command line and its parallel dims, after all checks of its fields."""
    name = arguments.config_name
    config = Composer(search_folders(name, arguments.config_dir), name).compose(arguments.overrides)
    return config, validate(config)


def size_of(config: Config) -> str:
    """Return the nodes, ranks and GPUs that a job asks for, in words."""
    cluster = config.cluster
    gpus = f", {plural(cluster.gpus_per_node, 'GPU')} on each" if cluster.gpus_per_node else ""
    nodes = plural(cluster.nodes, "node") if isinstance(cluster.nodes, int) else f"{cluster.nodes} nodes"
    return f"{nodes} x {plural(cluster.tasks_per_node, 'rank')}{gpus}"


def say_submitted(run_dir: RunDir, jobs: str, config: Config, *, as_json: bool) -> None:
    """Print that a run is submitted, and what to type next."""
    from slurmtrain.runs import lookup

    run = lookup.reference(run_dir)
    said = f"submitted run {run_dir.id} as job {jobs}: {size_of(config)}\n  {run_dir.path}"
    emit(
        {"run": run_dir.id, "path": str(run_dir.path), "job_ids": run_dir.info()["job_ids"]},
        f"{said}\n{next_steps(f'status {run}', f'logs {run} -f', f'cancel {run}')}",
        as_json=as_json,
    )


def next_steps(*commands: str) -> str:
    """Return commands as lines that a person can paste."""
    return "\n".join(f"  {PROGRAM} {command}" for command in commands)
