"""`-m ... submit`: a sweep over the points of a grid, or over those that a search chooses."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from slurmtrain.choices import Backend, Pruner
from slurmtrain.cli.columns import counts, summary
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.submit import awaited_runs, say_unless_awaited
from slurmtrain.config.folders import Primary, search_folders
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.control.checks import check, warn_of_memory
from slurmtrain.errors import EXIT_REQUEUE, UsageError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.planner.fit import share_of_gpu
from slurmtrain.sweep.plan import Composer, Grid, SweepPlan, composing, naming_point, plan_sweep, preview, validated
from slurmtrain.system.paths import current_folder

if TYPE_CHECKING:
    from slurmtrain.runs.sweep_dir import Sweep

log = logging.getLogger(__name__)

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"  # Hydra's own: choices and nothing else


def submit(arguments: argparse.Namespace) -> int:
    """Expand, compose and validate all points, then submit those that are missing, or run them here with cluster=local."""
    cwd, name = current_folder(), arguments.config_name
    if arguments.follow:
        raise UsageError("--follow does not work with -m", hint="sweep status last shows the state of the points")
    primary = Primary(name, search_folders(name, arguments.config_dir, arguments.config_path))
    with composing(primary) as composer:
        sweeper = composer.sweeper(arguments.overrides)
        if sweeper["_target_"] != BASIC_SWEEPER:
            from slurmtrain.cli.search import search

            return search(composer, sweeper, arguments)
        grid = composer.expand(arguments.overrides)
        if not grid.keys:
            log.info(
                "nothing varies, so this is a sweep of one run; choices are written key=1,2, and a single run needs no -m"
            )
        first = with_absolute_paths(composer.compose(grid.points[0]), cwd)
        if first.search.pruner != Pruner.NONE:
            raise UsageError(
                f"search.pruner={first.search.pruner} ends trials of a search, but all points of this sweep are fixed",
                hint="hydra/sweeper=optuna searches among the choices; without search.pruner, all are trained to the end",
            )

        def planned() -> SweepPlan:
            return plan_sweep(_fitting(composer, grid, arguments), cwd)

        if not arguments.dry_run:
            return _submit(planned, grid, primary, first, arguments)
        scripts = preview(planned(), cwd, arguments.array_parallelism, awaited_runs(first, arguments.after))
    print(*scripts, sep="\n", end="")
    how = f"{len(scripts)} array{'s' if len(scripts) > 1 else ''}" if scripts else "this machine, without SLURM"
    print(f"# {len(grid.points)} points for {how}; what varies: {', '.join(grid.keys) or 'nothing'}")
    return 0


def _fitting(composer: Composer, grid: Grid, arguments: argparse.Namespace) -> Iterator[Config]:
    """Yield the points, and raise if one is too large. Only the largest is built, since each would take seconds."""
    largest: tuple[float, int, Config, ParallelDims] | None = None
    said = set[str]()
    for number, (config, dims) in enumerate(validated(composer, grid)):
        with naming_point(grid, number):
            later, look = arguments.after is not None, not arguments.dry_run
            check(config, dims, current_folder(), later=later, look_at_files=look, said=said)
        share = share_of_gpu(config, dims) or 0.0
        if largest is None or share > largest[0]:
            largest = share, number, config, dims
        yield config
    assert largest is not None
    _, number, config, dims = largest
    with naming_point(grid, number):
        warn_of_memory(config, dims)


def _submit(
    planned: Callable[[], SweepPlan], grid: Grid, primary: Primary, first: Config, arguments: argparse.Namespace
) -> int:
    """Submit those points of a grid that are missing, or run them here with cluster=local.

    Args:
        planned: composes and checks all points. The same command finds its sweep without them.
        first: the config of the first point.
    """
    from slurmtrain.control.submitting import client_of
    from slurmtrain.launch.submit import slurm_conf_of
    from slurmtrain.slurm.client import SlurmClient
    from slurmtrain.sweep.folder import command_of, create_sweep, find_by_command, find_same
    from slurmtrain.sweep.jobs import submit_arrays

    parallelism, as_json = arguments.array_parallelism, arguments.json
    after, local = awaited_runs(first, arguments.after), first.cluster.backend == Backend.LOCAL
    command = command_of(arguments.overrides, primary, first)
    sweep = None if arguments.again else find_by_command(first, command)
    if sweep is None:
        plan = planned()
        sweep = None if arguments.again else find_same(plan)
    there = sweep is not None
    if sweep is not None:
        client = None if local else SlurmClient(slurm_conf_of(first))
    else:
        client = None if local else client_of(first, plan.asking.values())
        sweep = create_sweep(
            plan,
            grid.varied,
            arguments.overrides,
            current_folder(),
            parallelism=parallelism,
            after=after,
            again=arguments.again,
            command=command,
        )
    if client is None:
        return run_on_this_machine(sweep, parallelism or sweep.pack, as_json=as_json)
    say_unless_awaited(after, sweep)
    limit = sweep.info()["parallelism"]
    if parallelism not in (None, limit):
        log.info("sweep %s was submitted with --array-parallelism %s, which stays", sweep.id, limit or "not given")
    try:
        submission = submit_arrays(sweep, client)
    except KeyboardInterrupt:
        log.info("sweep %s: the same command submits the rest; sweep cancel %s ends it", sweep.id, sweep.id)
        raise
    job_ids = [job for number in sweep.array_numbers() if (job := sweep.job_id(number)) is not None]
    if as_json:
        print_json({"sweep": sweep.id, "path": str(sweep.path), "points": sweep.point_count(), "job_ids": job_ids})
    else:
        what = "is there already" if there else f"of {sweep.point_count()} points is submitted"
        print(f"sweep {sweep.id} {what}: job {', '.join(job_ids) or 'none yet'}\n  {sweep.path}")
        if there and not submission.submitted:
            print(
                f"  the same points as in this command; --again submits them again   sweep retry {sweep.id}: what failed"
            )
        print(f"  sweep status {sweep.id}   sweep collect {sweep.id}   sweep cancel {sweep.id}   (or: last)")
    submission.check()
    return 0


def run_on_this_machine(sweep: Sweep, at_once: int, *, as_json: bool) -> int:
    """Run the points on this machine; return 0 when all have finished, 75 when a person stopped it, else 1."""
    from slurmtrain.report.status.state import RunStatus
    from slurmtrain.sweep.jobs import states_of
    from slurmtrain.sweep.local import alone, run_here

    done_with = {RunStatus.FINISHED, RunStatus.REMOVED}  # states of runs that nobody has to start again
    count = sweep.point_count()
    if not as_json:
        print(f"sweep {sweep.id} of {count} points\n  {sweep.path}", flush=True)
    with alone(sweep):
        unfinished = [
            run_id for run_id, now in states_of(sweep).items() if now.status not in done_with and not now.alive
        ]
        to_the_end = run_here(sweep, unfinished, at_once, show=at_once == 1 and not as_json)
    states = counts(states_of(sweep).values())
    if as_json:
        print_json({"sweep": sweep.id, "path": str(sweep.path), "points": count, "job_ids": [], "states": states})
    else:
        print(f"sweep {sweep.id}: {summary(states)}")
        if not set(states) <= done_with:
            print("  the same command continues unfinished points")
        print(f"  sweep status {sweep.id}   sweep collect {sweep.id}   (or: last)")
    if not to_the_end:
        return EXIT_REQUEUE
    return 0 if set(states) <= done_with else 1
