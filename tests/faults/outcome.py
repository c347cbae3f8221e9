"""What a trial can end in, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


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
