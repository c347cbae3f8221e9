"""`-m ... submit`: a sweep over the points of a grid, or over those that a sweeper of Hydra's chooses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from slurmtrain.choices import Backend, Pruner, RequeueMode
from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.columns import counts, summary
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.submit import awaited_runs, say_unless_awaited
from slurmtrain.config.folders import Primary, search_folders
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.control.submitting import client_of
from slurmtrain.data.sources.config_check import check_prepared
from slurmtrain.errors import EXIT_REQUEUE, UsageError
from slurmtrain.launch.memory_check import check_memory
from slurmtrain.launch.named_paths import check_named_paths
from slurmtrain.planner.fit import check_fits, share_of_gpu
from slurmtrain.report.status.state import RunStatus
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep import folder as sweeps
from slurmtrain.sweep.create import create_sweep, find_same
from slurmtrain.sweep.jobs import check_submitted, submit_arrays
from slurmtrain.sweep.local import alone, run_here
from slurmtrain.sweep.plan import plan_sweep, preview
from slurmtrain.sweep.points import Grid, check, composing, naming_point
from slurmtrain.sweep.throttle import throttle
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"  # Hydra's own: choices and nothing else

DONE_WITH = {RunStatus.FINISHED, RunStatus.REMOVED}  # states of runs that nobody has to start again


def submit(arguments: Arguments) -> int:
    """Expand, compose and validate all points, then submit those that are missing, or run them here with cluster=local."""
    options, cwd = arguments.options, current_folder()
    if "--follow" in options:
        raise UsageError("--follow does not work with -m", hint="sweep status last shows the state of the points")
    parallelism = _positive(options.get("--array-parallelism"))
    name = options.get("--config-name", "config")
    primary = Primary(name, search_folders(name, options.get("--config-dir"), options.get("--config-path")))
    with composing(primary) as composer:
        if composer.sweeper(arguments.overrides)["_target_"] != BASIC_SWEEPER:
            from slurmtrain.cli.search import search

            return search(composer, arguments, parallelism)
        grid = composer.expand(arguments.overrides)
        if not grid.keys:
            log.info(
                "nothing varies, so this is a sweep of one run; choices are written key=1,2, and a single run needs no -m"
            )
        dry = "--dry-run" in options
        _refuse_pruner(composer.compose(grid.points[0]))
        sweep_plan = plan_sweep(_fitting(check(composer, grid), grid, later="--after" in options, dry=dry), cwd)
    after = awaited_runs(sweep_plan.first, options)
    if "--dry-run" in options:
        return _dry_run(grid, preview(sweep_plan, cwd, parallelism, after))
    local = sweep_plan.first.cluster.backend == Backend.LOCAL
    client = None if local else client_of(sweep_plan.first, sweep_plan.asking.values())
    sweep = None if "--again" in options else find_same(sweep_plan)
    there = sweep is not None
    if sweep is None:
        sweep = create_sweep(
            sweep_plan,
            grid.varied,
            arguments.overrides,
            cwd,
            max_array_size=client.max_array_size() if client is not None else None,
            parallelism=parallelism,
            after=after,
            again="--again" in options,
        )
    if client is None:
        return run_on_this_machine(sweep, parallelism or sweep.pack, as_json="--json" in options)
    say_unless_awaited(after, sweep)
    if there and parallelism not in (None, sweep.info()["parallelism"]):
        throttle(sweep, parallelism, client)
    if parallelism is not None and sweep_plan.first.requeue.mode == RequeueMode.RESUBMIT:
        log.info(
            "--array-parallelism does not apply to points that are submitted again as separate jobs (requeue=resubmit)"
        )
    return _submit(sweep, client, there=there, as_json="--json" in options)


def _refuse_pruner(config: Config) -> None:
    if config.search.pruner != Pruner.NONE:
        raise UsageError(
            f"search.pruner={config.search.pruner} ends trials of a search, but all points of this sweep are fixed",
            hint="hydra/sweeper=optuna searches among the choices; without search.pruner, all points are trained to the end",
        )


def _fitting(points: Iterable[tuple[Config, ParallelDims]], grid: Grid, *, later: bool, dry: bool) -> Iterator[Config]:
    """Yield the points, and raise if one is too large. Only the largest is built, since each would take seconds."""
    largest: tuple[float, int, Config, ParallelDims] | None = None
    warnings: dict[str, None] = {}  # the same of many points is said once
    for number, (config, dims) in enumerate(points):
        with naming_point(grid, number):
            check_fits(config, dims)
            check_prepared(config, later=later)
            if not dry:
                warnings |= dict.fromkeys(check_named_paths(config, current_folder(), later=later))
        share = share_of_gpu(config, dims) or 0.0
        if largest is None or share > largest[0]:
            largest = share, number, config, dims
        yield config
    assert largest is not None
    for warning in warnings:
        log.warning(warning)
    _, number, config, dims = largest
    with naming_point(grid, number):
        for warning in check_memory(config, dims):
            log.warning(warning)


def _dry_run(grid: Grid, scripts: list[str]) -> int:
    print(*scripts, sep="\n", end="")
    how = f"{len(scripts)} array{'s' if len(scripts) > 1 else ''}" if scripts else "this machine, without SLURM"
    print(f"# {len(grid.points)} points for {how}; what varies: {', '.join(grid.keys) or 'nothing'}")
    return 0


def _submit(sweep: Sweep, client: SlurmClient, *, there: bool, as_json: bool) -> int:
    try:
        submission = submit_arrays(sweep, client)
    except KeyboardInterrupt:
        known = [job for number in sweep.array_numbers() if (job := sweep.job_id(number)) is not None]
        goes_on = f"job {', '.join(known)} is submitted and goes on" if known else "no job of it is known yet"
        log.info(
            "sweep %s: %s; the same command submits the rest   sweep cancel %s ends it", sweep.id, goes_on, sweep.id
        )
        raise
    jobs, points = [*submission.found, *submission.submitted], sweep.point_count()
    if as_json:
        print_json({"sweep": sweep.id, "path": str(sweep.path), "points": points, "job_ids": jobs})
    else:
        what = "is there already" if there else f"of {points} points is submitted"
        print(f"sweep {sweep.id} {what}: job {', '.join(jobs) or 'none yet'}\n  {sweep.path}")
        if there and not submission.submitted:
            print(
                f"  the same points as in this command; --again submits them again   sweep retry {sweep.id}: what failed"
            )
        print(f"  sweep status {sweep.id}   sweep collect {sweep.id}   sweep cancel {sweep.id}   (or: last)")
    check_submitted(submission)
    return 0


def run_on_this_machine(sweep: Sweep, at_once: int, *, as_json: bool) -> int:
    """Run the points on this machine; return 0 when all have finished, 75 when a person stopped it, else 1."""
    if not as_json:
        print(f"sweep {sweep.id} of {sweep.point_count()} points\n  {sweep.path}", flush=True)
    with alone(sweep):
        now = sweeps.states_of(sweep)
        unfinished = [run_id for run_id, its in now.items() if its.status not in DONE_WITH and not its.alive]
        to_the_end = run_here(sweep, unfinished, at_once, show=at_once == 1 and not as_json)
    states = counts(sweeps.states_of(sweep).values())
    if as_json:
        facts = {"sweep": sweep.id, "path": str(sweep.path), "points": sweep.point_count(), "job_ids": []}
        print_json({**facts, "states": states})
    else:
        print(f"sweep {sweep.id}: {summary(states)}")
        if not set(states) <= DONE_WITH:
            print("  the same command continues unfinished points")
        print(f"  sweep status {sweep.id}   sweep collect {sweep.id}   (or: last)")
    if not to_the_end:
        return EXIT_REQUEUE
    return 0 if set(states) <= DONE_WITH else 1


def _positive(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--array-parallelism {text}: expected a number of runs, at least 1")
    return int(text)
