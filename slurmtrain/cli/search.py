"""`-m hydra/sweeper=... submit`: a sweep whose points are chosen by the results of earlier ones."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.choices import Backend, EvalMode, Pruner
from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.columns import print_table, summary
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.submit import awaited_runs, say_unless_awaited
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.control.submitting import PointLook, may_change_request
from slurmtrain.errors import RunFailedError, UsageError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.sweep.adaptive import OpenSweep, open_sweep
from slurmtrain.sweep.optuna_search import OptunaSearch, check_settings
from slurmtrain.sweep.optuna_study import TARGET
from slurmtrain.sweep.plan import SweepPlan
from slurmtrain.sweep.points import Composer, values_of
from slurmtrain.sweep.search import Search, identity_text, seeds
from slurmtrain.sweep.trials import Trial, TrialState, table
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)


def search(composer: Composer, arguments: Arguments, parallelism: int | None) -> int:
    """Submit a sweep whose points a sweeper of Hydra's chooses by the results of earlier ones, and wait until it is done."""
    options, overrides = arguments.options, arguments.overrides
    if "--dry-run" in options:
        raise UsageError(
            "--dry-run cannot show a search: its points depend on the results of earlier ones",
            hint="without the choices and -m it shows one point",
        )
    base = with_absolute_paths(composer.compose(composer.fixed(overrides)), current_folder())
    choices, sweeper = composer.choices(overrides), composer.sweeper(overrides)
    _check(base, sweeper)
    after = awaited_runs(base, options)
    # Other sweepers, and a function for the search space, may choose what no override says.
    hidden = sweeper["_target_"] != TARGET or bool(sweeper.get("custom_search_space"))
    varies = hidden or any(may_change_request(key) for key in choices)
    look = PointLook(base, varies=varies) if base.cluster.backend != Backend.LOCAL else None
    client = look.client if look is not None else None
    identity = identity_text(base, sweeper, choices)
    opened = open_sweep(
        SweepPlan(base, search=identity),
        overrides,
        client,
        parallelism=parallelism,
        after=after,
        again="--again" in options,
        look=look,
    )
    say_unless_awaited(after, opened.sweep)
    log.info("sweep %s: this shell waits for results; if it dies, repeat the command to continue", opened.sweep.id)
    words = [*overrides, *seeds(sweeper, identity)]
    trials: list[Trial] | None = None
    with _all_on_stderr() if "--json" in options else contextlib.nullcontext():
        if sweeper["_target_"] == TARGET:
            trials = _with_optuna(composer, opened, base, words, list(choices), as_json="--json" in options)
        else:
            _with_another_sweeper(composer, opened, words, list(choices))
    if "--json" in options:
        points, jobs = opened.sweep.point_count(), [opened.sweep.job_id(each) for each in opened.sweep.array_numbers()]
        facts = {"sweep": opened.sweep.id, "path": str(opened.sweep.path), "points": points, "job_ids": jobs}
        print_json({**facts, **({"trials": _as_json(trials, list(choices))} if trials is not None else {})})
    else:
        print(f"sweep {opened.sweep.id} is done\n  {opened.sweep.path}")
        print(f"  sweep collect {opened.sweep.id}   sweep status {opened.sweep.id}   (or: last)")
    return 0


def _check(base: Config, sweeper: Mapping[str, Any]) -> None:
    """Check the config of the points, and whether this sweeper can search with it.

    Raises:
        UsageError, ConfigError: it cannot.
    """
    validate(base)
    if base.eval.mode == EvalMode.JOB:
        raise UsageError(
            "eval.mode=job in a search: its evaluations may not be complete when the point finishes",
            hint="eval.mode=inline",
        )
    if sweeper["_target_"] == TARGET:
        check_settings(sweeper, base)
    elif base.search.pruner != Pruner.NONE:
        raise UsageError(
            f"search.pruner={base.search.pruner} works only with Optuna, but hydra.sweeper is {sweeper['_target_']}",
            hint="hydra/sweeper=optuna",
        )


def _with_another_sweeper(composer: Composer, opened: OpenSweep, words: Sequence[str], searched: Sequence[str]) -> None:
    """Let a sweeper of Hydra's that is not Optuna's choose the points.

    Raises:
        RunFailedError: a point has failed.
    """
    try:
        Search(composer, opened, searched).sweep(words)
    except RunFailedError as failure:
        raise RunFailedError(
            failure.message,
            hint=f"sweep retry {opened.sweep.id} retries failed points; then repeat the command; "
            "hydra.sweeper.max_failure_rate=0.2 bears some, where the sweeper has it",
        ) from None


def _with_optuna(
    composer: Composer, opened: OpenSweep, base: Config, words: Sequence[str], searched: Sequence[str], *, as_json: bool
) -> list[Trial]:
    """Search with Optuna, print the table of trials unless JSON is asked for, and return them."""
    name = opened.sweep.id
    folder = str(opened.sweep.path).replace("'", "\\'")
    composed = composer.with_hydra([*words, f"hydra.sweep.dir='{folder}'"])
    found = OptunaSearch(composer, opened, base, composed, composer.of_the_program(words), searched)
    try:
        found.run()
    except RunFailedError as failure:
        if not as_json:
            _print_trials(found.trials, searched)
        running = sum(trial.state == TrialState.RUNNING for trial in found.trials)
        hint = f"sweep retry {name} retries failed points; then repeat the command"
        if running and opened.client is not None:
            hint = f"{running} others go on: the same command waits for them, sweep cancel {name} ends them; {hint}"
        raise RunFailedError(failure.message, hint=hint) from None
    if not as_json:
        _print_trials(found.trials, searched)
    return found.trials


def _print_trials(trials: Sequence[Trial], searched: Sequence[str]) -> None:
    rows = table(trials)
    gpus = any(trial.spent.gpus for trial in trials)
    unit = "GPU h" if gpus else "hours"
    keys = [key.lstrip("+") for key in searched]
    pruned = any(trial.state == TrialState.PRUNED for trial in trials)
    header = ["trial", "state", *keys, "value", "steps", unit, *([f"saved {unit}"] if pruned else []), "run"]
    cells = []
    for row in rows:
        trial, chosen = row.trial, values_of(row.trial.overrides, searched)
        value = "" if trial.value is None else f"{trial.value:.6g}"
        steps = "" if trial.steps is None else str(trial.steps)
        saved = "" if row.saved_h is None else f"{row.saved_h:.3g}"
        numbers = [value, steps, f"{row.held_h:.3g}" if trial.run_id is not None else "", *([saved] if pruned else [])]
        cells.append(
            [
                str(trial.number),
                trial.state,
                *(_short(chosen.get(key, "")) for key in keys),
                *numbers,
                trial.run_id or "",
            ]
        )
    print_table(header, cells)
    count = Counter(trial.state for trial in trials)
    held, saved_h = sum(row.held_h for row in rows), sum(row.saved_h or 0.0 for row in rows)
    words = summary({str(state): number for state, number in count.most_common()})
    print(
        f"{words}; {held:.3g} {unit}" + (f", about {saved_h:.3g} saved by pruning" if count[TrialState.PRUNED] else "")
    )


def _short(value: str) -> str:
    """Return a chosen number with six digits; other values as they are."""
    try:
        return f"{float(value):.6g}" if len(value) > 8 else value
    except ValueError:
        return value


def _as_json(trials: Sequence[Trial], searched: Sequence[str]) -> list[dict[str, object]]:
    return [
        {
            "trial": row.trial.number,
            "state": row.trial.state,
            "varied": values_of(row.trial.overrides, searched),
            "value": row.trial.value,
            "steps": row.trial.steps,
            "pruned_at": row.trial.pruned_at,
            "gpus": row.trial.spent.gpus,
            "hours": row.trial.spent.held_s / 3600,
            "gpu_hours": row.held_h if row.trial.spent.gpus else 0.0,
            "saved_hours": None if row.saved_h is None else row.saved_h / (row.trial.spent.gpus or 1.0),
            "saved_gpu_hours": row.saved_h if row.trial.spent.gpus else None,
            "run": row.trial.run_id,
            "why": row.trial.why,
        }
        for row in table(trials)
    ]


@contextlib.contextmanager
def _all_on_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, also for Hydra's log and the ranks on this machine, since stdout is for the JSON alone."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
