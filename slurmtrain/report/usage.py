"""Where the hours of many runs went: by run or by user, from their directories."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slurmtrain.choices import Grouping
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.goodput import Goodput, over_all
from slurmtrain.report.gpu_hours import History, of_history, read_history
from slurmtrain.report.status.state import RunStatus, states
from slurmtrain.runs.ownership import check_parts
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.trust import name_of

Part = tuple[RunDir, Goodput]  # what adds up to a row


@dataclass(frozen=True)
class Row:
    """The hours of a run or of a person.

    Attributes:
        who: id of the run, or name of the user.
        runs: number of runs.
        goodput: the sum over them.
    """

    who: str
    runs: int
    goodput: Goodput


@dataclass(frozen=True)
class Usage:
    """The table, its last line, and what is to be said beside it.

    Attributes:
        unreadable: why runs are left out, a sentence each.
    """

    rows: tuple[Row, ...]
    total: Row
    unreadable: tuple[str, ...] = ()


def usage_of(
    run_dirs: Sequence[RunDir], *, by: Grouping, since: float | None = None, now: float | None = None
) -> Usage:
    """Return where the hours of these runs, and of the jobs that evaluated their checkpoints, went.

    Args:
        since: unix seconds; only what was after it counts. None: all of it.
        now: unix seconds; None: those of this machine's clock.
    """
    now = time.time() if now is None else now
    unreadable: list[str] = []
    parts: dict[str, list[Part]] = {}
    for run_dir, history, alive in _read_all(run_dirs, unreadable):
        spent = of_history(history, alive=alive, now=now)
        if since is not None and spent.end <= since:
            continue
        spent = spent if since is None else spent.since(since)
        whole = run_dir.evaluated_run or run_dir
        who = whole.id if by is Grouping.RUN else _owner(run_dir)
        # Segments are not kept: of thousands of runs they would fill the memory.
        parts.setdefault(who, []).append((whole, replace(spent, segments=())))
    rows = [_row(who, found) for who, found in parts.items()]
    if by is Grouping.RUN:
        rows.sort(key=lambda row: row.who)  # an id begins with its time
    else:
        rows.sort(key=lambda row: (row.goodput.gpu_hours, row.goodput.held_s), reverse=True)
    return Usage(tuple(rows), _row("total", [part for found in parts.values() for part in found]), tuple(unreadable))


def _row(who: str, parts: Sequence[Part]) -> Row:
    return Row(who, len({run for run, _ in parts}), over_all(spent for _, spent in parts))


def _read_all(run_dirs: Sequence[RunDir], unreadable: list[str]) -> Iterator[tuple[RunDir, History, bool | None]]:
    """Yield all runs and their evaluations; SLURM is asked, once, about those that only it can say the end of."""
    still_open: dict[RunDir, History] = {}
    for whole in run_dirs:
        for run_dir in [whole, *(whole.all_evaluations() if os.path.isdir(whole.evaluations) else ())]:
            try:
                check_parts(run_dir)
                history = read_history(run_dir)
            except UnreadableRecordError as error:
                unreadable.append(error.message)
            except OSError as error:
                unreadable.append(f"{run_dir.path}: {error}")
            else:
                if history.is_open:
                    still_open[run_dir] = history
                else:
                    yield run_dir, history, False
    now = states(still_open) if still_open else {}
    for run_dir, history in still_open.items():
        state = now[run_dir]
        # Where SLURM, or the host of a local run, cannot be asked, the run counts as alive.
        yield run_dir, history, None if state.status == RunStatus.UNKNOWN else state.alive


def _owner(run_dir: RunDir) -> str:
    """Return the owner of a run's folder: what run.json says of its user anybody can write."""
    try:
        uid = os.stat(run_dir.path).st_uid
    except OSError:
        return "unknown"
    return name_of(uid) or str(uid)
