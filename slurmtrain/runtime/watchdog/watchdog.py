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
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NoReturn, TextIO

from slurmtrain.checkpoint.store.transfers import blocks_moved
from slurmtrain.config.schema import WatchdogConfig
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.watchdog import evidence, phases, report
from slurmtrain.runtime.watchdog.heartbeats import (
    Alert,
    Beat,
    Heartbeats,
    pause_between_looks,
    silent_between,
    still_allowed,
    turn_s,
)
from slurmtrain.runtime.watchdog.monitor import Monitor
from slurmtrain.runtime.watchdog.phases import Allowance
from slurmtrain.runtime.watchdog.progress import ActiveClock, Position, Progress
from slurmtrain.runtime.watchdog.report import HangReport
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import process

log = logging.getLogger(__name__)

EXIT_CODE = 1  # of a rank that the watchdog ends: that of a crash
LOOK_EVERY_S = 1.0
ALERT_S = 0.5
ANSWER_S = 15.0  # for the store, whose thread may just be connecting anew
AGAIN_S = 10.0  # until the next look at the others, when one of them may take longer
FAILED_GRACE_S = 10.0  # for a rank to leave by itself when another one has failed
SAVING_GRACE_S = 40.0  # the same while it saves, for which the rank that has failed has waited, too
COLLECT_S = 10.0  # at most, until all live ranks have written what they know
QUIET_S = 3.0  # without a further one: those that have not written by then do not live
MONITOR_AFTER_S = 5.0  # the start of a rank has no time for a process beside it
UNHURRIED = (Allowance.START, Allowance.DEBUGGER)
PAGE_S = 10.0  # for the page of the lowest live rank, before the next one writes it


class Watchdog:
    """Watches the thread that made it, until `close`.

    Args:
        limits: the config group `watchdog`.
        distributed: this rank, and how it reaches the others.
        attempt_dir: where the page is written; None: there is no run, and the ranks write to stderr what they know.
        leaves_with_rank_0: when rank 0's process is gone without a word, this rank leaves, too. Not for programs whose ranks
            may end at different times.
    """

    def __init__(
        self,
        limits: WatchdogConfig,
        distributed: DistributedContext,
        attempt_dir: AttemptDir | None,
        *,
        leaves_with_rank_0: bool = True,
    ):
        environment = distributed.environment
        self._environment, self._attempt_dir = environment, attempt_dir
        self._watched = threading.get_ident()
        self._born = process.born(os.getpid())
        self._position: Callable[[], Position] = lambda: Position(0, None, False)
        self._clock = ActiveClock(time.monotonic())
        self._limits, self._progress = limits, Progress(limits)
        self._phase = phases.Phase("start", Allowance.START, False, "")
        self._step: int | None = None
        self._alert: Alert | None = None
        self._silent: set[int] = set()
        self._seen: dict[int, Beat] = {}
        self._heard: dict[int, tuple[int, float]] = {}  # number of each rank's newest beat, and when it came
        self._store_answers = True
        self._look_again = 0.0
        self._closed = threading.Event()
        self._firing = False
        self._timed_out: phases.Phase | None = None
        self._timed_out_at = 0.0
        self._timer_due = math.inf
        first = environment.rank - environment.local_rank
        self._local_ranks = range(first, min(first + environment.local_world_size, environment.world_size))
        self._heartbeats: Heartbeats | None = None
        self._began = time.monotonic()
        self._monitor: Monitor | None = None
        self._wants_monitor = environment.rank == first  # one process sees all ranks of its node
        self._stacks = _own_stacks_file(attempt_dir, environment)
        evidence.register_dumps(self._stacks)
        if environment.world_size > 1 and distributed.store_address is not None:
            self._heartbeats = Heartbeats(
                distributed.connect_to_store,
                self._beat,
                rank=environment.rank,
                world_size=environment.world_size,
                local_ranks=self._local_ranks,
                on_alert=self._note_alert,
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
        if self._heartbeats is not None:
            self._heartbeats.close()
        if self._monitor is not None:
            self._monitor.close()

    def failed(self, *, lost_a_peer: bool = False) -> None:
        """Tell the other ranks that this one has recorded a failure and leaves; if it hung before, finish the page first.

        Args:
            lost_a_peer: another rank has closed its connections: it may just be saying that it has found a hang.
        """
        if lost_a_peer and self._heartbeats is not None:
            self._heartbeats.read_alert(ALERT_S)
        if self._firing or (self._alert is not None and self._alert.kind == "hang"):
            self._thread.join(ANSWER_S + COLLECT_S + PAGE_S)
        if self._heartbeats is not None:
            self._heartbeats.tell("failed", 2.0)

    def collective_timed_out(self, error: BaseException) -> None:
        """Find out which ranks did not come to a collective, whose own time-out came first, and end the process.

        Args:
            error: what the collective has raised.
        """
        trace = traceback.extract_tb(error.__traceback__)
        stack = [phases.Frame(each.filename, each.lineno or 0, each.name) for each in trace]
        self._timed_out_at = time.monotonic()
        self._timed_out = replace(phases.phase_of(stack, stepping=self._position().stepping), waits=True)
        self._thread.join(self._turn_s() + 2 * ANSWER_S + COLLECT_S + PAGE_S)

    def _note_alert(self, alert: Alert) -> None:
        self._alert = alert

    def _beat(self, number: int) -> Beat:
        environment, phase = self._environment, self._phase
        return Beat(
            rank=environment.rank,
            number=number,
            time=time.time(),
            node=environment.node,
            pid=os.getpid(),
            born=self._born,
            step=self._step,
            phase=phase.name,
            waits=phase.waits and not self._progress.moving,
            where=phase.where,
            idle_s=round(self._progress.idle_s, 1),
            limit_s=min(1e9, round(self._progress.limit_s, 1)),  # JSON has no infinity
        )

    def _run(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            try:
                self._look()
                alert = self._alert
                if alert is not None and alert.kind == "failed":
                    self._leave_after(alert)
                elif (
                    alert is not None
                    or self._is_out_of_time()
                    or self._waits_for_a_silent_rank()
                    or (self._overdue() and self._nobody_is_at_work())
                ):
                    self._firing = True
                    if self._timed_out is not None:
                        self._nobody_is_at_work()  # to see who is silent
                    self._report_and_leave()
            except Exception as error:  # a watch that fails must not end what it watches
                log.warning("the watchdog has failed, and tries again: %s: %s", type(error).__name__, error)
                self._firing = False
                if self._closed.wait(AGAIN_S):
                    return

    def _look(self) -> None:
        now = self._clock.look(time.monotonic())
        position = self._position()
        phase = self._timed_out or phases.phase_of(phases.stack_of(self._watched), stepping=position.stepping)
        self._phase, self._step = phase, position.step
        allowance = Allowance.DEBUGGER if evidence.is_traced("self") else phase.allowance
        self._progress.look(now, position, allowance, blocks_moved())
        self._set_timer()
        self._tell_monitor()

    def _tell_monitor(self) -> None:
        if self._wants_monitor and time.monotonic() - self._began >= MONITOR_AFTER_S:
            self._wants_monitor = False
            try:
                self._monitor = Monitor(self._attempt_dir, self._environment.world_size)
            except OSError as error:
                log.warning("nothing will notice if this rank is stopped: %s", error)
        if self._monitor is not None:
            self._monitor.tell(self._beat(0), self._heartbeats.local_beats if self._heartbeats is not None else {})

    def _set_timer(self) -> None:
        """Have faulthandler write the stacks when this rank is overdue, if this thread has not run again by then."""
        left = self._progress.limit_s - self._progress.idle_s
        after = left if left > LOOK_EVERY_S else 60.0  # it runs, so there is no need
        if self._phase.allowance not in UNHURRIED:
            after = min(after, 0.8 * self._limits.silent_s)  # before others call it silent
        now = time.monotonic()
        if now >= self._timer_due:
            self._say_that_it_got_on()
        seconds = None if left > 1e6 else max(2 * LOOK_EVERY_S, after)
        evidence.set_timer(seconds, self._stacks)
        self._timer_due = math.inf if seconds is None else now + seconds

    def _say_that_it_got_on(self) -> None:
        """Take back the stacks that the timer may have written."""
        if self._stacks is None:
            say(evidence.GOT_ON)
            return
        with contextlib.suppress(OSError):
            self._stacks.truncate(0)

    def _turn_s(self) -> float:
        """Return how many seconds this rank waits for others that look first, and tell all what they find."""
        no_store = self._heartbeats is None or self._heartbeats.silent  # so that nobody could tell this rank
        return 0.0 if no_store else turn_s(self._environment.rank)

    def _overdue(self) -> bool:
        """Return whether this rank is to find out now whether some rank hangs."""
        return self._progress.overdue_s >= self._turn_s() and time.monotonic() >= self._look_again

    def _is_out_of_time(self) -> bool:
        """Return whether a collective of this rank has timed out, and it is to find out now which ranks did not come."""
        return self._timed_out is not None and time.monotonic() >= self._timed_out_at + self._turn_s()

    def _waits_for_a_silent_rank(self) -> bool:
        """Return whether this rank makes no progress, and no heartbeat has come from another one for `watchdog.silent_s`.

        Rank 0 hears all ranks, the others hear rank 0, which has the store. Until the first step is done, ranks load data
        and compile, where a call may hold the interpreter for longer.
        """
        if self._heartbeats is None:
            return False
        limit_s, now = self._limits.silent_s + 2 * self._heartbeats.every_s, self._clock.seconds
        silent = {}
        for rank, beat in self._heartbeats.heard.items():
            number, since = self._heard.get(rank, (None, now))
            self._heard[rank] = (beat.number, since if number == beat.number else now)
            if now - self._heard[rank][1] >= limit_s:
                silent[rank] = beat
        if self._phase.allowance in UNHURRIED or self._progress.idle_s < limit_s:
            return False
        # If its own beats do not come back to rank 0, it is the store that is away.
        if not silent or self._environment.rank in silent or self._is_traced(silent):
            return False
        self._silent, self._seen = set(silent), silent
        self._store_answers = not self._heartbeats.silent
        return True

    def _nobody_is_at_work(self) -> bool:
        """Ask the others; return False if one of them may take longer, or this rank has got on meanwhile."""
        if self._heartbeats is None:
            return True
        one = self._heartbeats.look(ANSWER_S)
        if self._closed.wait(3 * self._heartbeats.every_s):
            return False
        two = self._heartbeats.look(ANSWER_S)
        self._look()
        if not self._progress.overdue and self._timed_out is None:
            return False
        self._store_answers = one is not None and two is not None
        if two is None or one is None:
            return self._heartbeats.silent
        self._silent = silent_between(one, two, self._environment.world_size)
        self._seen = {rank: beat for rank, beat in two.items() if rank in self._silent}
        if still_allowed(two, self._silent, self._beat(0), self._limits.silent_s) or self._is_traced(self._silent):
            self._look_again = time.monotonic() + AGAIN_S
            return False
        return True

    def _is_traced(self, ranks: Collection[int]) -> bool:
        """Return whether a debugger has stopped one of these ranks, as far as they are on this node."""
        return any(rank in ranks and state == "t" for rank, state in self._local_states().items())

    def _local_states(self) -> dict[int, str]:
        beats = self._heartbeats.local_beats if self._heartbeats is not None else {}
        return {rank: evidence.state_of(beat.pid, beat.born) for rank, beat in beats.items()}

    def _make_report(self) -> HangReport:
        """Write down what this rank knows."""
        workers = []
        if not self._phase.waits:
            log_file = self._attempt_dir.stacks_log(self._environment.rank) if self._attempt_dir is not None else None
            monitor = self._monitor.pid if self._monitor is not None else None
            children = [pid for pid in process.living_descendants(os.getpid()) if pid != monitor]
            workers = evidence.describe_processes(children, log_file)
        seen = dict(self._seen)
        if self._heartbeats is not None and 0 in self._heartbeats.heard:
            seen.setdefault(0, self._heartbeats.heard[0])
        return HangReport(
            beat=self._beat(0),
            stacks=evidence.own_stacks(self._watched),
            collectives=evidence.last_collectives(),
            workers=workers,
            local_states=self._local_states(),
            seen={rank: beat for rank, beat in seen.items() if rank != self._environment.rank},
            store_answers=self._store_answers,
        )

    def _report_and_leave(self) -> NoReturn:
        """Write down what this rank knows, see that the page is written, end what hangs beside this rank, and leave."""
        if self._monitor is not None:
            self._monitor.close()  # this rank says itself what it knows
        if self._heartbeats is not None:
            self._heartbeats.tell("hang", 2.0)
        own_report = self._make_report()
        world_size, rank = self._environment.world_size, self._environment.rank
        expected = {each: self._environment.expected_node(each) for each in range(world_size)}
        if self._attempt_dir is None:
            self._say_what_is_known(own_report, expected)
            end_process()
        with contextlib.suppress(OSError):  # a full disk; it leaves all the same
            own_report.write(self._attempt_dir)
        found = self._wait_for_reports(self._attempt_dir) | {rank}
        nccl = self._attempt_dir.nccl_trace(rank)
        evidence.write_nccl_trace(nccl)
        place = sorted(found).index(rank)
        self._write_page(self._attempt_dir, place, expected)
        on_node = [each for each in found if each in self._local_ranks]
        if rank == min(on_node, default=rank):
            self._end_silent_local_ranks(found)
        end_process()

    def _wait_for_reports(self, attempt_dir: AttemptDir) -> set[int]:
        """Return the live ranks, which have written what they know, when all have, or no further one comes.

        Their files are read only by the one that writes the page.
        """
        began = changed = time.monotonic()
        count = 0
        every_s = self._heartbeats.every_s if self._heartbeats is not None else 0.0
        while True:
            here = set(attempt_dir.hang_reports())
            now = time.monotonic()
            if len(here) != count:
                count, changed = len(here), now
            all_here = count >= self._environment.world_size
            if all_here or now - changed > QUIET_S + 2 * every_s or now - began > COLLECT_S + 2 * every_s:
                return here
            if attempt_dir.hang_page.exists():  # this rank was late
                return here
            time.sleep(pause_between_looks(self._environment.world_size))

    def _write_page(self, attempt_dir: AttemptDir, place: int, expected: Mapping[int, str]) -> None:
        """Write the page if this is the lowest live rank; else wait for it, and write it if it does not come."""
        until = time.monotonic() + place * PAGE_S
        while not attempt_dir.hang_page.exists() and time.monotonic() < until:
            time.sleep(pause_between_looks(self._environment.world_size))
        if attempt_dir.hang_page.exists():
            return
        try:
            sentence = report.write_report(attempt_dir, self._environment.world_size, expected)
        except OSError as error:
            sentence = f"(the page cannot be written: {error})"
        say(f"slurmtrain: hung: {sentence}; see {attempt_dir.hang_page}")

    def _say_what_is_known(self, own_report: HangReport, expected: Mapping[int, str]) -> None:
        """Write to stderr what the page would say, as far as this rank knows: there is no folder that all ranks share."""
        world_size = self._environment.world_size
        beats = self._heartbeats.look(ANSWER_S) if self._heartbeats is not None else None
        known = {rank: HangReport(beat) for rank, beat in (beats or {}).items() if rank not in self._silent}
        known[self._environment.rank] = own_report
        if not self._store_answers or beats is None:
            known |= {rank: own_report for rank in range(1, world_size) if rank not in known}
        absent = report.find_absent(known, world_size, expected, {})
        say(f"slurmtrain: hung: {report.sentence_of(absent, known, world_size)}\n{own_report.stacks}")
        self._end_silent_local_ranks(known)

    def _end_silent_local_ranks(self, live: Collection[int]) -> None:
        """End the ranks of this node that cannot end themselves, with their data workers."""
        for rank, beat in (self._heartbeats.local_beats if self._heartbeats is not None else {}).items():
            if rank not in live and evidence.kill_tree(beat.pid, beat.born):
                say(f"slurmtrain: ended rank {rank} (pid {beat.pid}), which cannot end itself")

    def _leave_after(self, alert: Alert) -> None:
        """Leave when another rank has failed and this one waits for it, instead of when a collective times out."""
        grace = SAVING_GRACE_S if self._phase.allowance is Allowance.SAVE else FAILED_GRACE_S
        if self._closed.wait(grace):
            return
        self._look()
        sentence = f"left since rank {alert.rank} has failed, at {self._phase.name}: {self._phase.where}"
        if self._attempt_dir is not None:
            with contextlib.suppress(OSError):
                record_failure(
                    self._attempt_dir, self._environment.rank, Failure(EXIT_CODE, sentence, because_of_peer=True)
                )
        say(f"slurmtrain: {sentence}")
        end_process()


def _own_stacks_file(attempt_dir: AttemptDir | None, environment: Environment) -> TextIO | None:
    """Open a file for the stacks of a rank whose log has those of other ranks, too; None: it has a log of its own.

    Launchers write what all processes of a node say to one log. Of a dump in it nobody could tell whose it is.
    """
    if attempt_dir is None or environment.source != "torchrun":
        return None
    with contextlib.suppress(OSError):  # a full disk
        return attempt_dir.stacks_file(environment.rank).open("a")
    return None


def say(text: str) -> None:
    """Write to stderr without any lock of Python's, which the thread that hangs may hold."""
    with contextlib.suppress(OSError):
        os.write(2, (text.rstrip() + "\n").encode(errors="replace"))


def end_process() -> NoReturn:
    """End this process, whatever its main thread does, and its children with it."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            os.kill(child.pid or 0, signal.SIGKILL) if child.pid else None
    os._exit(EXIT_CODE)
