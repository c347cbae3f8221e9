"""What all benchmarks share: variants that take turns in one run, and one table of medians and ratios."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
REPOSITORY = Path(__file__).parents[2]


def options(doc: str | None, words: list[str], **defaults: Any) -> argparse.Namespace:
    """Read one option for each default: a number, a text, or a choice of several where it is a tuple."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        several = {"nargs": "+", "choices": default} if isinstance(default, tuple) else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **several)
    return parser.parse_args(words)


def in_turn(variants: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Measure each variant once a round, each round in another order; the first rounds do not count."""
    found: dict[str, list[T]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            value = variants[name]()
            if number >= 0:
                found[name].append(value)
    return found


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        values: one a round.
        wanted: such as "<= 2"; empty where nothing is.
    """

    what: str
    values: Sequence[float]
    unit: str = "s"
    wanted: str = ""


def ratio(what: str, ones: Sequence[float], others: Sequence[float], wanted: str = "") -> Row:
    """Return the ratios of two variants, each of the same round."""
    return Row(what, [one / other for one, other in zip(ones, others, strict=True)], "x", wanted)


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the table: median and range of each row, and whether it is what was wanted."""
    print(f"== {title}; {len(os.sched_getaffinity(0))} CPUs, load average {os.getloadavg()[0]:.1f}")
    width = max(len(row.what) for row in rows)
    for row in rows:
        middle = statistics.median(row.values)
        spread = f"({min(row.values):.3f} to {max(row.values):.3f})" if len(row.values) > 1 else ""
        print(f"  {row.what:{width}} {middle:10.3f} {row.unit:9} {spread}{_verdict(middle, row.wanted)}", flush=True)


def _verdict(value: float, wanted: str) -> str:
    if not wanted:
        return ""
    comparison, limit = wanted.split()
    met = value <= float(limit) if comparison == "<=" else value >= float(limit)
    return f"   wanted {wanted}: {'met' if met else 'MISSED'}"


def seconds_of(action: Callable[[], object]) -> float:
    """Return what `action` takes, by the clock."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def run(words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command in a folder, with this repository's packages, and return what it prints."""
    variables = {**(os.environ if environment is None else environment), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=folder, env=variables, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
    return done.stdout
