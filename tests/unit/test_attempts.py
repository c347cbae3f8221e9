"""The ledger of attempts, and the evidence that `settle` reads from it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from slurmtrain.config.schema import Config, RequeueConfig
from slurmtrain.rundir import RunDir, create
from slurmtrain.runtime import attempts
from slurmtrain.runtime.attempts import Attempt
from slurmtrain.runtime.judge import Reason, Verdict
from slurmtrain.runtime.settle import close_abandoned, own_job_id, settle
from slurmtrain.runtime.slurm import JobFacts, SlurmClient


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return create(tmp_path, "train")


def begin(run: RunDir, **fields: object) -> Attempt:
    before = attempts.newest_checkpoint_step(run)
    known = {"started": time.time(), "first_step": 0, "committed_before": before, **fields}
    attempt = Attempt(number=run.new_attempt(), **known)  # type: ignore[arg-type]
    attempts.write_attempt(run, attempt)
    return attempt


def commit(run: RunDir, step: int) -> None:
    path = run.checkpoints / f"checkpoint_{step:07d}"
    path.mkdir()
    (path / "COMPLETE").touch()


class SlurmSays(SlurmClient):
    def __init__(self, facts: JobFacts | None):
        self.facts = facts
        self.asked: list[str] = []

    def job(self, job_id: str) -> JobFacts | None:
        self.asked.append(job_id)
        return self.facts


# Records.


def test_a_record_reads_back_as_it_was_written(run: RunDir) -> None:
    attempt = begin(run, job_id="12", nodes=["n0", "n1"], world_size=4, reason="crash", last_step=7)
    assert attempts.read_attempt(run, 1) == attempt
    assert attempts.all_attempts(run) == [attempt]


def test_an_attempt_that_died_before_its_first_word_has_an_empty_record(run: RunDir) -> None:
    run.new_attempt()
    assert attempts.read_attempt(run, 1) == Attempt(number=1)


def test_a_torn_or_foreign_record_does_not_stop_a_reader(run: RunDir) -> None:
    run.new_attempt()
    record = run.attempt(1) / "attempt.json"
    record.write_text('{"number": 1, "job_')
    assert attempts.read_attempt(run, 1) == Attempt(number=1)
    record.write_text(json.dumps({"number": 5, "job_id": "3", "of_another_version": 1}))
    assert attempts.read_attempt(run, 1) == Attempt(number=1, job_id="3")


def test_why_it_was_told_to_stop_is_part_of_the_record(run: RunDir) -> None:
    begin(run)
    facts = JobFacts("RUNNING", preempt_time=5.0)
    attempts.record_stop(run.attempt(1), cause="SIGTERM", cause_time=9.5, seconds_left=100.0, facts=facts)
    attempt = attempts.read_attempt(run, 1)
    assert (attempt.cause, attempt.cause_time, attempt.seconds_left) == ("SIGTERM", 9.5, 100.0)
    assert attempt.facts is not None and attempt.facts["preempt_time"] == 5.0


def test_the_last_logged_step_is_read_past_a_torn_line(run: RunDir) -> None:
    assert attempts.last_logged_step(run) is None
    run.metrics_file.write_text('{"step": 10}\n{"step": 20, "loss": 1.5}\n{"step": 3')
    assert attempts.last_logged_step(run) == 20


def test_the_newest_checkpoint_is_a_complete_one(run: RunDir) -> None:
    assert attempts.newest_checkpoint_step(run) is None
    commit(run, 50)
    commit(run, 100)
    (run.checkpoints / "checkpoint_0000200").mkdir()
    (run.checkpoints / "checkpoint_0000300.tmp-1").mkdir()
    assert attempts.newest_checkpoint_step(run) == 100


# The budget.


@pytest.mark.parametrize(
    ("history", "count"),
    [
        ([], 0),
        (["crash"], 1),
        (["crash", "crash"], 2),
        (["crash", "time limit"], 2),
        (["crash+", "crash"], 1),
        (["crash", "crash+"], 0),
        (["crash", "preempted", "crash"], 2),
        (["crash", "node failure"], 1),
        (["crash", "finished!", "crash"], 1),
        (["crash", "crash!", "crash"], 1),
        (["crash", "cancelled!"], 0),
        (["crash", None], 1),
        (["preempted", "preempted"], 0),
    ],
)
def test_only_own_failures_since_the_last_progress_count(history: list[str | None], count: int) -> None:
    """A plus marks an attempt that committed a newer checkpoint, an exclamation mark one after which the run ended."""
    records = [
        Attempt(
            number=index + 1,
            reason=(reason or "").rstrip("+!") or None,
            verdict="end" if reason and reason.endswith("!") else "requeue",
            committed_before=10,
            committed_step=20 if reason and reason.endswith("+") else 10,
            stalled=bool(reason) and reason in ("crash", "time limit", "crash!"),
        )
        for index, reason in enumerate(history)
    ]
    after = len(records) + 1
    assert attempts.stalled_before([*records, Attempt(number=after, reason="crash")], after) == count


# Attempts that ended without a word.


def test_an_attempt_whose_node_died_is_closed_by_the_next(run: RunDir) -> None:
    begin(run, job_id="7")
    commit(run, 30)
    run.metrics_file.write_text('{"step": 33}\n')
    begin(run, job_id="7")
    close_abandoned(run, 2, Config())
    closed, current = attempts.all_attempts(run)
    assert (closed.reason, closed.verdict) == (Reason.NODE_FAILURE, Verdict.RESTARTING)
    assert (closed.committed_step, closed.last_step) == (30, 33) and closed.ended is not None
    assert closed.sentence is not None and "without a word" in closed.sentence
    assert current.reason is None
    assert [event["attempt"] for event in run.events()] == [1]
    close_abandoned(run, 2, Config())
    assert len(run.events()) == 1


def test_an_attempt_that_was_killed_at_the_end_of_a_grace_time_was_preempted(run: RunDir) -> None:
    begin(run)
    facts = JobFacts("RUNNING", start_time=1.0, preempt_time=5.0)
    attempts.record_stop(run.attempt(1), cause="SIGTERM", cause_time=5.0, seconds_left=None, facts=facts)
    begin(run)
    close_abandoned(run, 2, Config())
    assert attempts.read_attempt(run, 1).reason == Reason.PREEMPTED


def test_what_has_ended_properly_is_left_alone(run: RunDir) -> None:
    finished = begin(run, reason="crash", verdict="requeue", sentence="x")
    run.new_attempt()
    (run.attempt(2) / "setup-failed").write_text("no module")
    begin(run)
    close_abandoned(run, 3, Config())
    assert attempts.read_attempt(run, 1) == finished
    assert attempts.read_attempt(run, 2).reason is None


@pytest.mark.parametrize(
    ("left_behind", "reason"),
    [
        ({"said": "stopped", "cause": "SIGUSR2", "seconds_left": 60.0}, Reason.TIME_LIMIT),
        ({"said": "stopped", "cause": "SIGTERM"}, Reason.ASKED),
        ({"said": "finished"}, Reason.FINISHED),
        ({"failure": "ValueError: no"}, Reason.CRASH),
        ({"request": "cancel", "cause": "SIGTERM"}, Reason.CANCELLED),
        ({}, Reason.NODE_FAILURE),
    ],
)
def test_an_abandoned_attempt_is_judged_by_what_it_left_behind(
    run: RunDir, left_behind: dict[str, object], reason: Reason
) -> None:
    begin(run, said=left_behind.get("said"))
    if "cause" in left_behind:
        left = left_behind.get("seconds_left")
        attempts.record_stop(
            run.attempt(1), cause=str(left_behind["cause"]), cause_time=time.time(), seconds_left=left, facts=None
        )
    if "failure" in left_behind:
        attempts.record_failure(run.attempt(1), 0, exit_code=1, sentence=str(left_behind["failure"]))
    if "request" in left_behind:
        attempts.write_request(run, str(left_behind["request"]))
    begin(run)
    close_abandoned(run, 2, Config())
    assert attempts.read_attempt(run, 1).reason == reason


@pytest.mark.parametrize("opened", [True, False])
def test_a_crash_before_the_first_step_is_no_progress_whatever_was_saved_before(run: RunDir, opened: bool) -> None:
    commit(run, 30)
    for number in (1, 2):
        if opened:
            begin(run, committed_before=30)
        else:
            run.new_attempt()
        judgement = settle(run, number, 1, Config(requeue=RequeueConfig(max_attempts_without_progress=2)), None)
        assert judgement.reason == Reason.CRASH
    assert judgement.verdict == Verdict.END


# Causes and consequences.


def test_the_first_rank_that_failed_by_itself_is_the_cause(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.new_attempt()
    directory = run.attempt(1)
    assert attempts.first_failure(directory) is None
    clock = iter([10.0, 11.0, 12.0])
    monkeypatch.setattr(attempts.time, "time", lambda: next(clock))
    attempts.record_failure(directory, 0, exit_code=1, sentence="Connection closed by peer", because_of_peer=True)
    attempts.record_failure(directory, 3, exit_code=78, sentence="no GPU")
    attempts.record_failure(directory, 2, exit_code=1, sentence="ValueError: later")
    assert attempts.first_failure(directory) == (78, "rank 3: no GPU")
    assert attempts.first_failure(directory, because_of_peer=True) == (1, "rank 0: Connection closed by peer")


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("srun: error: n1: task 3: Killed\n", "n1: task 3: Killed"),
        ("srun: error: n[0-1]: tasks 0-3: Killed\n", "n[0-1]: tasks 0-3: Killed"),
        (
            "srun: error: gpu1: task 12: Segmentation fault (core dumped)\n",
            "gpu1: task 12: Segmentation fault (core dumped)",
        ),
        ("srun: error: n0: tasks 0,2: Aborted\n", "n0: tasks 0,2: Aborted"),
        ("srun: error: n0: task 1: Out Of Memory\n", "n0: task 1: Out Of Memory"),
        ("srun: error: n0: task 1: Exited with exit code 75\n", None),
        ("srun: error: n0: task 1: Terminated\n", None),
        ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n", None),
        ("", None),
        (None, None),
    ],
)
def test_sruns_words_on_killed_tasks_are_found(log: str | None, found: str | None, tmp_path: Path) -> None:
    if log is not None:
        (tmp_path / "srun.log").write_text("srun: job 5 queued\n" + log)
    assert attempts.killed_tasks(tmp_path) == found


# As 22.05.8 and 25.05.9 write it: into a job's log, and of a step into srun.log.
NODES_WORDS = {
    "22.05": "slurmstepd-n0: error: *** {what} ON n0 CANCELLED AT {at}{why} ***\n",
    "25.05": "[{at}.008] error: *** {what} ON n0 CANCELLED AT {at}{why} ***\n",
}


@pytest.mark.parametrize("version", NODES_WORDS)
def test_why_slurm_ended_a_job_is_read_from_its_log(version: str, tmp_path: Path) -> None:
    line, began = NODES_WORDS[version], 1_800_000_000.5

    def at(seconds: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(began + seconds))

    log = tmp_path / "slurm-2.log"
    log.write_text(line.format(what="JOB 2", at=at(-60), why=" DUE TO PREEMPTION") + "rank got TERM\n")
    assert attempts.cancelled_due_to(log, began) is None  # that was the attempt before
    for why in (" DUE TO JOB REQUEUE", " DUE TO PREEMPTION"):
        with log.open("a") as file:
            file.write(line.format(what="JOB 2", at=at(0), why=why))
        assert attempts.cancelled_due_to(log, began) == why.removeprefix(" DUE TO ")
    log.write_text(line.format(what="JOB 2", at=at(1), why=""))  # scancel
    assert attempts.cancelled_due_to(log, began) is None


def test_a_preemption_without_grace_is_told_from_a_requeue_by_the_jobs_log(run: RunDir) -> None:
    facts = JobFacts("COMPLETING", restarts=1, start_time=1.0)  # PreemptTime is gone
    words = NODES_WORDS["25.05"].format(what="JOB 7", at=time.strftime("%Y-%m-%dT%H:%M:%S"), why=" DUE TO {why}")
    for why, reason in (("JOB REQUEUE", Reason.REQUEUED), ("PREEMPTION", Reason.PREEMPTED)):
        attempt = begin(run, job_id="7", said="stopped")
        (run.path / "slurm-7.log").write_text(words.format(why=why))
        judgement = settle(run, attempt.number, 75, Config(), SlurmSays(facts))
        assert (judgement.reason, judgement.verdict) == (reason, Verdict.RESTARTING)


# What a person asked.


def test_a_request_is_for_the_attempt_that_was_running_then(run: RunDir) -> None:
    earlier = begin(run)
    assert attempts.request_for(run, earlier) is None
    attempts.write_request(run, "preempt")
    assert attempts.request_for(run, earlier) == "preempt"
    later = begin(run, started=time.time() + 60)
    assert attempts.request_for(run, later) is None


# Settling.


def test_settling_completes_the_record_and_uses_the_request_up(run: RunDir) -> None:
    begin(run, job_id="7", said="stopped")
    commit(run, 30)
    attempts.record_stop(run.attempt(1), cause="SIGTERM", cause_time=time.time(), seconds_left=None, facts=None)
    attempts.write_request(run, "preempt")
    client = SlurmSays(JobFacts("RUNNING", start_time=1.0))
    judgement = settle(run, 1, 75, Config(), client)
    assert (judgement.reason, judgement.verdict) == (Reason.ASKED, Verdict.REQUEUE)
    assert client.asked == ["7"]
    attempt = attempts.read_attempt(run, 1)
    assert (attempt.exit_code, attempt.reason, attempt.verdict, attempt.committed_step) == (75, "asked", "requeue", 30)
    assert attempt.progressed and attempt.last_step == 30 and attempt.ended is not None
    assert not run.request_file.exists()
    assert run.events()[-1]["verdict"] == "requeue"


def test_a_crash_loop_ends_and_a_checkpoint_resets_it(run: RunDir) -> None:
    config = Config(requeue=RequeueConfig(max_attempts_without_progress=2))

    def crash() -> Verdict:
        attempt = begin(run, first_step=attempts.newest_checkpoint_step(run) or 0)
        attempts.record_failure(run.attempt(attempt.number), 0, exit_code=1, sentence="boom")
        return settle(run, attempt.number, 1, config, None).verdict

    assert crash() == Verdict.REQUEUE
    attempt = begin(run)
    commit(run, 10)
    assert settle(run, attempt.number, 1, config, None).verdict == Verdict.REQUEUE
    assert crash() == Verdict.REQUEUE
    assert crash() == Verdict.END
    assert "2 attempts in a row" in (attempts.all_attempts(run)[-1].sentence or "")


def test_without_another_cause_the_rank_that_lost_its_peer_is_named(run: RunDir) -> None:
    begin(run)
    attempts.record_failure(run.attempt(1), 1, exit_code=1, sentence="Connection reset by peer", because_of_peer=True)
    assert "rank 1: Connection reset by peer" in settle(run, 1, 1, Config(), None).sentence
    (run.attempt(1) / "srun.log").write_text("srun: error: n0: task 0: Killed\n")
    assert "n0: task 0: Killed" in settle(run, 1, 137, Config(), None).sentence


def test_the_job_is_known_by_its_own_array_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "70")
    assert own_job_id() == "70"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert own_job_id() == "70_3"
