"""Rank 0's watchman: a stop is asked for early enough for the step that runs and a save, by what was measured."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runs import attempts, requests
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import stop_watcher as watch_module
from slurmtrain.runtime.stop_watcher import StopWatcher
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.system.files import read_json
from slurmtrain.system.signals import StopCause, StopFlag


class Slurm:
    """Says when the job's time ends."""

    def __init__(self, *left_s: float | None):
        self.ends = [None if seconds is None else time.time() + seconds for seconds in left_s]
        self.asked = 0

    def job(self, job_id: str) -> JobFacts:
        self.asked += 1
        return JobFacts("RUNNING", end_time=self.ends.pop(0) if len(self.ends) > 1 else self.ends[0])


def watch(signals: StopFlag, tmp_path: Path, client: Any) -> StopWatcher:
    made = StopWatcher(signals, AttemptDir(tmp_path), client, signal_lead_s=0)
    deadline = time.monotonic() + 60
    while made._end_time is None and time.monotonic() < deadline:  # it asks in a thread of its own
        time.sleep(0.005)
    return made


def test_slow_saves_bring_the_last_one_forward(tmp_path: Path) -> None:
    signals = StopFlag()
    made = watch(signals, tmp_path, Slurm(150.3))
    made.plan_stop(10.0, 40.0)  # 1.5 x 50 s before the end: 75 s from now
    assert not signals.wait(0.2)
    made.plan_stop(10.0, 90.0)  # 150 s before the end: at once
    assert signals.wait(60)
    assert signals.first is not None and signals.first.cause == "deadline"


def test_a_preemption_s_grace_time_is_what_is_left(tmp_path: Path) -> None:
    signals = StopFlag()
    made = watch(signals, tmp_path, slurm := Slurm(3600.0, 30.0))
    signals.request(StopCause.SIGTERM)
    before = time.time()
    left = made.seconds_left()
    assert left is not None and slurm.ends[0] is not None and before <= slurm.ends[0] - left <= time.time()


def test_a_time_limit_that_was_extended_is_followed(tmp_path: Path) -> None:
    """`scontrol update TimeLimit`: SLURM is asked before the clock is believed, and not all the time."""
    signals, slurm = StopFlag(), Slurm(1.0, 3600.0)
    made = StopWatcher(signals, AttemptDir(tmp_path), slurm, signal_lead_s=0.5)  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    while made._end_time != slurm.ends[-1] and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not signals.wait(0.3) and slurm.asked == 2
    made.plan_stop(1.0, 1.0)
    signals.request(StopCause.SIGUSR2)
    made.wait_for_record()
    record = read_json(tmp_path / "stop.json")
    assert record is not None and 3500 < record["seconds_left"] <= 3600


def test_a_save_that_was_planned_for_follows_the_time_limit(tmp_path: Path) -> None:
    signals, slurm = StopFlag(), Slurm(150.0, 3600.0)
    made = watch(signals, tmp_path, slurm)
    made.plan_stop(10.0, 90.0)  # 150 s before the end: at once, were that still the end
    deadline = time.monotonic() + 60
    while slurm.asked < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not signals.wait(0.3)
    made.plan_stop(10.0, 3000.0)
    assert signals.wait(60)
    assert signals.first is not None and signals.first.cause == "deadline"


def test_a_time_limit_that_was_lifted_stops_nobody_and_a_later_one_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals, slurm = StopFlag(), Slurm(1.0, None)
    made = StopWatcher(signals, AttemptDir(tmp_path), slurm, signal_lead_s=0.5)  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    while (slurm.asked < 2 or made._end_time is not None) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not signals.wait(0.8)
    assert made._end_time is None
    slurm.ends = [time.time() + 1.0]
    assert made._limit_has_moved()
    assert made._end_time == slurm.ends[0]
    signals.request(StopCause.SIGUSR2)
    made.wait_for_record()


def test_a_time_limit_that_was_shortened_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "ASK_EVERY_S", 0.05)
    signals = StopFlag()
    watch_made = StopWatcher(signals, AttemptDir(tmp_path), Slurm(3600.0, 1.0), signal_lead_s=0.5)  # type: ignore[arg-type]
    assert signals.wait(60) and signals.first is not None and signals.first.cause == "deadline"
    watch_made.wait_for_record()


@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_where_slurm_does_not_answer_the_clock_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    class Silent(Slurm):
        def job(self, job_id: str) -> JobFacts | None:  # type: ignore[override]
            if self.asked and how == "hangs":
                threading.Event().wait()
            return super().job(job_id) if self.asked == 0 else None

    monkeypatch.setattr(watch_module, "ANSWER_S", 0.1)
    signals = StopFlag()
    StopWatcher(signals, AttemptDir(tmp_path), Silent(1.0), signal_lead_s=1.0)  # type: ignore[arg-type]
    assert signals.wait(60) and signals.first is not None and signals.first.cause == "deadline"


def test_without_slurm_nothing_is_planned(tmp_path: Path) -> None:
    signals = StopFlag()
    made = StopWatcher(signals, AttemptDir(tmp_path), None, signal_lead_s=0)
    made.plan_stop(1e6, 1e6)
    assert not signals.wait(0.1)
    signals.request(StopCause.SIGTERM)
    assert made.seconds_left() is None


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "run")


def test_a_file_saves_once_and_another_ends_the_run(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.01)
    signals = StopFlag()
    (run_dir.path / "save").touch()
    made = StopWatcher(signals, AttemptDir(run_dir.attempts), None, signal_lead_s=0, run_dir=run_dir)
    deadline = time.monotonic() + 60
    while not made.take_save():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert not made.take_save() and not (run_dir.path / "save").exists() and not signals.requested
    (run_dir.path / "stop").touch()
    assert signals.wait(60)
    made.wait_for_record()
    assert not (run_dir.path / "stop").exists()
    record = read_json(run_dir.attempts / "stop.json")
    assert record is not None and record["cause"] == "the file stop"
    request = read_json(run_dir.request_file)
    assert request is not None and request["action"] == "stop"


class AskedMeanwhile(threading.Event):
    """Set by somebody else right after it was looked at."""

    def is_set(self) -> bool:
        before = super().is_set()
        self.set()
        return before


def test_a_save_that_is_asked_for_while_somebody_looks_is_not_forgotten(tmp_path: Path) -> None:
    signals = StopFlag()
    made = StopWatcher(signals, AttemptDir(tmp_path), None, signal_lead_s=0)
    made._save_asked = AskedMeanwhile()
    assert [made.take_save(), made.take_save()] == [False, True]
    signals.request(StopCause.SIGTERM)


def test_a_switch_that_cannot_be_taken_away_is_not_obeyed(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end every life of the run, and nobody could resume it."""
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.01)
    signals = StopFlag()
    (run_dir.path / "stop").mkdir()
    StopWatcher(signals, AttemptDir(run_dir.attempts), None, signal_lead_s=0, run_dir=run_dir)
    assert not signals.wait(0.2)
    signals.request(StopCause.SIGTERM)


def test_of_plans_that_are_made_at_the_same_moment_one_timer_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: set[object] = set()
    first_plans, go_on = threading.Event(), threading.Event()

    class Timer:
        daemon = True

        def __init__(self, seconds: float, action: object):
            if not first_plans.is_set():
                first_plans.set()
                assert go_on.wait(60)

        def start(self) -> None:
            waiting.add(self)

        def cancel(self) -> None:
            waiting.discard(self)

    signals = StopFlag()
    made = watch(signals, tmp_path, Slurm(3600.0))
    monkeypatch.setattr(threading, "Timer", Timer)
    planning = [threading.Thread(target=made.plan_stop, args=(1.0, save_s)) for save_s in (1.0, 2.0)]
    planning[0].start()
    assert first_plans.wait(60)
    planning[1].start()
    planning[1].join(0.3)  # it waits for the first, or would be done by now
    go_on.set()
    for thread in planning:
        thread.join(60)
    signals.request(StopCause.SIGTERM)
    made.wait_for_record()
    assert len(waiting) == 1


def test_two_threads_that_find_the_time_limit_extended_both_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock and the timer may both be due: the second must not believe its clock since the first has noted the change."""
    monkeypatch.setattr(watch_module, "ANSWER_S", 60.0)
    both_ask = threading.Barrier(2)

    class Extended(Slurm):
        def job(self, job_id: str) -> JobFacts:
            facts = super().job(job_id)
            if 1 < self.asked <= 3:
                both_ask.wait(60)
            return facts

    signals = StopFlag()
    made = watch(signals, tmp_path, Extended(100.0, 3600.0))
    moved: list[bool] = []
    asking = [threading.Thread(target=lambda: moved.append(made._limit_has_moved())) for _ in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    signals.request(StopCause.SIGTERM)
    made.wait_for_record()
    assert moved == [True, True]


def test_the_cause_is_on_record_before_slurm_has_answered(tmp_path: Path) -> None:
    """Rank 0 leaves after some seconds, which an overloaded controller needs for itself."""
    answers = threading.Event()

    class Slow(Slurm):
        def job(self, job_id: str) -> JobFacts:
            facts = super().job(job_id)
            if self.asked > 1:
                answers.wait(60)
            return facts

    signals = StopFlag()
    made = watch(signals, tmp_path, Slow(3600.0))
    signals.request(StopCause.SIGTERM)
    deadline = time.monotonic() + 60
    while (record := read_json(tmp_path / "stop.json")) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert record is not None and record["cause"] == StopCause.SIGTERM and record["facts"] is None
    assert record["seconds_left"] == pytest.approx(3600, abs=60)
    early = attempts.read_attempt_in(AttemptDir(tmp_path), 1)
    assert early.cause == StopCause.SIGTERM and early.facts_when_told is None
    answers.set()
    made._thread.join(60)
    record = read_json(tmp_path / "stop.json")
    assert record is not None and record["facts"]["state"] == "RUNNING" and record["cause"] == StopCause.SIGTERM


def test_what_fails_in_the_watch_ends_neither_the_switches_nor_the_record(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.01)

    class Broken(Slurm):
        def job(self, job_id: str) -> JobFacts:
            raise KeyError("a bug")

    def full(*words: Any, **values: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunDir, "event", full)
    monkeypatch.setattr(requests, "write_request", full)
    signals = StopFlag()
    made = StopWatcher(
        signals,
        AttemptDir(run_dir.attempts),
        Broken(),  # type: ignore[arg-type]
        signal_lead_s=0,
        run_dir=run_dir,
    )
    (run_dir.path / "save").touch()
    deadline = time.monotonic() + 60
    while not made.take_save():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    (run_dir.path / "stop").touch()
    assert signals.wait(60)
    made._thread.join(60)
    record = read_json(run_dir.attempts / "stop.json")
    assert record is not None and record["cause"] == "the file stop"
    assert caplog.text.count("a bug") == 1 and "No space left on device" in caplog.text


def test_the_clock_is_believed_where_no_thread_can_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals = StopFlag()
    made = watch(signals, tmp_path, Slurm(3600.0))

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_more)
        made._time_is_up()
    assert signals.first is not None and signals.first.cause == "deadline"
    made.wait_for_record()
