"""Where the hours of many runs went: by run, by user or by node.

From the run directories. What they cannot know is added where it can be had: from SLURM's accounting, for how long jobs held
their GPUs; from NVML, which of the GPUs stood idle although a run held them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slurmtrain.choices import Choice
from slurmtrain.errors import ClusterError, UnreadableRecordError
from slurmtrain.report.goodput.causes import HOLDS_NO_GPUS, Goodput, Sums, over_all
from slurmtrain.report.goodput.history import History, read_history
from slurmtrain.report.goodput.run import of_history
from slurmtrain.report.status.look import states
from slurmtrain.report.status.state import RunStatus
from slurmtrain.runs.gpu_use import GpuTotals, NodeGpus, read_gpu_use, total_of
from slurmtrain.runs.ownership import check_parts
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.command_environment import trusted_slurm_conf
from slurmtrain.slurm.parse_values import parse_time
from slurmtrain.system.trust import name_of

STALE_S = 86400.0  # ids of jobs are used again: a start of a job this long before or after a run is another job's


class Grouping(Choice):
    """What a row of the table is about."""

    RUN = "run"
    USER = "user"
    NODE = "node"


@dataclass(frozen=True)
class Row:
    """The hours of a run, of a person, or on a node.

    Attributes:
        who: id of the run, name of the user or of the node.
        runs: number of runs.
        goodput: the sum over them.
        gpus: what was sampled of their GPUs.
        accounted_gpu_s: GPUs x seconds that SLURM's accounting has for their jobs; None if it was not asked, or by node.
    """

    who: str
    runs: int
    goodput: Goodput
    gpus: GpuTotals
    accounted_gpu_s: float | None = None


@dataclass(frozen=True)
class Usage:
    """The table, its last line, and what is to be said beside it.

    Attributes:
        unreadable: why runs are left out, a sentence each.
        no_accounting: why SLURM's accounting is not in it; None if it is.
    """

    rows: tuple[Row, ...]
    total: Row
    unreadable: tuple[str, ...] = ()
    no_accounting: str | None = None


class _Run(NamedTuple):
    """What is kept of a run: its events and segments would fill the memory, if there are thousands of runs.

    Attributes:
        jobs: ids of its jobs; none if SLURM did not run it.
        slurm_conf: the slurm.conf that it names.
        attempts: numbers of those of its attempts that count and have records of how busy their GPUs were.
        goodput: where its time went, without its segments.
    """

    run_dir: RunDir
    jobs: tuple[str, ...]
    slurm_conf: str | None
    attempts: tuple[int, ...]
    goodput: Goodput


class _Open(NamedTuple):
    """A run of which SLURM, or the host of a local run, is to say whether it has ended."""

    run_dir: RunDir
    history: History


class _Part(NamedTuple):
    """What was read of some of the runs.

    Attributes:
        unreadable: why others of them are left out, a sentence each.
    """

    found: list[_Run | _Open]
    unreadable: list[str]


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
    accounted, no_accounting = _accounted(found, since)
    make = {Grouping.RUN: _by_run, Grouping.USER: _by_user, Grouping.NODE: _by_node}[by]
    rows = make(found, samples, accounted)
    total = _row("total", found, samples, accounted)
    return Usage(tuple(rows), total, tuple(unreadable), no_accounting)


def _with_evaluations(run_dirs: Iterable[RunDir]) -> list[RunDir]:
    found: list[RunDir] = []
    for run_dir in run_dirs:
        found.append(run_dir)
        if os.path.isdir(run_dir.evaluations):
            found += run_dir.all_evaluations()
    return found


def _read_all(run_dirs: Sequence[RunDir], since: float | None, now: float) -> tuple[list[_Run], list[str]]:
    """Read all runs; SLURM is asked, once, about those that only it can say the end of."""
    part = _read_some(run_dirs, since, now)
    found = part.found
    open_runs = [each for each in found if isinstance(each, _Open)]
    states_of = states([each.run_dir for each in open_runs]) if open_runs else {}
    runs = []
    for each in found:
        if isinstance(each, _Open):
            state = states_of[each.run_dir.id]
            # Where SLURM, or the host of a local run, cannot be asked, the run counts as alive.
            alive = None if state.status == RunStatus.UNKNOWN else state.alive
            kept = _kept(each.run_dir, each.history, alive, since, now)
        else:
            kept = each
        if kept is not None:
            runs.append(kept)
    return runs, part.unreadable


def _read_some(run_dirs: Sequence[RunDir], since: float | None, now: float) -> _Part:
    part = _Part([], [])
    for run_dir in run_dirs:
        try:
            check_parts(run_dir)
            history = read_history(run_dir)
        except UnreadableRecordError as error:
            part.unreadable.append(error.message)
        except OSError as error:
            part.unreadable.append(f"{run_dir.path}: {error}")
        else:
            ended = None if history.is_open else _kept(run_dir, history, False, since, now)
            if history.is_open or ended is not None:
                part.found.append(_Open(run_dir, history) if ended is None else ended)
    return part


def _kept(run_dir: RunDir, history: History, alive: bool | None, since: float | None, now: float) -> _Run | None:
    """Return what is to be kept of a run; None if nothing of it was after `since`."""
    spent = of_history(history, alive=alive, now=now, with_segments=False)
    numbers = set(spent.nodes)
    if since is not None and spent.end <= since:
        return None
    if since is not None and spent.begin < since:
        cut = of_history(history, alive=alive, now=now).since(since)
        numbers = {each.attempt for each in cut.pieces}
        spent = replace(cut, segments=())
    return _Run(
        run_dir,
        () if history.local or not spent.gpu_seconds else history.jobs,
        history.slurm_conf,
        tuple(
            each.record.number for each in history.tries if each.gpus and each.sampled and each.record.number in numbers
        ),
        spent,
    )


def _samples(run: _Run) -> list[NodeGpus]:
    """Return what was sampled of the GPUs in the attempts that count."""
    return [node for number in run.attempts for node in read_gpu_use(run.run_dir.attempt(number))]


def _accounted(found: Sequence[_Run], since: float | None) -> tuple[dict[RunDir, float], str | None]:
    """Return the GPU seconds of each run by SLURM's accounting, and why there are none, if so.

    Runs that shared a job share its GPUs. Only jobs of runs that held GPUs are asked about.
    """
    of_conf: dict[str | None, dict[str, list[_Run]]] = {}
    known: dict[str, str | None] = {}
    why: str | None = None
    for each in found:
        if not each.jobs:
            continue
        try:
            conf = trusted_slurm_conf(each.slurm_conf, named_by=each.run_dir.info_file, known=known)
        except ClusterError as error:
            why = error.message
            continue
        for job_id in each.jobs:
            of_conf.setdefault(conf, {}).setdefault(job_id, []).append(each)
    result: dict[RunDir, float] = {}
    for conf, jobs in of_conf.items():
        try:
            allocations = SlurmClient(conf).accounted(sorted(jobs))
        except (ClusterError, OSError) as error:
            why = error.message if isinstance(error, ClusterError) else str(error)
            continue
        for allocation in allocations:
            start = parse_time(allocation.start)
            sharing = [run for run in jobs.get(allocation.job_id, ()) if start is not None and _is_of(run, start)]
            for run in sharing:
                seconds = allocation.seconds
                if since is not None and start is not None:
                    seconds = max(0.0, min(seconds, start + seconds - since))
                result[run.run_dir] = result.get(run.run_dir, 0.0) + seconds * allocation.gpus / len(sharing)
    return result, why


def _is_of(run: _Run, start: float) -> bool:
    return run.goodput.begin - STALE_S <= start <= run.goodput.end + STALE_S


# The rows.

Samples = Mapping[RunDir, Sequence[NodeGpus]]
Accounted = Mapping[RunDir, float]


def _row(who: str, runs: Sequence[_Run], samples: Samples, accounted: Accounted) -> Row:
    asked = [accounted[each.run_dir] for each in runs if each.run_dir in accounted] if accounted else []
    whole = {each.run_dir.evaluated_run or each.run_dir for each in runs}
    return Row(
        who,
        len({run_dir.path for run_dir in whole}),
        over_all(each.goodput for each in runs),
        total_of(node for each in runs if each.attempts for node in samples[each.run_dir]),
        sum(asked) if asked else None,
    )


def _grouped(runs: Sequence[_Run], names: Sequence[str], samples: Samples, accounted: Accounted) -> list[Row]:
    groups: dict[str, list[_Run]] = {}
    for each, name in zip(runs, names, strict=True):
        groups.setdefault(name, []).append(each)
    return [_row(name, members, samples, accounted) for name, members in groups.items()]


def _by_run(runs: Sequence[_Run], samples: Samples, accounted: Accounted) -> list[Row]:
    names = [(each.run_dir.evaluated_run or each.run_dir).id for each in runs]
    return _grouped(runs, names, samples, accounted)


def _by_user(runs: Sequence[_Run], samples: Samples, accounted: Accounted) -> list[Row]:
    """Return a row for each owner of folders of runs: what run.json says of its user anybody can write."""
    owners = [_owner(each.run_dir) for each in runs]
    return sorted(_grouped(runs, owners, samples, accounted), key=_cost, reverse=True)


def _owner(run_dir: RunDir) -> str:
    try:
        uid = os.stat(run_dir.path).st_uid
    except OSError:
        return "unknown"
    return name_of(uid) or str(uid)


def _by_node(runs: Sequence[_Run], samples: Samples, accounted: Accounted) -> list[Row]:
    """Return a row for each node on which ranks ran. Its seconds are those of the node, its GPUs a node's part of the run's."""
    sums: dict[str, Sums] = {}
    of_node: dict[str, set[str]] = {}  # paths of the runs
    for each in runs:
        whole = str((each.run_dir.evaluated_run or each.run_dir).path)
        for piece in each.goodput.pieces:
            nodes = each.goodput.nodes.get(piece.attempt, ())
            if piece.cause in HOLDS_NO_GPUS or piece.seconds <= 0:
                continue
            for node in nodes:
                of_node.setdefault(node, set()).add(whole)
                sums.setdefault(node, Sums()).add(piece, len(nodes))
    sampled: dict[str, list[NodeGpus]] = {}
    for each in runs:
        for use in samples.get(each.run_dir, ()):
            sampled.setdefault(use.node, []).append(use)
    rows = [
        Row(name, len(of_node[name]), Goodput(**found.fields()), total_of(sampled.get(name, ())))
        for name, found in sums.items()
    ]
    return sorted(rows, key=_cost, reverse=True)


def _cost(row: Row) -> tuple[float, float]:
    return row.goodput.gpu_hours, row.goodput.held_s
