"""drill: interrupt tiny jobs in every way that the site knows, or a run of the user's own, and say how they come back."""

from __future__ import annotations

import argparse
import logging

from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import fields_of, print_json
from slurmtrain.cli.stop import open_run
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.frozen import load_frozen
from slurmtrain.control.drill.judge import Result
from slurmtrain.control.drill.run import Drill, drill
from slurmtrain.control.drill.ways import TINY, Plan, Way, is_for_site, keys_of, parse_ways
from slurmtrain.errors import EXIT_REQUEUE, UsageError
from slurmtrain.launch.changes import changed
from slurmtrain.launch.snapshot import source_of_run
from slurmtrain.system.paths import current_folder
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

OF_A_WAY = "way left_after_s time_s saved_step stopped_at resumed_at comparison"


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code: 1 if a way has failed, 75 if none could be judged, else 0."""
    words, cwd, given, source = arguments.overrides, current_folder(), None, None
    if arguments.run is None and is_for_site(words):
        given, words = keys_of(words), [*words, *TINY]
    every = list(Way) if given is not None else [Way.EARLY_SIGNAL]
    plan = Plan(
        ways=every if arguments.ways is None else parse_ways(arguments.ways),
        steps=arguments.steps,
        stop_at=arguments.stop_at or arguments.steps // 2,
        leaving_s=arguments.leaving,
        within_min=arguments.within,
    )
    if plan.stop_at >= plan.steps:
        raise UsageError(f"--stop-at {plan.stop_at}: expected a step before --steps {plan.steps}")
    if arguments.run is None:
        config, _ = compose_and_validate(argparse.Namespace(**{**vars(arguments), "overrides": words}))
    else:
        run_dir = open_run(arguments.run)
        config, source = load_frozen(run_dir.config_file), source_of_run(run_dir)
        if words:
            config, _ = changed(config, words, cwd)
        if source.root is None:
            log.warning("run %s runs in place: all runs of the drill share what the program writes there", run_dir.id)
    found = drill(config, plan, words, cwd, source=source, given=given)
    if arguments.json:
        ways = [{**fields_of(its, OF_A_WAY), **verdict._asdict()} for its, verdict in found.verdicts]
        print_json({"ways": ways, **fields_of(found, "took_s kept jobs_left")})
    else:
        _print(found)
    return exit_code([verdict.result for _, verdict in found.verdicts])


def exit_code(results: list[Result]) -> int:
    """Return 1 if something has failed, 75 if nothing could be judged, else 0."""
    if Result.FAILED in results:
        return 1
    return 0 if Result.PASSED in results else EXIT_REQUEUE


def _print(found: Drill) -> None:
    """Print a row for each way; below, what has happened in those that have not passed, and what to do."""
    rows = []
    for its, verdict in found.verdicts:
        left = "" if its.left_after_s is None else f"{its.left_after_s:.1f} s"
        bits = ""
        if its.comparison is not None and verdict.result in (Result.PASSED, Result.FAILED):
            bits = "the same" if its.comparison.same_bits else "others"
        if left and its.time_s:
            left += f" of {its.time_s:.0f} s"
        saved = f"step {its.saved_step}" if its.saved_step else ""
        rows.append([str(its.way), verdict.result, left, saved, bits])
    print_table(["way", "verdict", "left after", "saved", "bits"], rows)
    print()
    for its, verdict in found.verdicts:
        if verdict.result is not Result.PASSED or its.is_program or len(found.verdicts) == 1:
            print(printable(f"{its.way} {verdict.result}: {verdict.sentence}"))
            for hint in verdict.hints:
                print(printable(f"  hint: {hint}"))
    results = [verdict.result for _, verdict in found.verdicts]
    counts = ", ".join(f"{results.count(each)} {each}" for each in Result if each in results)
    jobs = "some of its jobs have not ended yet (they are cancelled)" if found.jobs_left else "no job is left"
    print(f"{counts}; it took {found.took_s:.0f} s, and {jobs}")
    if found.kept is not None:
        print(f"its runs are kept, to look at: {found.kept}")
