"""The watch of rank 0: a thread that watches the clock, SLURM's record and the switches.

It records why a stop was requested.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from slurmtrain.checkpoint.save.schedule import latest_stop
from slurmtrain.observe.profile_switch import ProfileSwitch
from slurmtrain.runs import attempts, requests
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import RunAction
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.job_states import JobState
from slurmtrain.system.signals import StopCause, StopFlag

log = logging.getLogger(__name__)

RECORD_TIMEOUT_S = 5.0
ANSWER_S = 5.0  # at most, when the clock says that it is time to stop
ASK_EVERY_S = 1800.0  # SLURM, whether the job's time limit was changed: by one rank of each job
LOOK_EVERY_S = 2.0  # seconds between looks for switches: a shared file system has no event to await


class StopWatcher:
    """Watches the clock, SLURM's record and the switches until a stop is requested, which it then records. On rank 0.

    A signal that came before Python had handlers was ignored. SLURM still has its reason on record, so SLURM is asked
    once at the start; and if the early warning never comes, the clock gives it. Somebody may have changed the time
    limit by then: SLURM is asked again before the clock is believed, and at intervals.

    Args:
        stop_flag: the flag of this rank, which a stop sets.
        attempt_dir: where the stop is recorded.
        client: asks SLURM; None: there is none to ask.
        signal_lead_s: seconds by which the early warning comes before the time limit; 0: there is none.
        run_dir: the run whose switches are watched; None: no switches.
        profile_switch: looks for the file by which a person asks for a profile; None: nobody does.
    """

    def __init__(
        self,
        stop_flag: StopFlag,
        attempt_dir: AttemptDir,
        client: SlurmClient | None,
        *,
        signal_lead_s: float,
        run_dir: RunDir | None = None,
        profile_switch: ProfileSwitch | None = None,
    ):
        self._stop_flag, self._attempt_dir, self._client = stop_flag, attempt_dir, client
        self._signal_lead_s, self._run_dir = signal_lead_s, run_dir
        self.profile_switch = profile_switch
        self._save_asked = threading.Event()
        # The plan, which training, the watch and the timer replace: only with the lock, or a timer would stay with an old plan.
        self._plan_lock = threading.Lock()
        self._end_time: float | None = None
        self._planned: threading.Timer | None = None
        self._needs: tuple[float, float] | None = None
        self._asked = time.monotonic()  # when SLURM was last asked for the job's end
        self._told: set[str] = set()  # of errors
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def wait_for_record(self) -> None:
        """Wait, before rank 0 exits, until the record of a stop that was just requested has reached the disk."""
        self._thread.join(timeout=RECORD_TIMEOUT_S)

    def plan_stop(self, step_s: float, save_s: float) -> None:
        """Plan a stop so early that the current step and a save are done before the time limit.

        It matters when they take longer than the early warning leaves them.

        Args:
            step_s: seconds of the longest step measured.
            save_s: seconds of the longest save measured.
        """
        with self._plan_lock:
            self._needs = (step_s, save_s)
            self._plan_again()

    def _plan_again(self) -> None:
        """Replace the timer by one for the newest end and needs. The caller holds the lock."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if self._end_time is None or self._needs is None:
            return
        step_s, save_s = self._needs
        left = latest_stop(self._end_time, step_s=step_s, save_s=save_s) - time.time()
        self._planned = threading.Timer(max(0.0, left), self._time_is_up)
        self._planned.daemon = True
        self._planned.start()

    def _time_is_up(self) -> None:
        if not self._limit_has_moved():
            self._stop_flag.request(StopCause.DEADLINE)

    def _limit_has_moved(self) -> bool:
        """Ask SLURM for the job's end, and plan anew if it has changed. Return False if SLURM does not answer soon."""
        if self._client is None:
            return False
        # Before SLURM is asked: another thread may ask, too, and be the first to note the change.
        before = self._end_time
        client, answers = self._client, queue.SimpleQueue[JobFacts | None]()
        # Waiting for an overloaded controller would use up the time that is left to save.
        try:
            threading.Thread(target=lambda: answers.put(client.job(own_job_id() or "")), daemon=True).start()
            facts = answers.get(timeout=ANSWER_S)
        except (queue.Empty, RuntimeError):  # no answer; or no more threads for this process
            return False
        if facts is None or facts.preempted:  # a preemption is announced by the signal
            return False
        now = facts.end_time
        if now is None and facts.state != JobState.RUNNING:
            return False
        # A job that runs without an end has the time limit UNLIMITED, which can be taken back.
        moved = now != before if now is None or before is None else abs(now - before) > 1.0
        if moved:
            self._set_end_time(now)
        return moved

    def _set_end_time(self, end_time: float | None) -> None:
        with self._plan_lock:
            self._end_time = end_time
            self._plan_again()

    def seconds_left(self) -> float | None:
        """Return the seconds until SLURM kills the job after a stop was requested, waiting for its answer.

        The result is None if they are not known.
        """
        self._thread.join(timeout=RECORD_TIMEOUT_S)
        return None if self._end_time is None else self._end_time - time.time()

    def take_save(self) -> bool:
        """Return whether a checkpoint has been requested since the last call."""
        if not self._save_asked.is_set():
            return False
        self._save_asked.clear()  # only what was seen: it may be asked for at any moment
        return True

    def _watch(self) -> None:
        self._guarded(lambda: self._set_end_time(self._ask_once()))
        self._asked = time.monotonic()
        self._guarded(self._look_at_switches)
        while not self._stop_flag.wait(self._pause()):
            self._guarded(self._look_at_clock)
            self._guarded(self._look_at_switches)
        self._guarded(self._record)

    def _guarded(self, look: Callable[[], None]) -> None:
        """Do one thing of the watch. An error of it, which is told once, must not end the others."""
        try:
            look()
        except Exception as error:
            sentence = f"{type(error).__name__}: {error}"
            if sentence not in self._told:
                self._told.add(sentence)
                log.warning("the watch for stops has failed, and goes on: %s", sentence)

    def _look_at_clock(self) -> None:
        due = self._deadline is not None and time.time() >= self._deadline
        if due or time.monotonic() >= self._asked + ASK_EVERY_S:
            self._asked = time.monotonic()
            if not self._limit_has_moved() and due:
                self._stop_flag.request(StopCause.DEADLINE)

    def _record(self) -> None:
        """Record why the ranks were told to stop: at once, and again with what SLURM says of the job.

        Rank 0 waits only RECORD_TIMEOUT_S for that, and an overloaded controller may take longer.
        """
        first = self._stop_flag.first
        assert first is not None
        end_time = self._end_time

        def record(facts: JobFacts | None) -> None:
            left = None if end_time is None else end_time - first.time
            attempts.record_stop(
                self._attempt_dir, cause=first.cause, cause_time=first.time, seconds_left=left, facts=facts
            )

        self._guarded(lambda: record(None))
        facts = self._client.job(own_job_id() or "") if self._client is not None else None
        if facts is not None and facts.end_time is not None:
            self._end_time = facts.end_time  # a preemption moves it to the end of the grace time
            if not facts.preempted and facts.state == JobState.RUNNING:
                end_time = facts.end_time
        if facts is not None or not self._attempt_dir.stop_file.exists():
            record(facts)

    @property
    def _deadline(self) -> float | None:
        """The time at which the clock gives the warning: half of the lead before the end, in unix seconds.

        SLURM's own signal, which may be up to 60 s early but never late, should come first.
        """
        if self._end_time is None or not self._signal_lead_s:
            return None
        return self._end_time - self._signal_lead_s / 2

    def _pause(self) -> float | None:
        pauses = [LOOK_EVERY_S] if self._run_dir is not None or self.profile_switch is not None else []
        if self._client is not None and self._end_time is not None:
            pauses.append(max(0.0, self._asked + ASK_EVERY_S - time.monotonic()))
        if self._deadline is not None:
            pauses.append(max(0.0, self._deadline - time.time()))
        return min(pauses, default=None)

    def _look_at_switches(self) -> None:
        if self.profile_switch is not None:
            self._guarded(self.profile_switch.look)
        run_dir = self._run_dir
        if run_dir is None:
            return

        def stop() -> None:
            self._guarded(lambda: requests.write_request(run_dir, RunAction.STOP))  # a full disk; it stops all the same
            self._stop_flag.request(StopCause.STOP_FILE)

        run_dir.take_switch(run_dir.save_switch, Event.SAVE_FILE_FOUND, self._save_asked.set)
        run_dir.take_switch(run_dir.stop_switch, Event.STOP_FILE_FOUND, stop)

    def _ask_once(self) -> float | None:
        """Return when the job's time ends, and request a stop if SLURM has ended or preempted the job already."""
        if self._client is None:
            return None
        facts = self._client.job(own_job_id() or "")
        if facts is not None and facts.preempted:
            self._stop_flag.request(StopCause.PREEMPTED)
        elif facts is not None and facts.state == JobState.COMPLETING:
            self._stop_flag.request(StopCause.ENDED)
        return _end_time(facts)


def _end_time(facts: JobFacts | None) -> float | None:
    if facts is not None:
        return facts.end_time
    stated = os.environ.get("SLURM_JOB_END_TIME")  # since 23.02; where scontrol cannot be run, in a container
    return float(stated) if stated else None
