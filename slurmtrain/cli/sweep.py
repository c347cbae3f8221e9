"""Sweeps: `-m ... submit`, and the verbs that look at one or steer it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from slurmtrain import rundir
from slurmtrain.cli.arguments import Arguments, Parser
from slurmtrain.cli.as_json import point_object, print_json
from slurmtrain.cli.collect import add_collect_options, print_collected
from slurmtrain.cli.runs import print_table
from slurmtrain.cli.submit import starting_after
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.compose import Primary, search_folders
from slurmtrain.config.points import Grid, check, composing
from slurmtrain.errors import EXIT_REQUEUE, ClusterError, UsageError
from slurmtrain.launch import collect
from slurmtrain.launch import sweep as sweeps
from slurmtrain.launch.after import find_runs
from slurmtrain.launch.here import run_here
from slurmtrain.launch.state import RunState
from slurmtrain.launch.submit import check_slurm_is_here, slurm_conf_of
from slurmtrain.launch.sweep import Sweep
from slurmtrain.launch.throttle import throttle
from slurmtrain.launch.timeplan import look_ahead
from slurmtrain.rundir import RunDir
from slurmtrain.runtime.slurm import SlurmClient


def submit(arguments: Arguments) -> int:
    """Expand, compose and validate all points, then submit what is not there yet, or run it here with cluster=local."""
    options, cwd = arguments.options, Path.cwd()
    if "--follow" in options:
        raise UsageError("--follow does not go with -m", hint="sweep status last shows how the points stand")
    parallelism = _positive(options.get("--array-parallelism"))
    grid, draft = _expanded(arguments, cwd)
    after = []
    if "--after" in options:
        starting_after(draft.first, options["--after"])  # whatever is wrong with that is said before anything is made
        after = find_runs(options["--after"], rundir.runs_root())
    if "--dry-run" in options:
        return _dry_run(grid, sweeps.preview(draft, cwd, parallelism, after))
    local = draft.first.cluster.backend == "local"
    client = None if local else _client(draft)
    sweep = None if "--again" in options else sweeps.find_same(draft)
    there = sweep is not None
    if sweep is None:
        sweep = sweeps.make(
            draft,
            grid.varied,
            arguments.overrides,
            cwd,
            max_array_size=_max_array_size(client) if client is not None else None,
            parallelism=parallelism,
            after=after,
            again="--again" in options,
        )
    if client is None:
        return _run_here(sweep, parallelism or sweep.pack, as_json="--json" in options)
    if there and after and [str(run_dir.path) for run_dir in after] != sweep.info()["after"]:
        _say(f"--after does not hold for {sweep.id}, which is there already")
    if there and parallelism not in (None, sweep.info()["parallelism"]):
        throttle(sweep, parallelism, client)
    if parallelism is not None and draft.first.requeue.mode == "resubmit":
        _say("--array-parallelism does not hold for points that are submitted again, each as a job (requeue=resubmit)")
    return _submit(sweep, client, there=there, as_json="--json" in options)


def _expanded(arguments: Arguments, cwd: Path) -> tuple[Grid, sweeps.Draft]:
    options = arguments.options
    name = options.get("--config-name", "config")
    primary = Primary(name, search_folders(name, options.get("--config-dir"), options.get("--config-path")))
    with composing(primary) as composer:
        grid = composer.expand(arguments.overrides)
        return grid, sweeps.draft(check(composer, grid), cwd)


def _dry_run(grid: Grid, scripts: list[str]) -> int:
    print(*scripts, sep="\n", end="")
    how = f"{len(scripts)} array{'s' if len(scripts) > 1 else ''}" if scripts else "this machine, without SLURM"
    print(f"# {len(grid.points)} points for {how}; what varies: {', '.join(grid.keys) or 'nothing'}")
    return 0


def _client(draft: sweeps.Draft) -> SlurmClient:
    """SLURM, which has to be there; with a warning of what is likely to go wrong."""
    client = SlurmClient(slurm_conf_of(draft.first))
    check_slurm_is_here()
    for warning in look_ahead(draft.first, Path(draft.first.job.runs_dir), client):
        _say(f"warning: {warning}")
    return client


def _max_array_size(client: SlurmClient) -> int | None:
    size = client.configuration().get("MaxArraySize", "")
    return int(size) or 1 if size.isdigit() else None  # 0: the cluster has no arrays


def _submit(sweep: Sweep, client: SlurmClient, *, there: bool, as_json: bool) -> int:
    submission = sweeps.submit_arrays(sweep, client, say=_say)
    jobs, points = [*submission.found, *submission.submitted], sweep.info()["points"]
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
    sweeps.check_submitted(submission)
    return 0


def _run_here(sweep: Sweep, at_once: int, *, as_json: bool) -> int:
    """Returns 0 when all points have finished, 75 when a person stopped it, else 1."""
    if not as_json:
        print(f"sweep {sweep.id} of {sweep.info()['points']} points\n  {sweep.path}", flush=True)
    to_the_end = run_here(sweep, at_once, _say, show=at_once == 1 and not as_json)
    counts = _counts(sweeps.states_of(sweep))
    if as_json:
        facts = {"sweep": sweep.id, "path": str(sweep.path), "points": sweep.info()["points"], "job_ids": []}
        print_json({**facts, "states": counts})
    else:
        print(f"sweep {sweep.id}: {_summary(counts)}")
        if set(counts) != {"finished"}:
            print("  the same command again goes on with what has not finished")
        print(f"  sweep status {sweep.id}   sweep collect {sweep.id}   (or: last)")
    if not to_the_end:
        return EXIT_REQUEUE
    return 0 if set(counts) <= {"finished", "removed"} else 1


def main(verb: str, words: list[str]) -> int:
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=VERBS[verb].help)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|status|collect|retry|cancel")
    for name, text in {
        "list": "all sweeps",
        "status": "the points of one, and how they stand",
        "collect": "a table of all points with their metrics, and a picture of a metric over what varies",
        "retry": "submit again what failed, was stopped or lost, or could not be submitted",
        "cancel": "end all that has not ended",
    }.items():
        action = actions.add_parser(name, help=text)
        if name != "list":
            action.add_argument("sweep", metavar="SWEEP", help="its name, a part of it, a path, or last")
        if name == "collect":
            add_collect_options(action)
        else:
            action.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    runs = rundir.runs_root()
    if options.action == "list":
        return _list(runs, as_json=options.json)
    sweep = sweeps.find(options.sweep, runs)
    if options.action == "status":
        return _status(sweep, as_json=options.json)
    if options.action == "collect":
        return _collect(sweep, options)
    return {"retry": _retry, "cancel": _cancel}[options.action](sweep, as_json=options.json)


def _list(runs: Path, *, as_json: bool) -> int:
    rows = [(sweep, sweep.info(), _counts(now)) for sweep, now in sweeps.states_of_all(sweeps.all_sweeps(runs))]
    if as_json:
        print_json([{"sweep": s.id, "path": str(s.path), "points": i["points"], "states": c} for s, i, c in rows])
        return 0
    if not rows:
        raise UsageError(f"there are no sweeps under {runs.resolve()}", hint="python -m slurmtrain -m key=1,2 submit")
    print_table(
        ["sweep", "submitted", "points", "states", "overrides"],
        [
            [
                sweep.id,
                time.strftime("%m-%d %H:%M", time.localtime(info["created"])),
                str(info["points"]),
                _summary(counts),
                " ".join(info["overrides"]),
            ]
            for sweep, info, counts in rows
        ],
    )
    return 0


def _status(sweep: Sweep, *, as_json: bool) -> int:
    points, now = sweep.points(), sweeps.states_of(sweep)
    if as_json:
        print_json(
            {"sweep": sweep.id, "states": _counts(now), "points": [point_object(p, now[p.run_id]) for p in points]}
        )
        return 0
    keys = list(points[0].varied)
    rows = []
    for point in points:
        state = now[point.run_id]
        step = "?" if state.step is None else str(state.step)
        varied = [point.varied[key] for key in keys]
        rows.append(
            [str(point.number), *varied, state.word, step, str(len(state.attempts)), point.run_id, state.sentence]
        )
    print_table(["point", *keys, "state", "step", "attempts", "run", ""], rows)
    print(f"\n{sweep.id}: {_summary(_counts(now))}")
    for doubt in dict.fromkeys(state.doubt for state in now.values() if state.doubt):
        print(f"SLURM cannot be asked: {doubt}")
    return 0


def _collect(sweep: Sweep, options: argparse.Namespace) -> int:
    now = sweeps.states_of(sweep)
    points = [
        collect.Point(point.number, point.varied, _run_dir_of(sweep, point), now[point.run_id].word)
        for point in sweep.points()
    ]
    print_collected(collect.table_of(points, metric=options.metric, mode=options.mode), options)
    return 0


def _run_dir_of(sweep: Sweep, point: sweeps.Point) -> RunDir | None:
    run_dir = sweep.run_dir(point.run_id)
    return run_dir if run_dir.info_file.exists() else None


def _retry(sweep: Sweep, *, as_json: bool) -> int:
    if sweep.info()["backend"] == "local":
        return _run_here(sweep, sweep.info()["parallelism"] or sweep.pack, as_json=as_json)
    chosen = sweeps.add_retry(sweep)
    submission = sweeps.submit_arrays(sweep, sweeps.client_of(sweep), say=_say)
    if as_json:
        print_json({"sweep": sweep.id, "runs": chosen, "job_ids": submission.submitted})
    elif submission.submitted:
        print(
            f"{len(chosen)} runs of {sweep.id} are chosen to be submitted again: job {', '.join(submission.submitted)}"
        )
    elif submission.limit is None:
        print(f"there is nothing to retry in {sweep.id}: {_summary(_counts(sweeps.states_of(sweep)))}")
    sweeps.check_submitted(submission)
    return 0


def _cancel(sweep: Sweep, *, as_json: bool) -> int:
    if sweep.info()["backend"] == "local":
        raise ClusterError(
            f"{sweep.id} runs in the foreground, if at all", hint="Ctrl-C there; cancel RUN ends a single point"
        )
    count = sweeps.cancel(sweep, sweeps.client_of(sweep))
    if as_json:
        print_json({"sweep": sweep.id, "cancelled": count})
    else:
        print(
            f"{count} runs of {sweep.id} are told to end" if count else f"nothing of {sweep.id} is running or waiting"
        )
    return 0


def _counts(now: dict[str, RunState]) -> dict[str, int]:
    return dict(Counter(state.word for state in now.values()).most_common())


def _summary(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def _positive(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--array-parallelism {text}: a number of runs, at least 1, was expected")
    return int(text)


def _say(text: str) -> None:
    print(f"slurmtrain: {text}", file=sys.stderr)  # --json has stdout
