"""runs: compare two runs, pack one, and remove those that have ended. Imports no torch."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import emit, print_json
from slurmtrain.cli.status import say_doubts, say_unreadable
from slurmtrain.cli.units import format_size
from slurmtrain.errors import UsageError
from slurmtrain.observe.metrics import is_detail, is_measured
from slurmtrain.report import prune
from slurmtrain.report.compare import MISSING, Comparison, compare
from slurmtrain.report.page.units import plural
from slurmtrain.report.table_files import short
from slurmtrain.runs import lookup
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import words_for_changes
from slurmtrain.system.paths import runs_root
from slurmtrain.system.records import printable

OTHER_ARCHIVES = (".zip", ".xz", ".txz", ".bz2", ".tbz2", ".zst", ".7z")  # what a bundle is not


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    return {"compare": _compare, "bundle": _bundle, "prune": _prune}[arguments.action](arguments)


def _bundle(arguments: argparse.Namespace) -> int:
    from slurmtrain.launch.bundle import write_bundle

    name = arguments.file
    if name is not None and (name == "-" or Path(name).suffix.lower() in OTHER_ARCHIVES):
        raise UsageError(f"a bundle is a file whose name ends in .tar.gz or .tar, not {name}", hint="my-run.tar.gz")
    if name is not None and (Path(name).is_dir() or not Path(name).resolve().parent.is_dir()):
        raise UsageError(f"cannot write {name}: it is a folder, or its folder does not exist", hint="my-run.tar.gz")
    run_dir = lookup.find(arguments.run, runs_root())
    target = Path(name or f"{run_dir.path.parent.name}-{run_dir.id}.tar.gz")
    digest = write_bundle(run_dir, target)
    size = target.stat().st_size
    emit(
        {"run": run_dir.id, "file": str(target.resolve()), "sha256": digest, "size": size},
        f"wrote {target} ({format_size(size)})\n  sha256 {digest}\n"
        f"  run it again, here or elsewhere: submit --from {target}",
        as_json=arguments.json,
    )
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    """Remove the directories of runs that have ended, or say which would be removed."""
    if arguments.older_than is None and arguments.state is None and not arguments.dry_run:
        raise UsageError(
            "this would remove every run that has ended, with its checkpoints",
            hint=f"say which: --older-than DAYS, or --state {' '.join(prune.ENDED)}; --dry-run shows them",
        )
    say_unreadable(runs_root())
    decided = prune.plan(
        runs_root(),
        now=time.time(),
        words=arguments.state or prune.ENDED,
        older_than_s=(arguments.older_than or 0.0) * 86400,
        keep_checkpoints=arguments.keep_checkpoints,
    )
    for run_id, reason in decided.stays.items():
        print(f"{run_id} stays: {reason}")
    freed, failed = 0, 0
    for removal in decided.removals:
        if not arguments.dry_run:
            try:
                if not prune.remove(removal, now=time.time()):
                    print(f"{removal.path.name} is kept: it has just changed")
                    continue
            except OSError as error:
                print(f"{removal.path.name} cannot be removed: {error.strerror}", file=sys.stderr)
                failed += 1
                continue
        freed += removal.size
        left = ", all but its checkpoints" if removal.keep else ""
        verb = "would remove" if arguments.dry_run else "removed"
        print(f"{verb} {removal.path.name} ({removal.what}, {format_size(removal.size)}{left})")
    if decided.removals:
        print(f"{format_size(freed)} {'would be' if arguments.dry_run else 'were'} freed ({freed} bytes)")
    else:
        print("nothing to remove")
    say_doubts(decided.states.values())
    return 1 if failed else 0


NAMES_SHOWN = 10  # files and tensors
FACTS_SHOWN = 12  # of a group: two environments may share no package
LONGEST_FACT = 60  # characters


def _compare(options: argparse.Namespace) -> int:
    """Print what differs between two runs.

    `--json` prints a and b (id, path, code of each run), the tolerance, and the fields of `Comparison`; a key that one of the
    configs lacks has no value for it.
    """
    root = runs_root()
    runs = {"a": lookup.find(options.a, root), "b": lookup.find(options.b, root)}
    found = compare(runs["a"], runs["b"], tolerance=options.tolerance, weights=options.weights)
    if not options.json:
        _print_comparison(runs, found, options.tolerance)
        return 0
    config = [
        {"key": key, **{side: value for side, value in zip(runs, values, strict=True) if value is not MISSING}}
        for key, *values in found.config
    ]
    sides = {side: {"id": run.id, "path": str(run.path), "code": run.info().get("code")} for side, run in runs.items()}
    first = {"first_divergence": found.first_divergence and asdict(found.first_divergence)}
    print_json({**sides, "tolerance": options.tolerance, **asdict(found), "config": config, **first})
    return 0


def _print_comparison(runs: dict[str, RunDir], found: Comparison, tolerance: float) -> None:
    same = len({os.path.realpath(run.path) for run in runs.values()}) == 1
    print("\n".join(f"{side}: {run.path}" for side, run in runs.items()) + f"{' (the same run)' if same else ''}\n")
    environment = found.environment
    facts: list[tuple[str, Any, Any]] = []
    for group, members in groupby(environment.differences, key=lambda each: each.group):
        differing = [
            (f"{group} {each.name}", MISSING if each.a is None else each.a, MISSING if each.b is None else each.b)
            for each in members
        ]
        facts += differing[:FACTS_SHOWN]
        if len(differing) > FACTS_SHOWN:
            facts.append((f"{group}: {len(differing) - FACTS_SHOWN} more (--json has all)", "", ""))
    revisions = [_revision(run) for run in runs.values()]
    rows = [*found.config, *([("code", *revisions)] if len({*revisions}) == 2 else []), *facts]
    if rows:
        print_table(["differs", "a", "b"], [[_fact(key), _fact(left), _fact(right)] for key, left, right in rows])
        print()
    if not found.config:
        print("the configs are the same")
    print(_code_sentence(revisions, found))
    if environment.missing:
        print(f"what {' and '.join(environment.missing)} used is not known: no attempt recorded it")
    elif not facts:
        print("they ran with the same packages, driver, image and variables")
    for name, groups in environment.within.items():
        print(f"not all attempts of {name} ran with the same {', '.join(groups)}; the newest is compared")
    print(_data_sentence(found))
    print(_divergence_sentence(found, tolerance))
    print(_weights_sentence(found))
    if metrics := [_metric_row(name, found) for name in found.final if not is_detail(name)]:
        print()
        print_table(["metric", "last in a", "last in b", "parts at"], metrics)


def _fact(value: Any) -> str:
    text = "-" if value is MISSING else "null" if value is None else " ".join(printable(str(value)).split())
    return text if len(text) <= LONGEST_FACT else f"{text[: LONGEST_FACT - 3]}..."


def _names(found: Sequence[str]) -> str:
    more = f" and {len(found) - NAMES_SHOWN} more" if len(found) > NAMES_SHOWN else ""
    return ", ".join(map(printable, found[:NAMES_SHOWN])) + more


def _revision(run: RunDir) -> str:
    code = run.info().get("code") or {}
    revision = code.get("revision")
    changes = words_for_changes(code.get("dirty")) if revision else " with changes" if code.get("dirty") else ""
    return (f"revision {printable(str(revision)[:12])}" if revision else "of no known revision") + changes


def _code_sentence(revisions: list[str], found: Comparison) -> str:
    words = f"the code is {revisions[0]} in both" if len({*revisions}) == 1 else "the revisions of the code differ"
    if found.files:
        verb = "differs" if len(found.files) == 1 else "differ"
        return f"{words}; {plural(len(found.files), 'file')} of the snapshots {verb}: {_names(found.files)}"
    if found.files is not None:
        return f"{words}; no file of the snapshots differs"
    if found.same_changes is not None:
        return f"{words}; git's diffs of tracked files {'are equal' if found.same_changes else 'differ'}"
    return f"{words}; its files are not compared, since there are no snapshots of both"


def _data_sentence(found: Comparison) -> str:
    data = found.data
    if not data.steps:
        return "which samples they have seen is not known: no step has the hash in both logs"
    if data.parts_at is not None:
        return f"they have seen other samples, or another order, from step {data.parts_at} on"
    return f"they have seen the same samples in the same order up to step {data.steps[-1]}"


def _divergence_sentence(found: Comparison, tolerance: float) -> str:
    if not found.steps:
        return "no step was logged by both"
    first = found.first_divergence
    logged = f"the {plural(len(found.steps), 'step')} that both have logged, {found.steps[0]} to {found.steps[-1]}"
    if first is None:
        return f"they are equal {f'within {tolerance:g}' if tolerance else 'to the last bit'} at {logged}"
    names = [name for name, each in found.divergences.items() if each.step == first.step and not is_measured(name)]
    return f"they diverge at step {first.step} ({_names(sorted(names))}), of {logged}"


def _weights_sentence(found: Comparison) -> str:
    weights = found.weights
    if weights.parts_at is not None:
        tensors = f"{plural(len(weights.tensors), 'tensor')}: {_names(weights.tensors)}"
        return f"their weights part at the checkpoint of step {weights.parts_at} ({tensors})"
    left = f"; not compared: {weights.left}" if weights.left else ""
    if not weights.steps:
        return f"their weights: no checkpoint of the same step was compared{left}"
    steps = ", ".join(map(str, weights.steps))
    return f"their weights are equal to the last bit in the checkpoints of step {steps}{left}"


def _metric_row(name: str, found: Comparison) -> list[str]:
    a, b = found.final[name]
    divergence = found.divergences.get(name)
    # With all digits, since two values may differ in the last one.
    where = "" if divergence is None else f"{divergence.step}: {divergence.a!r} and {divergence.b!r}"
    return [printable(name), short(a), short(b), where]
