"""`-m hydra/sweeper=... submit`: a sweep whose points are chosen by the results of earlier ones."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from slurmtrain.choices import Backend, EvalMode
from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.submit import awaited_runs, client_of, say_unless_awaited
from slurmtrain.config.validate import validate
from slurmtrain.errors import UsageError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.sweep.adaptive import open_sweep
from slurmtrain.sweep.plan import SweepPlan
from slurmtrain.sweep.points import Composer
from slurmtrain.sweep.search import RunFailedError, Search, identity_text, seeds
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)


def search(composer: Composer, arguments: Arguments, parallelism: int | None) -> int:
    """Submit a sweep whose points a sweeper of Hydra's chooses by the results of earlier ones, and wait until it is done."""
    options, overrides = arguments.options, arguments.overrides
    if "--dry-run" in options:
        raise UsageError(
            "--dry-run cannot show a search: its points are chosen by the results of earlier ones",
            hint="without the choices and -m it shows one point",
        )
    base = with_absolute_paths(composer.compose(composer.fixed(overrides)), current_folder())
    validate(base)
    if base.eval.mode == EvalMode.JOB:
        raise UsageError(
            "eval.mode=job in a search: when a point has finished, its evaluations may not have",
            hint="eval.mode=inline",
        )
    after = awaited_runs(base, options)
    client = client_of(base) if base.cluster.backend != Backend.LOCAL else None
    choices, sweeper = composer.choices(overrides), composer.sweeper(overrides)
    identity = identity_text(base, sweeper, choices)
    opened = open_sweep(
        SweepPlan(base, search=identity),
        overrides,
        client,
        parallelism=parallelism,
        after=after,
        again="--again" in options,
    )
    say_unless_awaited(after, opened.sweep)
    log.info(
        "sweep %s: this shell waits for results; if it dies, the same command goes on where it was", opened.sweep.id
    )
    words = [*overrides, *seeds(sweeper, identity)]
    with _all_on_stderr() if "--json" in options else contextlib.nullcontext():
        try:
            Search(composer, opened, list(choices)).sweep(words)
        except RunFailedError as failure:
            raise RunFailedError(
                failure.message,
                hint=f"sweep retry {opened.sweep.id} tries again what failed, and the same command then goes on; "
                "hydra.sweeper.max_failure_rate=0.2 bears some, where the sweeper has it",
            ) from None
    if "--json" in options:
        points, jobs = opened.sweep.point_count(), [opened.sweep.job_id(each) for each in opened.sweep.array_numbers()]
        print_json({"sweep": opened.sweep.id, "path": str(opened.sweep.path), "points": points, "job_ids": jobs})
    else:
        print(f"sweep {opened.sweep.id} is done\n  {opened.sweep.path}")
        print(f"  sweep collect {opened.sweep.id}   sweep status {opened.sweep.id}   (or: last)")
    return 0


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
