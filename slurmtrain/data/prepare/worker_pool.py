"""A pool of processes that prepare units, and the parent process that hands the units out.

The processes are children of the parent and end when it ends, for whatever reason. Stop signals reach the parent alone,
which then kills the processes: finished units are kept, and units that were begun are done again.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context, resource_tracker

from slurmtrain.data.format.reading import DataError
from slurmtrain.data.format.tokenizers import Tokenizer, load_tokenizer
from slurmtrain.data.prepare.unit import UnitRecord, prepare_unit, read_record
from slurmtrain.data.prepare.unit_plan import PreparePlan, Unit, file_errors_reported
from slurmtrain.data.prepare.units_done import units_done
from slurmtrain.errors import ConfigError
from slurmtrain.system.process import be_killed_with
from slurmtrain.system.signals import STOP_SIGNALS

LOOK_EVERY_S = 0.2  # for a stop


@dataclass
class Tally:
    """The progress of a share of the units: what was done before this process started, and what has been done since.

    Attributes:
        size, total: bytes of the inputs, read and in all.
        before: the part of `size` that was done before this process started.
        documents, bad: number of documents, and of records that could not be read.
    """

    size: int = 0
    total: int = 0
    before: int = 0
    documents: int = 0
    bad: int = 0

    def add(self, unit: Unit, record: UnitRecord) -> None:
        """Count a unit that is done."""
        self.size += unit.size
        self.documents += sum(shard.documents for shard in record.shards.values())
        self.bad += sum(len(piece.bad) for piece in record.pieces)


def work(
    plan: PreparePlan,
    units: Sequence[Unit],
    workers: int,
    stopped: Callable[[], bool],
    show: Callable[[Tally], None],
) -> bool:
    """Prepare those of the units that are not done. Return False when a stop was requested before they were finished.

    Args:
        workers: number of processes.
        stopped: returns whether a stop was requested, asked again and again.
        show: called with the progress whenever a unit is done.

    Raises:
        ConfigError: an input has changed or is not of its format.
        DataError: a disk is full, an input has vanished, or a process was killed.
    """
    tally, waiting = Tally(total=sum(unit.size for unit in units)), []
    with file_errors_reported(plan.output):
        done = units_done(plan.output)
        for unit in units:
            if unit.name in done:
                tally.add(unit, read_record(plan, unit))
            else:
                waiting.append(unit)
    tally.before = tally.size
    show(tally)
    if not waiting:
        return True
    others = set(active_children())
    pool = ProcessPoolExecutor(
        min(workers, len(waiting)), get_context("spawn"), _begin, (replace(plan, sources=(), units=()), os.getpid())
    )
    try:
        resource_tracker.ensure_running()  # while it starts, it would let the signals through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # which the processes inherit
        try:
            unit_of = {pool.submit(_prepare, unit): unit for unit in waiting}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        left = set(unit_of)
        while left and not stopped():
            ended, left = wait(left, LOOK_EVERY_S, FIRST_COMPLETED)
            for prepared in ended:
                tally.add(unit_of[prepared], prepared.result())
                show(tally)
        return not left
    except BrokenProcessPool:
        raise DataError(
            "a process was killed, or has crashed, while it prepared a part of the inputs",
            hint="was it memory? fewer prepare.workers need less; if it has said anything, that is above",
        ) from None
    finally:
        for process in set(active_children()) - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


# In a process of the pool.

_plan: PreparePlan  # without all units and sources


def _begin(plan: PreparePlan, parent: int) -> None:
    global _plan
    _plan = plan
    be_killed_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one CPU each; the worker processes are the parallelism


@functools.cache
def _tokenizer() -> Tokenizer:
    tokenizer, _ = load_tokenizer(_plan.tokenizer)
    if tokenizer.facts != _plan.facts:
        raise ConfigError(f"{_plan.tokenizer.name} was changed while a data set was being prepared")
    return tokenizer


def _prepare(unit: Unit) -> UnitRecord:
    tokenizer = _tokenizer()
    with file_errors_reported(_plan.output):
        return prepare_unit(_plan, unit, tokenizer)
