"""drill: interrupt tiny jobs in every way that the site knows, or a run of the user's own, and say how they come back."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.run_control import open_run
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.control.drill.comparison import TOLERANCE
from slurmtrain.control.drill.judge import Judgement, Result
from slurmtrain.control.drill.own import OwnDrill, OwnPlan, drill_config, drill_run
from slurmtrain.control.drill.scratch import Leftovers
from slurmtrain.control.drill.site import SiteDrill, drill_site
from slurmtrain.control.drill.ways import TINY, is_for_site, keys_of, parse_ways
from slurmtrain.errors import EXIT_REQUEUE, UsageError
from slurmtrain.system.paths import current_folder
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

WITHIN_MIN = 30.0
STEPS = 20
OF_SITE, OF_OWN = ("--ways", "--leaving"), ("--steps", "--stop-at", "--stop-after", "--tolerance")


def main(arguments: Arguments) -> int:
    """Run the verb and return its exit code."""
    options = arguments.options
    if len(arguments.positionals) > 1:
        raise UsageError(f"expected one RUN, but these are several: {' '.join(arguments.positionals)}")
    of_site = not arguments.positionals and is_for_site(arguments.overrides)
    for option in OF_OWN if of_site else OF_SITE:
        if option in options:
            whose = (
                "a run of your own, and this drills the site" if of_site else "the site, and this drills a run of yours"
            )
            raise UsageError(f"{option} is for a drill of {whose}", hint="drill --help")
    within_min = _number(options, "--within", WITHIN_MIN, least=0.1)
    keep = "--keep" in options
    if of_site:
        return _site(arguments, within_min, keep=keep)
    steps = int(_number(options, "--steps", STEPS, least=2, whole=True))
    plan = OwnPlan(
        steps=steps,
        stop_at=int(_number(options, "--stop-at", steps // 2, least=1, whole=True)),
        stop_after_s=_number(options, "--stop-after", 0, least=0) if "--stop-after" in options else None,
        tolerance=_number(options, "--tolerance", TOLERANCE, least=0),
        within_min=within_min,
        keep=keep,
    )
    if plan.stop_at >= plan.steps:
        raise UsageError(f"--stop-at {plan.stop_at}: expected a step before --steps {plan.steps}")
    if arguments.positionals:
        run_dir = open_run(arguments.positionals[0])
        return _own(drill_run(run_dir, plan, arguments.overrides, current_folder()), plan, options)
    config, _ = compose_and_validate(arguments)
    return _own(drill_config(config, plan, arguments.overrides, current_folder()), plan, options)


def _number(options: dict[str, str], name: str, default: float, *, least: float, whole: bool = False) -> float:
    text = options.get(name)
    if text is None:
        return default
    try:
        value = float(int(text)) if whole else float(text)
    except ValueError:
        value = math.nan
    if not (least <= value < math.inf):
        raise UsageError(f"{name} {text}: a {'whole ' if whole else ''}number of at least {least:g} was expected")
    return value


def _site(arguments: Arguments, within_min: float, *, keep: bool) -> int:
    ways = parse_ways(arguments.options.get("--ways"))
    leaving_s = _number(arguments.options, "--leaving", 0.0, least=0)
    given = keys_of(arguments.overrides)
    words = [*arguments.overrides, *TINY, "job.snapshot=none"]
    config, _ = compose_and_validate(dataclasses.replace(arguments, overrides=words))
    found = drill_site(
        config, ways, words, given, current_folder(), within_min=within_min, leaving_s=leaving_s, keep=keep
    )
    if "--json" in arguments.options:
        print_json(site_object(found))
    else:
        print_site(found)
    return exit_code([each.result for each in found.judgements])


def exit_code(results: list[Result]) -> int:
    """Return 1 if something has failed, 75 if nothing could be judged, else 0."""
    if Result.FAILED in results:
        return 1
    return 0 if Result.PASSED in results else EXIT_REQUEUE


# For a person.


def print_site(found: SiteDrill) -> None:
    """Print a row for each way, and below it why others than those that have passed have not, and what to set."""
    rows = [
        [
            each.way,
            each.result,
            _seconds(each.left_after_s, each.time_s),
            _saved(each),
            each.back_by or "",
            _seconds(each.back_after_s),
            {True: "the same", False: "others", None: ""}[each.same_bits],
        ]
        for each in found.judgements
    ]
    print_table(["way", "verdict", "left after", "saved", "came back", "after", "bits"], rows)
    print()
    for each in (each for each in found.judgements if each.result is not Result.PASSED):
        print(printable(f"{each.way}: {each.result}: {each.sentence}" if each.result is Result.FAILED else _line(each)))
        if each.advice is not None:
            print(printable(f"  set: {each.advice}" if each.result is Result.FAILED else f"  {each.advice}"))
    passed = sum(each.result is Result.PASSED for each in found.judgements)
    failed = sum(each.result is Result.FAILED for each in found.judgements)
    rest = len(found.judgements) - passed - failed
    print(f"{passed} passed, {failed} failed, {rest} not tried; {_left(found.took_s, found.leftovers)}")


def _left(took_s: float, leftovers: Leftovers) -> str:
    """Say how long a drill took, and what it has left behind."""
    jobs = "some of its jobs have not ended yet (they are cancelled)" if leftovers.jobs else "no job is left"
    kept = f"\nits runs are kept, to look at: {leftovers.folder}" if leftovers.folder is not None else ""
    return f"it took {took_s:.0f} s, and {jobs}{kept}"


def _line(each: Judgement) -> str:
    return f"{each.way}: {each.sentence}"


def _seconds(value: float | None, of: float | None = None) -> str:
    if value is None:
        return ""
    return f"{value:.1f} s" + (f" of {of:.0f} s" if of is not None else "")


def _saved(each: Judgement) -> str:
    if not each.saved_step:
        return ""
    return f"step {each.saved_step}" + (f", {each.save_s:.1f} s" if each.save_s is not None else "")


def _own(found: OwnDrill, plan: OwnPlan, options: dict[str, str]) -> int:
    if "--json" in options:
        print_json(own_object(found))
    else:
        print(printable(f"{found.result}: {found.sentence}"))
        for cause in found.causes:
            print(printable(f"  likely: {cause}"))
        print(_left(found.took_s, found.leftovers))
    return exit_code([found.result])


# For a program.


def site_object(found: SiteDrill) -> dict[str, Any]:
    """Return what `drill --json` prints of a site.

    took_s   seconds of the whole drill
    kept     folder of its runs; null if it was removed
    jobs_left  whether some of its jobs, which are cancelled, have not ended yet
    ways     for each way: way, result ("passed", "failed" or "not tried"), sentence, advice (what to set), told_after_s,
             left_after_s, time_s (that SLURM gives), saved_step, save_s, back_by, back_after_s, resumed_step and same_bits;
             null where it is not known; undecided: it can be tried here, and what came of it is not known
    """
    return {
        "took_s": found.took_s,
        **_leftovers_object(found.leftovers),
        "ways": [dataclasses.asdict(each) for each in found.judgements],
    }


def _leftovers_object(leftovers: Leftovers) -> dict[str, Any]:
    return {"kept": None if leftovers.folder is None else str(leftovers.folder), "jobs_left": leftovers.jobs}


def own_object(found: OwnDrill) -> dict[str, Any]:
    """Return what `drill RUN --json` prints.

    result       "passed", "failed" or "not tried"
    sentence, causes  what it has shown, and what is likely wrong
    stopped_at, resumed_at  steps; null where they are not known
    same_bits    whether nothing differs; null if nothing was compared
    relative     largest relative difference between two numbers; null for infinity
    steps        steps whose logs were compared
    checkpoint   step of the checkpoint that was compared; null: none
    parting      first difference in the logs: step, name, undisturbed and resumed; null: none
    tensors      names of the tensors that differ, each with relative (null: not comparable) and why
    took_s, kept, jobs_left  as for a site
    """
    same = found.comparison
    divergence = same.divergence if same is not None else None
    return {
        "result": found.result,
        "sentence": found.sentence,
        "causes": list(found.causes),
        "stopped_at": found.stopped_at,
        "resumed_at": found.resumed_at,
        "same_bits": same.same_bits if same is not None and same.anything_compared else None,
        "relative": None if same is None or not math.isfinite(same.largest) else same.largest,
        "steps": list(same.steps) if same is not None else [],
        "checkpoint": same.checkpoint if same is not None else None,
        "parting": None
        if divergence is None
        else {"step": divergence.step, "name": divergence.name, "undisturbed": divergence.a, "resumed": divergence.b},
        "tensors": [
            {
                "name": each.name,
                "relative": each.relative if math.isfinite(each.relative) else None,
                "why": each.why,
            }
            for each in (same.tensors if same is not None else ())
        ],
        "took_s": found.took_s,
        **_leftovers_object(found.leftovers),
    }
