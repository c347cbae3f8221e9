"""Where the hours of many runs went: by run or by user, from their directories."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from slurmtrain.choices import Grouping
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.causes import History, of_history, read_history
from slurmtrain.report.goodput import Goodput, over_all
from slurmtrain.report.status.state import RunStatus, states
from slurmtrain.runs.ownership import check_parts
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import name_of
from slurmtrain.system.process import be_killed_with

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
    spent: list[Part] = []
    still_open: dict[RunDir, History] = {}
    unreadable: list[str] = []
    for each in _map(partial(_read, since=since, now=now), run_dirs):
        spent += each.spent
        still_open |= each.still_open
        unreadable += each.unreadable
    for run_dir, state in (states(still_open) if still_open else {}).items():
        # Where SLURM, or the host of a local run, cannot be asked, the run counts as alive.
        alive = None if state.status == RunStatus.UNKNOWN else state.alive
        spent += _spent(run_dir, still_open[run_dir], alive, since, now)
    parts: dict[str, list[Part]] = {}
    for run_dir, goodput in spent:
        whole = run_dir.evaluated_run or run_dir
        who = whole.id if by is Grouping.RUN else _owner(run_dir)
        parts.setdefault(who, []).append((whole, goodput))
    rows = [_row(who, found) for who, found in parts.items()]
    if by is Grouping.RUN:
        rows.sort(key=lambda row: row.who)  # an id begins with its time
    else:
        rows.sort(key=lambda row: (row.goodput.gpu_hours, row.goodput.held_s), reverse=True)
    return Usage(tuple(rows), _row("total", [part for found in parts.values() for part in found]), tuple(unreadable))


def _row(who: str, parts: Sequence[Part]) -> Row:
    return Row(who, len({run for run, _ in parts}), over_all(spent for _, spent in parts))


class Found(NamedTuple):
    """What the files of a run and its evaluations say.

    Attributes:
        spent: the time of those that have ended.
        still_open: those that only SLURM, or the host of a local run, can say the end of.
        unreadable: why others are left out, a sentence each.
    """

    spent: list[Part]
    still_open: dict[RunDir, History]
    unreadable: list[str]


def _read(whole: RunDir, since: float | None, now: float) -> Found:
    found = Found([], {}, [])
    for run_dir in [whole, *(whole.all_evaluations() if os.path.isdir(whole.evaluations) else ())]:
        try:
            check_parts(run_dir)
            history = read_history(run_dir)
        except UnreadableRecordError as error:
            found.unreadable.append(error.message)
        except OSError as error:
            found.unreadable.append(f"{run_dir.path}: {error}")
        else:
            if history.is_open:
                found.still_open[run_dir] = history
            else:
                found.spent.extend(_spent(run_dir, history, False, since, now))
    return found


def _spent(run_dir: RunDir, history: History, alive: bool | None, since: float | None, now: float) -> list[Part]:
    """Return the time of a run from `since` on; nothing if it ended before."""
    goodput = of_history(history, alive=alive, now=now)
    if since is not None:
        if goodput.end <= since:
            return []
        goodput = goodput.since(since)
    # Segments are not kept: of thousands of runs they would fill the memory, and pass from process to process.
    return [(run_dir, replace(goodput, segments=()))]


def _map(read: Callable[[RunDir], Found], run_dirs: Sequence[RunDir]) -> Iterator[Found]:
    """Yield what is read of each run: of hundreds by as many processes as this one may use cores, at most eight."""
    processes = min(len(os.sched_getaffinity(0)), len(run_dirs) // 100, 8)
    if processes < 2:
        yield from map(read, run_dirs)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, _begin, (os.getpid(),)) as pool:
        yield from pool.map(read, run_dirs, chunksize=25)


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    be_killed_with(parent)  # else they would wait for ever for what it never sends


def _owner(run_dir: RunDir) -> str:
    """Return the owner of a run's folder: what run.json says of its user anybody can write."""
    try:
        uid = os.stat(run_dir.path).st_uid
    except OSError:
        return "unknown"
    return name_of(uid) or str(uid)
