"""The rows of the matrix by name, what a trial can end in, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from tests.faults.processes import Lane


class Outcome(Enum):
    """Columns of the table, in its order."""

    NEWEST = "restored newest"
    OLDER = "restored older"
    ERROR = "clear error"
    WRONG = "SILENT WRONG"  # something was restored that no save ever was given
    LOST = "LOST BOTH"  # nothing could be restored, although a committed checkpoint had not been touched
    UNEXPLAINED = "unexplained"  # a traceback, a hang, a process left over, damage not noticed, an outcome not foreseen


BAD = (Outcome.WRONG, Outcome.LOST, Outcome.UNEXPLAINED)


@dataclass(frozen=True)
class Trial:
    """One trial's outcome; `detail` says under which circumstances, so that it can be understood without a rerun."""

    outcome: Outcome
    detail: str = ""


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


def row_of_many(
    name: str, *expected: Outcome, kind: str = "cases", full: int = 20, short: int = 2, lanes: int | None = None
) -> Callable[[Work], Work]:
    """Enter a function that does so many trials as a row."""

    def enter(work: Work) -> Work:
        ROWS[name] = Row(name, work, kind, frozenset(expected), full, short, lanes)
        return work

    return enter


def row(
    name: str, *expected: Outcome, kind: str = "cases", full: int = 20, short: int = 2, lanes: int | None = None
) -> Callable[[Callable[[Lane], Trial]], Work]:
    """Enter a function that does one trial as a row."""

    def enter(one: Callable[[Lane], Trial]) -> Work:
        def work(lane: Lane, count: int) -> Iterator[Trial]:
            for _ in range(count):
                with lane.trial():
                    yield one(lane)

        return row_of_many(name, *expected, kind=kind, full=full, short=short, lanes=lanes)(work)

    return enter


def load() -> None:
    """Enter the rows of all modules."""
    from tests.faults import damage, endings, hostile_runs, jobs, kills, saves  # noqa: F401


def allowed(row: Row, trial: Trial) -> Trial:
    """The trial, or, when its outcome is none that the row expects, the same as unexplained."""
    if trial.outcome in row.expected or trial.outcome in (Outcome.WRONG, Outcome.LOST, Outcome.UNEXPLAINED):
        return trial
    return Trial(Outcome.UNEXPLAINED, f"{trial.outcome.value}, which is not expected here: {trial.detail}")


@dataclass
class Tally:
    """All trials of a row."""

    row: str
    skipped: str = ""
    seconds: float = 0.0
    counts: Counter[Outcome] = field(default_factory=Counter)
    bad: list[Trial] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        self.counts[trial.outcome] += 1
        if trial.outcome in BAD:
            self.bad.append(trial)

    @property
    def trials(self) -> int:
        return self.counts.total()

    def __getitem__(self, outcome: Outcome) -> int:
        return self.counts[outcome]


def table(tallies: Iterable[Tally]) -> str:
    """The table, and below it what was wrong, at most five trials of a row."""
    lines = [f"{'row':42}{'trials':>8}" + "".join(f"{outcome.value:>17}" for outcome in Outcome) + f"{'seconds':>9}"]
    explanations = []
    for tally in tallies:
        if tally.skipped:
            lines.append(f"{tally.row:42}{'-':>8}   skipped: {tally.skipped}")
            continue
        columns = "".join(f"{tally[outcome]:>17}" for outcome in Outcome)
        lines.append(f"{tally.row:42}{tally.trials:>8}{columns}{tally.seconds:>9.0f}")
        explanations += [f"{tally.row}: {trial.outcome.value}: {trial.detail}" for trial in tally.bad[:5]]
    return "\n".join([*lines, *explanations])
