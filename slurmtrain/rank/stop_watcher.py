"""The watch of rank 0: a thread that watches the clock, SLURM's record and the switches.

It records why a stop was requested.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from slurmtrain.checkpoint.save.schedule import latest_stop
from slurmtrain.runs import attempts, requests
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.requests import RunAction
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id
from slurmtrain.slurm.job_facts import JobFacts, JobState
from slurmtrain.system.signals import StopCause, StopFlag

log = logging.getLogger(__name__)

RECORD_TIMEOUT_S = 5.0
ANSWER_S = 15.0  # longest wait for an answer of SLURM: the time left to save goes by meanwhile
ASK_EVERY_S = 1800.0  # SLURM, whether the job's time limit was changed: by one rank of each job
ASK_AGAIN_S = 60.0  # after no answer
LOOK_EVERY_S = 2.0  # seconds between looks for switches: a shared file system has no event to await


class StopWatcher:
    """Watches the clock, SLURM's record and the switches until a stop is requested, which it then records. On rank 0.

    A signal that came before Python had handlers was ignored. SLURM still has its reason on record, so SLURM is asked
    once at the start; and if the early warning never comes, the clock gives it. Somebody may have changed the time
    limit by then: SLURM is asked again before the clock is believed, and at intervals.

    SLURM says how much time is left, which is counted down on the monotonic clock: the wall clock of a node may be wrong.

    Args:
        stop_flag: the flag of this rank, which a stop sets.
        attempt_dir: where the stop is recorded.
        client: asks SLURM, and waits at most `ANSWER_S` for an answer; None: there is none to ask.
        signal_lead_s: seconds by which the early warning comes before the time limit; 0: there is none.
        run_dir: the run whose switches are watched; None: no switches.
        profiles: the run can profile steps.
    """

    def __init__(
        self,
        stop_flag: StopFlag,
        attempt_dir: AttemptDir,
        client: SlurmClient | None,
        *,
        signal_lead_s: float,
        run_dir: RunDir | None = None,
        profiles: bool = False,
    ):
        self._stop_flag, self._attempt_dir, self._client = stop_flag, attempt_dir, client
        self._signal_lead_s, self._run_dir = signal_lead_s, run_dir
        self._profiles = profiles
        # When SLURM ends the job, and when to ask it next, by the monotonic clock.
        self._end = math.inf
        self._next_ask = math.inf if client is None else 0.0
        self._needs: tuple[float, float] | None = None
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
        self._needs = (step_s, save_s)

    def seconds_left(self) -> float | None:
        """Return the seconds until SLURM kills the job after a stop was requested, waiting for its answer.

        The result is None if they are not known.
        """
        self._thread.join(timeout=RECORD_TIMEOUT_S)
        return None if self._end == math.inf else self._end - time.monotonic()

    def _watch(self) -> None:
        while True:
            self._guarded(self._look_at_clock)
            self._guarded(self._look_at_switches)
            if self._stop_flag.wait(min(LOOK_EVERY_S, max(0.0, self._deadline - time.monotonic()))):
                break
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
        if self._client is not None and time.monotonic() >= min(self._next_ask, self._deadline):
            self._ask(self._client)
        if time.monotonic() >= self._deadline:
            self._stop_flag.request(StopCause.DEADLINE)

    def _ask(self, client: SlurmClient) -> None:
        """Ask SLURM when the job's time ends, and request a stop if SLURM has ended or preempted the job already."""
        asked = time.monotonic()
        facts = client.job_and_clock(own_job_id() or "")
        self._next_ask = asked + (ASK_EVERY_S if facts is not None and facts.as_of is not None else ASK_AGAIN_S)
        if facts is None:
            return
        if facts.preempted:
            self._stop_flag.request(StopCause.PREEMPTED)
        elif facts.state == JobState.COMPLETING:
            self._stop_flag.request(StopCause.ENDED)
        elif facts.seconds_left is not None:
            self._end = asked + facts.seconds_left
        elif facts.end_time is None and facts.state == JobState.RUNNING:  # its time limit is UNLIMITED
            self._end = math.inf

    def _record(self) -> None:
        """Record why the ranks were told to stop: at once, and again with what SLURM says of the job.

        Rank 0 waits only RECORD_TIMEOUT_S for that, and an overloaded controller may take longer.
        """
        first = self._stop_flag.first
        assert first is not None
        end = self._end

        def record(facts: JobFacts | None) -> None:
            left = None if end == math.inf else end - first.moment
            attempts.record_stop(
                self._attempt_dir, cause=first.cause, cause_time=first.time, seconds_left=left, facts=facts
            )

        self._guarded(lambda: record(None))
        asked = time.monotonic()
        facts = self._client.job_and_clock(own_job_id() or "") if self._client is not None else None
        if facts is not None and facts.state == JobState.COMPLETING:
            self._end = math.inf
        elif facts is not None and facts.seconds_left is not None:
            self._end = asked + facts.seconds_left  # a preemption moves it to the end of the grace time
            if not facts.preempted and facts.state == JobState.RUNNING:
                end = self._end
        if facts is not None or not self._attempt_dir.stop_file.exists():
            record(facts)

    @property
    def _deadline(self) -> float:
        """When the clock gives the warning: half of the lead before the end, or earlier if a step and a save take longer.

        SLURM's own signal, which may be up to 60 s early but never late, should come first.
        """
        needs, end = self._needs, self._end
        warning = end - self._signal_lead_s / 2 if self._signal_lead_s else math.inf
        return warning if needs is None else min(warning, latest_stop(end, step_s=needs[0], save_s=needs[1]))

    def _look_at_switches(self) -> None:
        run_dir, flag = self._run_dir, self._stop_flag
        if run_dir is None:
            return

        def stop() -> None:
            self._guarded(lambda: requests.write_request(run_dir, RunAction.STOP))  # a full disk; it stops all the same
            flag.request(StopCause.STOP_FILE)

        if self._profiles:
            run_dir.take_switch(run_dir.profile_switch, Event.PROFILE_FILE_FOUND, flag.profile_asked.set)
        run_dir.take_switch(run_dir.save_switch, Event.SAVE_FILE_FOUND, flag.save_asked.set)
        run_dir.take_switch(run_dir.stop_switch, Event.STOP_FILE_FOUND, stop)
