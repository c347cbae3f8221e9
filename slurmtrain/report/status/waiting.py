"""Wait for runs to end, with few looks at their files and one squeue call now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from slurmtrain.errors import SlurmtrainError
from slurmtrain.report.status.state import RunState, is_over, states
from slurmtrain.runs.run_dir import RunDir

LOOK_EVERY_S = 0.5  # at the runs' own files, which say that they have ended
LOOKS_PER_S = 200  # at most, at the files of all runs together
ASK_EVERY_S = 20.0  # SLURM, about those that have not: a job may be gone without a word


class RunFailedError(SlurmtrainError):
    """A run has ended without a result: it failed, or its job is gone."""


class RunStoppedError(RunFailedError):
    """A run was cancelled, or something else has ended it before it had finished; `resume` continues it."""


class WaitTimeoutError(SlurmtrainError, TimeoutError):
    """What was waited for has not happened in the given time. It goes on."""


class EndWatch:
    """Runs whose end is waited for. Others may be added meanwhile.

    Args:
        ask_first: ask SLURM at once, too; else only what the runs' own files say is seen at first.
        is_to_come: returns whether a run that nobody has is one that somebody will still start.

    Attributes:
        seen: what was known of each run when somebody last asked SLURM.
    """

    def __init__(self, *, ask_first: bool = True, is_to_come: Callable[[RunState], bool] = lambda now: False):
        self._is_to_come = is_to_come
        self._waiting: dict[RunDir, None] = {}
        self._asked = time.monotonic() - (ASK_EVERY_S if ask_first else 0.0)
        self._revived = set[RunDir]()
        self.seen: dict[RunDir, RunState] = {}

    @property
    def waiting(self) -> list[RunDir]:
        """The runs that have not been seen to end."""
        return list(self._waiting)

    @property
    def pause_s(self) -> float:
        """The seconds before the next look. The files are on a shared file system: there is no event to await."""
        return max(LOOK_EVERY_S, len(self._waiting) / LOOKS_PER_S)

    def add(self, run_dirs: Iterable[RunDir]) -> None:
        self._waiting.update(dict.fromkeys(run_dirs))

    def forget(self, run_dirs: Iterable[RunDir]) -> None:
        """Wait no longer for these."""
        for run_dir in run_dirs:
            self._waiting.pop(run_dir, None)

    def look(self) -> Iterator[tuple[RunDir, RunState]]:
        """Yield the runs that have ended since the last look, with their states.

        Raises:
            UnreadableRecordError: the files of a run cannot be used.
        """
        ask = time.monotonic() - self._asked >= ASK_EVERY_S
        if ask:
            self._asked = time.monotonic()
        looked = [run_dir for run_dir in self._waiting if ask or (run_dir not in self._revived and is_over(run_dir))]
        now = states(looked)
        alive = {run_dir for run_dir in looked if now[run_dir].alive}
        self._revived = self._revived | alive if not ask else set()
        for run_dir in looked:
            its = self.seen[run_dir] = now[run_dir]
            if not its.alive and not self._is_to_come(its):
                del self._waiting[run_dir]
                yield run_dir, its


def as_they_end(
    run_dirs: Iterable[RunDir],
    *,
    timeout_s: float | None = None,
    ask_first: bool = True,
    is_to_come: Callable[[RunState], bool] = lambda now: False,
) -> Iterator[tuple[RunDir, RunState]]:
    """Yield every run as it ends, with its state; those that have ended already come first.

    Args:
        timeout_s: seconds to wait for all of them.
        ask_first, is_to_come: as in `EndWatch`.

    Raises:
        WaitTimeoutError: they have not all ended by then.
        UnreadableRecordError: the files of a run cannot be used.
    """
    began, watch = time.monotonic(), EndWatch(ask_first=ask_first, is_to_come=is_to_come)
    watch.add(run_dirs)
    while watch.waiting:
        yield from watch.look()
        if watch.waiting:
            left = watch.pause_s if timeout_s is None else began + timeout_s - time.monotonic()
            if left <= 0:
                left_over = watch.waiting
                which = f"run {left_over[0].id} has" if len(left_over) == 1 else f"{len(left_over)} runs have"
                raise WaitTimeoutError(f"{which} not ended after {timeout_s:g} s; nothing is changed by that")
            time.sleep(min(watch.pause_s, left))
