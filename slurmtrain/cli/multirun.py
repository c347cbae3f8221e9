"""`-m ... submit`: a sweep over the points of a grid, or over those that a search chooses by the results of earlier ones."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.choices import Backend, EvalMode, Pruner
from slurmtrain.cli.columns import counts, summary
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.submit import next_steps
from slurmtrain.config.compose import BASIC_SWEEPER, Composer
from slurmtrain.config.folders import search_folders
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_REQUEUE, UsageError
from slurmtrain.launch.checks import check
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.report.page.units import plural
from slurmtrain.report.status.waiting import RunFailedError
from slurmtrain.sweep.plan import Choices, Grid, SweepPlan, choices_of, naming_point, preview, short_key, validated
from slurmtrain.system.paths import current_folder

if TYPE_CHECKING:
    from slurmtrain.runs.run_dir import RunDir
    from slurmtrain.runs.sweep_dir import Sweep
    from slurmtrain.sweep.study import Study

log = logging.getLogger(__name__)


def submit(arguments: argparse.Namespace) -> int:
    """Expand, compose and validate all points, then submit those that are missing, or run them here with cluster=local."""
    name = arguments.config_name
    if arguments.origin is not None:
        raise UsageError("--from submits one run, but -m makes a sweep", hint="submit --from RUN once for each value")
    if arguments.follow:
        raise UsageError("--follow does not work with -m", hint="sweep status last shows the state of the points")
    composer = Composer(search_folders(name, arguments.config_dir), name)
    choices = choices_of(composer, arguments.overrides)
    if choices.sweeper["_target_"] != BASIC_SWEEPER:
        return _search(composer, choices, arguments)
    grid = choices.grid()
    if not grid.keys:
        log.info(
            "nothing varies, so this is a sweep of one run; choices are written key=1,2, and a single run needs no -m"
        )
    first = with_absolute_paths(composer.compose(grid.points[0]), current_folder())
    if first.search.pruner != Pruner.NONE:
        raise UsageError(
            f"search.pruner={first.search.pruner} ends trials of a search, but all points of this sweep are fixed",
            hint="hydra/sweeper=optuna searches among the choices; without search.pruner, all are trained to the end",
        )
    if arguments.dry_run:
        return _preview(composer, grid, first, arguments)
    return _submit(composer, grid, first, arguments)


def _preview(composer: Composer, grid: Grid, first: Config, arguments: argparse.Namespace) -> int:
    plan, after = _planned(composer, grid, arguments), _awaited_runs(first, arguments.after)
    scripts = preview(plan, current_folder(), arguments.array_parallelism, after)
    print(*scripts, sep="\n", end="")
    how = f"{len(scripts)} array{'s' if len(scripts) > 1 else ''}" if scripts else "this machine, without SLURM"
    varied = ", ".join(map(short_key, grid.keys)) or "nothing"
    print(f"# {plural(len(grid.points), 'point')} for {how}; what varies: {varied}")
    return 0


def _planned(composer: Composer, grid: Grid, arguments: argparse.Namespace) -> SweepPlan:
    """Compose and check all points, and raise if one is too large."""
    plan: SweepPlan | None = None
    said, cwd = set[str](), current_folder()
    for number, (config, dims) in enumerate(validated(composer, grid)):
        with naming_point(grid, number):
            later, look = arguments.after is not None, not arguments.dry_run
            check(config, dims, cwd, later=later, look_at_files=look, said=said)
        config = with_absolute_paths(config, cwd)
        plan = plan or SweepPlan(config)
        plan.add(config)
    assert plan is not None
    return plan


def _submit(composer: Composer, grid: Grid, first: Config, arguments: argparse.Namespace) -> int:
    """Submit those points of a grid that are missing, or run them here with cluster=local."""
    from slurmtrain.control.submitting import client_of
    from slurmtrain.launch.submit import slurm_conf_of
    from slurmtrain.slurm.client import SlurmClient
    from slurmtrain.sweep.folder import command_of, create_sweep, find_by_command, find_same
    from slurmtrain.sweep.jobs import submit_arrays

    parallelism, again = arguments.array_parallelism, arguments.again
    after, local = _awaited_runs(first, arguments.after), first.cluster.backend == Backend.LOCAL
    # The same command finds its sweep without composing all points.
    command = command_of(arguments.overrides, composer, first)
    sweep = None if again else find_by_command(first, command)
    if sweep is None:
        plan = _planned(composer, grid, arguments)
        sweep = None if again else find_same(plan)
    there = sweep is not None
    if sweep is not None:
        client = None if local else SlurmClient(slurm_conf_of(first))
    else:
        client = None if local else client_of(first, plan.asking.values())
        how: dict[str, Any] = {"parallelism": parallelism, "after": after, "again": again, "command": command}
        sweep = create_sweep(plan, grid.varied, arguments.overrides, current_folder(), **how)
    if client is None:
        return run_on_this_machine(sweep, parallelism or sweep.pack, as_json=arguments.json)
    _say_unless_awaited(after, sweep)
    limit = sweep.info()["parallelism"]
    if parallelism not in (None, limit):
        log.info("sweep %s was submitted with --array-parallelism %s, which stays", sweep.id, limit or "not given")
    try:
        submission = submit_arrays(sweep, client)
    except KeyboardInterrupt:
        log.info("sweep %s: the same command submits the rest; sweep cancel %s ends it", sweep.id, sweep.id)
        raise
    if arguments.json:
        print_json(_facts_of(sweep))
    else:
        what = "is there already" if there else f"of {plural(sweep.point_count(), 'point')} is submitted"
        print(f"sweep {sweep.id} {what}: job {', '.join(_facts_of(sweep)['job_ids']) or 'none yet'}\n  {sweep.path}")
        if there and not submission.submitted:
            print("  the same points as in this command; --again submits them again, and sweep retry what failed")
        print(next_steps(*(f"sweep {action} {sweep.id}" for action in ("status", "collect", "cancel"))))
    submission.check()
    return 0


def _awaited_runs(config: Config, after: str | None) -> list[RunDir]:
    """Return the runs of --after. Errors in them are raised before anything is created."""
    if after is None:
        return []
    from slurmtrain.launch.dependencies import find_runs, starting_after

    starting_after(config, after)
    return find_runs(after)


def _say_unless_awaited(after: Sequence[RunDir], sweep: Sweep) -> None:
    """Log a message if --after names other runs than those that an existing sweep already waits for."""
    if after and [str(run_dir.path) for run_dir in after] != sweep.info()["after"]:
        log.info("--after does not apply to %s, which already exists", sweep.id)


def _facts_of(sweep: Sweep) -> dict[str, Any]:
    """Return what --json prints of every sweep."""
    jobs = [job for number in sweep.array_numbers() if (job := sweep.job_id(number)) is not None]
    return {"sweep": sweep.id, "path": str(sweep.path), "points": sweep.point_count(), "job_ids": jobs}


def run_on_this_machine(sweep: Sweep, at_once: int, *, as_json: bool) -> int:
    """Run the points on this machine; return 0 when all have finished, 75 when a person stopped it, else 1."""
    from slurmtrain.report.status.state import RunStatus
    from slurmtrain.sweep.jobs import LocalRuns, alone, states_of

    done_with = {RunStatus.FINISHED, RunStatus.REMOVED}  # states of runs that nobody has to start again
    if not as_json:
        print(f"sweep {sweep.id} of {plural(sweep.point_count(), 'point')}\n  {sweep.path}", flush=True)
    with alone(sweep):
        unfinished = [
            run_id for run_id, now in states_of(sweep).items() if now.status not in done_with and not now.alive
        ]
        to_the_end = True
        with LocalRuns(sweep, show=at_once == 1 and not as_json, at_once=at_once) as runs:
            try:
                for run_id in unfinished:
                    runs.start(sweep.run_dir(run_id))
                for _ in unfinished:
                    runs.ended()
            except KeyboardInterrupt:
                to_the_end = False
    states = counts(states_of(sweep).values())
    finished = set(states) <= done_with
    if as_json:
        print_json({**_facts_of(sweep), "states": states})
    else:
        goes_on = "" if finished else "; the same command continues unfinished points"
        print(f"sweep {sweep.id}: {summary(states)}{goes_on}")
        print(next_steps(f"sweep status {sweep.id}", f"sweep collect {sweep.id}"))
    return EXIT_REQUEUE if not to_the_end else 0 if finished else 1


def _search(composer: Composer, choices: Choices, arguments: argparse.Namespace) -> int:
    """Submit a sweep whose points Optuna chooses by the results of earlier ones, and wait until it is done."""
    from slurmtrain.control.submitting import PointLook, may_change_request
    from slurmtrain.sweep.search import Search, open_sweep
    from slurmtrain.sweep.study import TARGET, Study, TrialState

    overrides = arguments.overrides
    if choices.sweeper["_target_"] != TARGET:
        raise UsageError(
            f"hydra.sweeper is {choices.sweeper['_target_']}, but a search works only with hydra/sweeper=optuna",
            hint="hydra/launcher=slurmtrain runs the jobs of a Hydra program of your own with any sweeper",
        )
    if arguments.dry_run:
        raise UsageError(
            "--dry-run cannot show a search: its points depend on the results of earlier ones",
            hint="without the choices and -m it shows one point",
        )
    if not choices.space:
        raise UsageError("a search needs values to choose", hint="optim.lr='tag(log,interval(1e-5,1e-2))'")
    stand_in = [f"{key}=?" for key in choices.space if key.startswith("+job.args.")]  # the program refers to them
    base = with_absolute_paths(composer.compose([*choices.fixed, *stand_in]), current_folder())
    validate(base)
    if base.eval.mode == EvalMode.JOB:
        raise UsageError(
            "eval.mode=job in a search: its evaluations may not be complete when the point finishes",
            hint="eval.mode=inline",
        )
    study = Study(choices.sweeper, choices.space, base)
    after = _awaited_runs(base, arguments.after)
    asks = PointLook(base) if base.cluster.backend != Backend.LOCAL else None
    if asks is not None and not any(map(may_change_request, choices.space)):
        asks(base)

    def look(config: Config) -> None:
        dims = validate(config)
        check(config, dims, current_folder())
        if asks is not None:
            asks(config)

    opened = open_sweep(
        SweepPlan(base, search=study.identity),
        overrides,
        asks.client if asks is not None else None,
        parallelism=arguments.array_parallelism,
        after=after,
        again=arguments.again,
        look=look,
    )
    name = opened.sweep.id
    _say_unless_awaited(after, opened.sweep)
    log.info("sweep %s: this shell waits for results; if it dies, repeat the command to continue", name)
    try:
        Search(composer, opened, study, base, choices.fixed, show=not arguments.json).run()
    except KeyboardInterrupt:
        if opened.client is not None:
            log.info("the jobs of %s go on without this shell; sweep cancel %s ends them", name, name)
        raise
    except RunFailedError as failure:
        if not arguments.json:
            _say_trials(study)
        running = sum(trial.state == TrialState.RUNNING for trial in study.trials)
        hint = failure.hint or "repeat the command to continue with other trials"
        if running and opened.client is not None:
            hint = f"{running} others go on: the same command waits for them, sweep cancel {name} ends them; {hint}"
        raise RunFailedError(failure.message, hint=hint) from None
    if arguments.json:
        print_json({**_facts_of(opened.sweep), "trials": study.trials})
    else:
        _say_trials(study)
        print(f"sweep {name} is done\n  {opened.sweep.path}")
        print(next_steps(f"sweep collect {name}", f"sweep status {name}", f"usage {name}"))
    return 0


def _say_trials(study: Study) -> None:
    """Print how many trials are in each state, and the best one."""
    print(summary(dict(Counter(str(trial.state) for trial in study.trials).most_common())))
    best = study.best()
    if best is not None:
        print(f"best is {best.value:.6g}, of trial {best.number}: {best.in_words}, run {best.run}")
