"""runs: compare two runs, and remove those that have ended. Imports no torch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from slurmtrain.cli.checkpoints import remove_all
from slurmtrain.cli.columns import one_line, print_doubts, print_table
from slurmtrain.cli.json_output import fields_of, print_json
from slurmtrain.errors import UsageError
from slurmtrain.observe.metrics import is_detail, is_measured
from slurmtrain.report import prune
from slurmtrain.report.collect import short
from slurmtrain.report.compare import MISSING, Comparison, compare
from slurmtrain.report.page.units import listed, plural
from slurmtrain.runs import lookup
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import words_for_changes
from slurmtrain.system.paths import runs_root

FACTS_SHOWN = 12  # of a group: two environments may share no package
LONGEST_FACT = 60  # characters


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    return _compare(arguments) if arguments.action == "compare" else _prune(arguments)


def _prune(arguments: argparse.Namespace) -> int:
    """Remove the directories of runs that have ended, or say which would be removed."""
    if arguments.older_than is None and arguments.state is None and not arguments.dry_run:
        raise UsageError(
            "this would remove every run that has ended, with its checkpoints",
            hint=f"say which: --older-than DAYS, or --state {' '.join(prune.ENDED)}; --dry-run shows them",
        )
    decided = prune.plan(
        runs_root(),
        now=time.time(),
        words=arguments.state or prune.ENDED,
        older_than_s=(arguments.older_than or 0.0) * 86400,
    )
    for run_id, reason in decided.stays.items():
        print(f"{run_id} stays: {reason}")
    removals = {each.path: each for each in decided.removals}
    code = remove_all(
        {path: each.what for path, each in removals.items()},
        lambda path: prune.remove(removals[path], now=time.time()),
        size_of=lambda path: removals[path].size,
        dry_run=arguments.dry_run,
    )
    print_doubts(decided.states.values())
    return code


def _compare(options: argparse.Namespace) -> int:
    """Print what differs between two runs.

    `--json` prints a and b (id, path, code of each run), the tolerance, and the fields of `Comparison`; a key that one of the
    two lacks has no value for it.
    """
    root = runs_root()
    runs = {"a": lookup.find(options.a, root), "b": lookup.find(options.b, root)}
    found = compare(runs["a"], runs["b"], tolerance=options.tolerance)
    if options.json:
        differences = {
            what: [
                {"key": key, **{side: value for side, value in zip(runs, values, strict=True) if value is not MISSING}}
                for key, *values in of_it
            ]
            for what, of_it in (("config", found.config), ("environment", found.environment))
        }
        sides = {side: fields_of(run, "id path") | {"code": run.info().get("code")} for side, run in runs.items()}
        names = "files unrecorded steps data divergences final first_divergence"
        print_json({**sides, "tolerance": options.tolerance, **differences, **fields_of(found, names)})
        return 0
    for side, run in runs.items():
        print(one_line(f"{side}: {run.path}, {_revision(run)}"))
    print()
    rows: list[tuple[Any, ...]] = [*found.config]
    for group, members in groupby(found.environment, key=lambda each: each[0].partition(".")[0]):
        facts = list(members)
        rows += facts[:FACTS_SHOWN]
        if len(facts) > FACTS_SHOWN:
            rows.append((f"{group}: {len(facts) - FACTS_SHOWN} more (--json has all)", "", ""))
    if rows:
        print_table(["differs", "a", "b"], [[*map(_fact, row)] for row in rows])
        print()
    for sentence in _sentences(found, options.tolerance):
        print(one_line(sentence))
    metrics = []
    for name, values in found.final.items():
        if not is_detail(name):
            parts = found.divergences.get(name)
            # With all digits, since two values may differ in the last one.
            where = "" if parts is None else f"{parts.step}: {parts.a!r} and {parts.b!r}"
            metrics.append([name, *map(short, values), where])
    if metrics:
        print()
        print_table(["metric", "last in a", "last in b", "parts at"], metrics)
    return 0


def _revision(run: RunDir) -> str:
    code = run.info().get("code") or {}
    if not code.get("revision"):
        return "of no known revision"
    return f"revision {str(code['revision'])[:12]}{words_for_changes(code.get('dirty'))}"


def _fact(value: Any) -> str:
    text = "-" if value is MISSING else "null" if value is None else " ".join(str(value).split())
    return text if len(text) <= LONGEST_FACT else f"{text[: LONGEST_FACT - 3]}..."


def _sentences(found: Comparison, tolerance: float) -> Iterator[str]:
    """Say what is the same in both runs, and where they part."""
    if not found.config:
        yield "the configs are the same"
    if found.files:
        yield f"{plural(len(found.files), 'file')} of the snapshots of the code differ: {listed(found.files)}"
    elif found.files is not None:
        yield "no file of the snapshots of the code differs"
    else:
        yield "the files of the code are not compared, since there are no snapshots of both"

    data = found.data
    if found.unrecorded:
        yield f"what {' and '.join(found.unrecorded)} used is not known: no attempt recorded it"
    elif not found.environment:
        yield "they ran with the same packages, driver and image"

    if not data.steps:
        yield "which samples they have seen is not known: no step has the hash in both logs"
    elif data.parts_at is not None:
        yield f"they have seen other samples, or another order, from step {data.parts_at} on"
    else:
        yield f"they have seen the same samples in the same order up to step {data.steps[-1]}"

    steps, first = found.steps, found.first_divergence
    logged = f"the {plural(len(steps), 'step')} that both have logged, {steps[0]} to {steps[-1]}" if steps else ""
    if not steps:
        yield "no step was logged by both"
    elif first is None:
        yield f"they are equal {f'within {tolerance:g}' if tolerance else 'to the last bit'} at {logged}"
    else:
        at = sorted(
            name for name, each in found.divergences.items() if each.step == first.step and not is_measured(name)
        )
        yield f"they diverge at step {first.step} ({listed(at)}), of {logged}"
