"""Where the hours of many runs went: by run, by user or by node.

From the run directories, and what NVML has shown of the GPUs that stood idle although a run held them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slurmtrain.choices import Grouping
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.goodput.causes import HOLDS_NO_GPUS, Goodput, Segment, over_all, sums_of
from slurmtrain.report.goodput.history import History, read_history
from slurmtrain.report.goodput.run import of_history
from slurmtrain.report.status.look import states
from slurmtrain.report.status.state import RunStatus
from slurmtrain.runs.gpu_use import GpuTotals, NodeGpus, read_gpu_use, total_of
from slurmtrain.runs.ownership import check_parts
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.trust import name_of


@dataclass(frozen=True)
class Row:
    """The hours of a run, of a person, or on a node.

    Attributes:
        who: id of the run, name of the user or of the node.
        runs: number of runs.
        goodput: the sum over them.
        gpus: what was sampled of their GPUs.
    """

    who: str
    runs: int
    goodput: Goodput
    gpus: GpuTotals


@dataclass(frozen=True)
class Usage:
    """The table, its last line, and what is to be said beside it.

    Attributes:
        unreadable: why runs are left out, a sentence each.
    """

    rows: tuple[Row, ...]
    total: Row
    unreadable: tuple[str, ...] = ()


class _Run(NamedTuple):
    """What is kept of a run: its events and segments would fill the memory, if there are thousands of runs.

    Attributes:
        attempts: numbers of those of its attempts that count and have records of how busy their GPUs were.
        goodput: where its time went, without its segments.
        parts: its segments, those of an attempt with the same cause as one.
    """

    run_dir: RunDir
    attempts: tuple[int, ...]
    goodput: Goodput
    parts: tuple[Segment, ...]


def usage_of(
    run_dirs: Sequence[RunDir], *, by: Grouping, since: float | None = None, now: float | None = None
) -> Usage:
    """Return where the hours of these runs, and of the jobs that evaluated their checkpoints, went.

    Args:
        since: unix seconds; only what was after it counts. None: all of it.
        now: unix seconds; None: those of this machine's clock.
    """
    now = time.time() if now is None else now
    found, unreadable = _read_all(_with_evaluations(run_dirs), since, now)
    samples = {each.run_dir: _samples(each) for each in found if each.attempts}
    make = {Grouping.RUN: _by_run, Grouping.USER: _by_user, Grouping.NODE: _by_node}[by]
    return Usage(tuple(make(found, samples)), _row("total", found, samples), tuple(unreadable))


def _with_evaluations(run_dirs: Iterable[RunDir]) -> list[RunDir]:
    found: list[RunDir] = []
    for run_dir in run_dirs:
        found.append(run_dir)
        if os.path.isdir(run_dir.evaluations):
            found += run_dir.all_evaluations()
    return found


def _read_all(run_dirs: Sequence[RunDir], since: float | None, now: float) -> tuple[list[_Run], list[str]]:
    """Read all runs; SLURM is asked, once, about those that only it can say the end of."""
    found: dict[RunDir, _Run | History | None] = {}
    unreadable = []
    for run_dir in run_dirs:
        try:
            check_parts(run_dir)
            history = read_history(run_dir)
        except UnreadableRecordError as error:
            unreadable.append(error.message)
        except OSError as error:
            unreadable.append(f"{run_dir.path}: {error}")
        else:
            found[run_dir] = history if history.is_open else _kept(run_dir, history, False, since, now)
    open_runs = {run_dir: each for run_dir, each in found.items() if isinstance(each, History)}
    states_of = states(open_runs) if open_runs else {}
    for run_dir, history in open_runs.items():
        state = states_of[run_dir.id]
        # Where SLURM, or the host of a local run, cannot be asked, the run counts as alive.
        alive = None if state.status == RunStatus.UNKNOWN else state.alive
        found[run_dir] = _kept(run_dir, history, alive, since, now)
    return [each for each in found.values() if isinstance(each, _Run)], unreadable


def _kept(run_dir: RunDir, history: History, alive: bool | None, since: float | None, now: float) -> _Run | None:
    """Return what is to be kept of a run; None if nothing of it was after `since`."""
    spent = of_history(history, alive=alive, now=now)
    if since is not None and spent.end <= since:
        return None
    if since is not None:
        spent = spent.since(since)
    lengths: dict[Segment, float] = {}
    for each in spent.segments:
        key = each._replace(start=0.0, end=0.0)
        lengths[key] = lengths.get(key, 0.0) + each.seconds
    numbers = {each.attempt for each in spent.segments}
    sampled = (each for each in history.tries if each.gpus and each.sampled and each.record.number in numbers)
    return _Run(
        run_dir,
        tuple(each.record.number for each in sampled),
        replace(spent, segments=()),
        tuple(key._replace(end=seconds) for key, seconds in lengths.items()),
    )


def _samples(run: _Run) -> list[NodeGpus]:
    """Return what was sampled of the GPUs in the attempts that count."""
    return [node for number in run.attempts for node in read_gpu_use(run.run_dir.attempt(number))]


# The rows.

Samples = Mapping[RunDir, Sequence[NodeGpus]]


def _row(who: str, runs: Sequence[_Run], samples: Samples) -> Row:
    whole = {each.run_dir.evaluated_run or each.run_dir for each in runs}
    return Row(
        who,
        len({run_dir.path for run_dir in whole}),
        over_all(each.goodput for each in runs),
        total_of(node for each in runs if each.attempts for node in samples[each.run_dir]),
    )


def _grouped(runs: Sequence[_Run], name_of_run: Callable[[_Run], str], samples: Samples) -> list[Row]:
    groups: dict[str, list[_Run]] = {}
    for each in runs:
        groups.setdefault(name_of_run(each), []).append(each)
    return [_row(name, members, samples) for name, members in groups.items()]


def _by_run(runs: Sequence[_Run], samples: Samples) -> list[Row]:
    return _grouped(runs, lambda each: (each.run_dir.evaluated_run or each.run_dir).id, samples)


def _by_user(runs: Sequence[_Run], samples: Samples) -> list[Row]:
    """Return a row for each owner of folders of runs: what run.json says of its user anybody can write."""
    return sorted(_grouped(runs, _owner, samples), key=_cost, reverse=True)


def _owner(run: _Run) -> str:
    try:
        uid = os.stat(run.run_dir.path).st_uid
    except OSError:
        return "unknown"
    return name_of(uid) or str(uid)


def _by_node(runs: Sequence[_Run], samples: Samples) -> list[Row]:
    """Return a row for each node on which ranks ran. Its seconds are those of the node, its GPUs a node's part of the run's."""
    parts: dict[str, list[Segment]] = {}
    of_node: dict[str, set[str]] = {}  # paths of the runs
    for each in runs:
        whole = str((each.run_dir.evaluated_run or each.run_dir).path)
        for part in each.parts:
            nodes = each.goodput.nodes.get(part.attempt, ())
            for node in nodes if part.cause not in HOLDS_NO_GPUS else ():
                of_node.setdefault(node, set()).add(whole)
                parts.setdefault(node, []).append(part._replace(gpus=part.gpus / len(nodes)))
    sampled: dict[str, list[NodeGpus]] = {}
    for each in runs:
        for use in samples.get(each.run_dir, ()):
            sampled.setdefault(use.node, []).append(use)
    rows = [
        Row(name, len(of_node[name]), Goodput(**sums_of(found)), total_of(sampled.get(name, ())))
        for name, found in parts.items()
    ]
    return sorted(rows, key=_cost, reverse=True)


def _cost(row: Row) -> tuple[float, float]:
    return row.goodput.gpu_hours, row.goodput.held_s
