"""`-m hydra/sweeper=optuna ... submit`: a sweep whose points are chosen by the results of earlier ones."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.choices import Backend, EvalMode
from slurmtrain.cli.columns import print_table, summary
from slurmtrain.cli.json_output import fields_of, print_json
from slurmtrain.cli.submit import awaited_runs, say_unless_awaited
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.control.checks import check, warn_of_memory
from slurmtrain.control.submitting import PointLook, may_change_request
from slurmtrain.errors import RunFailedError, UsageError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.report import collect
from slurmtrain.report.table_files import short
from slurmtrain.sweep.adaptive import open_sweep
from slurmtrain.sweep.plan import Composer, SweepPlan
from slurmtrain.sweep.search import Search
from slurmtrain.sweep.study import TARGET, Study, Trial, TrialState
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)


def search(composer: Composer, sweeper: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Submit a sweep whose points Optuna chooses by the results of earlier ones, and wait until it is done."""
    overrides, as_json = arguments.overrides, arguments.json
    if sweeper["_target_"] != TARGET:
        raise UsageError(
            f"hydra.sweeper is {sweeper['_target_']}, but a search works only with hydra/sweeper=optuna",
            hint="hydra/launcher=slurmtrain runs the jobs of a Hydra program of your own with any sweeper",
        )
    if arguments.dry_run:
        raise UsageError(
            "--dry-run cannot show a search: its points depend on the results of earlier ones",
            hint="without the choices and -m it shows one point",
        )
    fixed, space = composer.fixed(overrides), composer.space(overrides)
    if not space:
        raise UsageError("a search needs values to choose", hint="optim.lr='tag(log,interval(1e-5,1e-2))'")
    base = with_absolute_paths(composer.compose(fixed), current_folder())
    validate(base)
    if base.eval.mode == EvalMode.JOB:
        raise UsageError(
            "eval.mode=job in a search: its evaluations may not be complete when the point finishes",
            hint="eval.mode=inline",
        )
    study = Study(sweeper, space, base)
    after = awaited_runs(base, arguments.after)
    varies = any(may_change_request(key) for key in space)
    asks = PointLook(base, varies=varies) if base.cluster.backend != Backend.LOCAL else None

    def look(config: Config) -> None:
        dims = validate(config)
        check(config, dims, current_folder())
        warn_of_memory(config, dims)
        if asks is not None:
            asks(config)

    opened = open_sweep(
        SweepPlan(base, search=study.identity),
        overrides,
        asks.client if asks is not None else None,
        parallelism=arguments.array_parallelism,
        after=after,
        again=lambda found: arguments.again,
        look=look,
    )
    name = opened.sweep.id
    say_unless_awaited(after, opened.sweep)
    log.info("sweep %s: this shell waits for results; if it dies, repeat the command to continue", name)
    try:
        Search(composer, opened, study, base, fixed, show=not as_json).run()
    except RunFailedError as failure:
        if not as_json:
            _print_trials(study.trials, list(space))
        running = sum(trial.state == TrialState.RUNNING for trial in study.trials)
        hint = "repeat the command to continue with other trials"
        if running and opened.client is not None:
            hint = f"{running} others go on: the same command waits for them, sweep cancel {name} ends them; {hint}"
        raise RunFailedError(failure.message, hint=hint) from None
    if as_json:
        jobs = [opened.sweep.job_id(each) for each in opened.sweep.array_numbers()]
        facts = {"sweep": name, "path": str(opened.sweep.path), "points": opened.sweep.point_count(), "job_ids": jobs}
        print_json({**facts, "trials": [_as_json(trial) for trial in study.trials]})
    else:
        _print_trials(study.trials, list(space))
        print(f"sweep {name} is done\n  {opened.sweep.path}")
        print(f"  sweep collect {name}   sweep status {name}   usage {name}   (or: last)")
    return 0


def _as_json(trial: Trial) -> dict[str, object]:
    varied = {key.lstrip("+"): value for key, value in trial.chosen.items()}
    return {"trial": trial.number, "varied": varied, **fields_of(trial, "state value steps pruned_at run why")}


def _print_trials(trials: Sequence[Trial], keys: Sequence[str]) -> None:
    cells = [
        [
            str(trial.number),
            trial.state,
            *(short(collect.value_of(trial.chosen[key])) for key in keys),
            short(trial.value),
            short(trial.steps),
            trial.run or "",
        ]
        for trial in trials
    ]
    print_table(["trial", "state", *(key.lstrip("+") for key in keys), "value", "steps", "run"], cells)
    print(summary(dict(Counter(str(trial.state) for trial in trials).most_common())))
