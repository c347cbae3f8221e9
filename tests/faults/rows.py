"""The rows of the matrix by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.faults.outcome import Outcome, Trial
from tests.faults.processes import Lane

Work = Callable[[Lane, int], Iterator[Trial]]


class SkippedError(Exception):
    """This row cannot be run here; the text says why."""


@dataclass(frozen=True)
class Row:
    """One kind of fault.

    Attributes:
        work: yields the outcomes of so many trials.
        kind: "trials" or "flips" for rows whose number of trials is asked for; "cases" for a fixed list.
        expected: outcomes that are right; another one is unexplained.
        full, short: trials of the whole matrix and of the tests, for `cases` the rounds through the list.
        lanes: trials at a time, where it is not left to the caller.
    """

    name: str
    work: Work
    kind: str
    expected: frozenset[Outcome]
    full: int
    short: int
    lanes: int | None = None


ROWS: dict[str, Row] = {}


def row(
    name: str,
    *expected: Outcome,
    kind: str = "cases",
    full: int = 20,
    short: int = 2,
    lanes: int | None = None,
) -> Callable[[Work], Work]:
    """Enter a function as a row."""

    def enter(work: Work) -> Work:
        ROWS[name] = Row(name, work, kind, frozenset(expected), full, short, lanes)
        return work

    return enter


def allowed(row: Row, trial: Trial) -> Trial:
    """The trial, or, when its outcome is none that the row expects, the same as unexplained."""
    if trial.outcome in row.expected or trial.outcome in (Outcome.WRONG, Outcome.LOST, Outcome.UNEXPLAINED):
        return trial
    return Trial(Outcome.UNEXPLAINED, f"{trial.outcome.value}, which is not expected here: {trial.detail}")
