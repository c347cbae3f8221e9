"""runs compare: what differs between two runs, as text or JSON."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import asdict
from itertools import groupby
from typing import Any

from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import UsageError
from slurmtrain.observe.metrics import is_detail, is_measured
from slurmtrain.report import compare
from slurmtrain.report.compare import MISSING, Comparison, Environments
from slurmtrain.report.page.units import plural
from slurmtrain.report.table_files import short
from slurmtrain.runs import lookup
from slurmtrain.runs.code_record import words_for_changes
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.records import printable

FILES_SHOWN = 10
FACTS_SHOWN = 12  # of a group: two environments may share no package
LONGEST_FACT = 60  # characters


def compare_runs(options: argparse.Namespace) -> int:
    """Print what differs between two runs."""
    if not (math.isfinite(options.tolerance) and options.tolerance >= 0):
        raise UsageError(
            f"--tolerance {options.tolerance:g} is not a valid tolerance", hint="0, or a small number such as 1e-6"
        )
    root = lookup.runs_root()
    a, b = lookup.find(options.a, root), lookup.find(options.b, root)
    found = compare.compare(a, b, tolerance=options.tolerance, weights=options.weights)
    if options.json:
        print_json(_comparison_object(a, b, found, options.tolerance))
    else:
        _print_comparison(a, b, found, options.tolerance)
    return 0


def _print_comparison(a: RunDir, b: RunDir, found: Comparison, tolerance: float) -> None:
    print(
        f"a: {a.path}\nb: {b.path}{' (the same run)' if os.path.realpath(a.path) == os.path.realpath(b.path) else ''}\n"
    )
    if found.config:
        print_table(
            ["config", "a", "b"], [[printable(key), _value(left), _value(right)] for key, left, right in found.config]
        )
    else:
        print("the configs are the same")
    print(f"\n{_code_sentence(a, b, found)}")
    _print_environments(found.environment)
    print(_data_sentence(found))
    print(f"{_divergence_sentence(found, tolerance)}\n{_weights_sentence(found)}")
    if found.final:
        print()
        print_table(
            ["metric", "last in a", "last in b", "parts at"],
            [_metric_row(name, found) for name in found.final if not is_detail(name)],
        )


def _value(value: Any) -> str:
    return "-" if value is MISSING else "null" if value is None else printable(str(value))


def _code_sentence(a: RunDir, b: RunDir, found: Comparison) -> str:
    files = found.files
    left, right = _revision(a), _revision(b)
    revisions = f"the code is {left} in both" if left == right else f"the code is {left} in a, {right} in b"
    if files is None and found.same_changes is not None:
        return f"{revisions}; git's diffs of tracked files {'are equal' if found.same_changes else 'differ'}"
    if files is None:
        return f"{revisions}; its files are not compared, since there are no snapshots of both"
    if not files:
        return f"{revisions}; no file of the snapshots differs"
    shown = ", ".join(map(printable, files[:FILES_SHOWN])) + (
        f" and {len(files) - FILES_SHOWN} more" if len(files) > FILES_SHOWN else ""
    )
    verb = "differs" if len(files) == 1 else "differ"
    return f"{revisions}; {plural(len(files), 'file')} of the snapshots {verb}: {shown}"


def _print_environments(found: Environments) -> None:
    """Print what the runs ran with, as far as it differs, by groups."""
    if found.missing:
        which = " and ".join(found.missing)
        print(f"what {which} used is not known: no attempt of {'them' if len(found.missing) > 1 else 'it'} recorded it")
    elif not found.differences:
        print("they ran with the same packages, driver, image and variables")
    rows: list[list[str]] = []
    for group, members in groupby(found.differences, key=lambda each: each.group):
        differing = list(members)
        shown = differing[:FACTS_SHOWN]
        rows += [[f"{group} {printable(each.name)}", _fact(each.a), _fact(each.b)] for each in shown]
        if len(differing) > len(shown):
            rows.append([f"{group}: {len(differing) - len(shown)} more (--json has all)", "", ""])
    if rows:
        print()
        print_table(["ran with", "a", "b"], rows)
        print()
    for name, groups in found.within.items():
        print(f"not all attempts of {name} ran with the same {', '.join(groups)}; the newest is compared")


def _fact(value: str | None) -> str:
    if value is None:
        return "-"
    text = " ".join(printable(value).split())
    return text if len(text) <= LONGEST_FACT else f"{text[: LONGEST_FACT - 3]}..."


def _revision(run: RunDir) -> str:
    code = run.info().get("code") or {}
    revision = code.get("revision")
    if not revision:
        return "of no known revision" + (" with changes" if code.get("dirty") else "")
    return f"revision {printable(str(revision)[:12])}{words_for_changes(code.get('dirty'))}"


def _divergence_sentence(found: Comparison, tolerance: float) -> str:
    if not found.steps:
        return "no step was logged by both"
    within = f"within {tolerance:g}" if tolerance else "to the last bit"
    only = len(found.steps) == 1
    several = f"{len(found.steps)} steps that both have logged, {found.steps[0]} to {found.steps[-1]}"
    first = found.first_divergence
    if first is None:
        every = f"step {found.steps[0]}, the only one that both have logged" if only else f"all {several}"
        return f"they are equal {within} at {every}"
    names = [name for name, each in found.divergences.items() if each.step == first.step and not is_measured(name)]
    of = "the only one that both have logged" if only else f"of {several}"
    return f"they diverge at step {first.step} ({printable(', '.join(sorted(names)))}), {of}"


def _data_sentence(found: Comparison) -> str:
    data = found.data
    if not data.steps:
        return "which samples they have seen is not known: no step has the hash in both logs"
    if data.parts_at is not None:
        return f"they have seen other samples, or another order, from step {data.parts_at} on"
    return f"they have seen the same samples in the same order up to step {data.steps[-1]}"


def _weights_sentence(found: Comparison) -> str:
    weights = found.weights
    left = f"; not compared: {weights.left}" if weights.left else ""
    if weights.parts_at is not None:
        names = ", ".join(map(printable, weights.tensors[:3])) + (", ..." if len(weights.tensors) > 3 else "")
        tensors = plural(len(weights.tensors), "tensor")
        return f"their weights part at the checkpoint of step {weights.parts_at} ({tensors}: {names})"
    if not weights.steps:
        return f"their weights: no checkpoint of the same step was compared{left}"
    steps = ", ".join(map(str, weights.steps))
    return f"their weights are equal to the last bit in the checkpoints of step {steps}{left}"


def _metric_row(name: str, found: Comparison) -> list[str]:
    a, b = found.final[name]
    divergence = found.divergences.get(name)
    where = "" if divergence is None else f"{divergence.step}: {' and '.join(told_apart(divergence.a, divergence.b))}"
    return [printable(name), short(a), short(b), where]


def told_apart(a: float, b: float) -> tuple[str, str]:
    """Return two numbers that differ with as many digits as it takes to see it: 9 if they suffice, at most 17."""
    for digits in range(9, 17):
        shown = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if shown[0] != shown[1]:
            return shown
    return f"{a:.17g}", f"{b:.17g}"


def _comparison_object(a: RunDir, b: RunDir, found: Comparison, tolerance: float) -> dict[str, Any]:
    """Return what `runs compare A B --json` prints.

    a, b         id, path and code (revision, dirty) of each run
    config       a list of key, a, b; without a or b if that run has no such key
    files        paths of code that differ; null when there are no snapshots of both
    same_changes  whether both have the same changes to tracked files of the same revision, where files is null; null when
                 that is not known
    environment  differences: a list of group, name, a, b (null where one has no such fact) of what the newest attempts ran
                 with; missing: the runs of which that is not known; within: groups in which attempts of one run differ
    tolerance    the tolerance that was given
    steps        number of steps that both have logged
    parted_at    the first step at which a metric that does not measure speed differs; null when none does
    data         steps: number of steps at which both have logged the hash of their samples; parted_at: the first at which
                 it differs, or null
    weights      steps: steps of the checkpoints that were compared; parted_at: the first that differs, or null; tensors: names
                 of tensors that differ there; left: why others were not compared, or null
    metrics      by name: final (a and b), and where it differs first (step, a, b) or null
    """
    return {
        **{
            side: {"id": run.id, "path": str(run.path), "code": run.info().get("code")}
            for side, run in (("a", a), ("b", b))
        },
        "config": [
            {"key": key, **{side: value for side, value in (("a", left), ("b", right)) if value is not MISSING}}
            for key, left, right in found.config
        ],
        "files": found.files,
        "same_changes": found.same_changes,
        "environment": {
            "differences": [asdict(each) for each in found.environment.differences],
            "missing": found.environment.missing,
            "within": found.environment.within,
        },
        "tolerance": tolerance,
        "steps": len(found.steps),
        "parted_at": found.first_divergence.step if found.first_divergence is not None else None,
        "data": {"steps": len(found.data.steps), "parted_at": found.data.parts_at},
        "weights": {
            "steps": found.weights.steps,
            "parted_at": found.weights.parts_at,
            "tensors": found.weights.tensors,
            "left": found.weights.left,
        },
        "metrics": {
            name: {
                "final": {"a": final[0], "b": final[1]},
                "parts": vars(found.divergences[name]) if name in found.divergences else None,
            }
            for name, final in found.final.items()
        },
    }
