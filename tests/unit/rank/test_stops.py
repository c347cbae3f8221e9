"""Why a job is told to stop, and how much time that leaves: SLURM's signals, its record of the job, and the clock."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slurmtrain.cli import main
from slurmtrain.rank.stop_watcher import StopWatcher
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.system.signals import StopCause, StopFlag
from tests.support.fake_slurm import ON_CPUS, FakeSlurm

STOPS = "trap 'exit 75' TERM; touch ready; while sleep 0.05; do :; done"
DEAF = "trap '' TERM; touch ready; while sleep 0.05; do :; done"


def submitted(folder: Path, program: str, slurm: FakeSlurm, *more: str) -> str:
    """The id of a job of this program."""
    folder.mkdir()
    (folder / "program.sh").write_text(program)
    with contextlib.chdir(folder):
        words = ["job=command", "job.command='bash program.sh'", "job.snapshot=none", "requeue.restart_delay_s=0"]
        assert main([*ON_CPUS, "cluster.signal_lead_s=300", *words, *more, "submit"]) == 0
    return str(slurm.jobs[-1]["id"])


def status(folder: Path) -> dict[str, Any]:
    (run_json,) = folder.glob("runs/*/*/run.json")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["status", str(run_json.parent), "--json"]) == 0
    found: dict[str, Any] = json.loads(shown.getvalue())
    return found


def test_a_job_stops_when_the_clock_or_slurm_says_so_and_its_program_ends_before_slurm_would_kill_it(
    project: Path, slurm: FakeSlurm
) -> None:
    """The early warning comes 300 s before the time limit. Where it does not, the clock gives it 150 s before.

    The wall clock of the node is an hour ahead of the controller's.
    """
    slurm.set_clock(-3600)
    programs = {"clock": STOPS, "silent": STOPS, "extended": STOPS, "preempted": DEAF}
    jobs = {name: submitted(project / name, program, slurm) for name, program in programs.items()}
    for name, left_s in (("clock", 153), ("silent", 170), ("extended", 170), ("preempted", 3600)):
        slurm.change(jobs[name], end=slurm.at(left_s))
    asks = {name: f"scontrol show job -o {job}" for name, job in jobs.items()}
    with ThreadPoolExecutor(4) as pool:
        running = {name: pool.submit(slurm.run, job) for name, job in jobs.items()}

        def wait_until(name: str, condition: Callable[[], bool]) -> None:
            while not condition():
                assert not running[name].done(), running[name].result().stdout
                time.sleep(0.05)

        for name in ("extended", "silent", "preempted"):
            wait_until(name, (project / name / "ready").exists)
        slurm.change(jobs["extended"], end=slurm.at(3600))  # by the administrator
        slurm.fail(asks["silent"], times=1)
        asked = slurm.calls().count(asks["extended"])
        slurm.change(jobs["preempted"], preempted=slurm.at(0), end=slurm.at(13))
        slurm.signal(jobs["preempted"], signal.SIGTERM)
        for name in ("preempted", "clock", "silent"):
            running[name].result()
        # SLURM is asked before the clock is believed.
        wait_until("extended", lambda: slurm.calls().count(asks["extended"]) > asked)
        slurm.signal(jobs["extended"], signal.SIGTERM)
        running["extended"].result()

    def ending(name: str) -> tuple[str, str]:
        (attempt,) = status(project / name)["attempts"]
        return attempt["reason"], attempt["verdict"]

    assert ending("clock") == ending("silent") == ("time limit", "requeue")
    assert ending("extended") == ("asked", "requeue")
    assert ending("preempted") == ("preempted", "requeue")
    (events,) = (project / "preempted").glob("runs/*/*/events.jsonl")
    said = map(json.loads, events.read_text().splitlines())
    (killed,) = [each for each in said if each["event"].startswith("killed")]
    assert 5 < killed["seconds"] < 13


class Slurm:
    """Says how much time the job has left, each time something else; at last the same. Its clock is its own."""

    def __init__(self, *left_s: float):
        self.answers = list(left_s)
        self.asked = threading.Semaphore(0)

    def job_and_clock(self, job_id: str) -> JobFacts:
        self.asked.release()
        left_s = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return JobFacts("RUNNING", end_time=1e6 + left_s, as_of=1e6)


def test_slow_saves_bring_the_stop_forward_and_follow_a_time_limit_that_was_extended(tmp_path: Path) -> None:
    stop_flag, slurm = StopFlag(), Slurm(150.0, 3600.0)
    watcher = StopWatcher(stop_flag, AttemptDir(tmp_path), slurm, signal_lead_s=0)  # type: ignore[arg-type]
    assert slurm.asked.acquire(timeout=60)
    watcher.plan_stop(10.0, 90.0)  # 1.5 x 100 s before the end: at once, were that still the end
    assert slurm.asked.acquire(timeout=60)
    watcher.plan_stop(10.0, 3000.0)
    assert stop_flag.wait(60) and stop_flag.first is not None and stop_flag.first.cause == "deadline"
    left = watcher.seconds_left()  # of which a save may take its part
    assert left is not None and 3500 < left <= 3600


def test_what_is_asked_for_by_files_is_taken_once(tmp_path: Path) -> None:
    run, flag = RunDir(tmp_path), StopFlag()
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    run.profile_switch.touch()
    run.save_switch.touch()
    StopWatcher(flag, AttemptDir(tmp_path), None, signal_lead_s=0, run_dir=run, profiles=True)
    assert flag.profile_asked.wait(60) and flag.save_asked.wait(60)
    assert not run.profile_switch.exists() and not run.save_switch.exists() and not flag.requested
    flag.request(StopCause.PROGRAM)
