"""The thread of every rank that watches whether its main thread gets on, and ends the rank when some rank hangs.

It never waits for anything that may hang itself: what asks the store has a thread of its own, and a rank whose interpreter
is held, so that this thread cannot run either, is found by the others. Its stacks are written by faulthandler's timer,
which needs no interpreter and is set anew at every look.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from traceback import FrameSummary
from typing import NoReturn, TextIO

import msgspec

from slurmtrain.checkpoint.format.blocks import blocks_moved
from slurmtrain.config.schema import WatchdogConfig
from slurmtrain.hangs import evidence, judge, page
from slurmtrain.hangs.beats import ActiveClock, Beat, Position, Progress
from slurmtrain.hangs.judge import Report
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.heartbeats import Exchange
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.system import activity, process
from slurmtrain.system.process import ProcessMark

log = logging.getLogger(__name__)

EXIT_CODE = 1  # of a rank that the watchdog ends: that of a crash
LOOK_EVERY_S = 1.0
AGAIN_S = 10.0  # until the next look, after an error
ENDS_S = 60.0  # from a hang that is found until this process has left, at most


class Watchdog:
    """Watches the thread that made it, until `close`.

    Args:
        limits: the config group `watchdog`.
        distributed: this rank, and how it reaches the others.
        attempt_dir: where the page is written.
    """

    def __init__(self, limits: WatchdogConfig, distributed: DistributedContext, attempt_dir: AttemptDir):
        self._limits, self._environment, self._attempt_dir = limits, distributed.environment, attempt_dir
        self._watched, self._process = threading.get_ident(), ProcessMark.own()
        activity.trains_in(self._watched)
        self._position: Callable[[], Position] = lambda: Position(0, None, False)
        self._clock, self._progress, self._silence = ActiveClock(time.monotonic()), Progress(limits), judge.Silence()
        self._timed_out: list[FrameSummary] = []  # where a collective's own time-out has come first
        self._closed = threading.Event()
        rank, world_size = self._environment.rank, self._environment.world_size
        self._stacks = _open_stacks(attempt_dir, rank)
        self._timer_s = max(2 * LOOK_EVERY_S, 0.8 * min(limits.silent_s, limits.min_s))  # before others call it hung
        faulthandler.register(evidence.DUMP_SIGNAL, file=self._stacks)
        # The timer is a thread, which a forked child does not have, but waits for when it ends.
        os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)
        self._looks, self._looked = 0, time.monotonic()
        self._beat = self._look()
        first = rank - self._environment.local_rank
        self._near = set(range(first, min(first + self._environment.local_world_size, world_size))) - {rank}
        has_store = world_size > 1 and distributed.store_address is not None
        self._exchange = Exchange(
            distributed.connect_to_store if has_store else None,
            lambda: self._beat,
            sorted((set(range(world_size)) if rank == 0 else {0, *self._near}) - {rank}),
            world_size,
        )
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def follow(self, position: Callable[[], Position]) -> None:
        """Take from now on what this function returns for how far this rank has got. It is called by another thread."""
        self._position = position

    def close(self) -> None:
        """Stop to watch, since this rank leaves: it is not silent. If a hang was just found, this does not return."""
        self._closed.set()
        self._thread.join(ENDS_S)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(evidence.DUMP_SIGNAL)
        self._stacks.close()
        with contextlib.suppress(OSError):
            self._attempt_dir.stacks_file(self._environment.rank).unlink(missing_ok=True)
            if self._environment.world_size == 1:
                self._attempt_dir.heartbeat_file.unlink(missing_ok=True)
        self._exchange.close()

    def collective_timed_out(self, error: BaseException) -> None:
        """Name the ranks that did not come to a collective, whose own time-out came first, and end the process.

        Args:
            error: what the collective has raised.
        """
        self._timed_out = list(reversed(traceback.extract_tb(error.__traceback__)))
        self._thread.join(ENDS_S)

    def _run(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            try:
                timed_out = bool(self._timed_out)
                self._beat = self._look()
                if timed_out or self._exchange.alert or self._hangs():
                    self._report_and_leave()
            except Exception as error:  # a watch that fails must not end what it watches
                log.warning("the watchdog has failed, and tries again: %s: %s", type(error).__name__, error)
                self._closed.wait(AGAIN_S)

    def _look(self) -> Beat:
        """Return how far the watched thread has got, and put off the timer that writes the stacks of this rank."""
        now = time.monotonic()
        if now - self._looked >= self._timer_s:  # it has written them, and this rank has got on
            with contextlib.suppress(OSError):
                self._stacks.truncate(0)
        self._looks, self._looked = self._looks + 1, now
        with contextlib.suppress(RuntimeError):  # no thread can be started for it: the rank beats all the same
            faulthandler.dump_traceback_later(self._timer_s, file=self._stacks)
        activity.follow_compiler()
        progress, position, phase = self._progress, self._position(), activity.told()
        if (
            phase == activity.START and position.stepping
        ):  # a loop of the user's own tells only that it calls `should_stop`
            phase = "step"
        progress.look(self._clock.look(now), position, phase, blocks_moved())
        beat = Beat(
            rank=self._environment.rank,
            number=self._looks,
            time=time.time(),
            node=self._environment.node,
            process=self._process,
            step=position.step,
            phase=phase,
            waits=bool(self._timed_out) or activity.waits(self._watched),
            idle_s=round(progress.idle_s, 1),
            limit_s=round(progress.limit_s, 1),
            unhurried=progress.unhurried,
        )
        if self._environment.world_size == 1:
            with contextlib.suppress(OSError):  # for the supervisor, to which a new time of the file is enough
                self._attempt_dir.heartbeat_file.write_bytes(msgspec.json.encode(beat))
        return beat

    def _hangs(self) -> bool:
        """Return whether some rank hangs, as far as this rank can tell."""
        heard, every_s = self._exchange.heard, self._exchange.every_s
        if self._environment.rank == 0 and self._exchange.silent_s > judge.silent_after(every_s):
            heard = {}  # its own store is away
        silence = self._silence.look(heard, self._clock.seconds)
        return judge.hangs(self._beat, heard, silence, limit_s=float(self._limits.silent_s), every_s=every_s)

    def _make_report(self) -> Report:
        """Return what this rank knows."""
        beat, heard, workers = self._beat, self._exchange.heard, []
        if not beat.waits:
            file = self._attempt_dir.stacks_file(beat.rank)
            workers = evidence.describe_processes(process.living_descendants(os.getpid()), file)
        writers = [thread.ident for thread in threading.enumerate() if thread.name == "checkpoint-writer"]
        saves = writers and activity.told() == activity.SAVE
        stack = self._timed_out or evidence.stack_of((saves and writers[0]) or self._watched)
        states = {rank: evidence.state_of(heard[rank].process) for rank in self._near & heard.keys()}
        return Report(beat, evidence.where(stack), evidence.own_stacks(self._watched), workers, states, heard)

    def _report_and_leave(self) -> NoReturn:
        """Report what this rank knows, see that the page is written, end what hangs beside this rank, and leave."""
        self._exchange.alert = True
        report, rank, world_size = self._make_report(), self._environment.rank, self._environment.world_size
        nodes = [self._environment.expected_node(each) for each in range(world_size)]
        try:
            live = page.write_together(self._attempt_dir, report, nodes, self._exchange.every_s)
        except OSError as error:
            live = set(self._attempt_dir.hang_reports())
            page.say(f"slurmtrain: hung: (the page cannot be written: {error})")
        if rank == min({rank, *(live & self._near)}):
            process.kill_trees(report.heard[each].process for each in self._near - live & report.heard.keys())
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(EXIT_CODE)  # whatever the main thread does


def _open_stacks(attempt_dir: AttemptDir, rank: int) -> TextIO:
    try:
        return attempt_dir.stacks_file(rank).open("a")
    except OSError:  # a full disk
        return open(os.devnull, "a")
