"""Sweeps: `-m ... submit`, and the verbs that look at one or steer it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from slurmtrain import rundir
from slurmtrain.cli.arguments import Arguments, Parser
from slurmtrain.cli.as_json import point_object, print_json
from slurmtrain.cli.collect import add_collect_options, print_collected
from slurmtrain.cli.columns import (
    PROGRESS,
    counts,
    doubts,
    print_table,
    progress_cells,
    remark,
    summary,
    table_lines,
    terminal_width,
    urgency,
)
from slurmtrain.cli.runs import say_doubts, say_unreadable
from slurmtrain.cli.submit import starting_after
from slurmtrain.cli.verbs import VERBS
from slurmtrain.cli.watch import View, add_watch_options, check_watch_options, watch
from slurmtrain.config.compose import Primary, search_folders
from slurmtrain.config.points import Grid, check, composing, naming_point
from slurmtrain.config.schema import Config
from slurmtrain.data.prepared_config import check_prepared
from slurmtrain.errors import EXIT_REQUEUE, ClusterError, UsageError
from slurmtrain.launch import collect, sweep_jobs
from slurmtrain.launch import sweep as sweeps
from slurmtrain.launch.after import find_runs
from slurmtrain.launch.claims import is_claimed
from slurmtrain.launch.draft import draft_of, preview
from slurmtrain.launch.fits import check_memory
from slurmtrain.launch.here import alone, run_here
from slurmtrain.launch.progress import eta_of_all, lowest, roughly
from slurmtrain.launch.state import RunState
from slurmtrain.launch.submit import check_slurm_is_here, slurm_conf_of
from slurmtrain.launch.sweep import Point, Sweep
from slurmtrain.launch.sweep_folder import find_same, make
from slurmtrain.launch.sweep_jobs import add_retry, check_submitted, submit_arrays
from slurmtrain.launch.throttle import throttle
from slurmtrain.launch.timeplan import look_ahead
from slurmtrain.planner.fit import check_fits, share_of_gpu
from slurmtrain.rundir import RunDir
from slurmtrain.runtime.slurm import SlurmClient

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"  # Hydra's own: choices and nothing else

DONE_WITH = {"finished", "removed"}  # states of runs that nobody has to start again


def submit(arguments: Arguments) -> int:
    """Expand, compose and validate all points, then submit what is not there yet, or run it here with cluster=local."""
    options, cwd = arguments.options, Path.cwd()
    if "--follow" in options:
        raise UsageError("--follow does not go with -m", hint="sweep status last shows how the points stand")
    parallelism = _positive(options.get("--array-parallelism"))
    name = options.get("--config-name", "config")
    primary = Primary(name, search_folders(name, options.get("--config-dir"), options.get("--config-path")))
    with composing(primary) as composer:
        if composer.sweeper(arguments.overrides)["_target_"] != BASIC_SWEEPER:
            from slurmtrain.cli.search import search

            return search(composer, arguments, parallelism)
        grid = composer.expand(arguments.overrides)
        draft = draft_of(_fitting(check(composer, grid), grid), cwd)
    after = awaited_runs(draft.first, options)
    if "--dry-run" in options:
        return _dry_run(grid, preview(draft, cwd, parallelism, after))
    local = draft.first.cluster.backend == "local"
    client = None if local else client_of(draft.first)
    sweep = None if "--again" in options else find_same(draft)
    there = sweep is not None
    if sweep is None:
        sweep = make(
            draft,
            grid.varied,
            arguments.overrides,
            cwd,
            max_array_size=client.max_array_size() if client is not None else None,
            parallelism=parallelism,
            after=after,
            again="--again" in options,
        )
    if client is None:
        return _run_here(sweep, parallelism or sweep.pack, as_json="--json" in options)
    say_unless_awaited(after, sweep)
    if there and parallelism not in (None, sweep.info()["parallelism"]):
        throttle(sweep, parallelism, client)
    if parallelism is not None and draft.first.requeue.mode == "resubmit":
        say("--array-parallelism does not hold for points that are submitted again, each as a job (requeue=resubmit)")
    return _submit(sweep, client, there=there, as_json="--json" in options)


def _fitting(configs: Iterable[Config], grid: Grid) -> Iterator[Config]:
    """Pass the points on, none of which may be too large. The largest is laid out: each would take seconds."""
    largest: tuple[float, int, Config] | None = None
    for number, config in enumerate(configs):
        with naming_point(grid, number):
            check_fits(config)
            check_prepared(config)
        share = share_of_gpu(config) or 0.0
        if largest is None or share > largest[0]:
            largest = share, number, config
        yield config
    assert largest is not None
    _, number, config = largest
    with naming_point(grid, number):
        for warning in check_memory(config):
            say(f"warning: {warning}")


def _dry_run(grid: Grid, scripts: list[str]) -> int:
    print(*scripts, sep="\n", end="")
    how = f"{len(scripts)} array{'s' if len(scripts) > 1 else ''}" if scripts else "this machine, without SLURM"
    print(f"# {len(grid.points)} points for {how}; what varies: {', '.join(grid.keys) or 'nothing'}")
    return 0


def awaited_runs(config: Config, options: Mapping[str, str]) -> list[RunDir]:
    """Those of --after. Whatever is wrong with them is said before anything is made."""
    if "--after" not in options:
        return []
    starting_after(config, options["--after"])
    return find_runs(options["--after"], rundir.runs_root())


def say_unless_awaited(after: Sequence[RunDir], sweep: Sweep) -> None:
    """A sweep that was there already waits for what it was told to wait for when it was made."""
    if after and [str(run_dir.path) for run_dir in after] != sweep.info()["after"]:
        say(f"--after does not hold for {sweep.id}, which is there already")


def client_of(config: Config) -> SlurmClient:
    """SLURM, which has to be there; with a warning of what is likely to go wrong."""
    client = SlurmClient(slurm_conf_of(config))
    check_slurm_is_here()
    for warning in look_ahead(config, Path(config.job.runs_dir), client):
        say(f"warning: {warning}")
    return client


def _submit(sweep: Sweep, client: SlurmClient, *, there: bool, as_json: bool) -> int:
    submission = submit_arrays(sweep, client, say=say)
    jobs, points = [*submission.found, *submission.submitted], sweep.point_count()
    if as_json:
        print_json({"sweep": sweep.id, "path": str(sweep.path), "points": points, "job_ids": jobs})
    else:
        what = "is there already" if there else f"of {points} points is submitted"
        print(f"sweep {sweep.id} {what}: job {', '.join(jobs) or 'none yet'}\n  {sweep.path}")
        if there and not submission.submitted:
            print(
                f"  the same points as in this command; --again submits them anew   sweep retry {sweep.id}: what failed"
            )
        print(f"  sweep status {sweep.id}   sweep collect {sweep.id}   sweep cancel {sweep.id}   (or: last)")
    check_submitted(submission)
    return 0


def _run_here(sweep: Sweep, at_once: int, *, as_json: bool) -> int:
    """Returns 0 when all points have finished, 75 when a person stopped it, else 1."""
    if not as_json:
        print(f"sweep {sweep.id} of {sweep.point_count()} points\n  {sweep.path}", flush=True)
    with alone(sweep):
        now = sweeps.states_of(sweep)
        unfinished = [run_id for run_id, its in now.items() if its.word not in DONE_WITH and not its.alive]
        to_the_end = run_here(sweep, unfinished, at_once, say, show=at_once == 1 and not as_json)
    states = counts(sweeps.states_of(sweep).values())
    if as_json:
        facts = {"sweep": sweep.id, "path": str(sweep.path), "points": sweep.point_count(), "job_ids": []}
        print_json({**facts, "states": states})
    else:
        print(f"sweep {sweep.id}: {summary(states)}")
        if not set(states) <= DONE_WITH:
            print("  the same command again goes on with what has not finished")
        print(f"  sweep status {sweep.id}   sweep collect {sweep.id}   (or: last)")
    if not to_the_end:
        return EXIT_REQUEUE
    return 0 if set(states) <= DONE_WITH else 1


def main(verb: str, words: list[str]) -> int:
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=VERBS[verb].help)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|status|collect|retry|cancel")
    for name, text in {
        "list": "all sweeps",
        "status": "the points of one, and how they stand",
        "collect": "a table of all points with their metrics, and a picture of a metric over what varies",
        "retry": "submit again what failed, was stopped or lost, and what has not been submitted",
        "cancel": "end all that has not ended",
    }.items():
        action = actions.add_parser(name, help=text)
        if name != "list":
            action.add_argument("sweep", metavar="SWEEP", help="its name, a part of it, a path, or last")
        if name == "collect":
            add_collect_options(action)
        else:
            action.add_argument("--json", action="store_true")
        if name == "status":
            add_watch_options(action)
    options = parser.parse_args(words)
    runs = rundir.runs_root()
    if options.action == "list":
        return _list(runs, as_json=options.json)
    sweep = sweeps.find(options.sweep, runs)
    if options.action == "status":
        return _status(sweep, options)
    if options.action == "collect":
        return _collect(sweep, options)
    return {"retry": _retry, "cancel": _cancel}[options.action](sweep, as_json=options.json)


def _list(runs: Path, *, as_json: bool) -> int:
    say_unreadable(runs)
    rows = [(sweep, sweep.info(), counts(now.values())) for sweep, now in sweeps.states_of_all(sweeps.all_sweeps(runs))]
    if as_json:
        print_json([{"sweep": s.id, "path": str(s.path), "points": s.point_count(), "states": c} for s, _, c in rows])
        return 0
    if not rows:
        raise UsageError(f"there are no sweeps under {runs.resolve()}", hint="python -m slurmtrain -m key=1,2 submit")
    print_table(
        ["sweep", "submitted", "points", "states", "overrides"],
        [
            [
                sweep.id,
                time.strftime("%m-%d %H:%M", time.localtime(info["created"])),
                str(sweep.point_count()),
                summary(states),
                " ".join(info["overrides"]),
            ]
            for sweep, info, states in rows
        ],
    )
    return 0


def _status(sweep: Sweep, options: argparse.Namespace) -> int:
    check_watch_options(options)
    if options.watch:
        return watch(lambda: _view(sweep), options.every)
    points, now = sweep.points(), sweeps.states_of(sweep)
    if options.json:
        print_json(
            {
                "sweep": sweep.id,
                "states": counts(now.values()),
                "points": [point_object(p, now[p.run_id]) for p in points],
            }
        )
        return 0
    print(f"{_headline(sweep, points, now)}\n")
    print_table(_header(points), [_row(point, now[point.run_id]) for point in points])
    say_doubts(now.values())
    return 0


def _view(sweep: Sweep) -> View:
    """All points, first what runs, then what waits, then what has ended."""
    points, now = sweep.points(), sweeps.states_of(sweep)
    headline = _headline(sweep, points, now)
    points.sort(key=lambda point: urgency(now[point.run_id]))
    lines = table_lines(_header(points), [_row(point, now[point.run_id]) for point in points], terminal_width())
    # Whoever waits for its points may be about to begin the next ones.
    over = not any(state.alive for state in now.values()) and not is_claimed(sweep.path)
    return View([headline, "", *lines], doubts(now.values()), over)


def _header(points: Sequence[Point]) -> list[str]:
    return ["point", *(points[0].varied if points else ()), "state", *PROGRESS, "attempts", "run", ""]


def _row(point: Point, now: RunState) -> list[str]:
    attempts = str(len(now.attempts))
    return [
        str(point.number),
        *point.varied.values(),
        now.word,
        *progress_cells(now),
        attempts,
        point.run_id,
        remark(now),
    ]


def _headline(sweep: Sweep, points: Sequence[Point], now: dict[str, RunState]) -> str:
    """How many are in which state, how long all of it takes, and the best loss so far."""
    running = [state.progress for state in now.values() if state.word == "running"]
    # Prepared: their turn comes on this machine, or when there is room for more jobs.
    waiting = [each for each in now.values() if each.word == "prepared" or (each.alive and each.word != "running")]
    words = [f"{sweep.id}: {summary(counts(now.values())) or 'no points yet'}"]
    eta_s = eta_of_all([each.progress for each in waiting], running)
    if eta_s is not None:
        words.append(f"about {roughly(eta_s)} left")
    best = lowest((point.number, now[point.run_id].progress) for point in points)
    if best is not None:
        words.append(f"lowest {best.metric} {best.value:.4f} (point {best.point})")
    if sweep.cancelled_file.exists():
        words.append(f"cancelled, sweep retry {sweep.id} goes on")
    return "; ".join(words)


def _collect(sweep: Sweep, options: argparse.Namespace) -> int:
    now = sweeps.states_of(sweep)
    points = [
        collect.Point(point.number, point.varied, _run_dir_of(sweep, point), now[point.run_id].word)
        for point in sweep.points()
    ]
    print_collected(collect.table_of(points, metric=options.metric, mode=options.mode), options)
    return 0


def _run_dir_of(sweep: Sweep, point: Point) -> RunDir | None:
    run_dir = sweep.run_dir(point.run_id)
    return run_dir if run_dir.info_file.exists() else None


def _retry(sweep: Sweep, *, as_json: bool) -> int:
    if sweep.info()["backend"] == "local":
        return _run_here(sweep, sweep.info()["parallelism"] or sweep.pack, as_json=as_json)
    chosen = add_retry(sweep)
    submission = submit_arrays(sweep, sweeps.client_of(sweep), say=say)
    if as_json:
        print_json({"sweep": sweep.id, "runs": chosen, "job_ids": submission.submitted})
    elif submission.submitted:
        again = f"{len(chosen)} runs of {sweep.id} are" if chosen else f"what was missing of {sweep.id} is"
        print(f"{again} submitted: job {', '.join(submission.submitted)}")
    elif submission.limit is None:
        print(f"there is nothing to retry in {sweep.id}: {summary(counts(sweeps.states_of(sweep).values()))}")
    check_submitted(submission)
    return 0


def _cancel(sweep: Sweep, *, as_json: bool) -> int:
    if sweep.info()["backend"] == "local":
        raise ClusterError(
            f"{sweep.id} runs in the foreground, if at all", hint="Ctrl-C there; cancel RUN ends a single point"
        )
    count = sweep_jobs.cancel(sweep, sweeps.client_of(sweep))
    if as_json:
        print_json({"sweep": sweep.id, "cancelled": count})
    else:
        print(
            f"{count} runs of {sweep.id} are told to end" if count else f"nothing of {sweep.id} is running or waiting"
        )
    return 0


def _positive(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--array-parallelism {text}: a number of runs, at least 1, was expected")
    return int(text)


def say(text: str) -> None:
    print(f"slurmtrain: {text}", file=sys.stderr, flush=True)  # --json has stdout
