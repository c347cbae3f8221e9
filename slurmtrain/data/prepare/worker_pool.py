"""A pool of processes that prepare units one after another, and the parent process that hands the units out.

The processes are children of the parent and end when it ends, for whatever reason. Stop signals reach the parent alone,
which then kills the processes: finished units are kept, and units that were begun are done again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

from slurmtrain.data.format.tokenizers import load_tokenizer
from slurmtrain.data.prepare.file_errors import file_errors_reported
from slurmtrain.data.prepare.unit import UnitProgress, UnitRecord, describe, prepare_unit, read_records
from slurmtrain.data.prepare.unit_plan import PreparePlan, Unit
from slurmtrain.errors import ConfigError, DataError, SlurmtrainError, how_it_ended
from slurmtrain.system.process import be_killed_with
from slurmtrain.system.signals import STOP_SIGNALS

MAX_LEADING_BAD_RECORDS = 100  # bad records before the first good one


class Stop(Protocol):
    """A request to stop that may come at any time."""

    @property
    def requested(self) -> bool: ...

    def wait(self) -> bool:
        """Block until a stop is requested."""


@dataclass
class Tally:
    """The progress of a share of the units: what was done before this process started, and what has been done since.

    Attributes:
        units_done, units: number of units, finished and in all.
        size, total: bytes of the inputs, read and in all.
        before: the part of `size` that was done before this process started.
        documents, bad: number of documents, and of records that could not be read.
    """

    units_done: int = 0
    units: int = 0
    size: int = 0
    total: int = 0
    before: int = 0
    documents: int = 0
    bad: int = 0


def work(
    plan: PreparePlan,
    units: Sequence[Unit],
    workers: int,
    stop: Stop,
    show: Callable[[Tally], None],
    *,
    max_bad_share: float,
) -> bool:
    """Prepare those of the units that are not done. Return False when a stop was requested before they were finished.

    Args:
        workers: number of processes.
        show: called with the progress whenever it changes.

    Raises:
        ConfigError: an input has changed or is not of its format, or all of many records are bad.
        DataError: a disk is full, an input has vanished, or a process was killed.
    """
    ledger = _Ledger(units, hopeless=max_bad_share < 1)
    waiting = deque[Unit]()
    with file_errors_reported(plan.output):
        for unit, record in zip(units, read_records(plan, units), strict=True):
            if record is None:
                waiting.append(unit)
            else:
                ledger.was_done(unit, record)
    show(ledger.tally())
    if not waiting:
        return True
    told = _stop_connection(stop)
    pool: list[_Worker] = []
    try:
        for _ in range(min(workers, len(waiting))):
            pool.append(_start_worker(replace(plan, sources=(), units=())))
            pool[-1].begin(waiting.popleft())
        while any(worker.unit is not None for worker in pool):
            ready = wait([told, *(worker.connection for worker in pool if worker.unit is not None)])
            if told in ready or stop.requested:
                return False
            for worker in pool:
                if worker.connection in ready:
                    ledger.note(worker, worker.receive())
                    if worker.unit is None and waiting:
                        worker.begin(waiting.popleft())
            show(ledger.tally())
        return True
    finally:
        for worker in pool:
            worker.process.kill()
            worker.process.join()
        told.close()


def _stop_connection(stop: Stop) -> Connection:
    """Return a connection that becomes readable when a stop is requested.

    `multiprocessing.connection.wait` takes no events of threads.
    """
    reader, writer = Pipe(duplex=False)

    def tell() -> None:
        stop.wait()
        writer.close()

    threading.Thread(target=tell, name="when-told", daemon=True).start()
    return reader


@dataclass
class _Worker:
    """A process of the pool, as its parent sees it."""

    process: SpawnProcess
    connection: Connection
    unit: Unit | None = None

    def begin(self, unit: Unit) -> None:
        self.unit = unit
        with contextlib.suppress(BrokenPipeError):  # it has ended: that is heard, too
            self.connection.send(unit)

    def receive(self) -> UnitProgress | UnitRecord:
        """Return the next message of the process, or raise the error that it reports.

        Raises:
            DataError: the process has died.
        """
        assert self.unit is not None
        try:
            said = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            raise DataError(
                f"a process {how_it_ended(code)} while it prepared {describe(self.unit.pieces)}",
                hint="was it memory? fewer prepare.workers need less" if code < 0 else "its last words are above",
            ) from None
        if isinstance(said, SlurmtrainError):
            raise said
        assert isinstance(said, UnitProgress | UnitRecord)
        return said


class _Ledger:
    """The counts of what the processes of the pool report."""

    def __init__(self, units: Sequence[Unit], *, hopeless: bool):
        self._hopeless = hopeless
        self._running: dict[int, UnitProgress] = {}
        self._tally = Tally(units=len(units), total=sum(unit.size for unit in units))

    def was_done(self, unit: Unit, record: UnitRecord) -> None:
        """Count a unit that was done before this process started."""
        self._add(unit, record)
        self._tally.before += unit.size

    def note(self, worker: _Worker, said: UnitProgress | UnitRecord) -> None:
        """Count what a process has reported.

        Raises:
            ConfigError: all of many records so far are bad.
        """
        assert worker.unit is not None
        if isinstance(said, UnitProgress):
            self._running[worker.unit.number] = said
            now = self.tally()
            if self._hopeless and said.first_bad and not now.documents and now.bad >= MAX_LEADING_BAD_RECORDS:
                raise ConfigError(
                    f"none of the first {now.bad} records can be used, such as in {said.first_bad}",
                    hint="prepare.text_field, prepare.format",
                )
            return
        self._running.pop(worker.unit.number, None)
        self._add(worker.unit, said)
        worker.unit = None

    def tally(self) -> Tally:
        now = Tally(**vars(self._tally))
        for progress in self._running.values():
            now.size += progress.size
            now.documents += progress.documents
            now.bad += progress.bad
        return now

    def _add(self, unit: Unit, record: UnitRecord) -> None:
        self._tally.units_done += 1
        self._tally.size += unit.size
        self._tally.documents += sum(shard.documents for shard in record.shards.values())
        self._tally.bad += sum(len(piece.bad) for piece in record.pieces)


def _start_worker(plan: PreparePlan) -> _Worker:
    """Start a process of the pool, which gets the plan without all units and sources.

    It inherits that stop signals are blocked, so that there is no moment at which they could reach it.
    """
    context = get_context("spawn")
    ours, theirs = Pipe()
    process = context.Process(target=_serve, args=(theirs, plan, os.getpid()), daemon=True)
    resource_tracker.ensure_running()  # while it starts, it would let the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return _Worker(process, ours)


def _serve(connection: Connection, plan: PreparePlan, parent: int) -> None:
    """Run a process of the pool: prepare each unit that comes over the connection."""
    be_killed_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one CPU each; the worker processes are the parallelism
    try:
        tokenizer, _ = load_tokenizer(plan.settings.tokenizer)
        if tokenizer.facts != plan.settings.facts:
            raise ConfigError(f"{plan.settings.tokenizer.name} was changed while a data set was being prepared")
        while True:
            unit: Unit = connection.recv()
            with file_errors_reported(plan.output):
                record = prepare_unit(plan, unit, tokenizer, connection.send)
            connection.send(record)
    except SlurmtrainError as error:
        connection.send(error)
