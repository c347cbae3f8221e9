"""The thread of every rank that watches whether its main thread gets on, and ends the rank when some rank hangs.

It never waits for anything that may hang itself: what asks the store has a thread of its own, and a rank whose interpreter
is held, so that this thread cannot run either, is found by the others. Its stacks are written by faulthandler's timer,
which needs no interpreter and is set anew at every look.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn, TextIO

import msgspec

from slurmtrain.checkpoint.format.reading import blocks_moved
from slurmtrain.config.schema import WatchdogConfig
from slurmtrain.hangs import evidence, judge, page
from slurmtrain.hangs.beats import ActiveClock, Beat, Position, Progress
from slurmtrain.hangs.judge import Report
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.heartbeats import FAILED, HANG, Exchange
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.system import activity, process

log = logging.getLogger(__name__)

EXIT_CODE = 1  # of a rank that the watchdog ends: that of a crash
LOOK_EVERY_S = 1.0
TELL_S = 2.0  # for the store to take what is told to all
AGAIN_S = 10.0  # until the next look, after an error
FAILED_GRACE_S = 10.0  # for a rank to leave by itself when another one has failed
SAVING_GRACE_S = 40.0  # the same while it saves, for which the rank that has failed has waited, too
ENDS_S = 60.0  # from a hang that is found until this process has left, at most


class Watchdog:
    """Watches the thread that made it, until `close`.

    Args:
        limits: the config group `watchdog`.
        distributed: this rank, and how it reaches the others.
        attempt_dir: where the page is written.
        leaves_with_rank_0: when rank 0's process is gone without a word, this rank leaves, too. Not for programs whose ranks
            may end at different times.
    """

    def __init__(
        self,
        limits: WatchdogConfig,
        distributed: DistributedContext,
        attempt_dir: AttemptDir,
        *,
        leaves_with_rank_0: bool = True,
    ):
        self._limits, self._environment, self._attempt_dir = limits, distributed.environment, attempt_dir
        self._watched, self._born = threading.get_ident(), process.born(os.getpid())
        activity.trains_in(self._watched)
        self._position: Callable[[], Position] = lambda: Position(0, None, False)
        self._clock, self._progress, self._silence = ActiveClock(time.monotonic()), Progress(limits), judge.Silence()
        self._timed_out: list[evidence.Frame] = []  # where a collective's own time-out has come first
        self._timer_due = math.inf
        self._closed, self._leaving = threading.Event(), False
        self._stacks = _open_stacks(attempt_dir, self._environment.rank)
        evidence.register_dumps(self._stacks)
        first = self._environment.rank - self._environment.local_rank
        last = min(first + self._environment.local_world_size, self._environment.world_size)
        self._near = set(range(first, last)) - {self._environment.rank}
        self._beat = self._make_beat(0)
        has_store = self._environment.world_size > 1 and distributed.store_address is not None
        heard = range(self._environment.world_size) if self._environment.rank == 0 else (0, *self._near)
        self._exchange = Exchange(
            distributed.connect_to_store if has_store else None,
            self._make_beat,
            rank=self._environment.rank,
            world_size=self._environment.world_size,
            read=sorted({*heard} - {self._environment.rank}),
            gone_means_failed=leaves_with_rank_0,
        )
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def follow(self, position: Callable[[], Position]) -> None:
        """Take from now on what this function returns for how far this rank has got. It is called by another thread."""
        self._position = position

    def close(self) -> None:
        """Stop to watch: this rank leaves in good order. If a hang was just found, this never returns."""
        self._closed.set()
        self._thread.join()
        evidence.set_timer(None)
        if self._stacks is not None:
            evidence.register_dumps()  # before its file is closed
            self._stacks.close()
            with contextlib.suppress(OSError):
                os.unlink(self._stacks.name)
        if self._environment.world_size == 1:
            self._attempt_dir.heartbeat_file.unlink(missing_ok=True)
        self._exchange.close()

    def failed(self, *, lost_a_peer: bool = False) -> None:
        """Tell the other ranks that this one has recorded a failure and leaves; if it hung before, finish the page first.

        Args:
            lost_a_peer: another rank has closed its connections: it may just be saying that it has found a hang.
        """
        if lost_a_peer:
            self._exchange.refresh(TELL_S)
        if self._leaving or (self._exchange.alert is not None and self._exchange.alert.kind == HANG):
            self._thread.join(ENDS_S)
        self._exchange.tell(FAILED, TELL_S)

    def collective_timed_out(self, error: BaseException) -> None:
        """Name the ranks that did not come to a collective, whose own time-out came first, and end the process.

        Args:
            error: what the collective has raised.
        """
        self._timed_out = evidence.frames_of(error)
        self._thread.join(ENDS_S)

    def _make_beat(self, number: int) -> Beat:
        progress = self._progress
        return Beat(
            rank=self._environment.rank,
            number=number,
            time=time.time(),
            node=self._environment.node,
            pid=os.getpid(),
            born=self._born,
            step=self._position().step,
            phase=self._phase(),
            waits=bool(self._timed_out) or activity.waits(self._watched),
            idle_s=round(progress.idle_s, 1),
            limit_s=round(progress.limit_s, 1),
            unhurried=progress.unhurried,
        )

    def _phase(self) -> str:
        # A loop of the user's own tells nothing but that it calls `should_stop`.
        return "step" if activity.told() == activity.START and self._position().stepping else activity.told()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            try:
                self._look()
                alert = self._exchange.alert
                if alert is not None and alert.kind == FAILED:
                    self._leave_after(alert.rank)
                elif alert is not None or self._timed_out or self._hangs():
                    self._report_and_leave()
            except Exception as error:  # a watch that fails must not end what it watches
                log.warning("the watchdog has failed, and tries again: %s: %s", type(error).__name__, error)
                if self._closed.wait(AGAIN_S):
                    return

    def _look(self) -> None:
        activity.follow_compiler()
        self._progress.look(self._clock.look(time.monotonic()), self._position(), self._phase(), blocks_moved())
        self._beat = self._make_beat(self._beat.number + 1)
        self._set_timer()
        if self._environment.world_size == 1:
            with contextlib.suppress(OSError):  # for the supervisor, to which a new time of the file is enough
                self._attempt_dir.heartbeat_file.write_bytes(msgspec.json.encode(self._beat))

    def _set_timer(self) -> None:
        """Have faulthandler write the stacks when this rank is overdue, if this thread has not run again by then."""
        now, left = time.monotonic(), self._progress.limit_s - self._progress.idle_s
        if now >= self._timer_due and self._stacks is not None:  # it may have written them, and this rank has got on
            with contextlib.suppress(OSError):
                self._stacks.truncate(0)
        after = left if left > LOOK_EVERY_S else 60.0  # it runs, so there is no need
        if not self._progress.unhurried:
            after = min(after, 0.8 * self._limits.silent_s)  # before others call it silent
        seconds = max(2 * LOOK_EVERY_S, after)
        evidence.set_timer(seconds, self._stacks)
        self._timer_due = now + seconds

    def _hangs(self) -> bool:
        """Return whether some rank hangs, as far as this rank can tell."""
        heard, every_s = dict(self._exchange.heard), self._exchange.every_s
        silence = self._silence.look(heard, self._clock.seconds)
        if self._environment.rank == 0 and self._exchange.silent_s > judge.silent_after(every_s):
            heard, silence = {}, {}  # its own store is away
        limit_s = float(self._limits.silent_s)
        return judge.hangs(self._beat, heard, silence, limit_s=limit_s, every_s=every_s)

    def _states_near(self) -> dict[int, str]:
        """Return the states of the other ranks of this node, as far as they were heard."""
        heard = self._exchange.heard
        return {rank: evidence.state_of(heard[rank].pid, heard[rank].born) for rank in self._near & heard.keys()}

    def _make_report(self) -> Report:
        """Return what this rank knows."""
        beat, workers = self._make_beat(0), []
        if not beat.waits:
            file = self._attempt_dir.stacks_file(beat.rank)
            workers = evidence.describe_processes(process.living_descendants(os.getpid()), file)
        return Report(
            beat,
            self._where(),
            evidence.own_stacks(self._watched),
            evidence.last_collectives(),
            workers,
            self._states_near(),
            dict(self._exchange.heard),
        )

    def _where(self) -> str:
        """Return where this rank is: the main thread, or the one that writes the save for which it waits."""
        writers = [thread.ident for thread in threading.enumerate() if thread.name == "checkpoint-writer"]
        thread = writers[0] if writers and activity.told() == activity.SAVE else self._watched
        return evidence.where(self._timed_out or evidence.stack_of(thread or self._watched))

    def _report_and_leave(self) -> NoReturn:
        """Report what this rank knows, see that the page is written, end what hangs beside this rank, and leave."""
        self._leaving = True
        self._exchange.tell(HANG, TELL_S)
        report, rank, world_size = self._make_report(), self._environment.rank, self._environment.world_size
        expected_nodes = {each: self._environment.expected_node(each) for each in range(world_size)}
        try:
            live = page.write_together(self._attempt_dir, report, world_size, self._exchange.every_s, expected_nodes)
        except OSError as error:
            live = set(self._attempt_dir.hang_reports())
            page.say(f"slurmtrain: hung: (the page cannot be written: {error})")
        if rank == min({rank, *(live & self._near)}):
            for each in self._near - live & report.heard.keys():
                if evidence.kill_tree(report.heard[each].pid, report.heard[each].born):
                    page.say(f"slurmtrain: ended rank {each} (pid {report.heard[each].pid}), which cannot end itself")
        end_process()

    def _leave_after(self, failed: int) -> None:
        """Leave when another rank has failed and this one waits for it, instead of when a collective times out."""
        saves = activity.told() in (activity.SAVE, activity.RESTORE)
        if self._closed.wait(SAVING_GRACE_S if saves else FAILED_GRACE_S):
            return
        sentence = f"left since rank {failed} has failed, at {activity.told()}: {self._where()}"
        with contextlib.suppress(OSError):
            failure = Failure(EXIT_CODE, sentence, because_of_peer=True)
            record_failure(self._attempt_dir, self._environment.rank, failure)
        page.say(f"slurmtrain: {sentence}")
        end_process()


def _open_stacks(attempt_dir: AttemptDir, rank: int) -> TextIO | None:
    """Open the file for a rank's stacks; None, with a full disk: they go to its stderr."""
    with contextlib.suppress(OSError):
        return attempt_dir.stacks_file(rank).open("a")
    return None


def end_process() -> NoReturn:
    """End this process, whatever its main thread does, and its children with it."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            os.kill(child.pid or 0, signal.SIGKILL) if child.pid else None
    os._exit(EXIT_CODE)
