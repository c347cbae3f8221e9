"""What the exit code of a program of the user's own means: pure functions to the exit codes of our contract."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.jobs.program_start import STOPS

SIGNAL_LAG_S, SHORT_SIGNAL_LAG_S = 1.0, 0.25
# Exit codes of a program that died of a stop signal, directly or as a shell reports it.
DIED_OF_A_STOP = {sign for number in STOPS for sign in (-number, 128 + number)}


@dataclass(frozen=True)
class FinishedWhen:
    """The value of job.finished_when: an exit code, or a file. One of the two is None."""

    code: int | None
    file: Path | None

    @classmethod
    def of(cls, text: str | None) -> FinishedWhen | None:
        if text is None:
            return None
        return cls(int(text), None) if text.isdigit() else cls(None, Path(text))

    def is_there(self, context: AttemptContext) -> bool:
        """Return whether the file exists: in the run directory, or in the folder in which the program runs."""
        return self.file is not None and any(
            (folder / self.file).exists() for folder in context.run_dir.program_folders
        )


def contract_code(code: int, *, told: bool, rule: FinishedWhen | None, there: bool) -> int:
    """Return the exit code of our contract for the end of a program.

    Exit code 0 means that it has finished, unless it was told to stop before: many programs that trap the signal save
    and exit with 0. If one had finished all the same, it exits with 0 at once when it is started again.

    Args:
        code: the program's own; minus the signal's number when one has killed it.
        told: this rank was told to stop before the program ended.
        there: the file that `rule` names exists.
    """
    if rule is not None and rule.code is not None:
        if code == rule.code:
            return 0
        if code == 0:
            return EXIT_REQUEUE
    if rule is not None and rule.file is not None and (code == 0 or (told and code in DIED_OF_A_STOP)):
        return 0 if there else EXIT_REQUEUE
    if code in (EXIT_REQUEUE, EXIT_CONFIG):
        return code
    return EXIT_REQUEUE if told else code


def signal_lag_s(code: int) -> float:
    """Return how many seconds after the end of a program a stop signal may come that was the cause of that end.

    A program that was killed by another signal has not ended for it. One that exits with an error may have handled it so; but
    when a rank has crashed, all others are soon told to stop, too, and that must not be taken for the cause.
    """
    if code in DIED_OF_A_STOP or code == 0:
        return SIGNAL_LAG_S
    return SHORT_SIGNAL_LAG_S if code > 0 else 0.0


def is_crash(code: int, *, told: bool, rule: FinishedWhen | None) -> bool:
    """Return whether a program has crashed that ended with this code, as `contract_code`."""
    return contract_code(code, told=told, rule=rule, there=False) not in (0, EXIT_REQUEUE, EXIT_CONFIG)


def described(code: int) -> str:
    """Return the end of a program in words: "exit code 1", "signal 9 (SIGKILL)"."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
