"""The ledger of attempts, and the evidence that `finish_attempt` reads from it."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.choices import Backend
from slurmtrain.config.schema import Config, RequeueConfig
from slurmtrain.errors import ClusterError
from slurmtrain.runs import attempt_history, attempts, reached_step, requests
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.events import Event
from slurmtrain.runs.failures import Failure, Failures, Hang, RankFailure, found_hang, record_failure, record_hang
from slurmtrain.runs.node_blame import blamed_for
from slurmtrain.runs.outcome import AttemptOutcome, decide_outcome
from slurmtrain.runs.reasons import Reason, RunAction, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.srun_log import SrunLog, cancelled_due_to
from slurmtrain.runtime import finish_attempt as finish_module
from slurmtrain.runtime.abandoned_attempts import close_abandoned
from slurmtrain.runtime.begin_attempt import budget_used_up, ended_before
from slurmtrain.runtime.finish_attempt import finish_attempt
from slurmtrain.runtime.jobs.program_stop import told_facts
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.node_ledger import BlamePolicy
from slurmtrain.system import files, records
from slurmtrain.system.files import write_json
from slurmtrain.system.signals import StopCause
from tests.support.runs import add_attempt


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return create_run_dir(tmp_path, "train")


def begin(run: RunDir, **fields: Any) -> Attempt:
    before = reached_step.newest_checkpoint_step(run)
    return add_attempt(run, **{"first_step": 0, "committed_before": before, **fields})


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


def test_a_record_says_apart_why_it_ended_and_what_happens_next(run: RunDir) -> None:
    attempt = begin(run)
    assert attempt.why is None
    attempt.say("hung: rank 1 did not come; 3 other ranks waited", "it is requeued")
    attempts.write_attempt(run, attempt)
    read = attempts.read_attempt(run, 1)
    assert read.sentence == "hung: rank 1 did not come; 3 other ranks waited; it is requeued"
    assert (read.why, read.next_step) == ("hung: rank 1 did not come; 3 other ranks waited", "it is requeued")
    read.say("cancelled by scancel")
    assert (read.why, read.sentence, read.next_step) == ("cancelled by scancel", "cancelled by scancel", None)


def test_an_attempt_that_died_before_its_first_word_has_an_empty_record(run: RunDir) -> None:
    run.new_attempt()
    assert attempts.read_attempt(run, 1) == Attempt(number=1)


def test_a_torn_or_foreign_record_does_not_stop_a_reader(run: RunDir) -> None:
    run.new_attempt()
    record = run.attempt(1).path / "attempt.json"
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
    assert attempt.facts_when_told == facts == told_facts(run.attempt(1))


def test_what_another_version_has_recorded_of_the_job_is_read_as_far_as_it_is_known(run: RunDir) -> None:
    begin(run)
    for facts, known in (
        ({"state": "RUNNING", "end_time": 9.0, "of_another_version": 1}, JobFacts("RUNNING", end_time=9.0)),
        ({"state": "RUNNING", "end_time": "soon", "restarts": None}, JobFacts("RUNNING")),
        ({"end_time": 9.0}, None),
        (None, None),
    ):
        write_json(run.attempt(1).stop_file, {"cause": "SIGTERM", "time": 1.0, "facts": facts})
        assert attempts.read_attempt(run, 1).facts_when_told == known == told_facts(run.attempt(1))
    run.attempt(1).stop_file.write_text('{"facts": "none"}')
    assert told_facts(run.attempt(1)) is None


def test_the_last_logged_step_is_read_past_a_torn_line(run: RunDir) -> None:
    assert reached_step.last_logged_step(run) is None
    run.metrics_file.write_text('{"step": 10}\n{"step": 20, "loss": 1.5}\n{"step": 3')
    assert reached_step.last_logged_step(run) == 20


def test_the_newest_checkpoint_is_a_complete_one(run: RunDir) -> None:
    assert reached_step.newest_checkpoint_step(run) is None
    commit(run, 50)
    commit(run, 100)
    (run.checkpoints / "checkpoint_0000200").mkdir()
    (run.checkpoints / "checkpoint_0000300.tmp-1").mkdir()
    assert reached_step.newest_checkpoint_step(run) == 100


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
    assert len(attempt_history.stalled_numbers([*records, Attempt(number=after, reason="crash")], after)) == count


@pytest.mark.parametrize(
    ("began_at", "count"),
    [
        ([0, 0, 0], 2),
        ([0, 50, 90], 0),  # each went on from a copy on the nodes of the one before
        ([0, 50, 50], 1),  # the second one got nowhere
        ([0, 50, None, 50], 2),
        ([0, 50, 0, 50], 2),  # the copies were lost, and the same steps were done again
        ([50, 50], 1),  # it began from another run's checkpoint
    ],
)
def test_an_attempt_from_whose_copy_the_next_one_goes_on_has_made_progress(
    began_at: list[int | None], count: int
) -> None:
    records = [
        Attempt(number=index + 1, reason="crash", verdict="requeue", stalled=True, first_step=step)
        for index, step in enumerate(began_at)
    ]
    assert len(attempt_history.stalled_numbers(records, len(records))) == count


# Attempts that ended without a word.


def test_an_attempt_whose_node_died_is_closed_by_the_next(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    begin(run, job_id="7")
    commit(run, 30)
    run.metrics_file.write_text('{"step": 33}\n')
    begin(run, job_id="7")
    close_abandoned(run, 2, Config(), None)
    closed, current = attempts.all_attempts(run)
    assert (closed.reason, closed.verdict) == (Reason.NODE_FAILURE, Verdict.RESTARTING)
    assert (closed.committed_step, closed.last_step) == (30, 33) and closed.ended is not None
    assert closed.sentence is not None and "without a word" in closed.sentence
    assert current.reason is None
    assert [event["attempt"] for event in run.events()] == [1]
    close_abandoned(run, 2, Config(), None)
    assert len(run.events()) == 1


def test_an_attempt_that_was_killed_at_the_end_of_a_grace_time_was_preempted(run: RunDir) -> None:
    begin(run)
    facts = JobFacts("RUNNING", start_time=1.0, preempt_time=5.0)
    attempts.record_stop(run.attempt(1), cause="SIGTERM", cause_time=5.0, seconds_left=None, facts=facts)
    begin(run)
    close_abandoned(run, 2, Config(), None)
    assert attempts.read_attempt(run, 1).reason == Reason.PREEMPTED


def test_what_has_ended_properly_is_left_alone(run: RunDir) -> None:
    finished = begin(run, reason="crash", verdict="requeue", sentence="x")
    run.new_attempt()
    (run.attempt(2).path / "setup-failed").write_text("no module")
    begin(run)
    close_abandoned(run, 3, Config(), None)
    assert attempts.read_attempt(run, 1) == finished
    assert attempts.read_attempt(run, 2).reason is None


@pytest.mark.parametrize(
    ("left_behind", "reason"),
    [
        ({"said": "stopped", "cause": "SIGUSR2", "seconds_left": 60.0}, Reason.TIME_LIMIT),
        ({"said": "stopped", "cause": "SIGTERM"}, Reason.ASKED),
        ({"said": "finished"}, Reason.FINISHED),
        ({"said": "finished", "failure": "ValueError: no"}, Reason.CRASH),
        ({"failure": "ValueError: no"}, Reason.CRASH),
        ({"request": "cancel", "cause": "SIGTERM"}, Reason.CANCELLED),
        ({}, Reason.NODE_FAILURE),
    ],
)
def test_the_outcome_of_an_abandoned_attempt_is_decided_by_what_it_left_behind(
    run: RunDir, left_behind: dict[str, Any], reason: Reason
) -> None:
    begin(run, said=left_behind.get("said"))
    if "cause" in left_behind:
        left = left_behind.get("seconds_left")
        attempts.record_stop(
            run.attempt(1), cause=str(left_behind["cause"]), cause_time=time.time(), seconds_left=left, facts=None
        )
    if "failure" in left_behind:
        record_failure(run.attempt(1), 0, Failure(1, str(left_behind["failure"])))
    if "request" in left_behind:
        requests.write_request(run, RunAction(str(left_behind["request"])))
    begin(run)
    close_abandoned(run, 2, Config(), None)
    assert attempts.read_attempt(run, 1).reason == reason


class Asked(SlurmClient):
    """SLURM, with one answer about jobs and one about steps; an error where it cannot be asked."""

    def __init__(self, job: JobFacts | Exception | None = None, step: bool = False):
        self.answer, self.step = job, step

    def look(self, job_id: str) -> JobFacts | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def step_lives(self, step_id: str) -> bool:
        return self.step


@pytest.mark.parametrize(
    ("case", "fields", "client", "alive"),
    [
        ("another job that runs", {"job_id": "8"}, Asked(JobFacts("RUNNING")), True),
        ("another job that leaves", {"job_id": "8"}, Asked(JobFacts("COMPLETING")), True),
        ("another job that has ended", {"job_id": "8"}, Asked(JobFacts("NODE_FAIL")), False),
        ("another job that was started again", {"job_id": "8"}, Asked(JobFacts("RUNNING", restarts=1)), False),
        ("another job that SLURM has forgotten", {"job_id": "8"}, Asked(None), False),
        ("another job, and nobody answers", {"job_id": "8"}, Asked(ClusterError("no")), True),
        ("another job, and nobody to ask", {"job_id": "8"}, None, True),
        ("an earlier life of this job", {"job_id": "7"}, Asked(ClusterError("no")), False),
        ("another step that runs", {"job_id": "7", "restart_count": 1, "step_id": "7.0"}, Asked(step=True), True),
        ("another step that is gone", {"job_id": "7", "restart_count": 1, "step_id": "7.0"}, Asked(), False),
        ("a process of this host", {"pid": os.getpid(), "host": socket.gethostname()}, None, True),
        ("a process that has ended", {"pid": 1 << 22, "host": socket.gethostname()}, None, False),
        ("a process of before a reboot", {"pid": os.getpid(), "born": "1", "host": socket.gethostname()}, None, False),
        ("a process of another host", {"pid": 1, "host": "elsewhere"}, None, True),
        ("whose rank 0 never came", {"started": 0.0}, None, False),
        ("that another job is setting up", {"claim": "8 0"}, Asked(JobFacts("RUNNING")), True),
        ("that another job was setting up", {"claim": "8 0"}, Asked(JobFacts("NODE_FAIL")), False),
        ("that this job was setting up", {"claim": "7 0"}, Asked(JobFacts("RUNNING")), False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_attempt_that_may_still_run_is_never_closed(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    fields: dict[str, object],
    client: SlurmClient | None,
    alive: bool,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    if "claim" in fields:
        (run.attempt(run.new_attempt()).path / "job").write_text(f"{fields['claim']}\n")
    else:
        begin(run, **fields)
    begin(run, job_id="7", restart_count=1)
    close_abandoned(run, 2, Config(), client)
    assert (attempts.read_attempt(run, 1).reason is None) == alive


def test_a_run_that_takes_its_nodes_down_ends_with_the_budget(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is left on such a node who could record the outcome: the next start counts."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    config = Config(requeue=RequeueConfig(max_attempts_without_progress=3))
    for life in range(3):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(life))
        assert budget_used_up(run, config, None) is None
        begin(run, job_id="7", restart_count=life)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert budget_used_up(run, config, None) == Verdict.END
    last = attempts.all_attempts(run)[-1]
    assert (last.reason, last.verdict) == (Reason.NODE_FAILURE, Verdict.END)
    spent = "3 attempts in a row without a new checkpoint: giving up (requeue.max_attempts_without_progress)"
    assert last.sentence == f"ended without a word: its node failed, or it was killed; {spent}"
    assert last.next_step == spent


def test_a_node_that_dies_after_progress_costs_nothing_of_the_budget(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    config = Config(requeue=RequeueConfig(max_attempts_without_progress=1))
    for life in range(3):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(life))
        assert budget_used_up(run, config, None) is None
        begin(run, job_id="7", restart_count=life)
        commit(run, 10 * (life + 1))


def test_where_a_run_has_trained_a_start_that_fails_is_the_nodes_fault(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(requeue=RequeueConfig(max_attempts_without_progress=3))
    monkeypatch.setenv("SLURMD_NODENAME", "n3")

    def bad_start(how: str) -> tuple[Verdict, list[str]]:
        number = run.new_attempt()
        if how == "set-up":
            (run.attempt(number).path / "setup-failed").write_text("set-up failed with code 1: module load cuda\n")
        else:
            attempts.write_attempt(run, Attempt(number, started=time.time(), committed_before=10))
            record_failure(run.attempt(number), 0, Failure(78, "no GPU is visible"))
        verdict = finish_attempt(run, number, 78, config, None).verdict
        return verdict, attempts.read_attempt(run, number).bad_nodes

    assert bad_start("set-up") == (Verdict.END, [])  # it has never worked: the config's fault
    trained = begin(run, stepping=time.time(), said="stopped")
    commit(run, 10)
    assert finish_attempt(run, trained.number, 75, config, None).verdict == Verdict.REQUEUE
    assert bad_start("set-up") == (Verdict.REQUEUE, ["n3"])
    monkeypatch.setenv("SLURMD_NODENAME", "n4")
    assert bad_start("no GPU") == (Verdict.REQUEUE, ["n4"])
    assert [each.node for each in blamed_for([run], BlamePolicy(), None, time.time())] == ["n3", "n4"]
    assert bad_start("no GPU")[0] == Verdict.END
    sentence = attempts.all_attempts(run)[-1].sentence or ""
    assert "the fault of n4" in sentence and "giving up" in sentence


def test_a_config_that_was_changed_since_the_run_has_trained_is_to_blame_and_no_node(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    trained = begin(run, stepping=time.time(), said="stopped")
    commit(run, 10)
    assert finish_attempt(run, trained.number, 75, Config(), None).verdict == Verdict.REQUEUE
    write_json(run.info_file, {"job_ids": [], "changes": [{"time": time.time(), "set": ["optim.lr=1"]}]})
    failed = begin(run)
    record_failure(run.attempt(2), 0, Failure(78, "no such thing"))
    outcome = finish_attempt(run, failed.number, 78, Config(), None)
    assert (outcome.reason, outcome.verdict, outcome.bad_nodes) == (Reason.CONFIG, Verdict.END, ())


def test_a_checkpoint_that_does_not_fit_is_no_nodes_fault(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    trained = begin(run, stepping=time.time(), said="stopped")
    commit(run, 10)
    assert finish_attempt(run, trained.number, 75, Config(), None).verdict == Verdict.REQUEUE
    failed = begin(run)
    record_failure(run.attempt(2), 0, Failure(78, "another model", on_any_node=True))
    outcome = finish_attempt(run, failed.number, 78, Config(), None)
    assert (outcome.reason, outcome.verdict, outcome.bad_nodes) == (Reason.CONFIG, Verdict.END, ())


def test_a_node_that_the_checks_before_training_find_unfit_is_left_out_within_the_budget(run: RunDir) -> None:
    config = Config()
    config.requeue.max_attempts_without_progress = 2

    def refused(*bad: str, nodes: int = 4) -> AttemptOutcome:
        attempt = begin(run, nodes=[f"n{index}" for index in range(nodes)], world_size=nodes)
        folder = run.attempt(attempt.number)
        record_failure(folder, 3, Failure(1, "rank 0 exited before all ranks had connected"))
        said = f"preflight, gpu_missing: {bad[0]}: 7 GPUs are visible"
        record_failure(folder, 0, Failure(78, said, bad_nodes=bad))
        return finish_attempt(run, attempt.number, 78, config, None)

    outcome = refused("n2", "n3")  # which has never trained
    assert (outcome.reason, outcome.verdict, outcome.bad_nodes) == (Reason.BAD_NODE, Verdict.REQUEUE, ("n2", "n3"))
    assert outcome.sentence.startswith("rank 0: preflight, gpu_missing: n2: 7 GPUs are visible (the fault of n2, n3)")
    assert [each.node for each in blamed_for([run], BlamePolicy(), None, time.time())] == ["n2", "n3"]
    assert refused("n1").verdict is Verdict.END  # the budget is spent
    # Names that are not of this attempt, and most of its nodes: no other start would mend that.
    for bad in (("n7",), ("n0", "n1", "n2")):
        outcome = refused(*bad)
        assert (outcome.reason, outcome.verdict, outcome.bad_nodes) == (Reason.CONFIG, Verdict.END, ())


def test_nobody_is_blamed_for_what_it_says_of_most_nodes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    begin(run, stepping=time.time(), said="stopped")
    failed = begin(run, nodes=["n0", "n1", "n2"])
    said = "preflight, disk_full: n0, n1, n2"
    record_failure(run.attempt(2), 0, Failure(78, said, bad_nodes=("n0", "n1", "n2")))
    outcome = finish_attempt(run, failed.number, 78, Config(), None)
    assert (outcome.reason, outcome.verdict, outcome.bad_nodes) == (Reason.BAD_NODE, Verdict.REQUEUE, ())


def test_on_a_machine_that_is_all_there_is_no_node_can_be_left_out(run: RunDir) -> None:
    config = Config()
    config.cluster.backend = Backend.LOCAL
    attempt = begin(run, nodes=["vm"])
    record_failure(run.attempt(attempt.number), 0, Failure(78, "a disk is full", bad_nodes=("vm",)))
    outcome = finish_attempt(run, attempt.number, 78, config, None)
    assert (outcome.reason, outcome.verdict, outcome.bad_nodes) == (Reason.CONFIG, Verdict.END, ())


@pytest.mark.parametrize(("what", "verdict"), [("cancel", Verdict.END), ("finished", Verdict.DONE)])
def test_what_had_ended_stays_so_although_whoever_was_to_record_it_was_killed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, what: str, verdict: Verdict
) -> None:
    write_json(run.info_file, {"job_ids": ["7"]})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    attempt = begin(run, job_id="7", said="finished" if what == "finished" else "stopped", cause="SIGTERM")
    if what == "cancel":
        requests.write_request(run, RunAction.CANCEL)
        assert requests.take_request(run, attempt) == "cancel"  # as `finish_attempt` did, which was killed then
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert ended_before(run, "7", 1) is None
    assert budget_used_up(run, Config(), None) == verdict
    assert attempts.read_attempt(run, 1).verdict == verdict
    assert ended_before(run, "7", 1) == verdict


def test_what_had_ended_stays_so_although_the_disk_is_too_full_to_record_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.info_file, {"job_ids": ["7"]})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    begin(run, job_id="7", said="finished")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_write", full)
    assert budget_used_up(run, Config(), None) == Verdict.DONE


def test_a_person_who_resumes_a_run_whose_cancel_was_never_recorded_starts_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.info_file, {"job_ids": ["7", "8"]})
    attempt = begin(run, job_id="7", said="stopped", cause="SIGTERM")
    requests.write_request(run, RunAction.CANCEL)
    requests.take_request(run, attempt)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert budget_used_up(run, Config(), SlurmThatHasForgotten()) is None
    assert attempts.read_attempt(run, 1).reason == Reason.CANCELLED


class SlurmThatHasForgotten(SlurmClient):
    def look(self, job_id: str) -> JobFacts | None:
        return None


@pytest.mark.parametrize(
    ("newer", "fenced", "reason", "words"),
    [
        ({"verdict": Verdict.END, "reason": "config"}, False, Reason.PREEMPTED, "requeued"),
        ({"verdict": Verdict.END, "reason": "config"}, True, Reason.SUPERSEDED, "`resume` continues it"),
        ({"verdict": Verdict.END, "reason": "cancelled"}, False, Reason.SUPERSEDED, "attempt 2 in job 8 has ended"),
        ({"verdict": Verdict.DONE, "reason": "finished"}, False, Reason.SUPERSEDED, "attempt 2 in job 8 has ended"),
        ({"verdict": Verdict.REQUEUE, "reason": "preempted"}, False, Reason.SUPERSEDED, "attempt 2 in job 8 goes on"),
        ({}, False, Reason.SUPERSEDED, "attempt 2 in job 8 goes on"),
    ],
)
def test_a_newer_attempt_that_has_failed_for_good_supersedes_nobody(
    run: RunDir, newer: dict[str, object], fenced: bool, reason: Reason, words: str
) -> None:
    write_json(run.info_file, {"job_ids": []})
    begin(run, job_id="7", said="stopped")
    begin(run, job_id="8", **newer)
    facts = JobFacts("RUNNING", start_time=1.0, preempt_time=5.0)
    if fenced:
        record_failure(run.attempt(1), 0, Failure(1, "may not commit", superseded=True))
    outcome = finish_attempt(run, 1, 1 if fenced else 75, Config(), SlurmSays(facts))
    assert outcome.reason == reason
    assert words in outcome.sentence


def test_an_attempt_that_a_newer_job_has_superseded_ends(run: RunDir) -> None:
    write_json(run.info_file, {"job_ids": []})
    old = begin(run, job_id="7")
    begin(run, job_id="8")
    outcome = finish_attempt(run, old.number, 1, Config(), SlurmSays(JobFacts("RUNNING")))
    assert (outcome.reason, outcome.verdict) == (Reason.SUPERSEDED, Verdict.END)
    assert "attempt 2 in job 8" in outcome.sentence
    assert ended_before(run, "7", 1) == Verdict.END and ended_before(run, "8", 1) is None


@pytest.mark.parametrize("reason", ["superseded", "config"])
@pytest.mark.parametrize("again", [True, False])
def test_what_an_earlier_job_with_the_same_id_was_told_ends_no_later_one(run: RunDir, reason: str, again: bool) -> None:
    """SLURM's ids begin anew on a cluster that is set up again."""
    write_json(run.info_file, {"job_ids": ["7"]})
    run.event(Event.SUBMITTED, job_id="7")
    begin(run, job_id="7", reason=reason, verdict=Verdict.END)
    run.event(Event.ATTEMPT_ENDED, attempt=1)
    if again:
        run.event(Event.SUBMITTED, job_id="7")
        assert ended_before(run, "7", 0) is None
    assert ended_before(run, "7", 1) == (None if again else Verdict.END)


def test_a_step_of_an_earlier_job_with_the_same_id_is_not_taken_for_ones_own(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, job_id="7", step_id="7.0")
    begin(run, job_id="7", step_id="7.0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert list(close_abandoned(run, 2, Config(), Asked(step=True))) == [1]


@pytest.mark.parametrize("opened", [True, False])
def test_a_crash_before_the_first_step_is_no_progress_whatever_was_saved_before(run: RunDir, opened: bool) -> None:
    commit(run, 30)
    for number in (1, 2):
        if opened:
            begin(run, committed_before=30)
        else:
            run.new_attempt()
        outcome = finish_attempt(run, number, 1, Config(requeue=RequeueConfig(max_attempts_without_progress=2)), None)
        assert outcome.reason == Reason.CRASH
    assert outcome.verdict == Verdict.END


# Causes and consequences.


def test_the_first_rank_that_failed_by_itself_is_the_cause(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.new_attempt()
    directory = run.attempt(1)
    assert Failures.read(directory).first() is None
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    clock = iter([10.0, 11.0, 12.0])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    record_failure(directory, 0, Failure(1, "Connection closed by peer", because_of_peer=True))
    record_failure(directory, 3, Failure(78, "no GPU"))
    record_failure(directory, 2, Failure(1, "ValueError: later"))
    found = Failures.read(directory)
    first, lost = found.first(), found.first(because_of_peer=True)
    assert first == RankFailure(3, Failure(78, "no GPU"), 11.0, "n2") and first.sentence == "rank 3: no GPU"
    assert lost is not None and (lost.failure.exit_code, lost.sentence) == (1, "rank 0: Connection closed by peer")


def test_what_a_rank_died_of_counts_from_then_however_late_it_is_on_record_and_no_torn_record_hides_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.new_attempt()
    directory = run.attempt(1)
    directory.failure_file(7).write_text('{"rank": 7, "exit_')
    directory.failure_file(8).write_text('{"rank": 8, "exit_code": "one", "sentence": [], "time": 0}')
    directory.failure_file(9).write_text('{"rank": 9}')
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    record_failure(directory, 0, Failure(1, "ValueError: I noticed"))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    record_failure(directory, 3, Failure(-9, "python ended with signal 9 (SIGKILL)"), when=time.time() - 5)
    found = Failures.read(directory)
    first = found.first()
    assert first is not None and (first.rank, first.node) == (3, "n1")
    assert sorted(found.nodes) == ["n0", "n1"]


def test_all_evidence_is_read_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace time of a preemption goes on meanwhile, and there may be a thousand ranks."""
    begin(run, nodes=["n0", "n1"])
    directory = run.attempt(1)
    directory.srun_log.write_text("srun: error: n1: task 1: Killed\n")
    for rank in range(2):
        record_failure(directory, rank, Failure(1, "boom"))
    opened: list[str] = []
    real = records.open_with_size

    def open_with_size(path: Path) -> tuple[int, int]:
        opened.append(path.name)
        return real(path)

    monkeypatch.setattr(records, "open_with_size", open_with_size)
    finish_attempt(run, 1, 137, Config(), None)
    assert [opened.count(name) for name in ("failed-0.json", "failed-1.json", "srun.log")] == [1, 1, 1]


def test_a_node_is_not_blamed_for_ranks_that_only_lost_another_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    for nodes, failed_on in ((["n0", "n1"], None), (["n0"], "n0")):
        attempt = begin(run, nodes=nodes)
        lost = Failure(1, "Connection closed by peer", because_of_peer=True)
        record_failure(run.attempt(attempt.number), 0, lost)
        finish_attempt(run, attempt.number, 1, Config(), None)
        assert attempts.read_attempt(run, attempt.number).failed_on == failed_on


@pytest.mark.parametrize(("nodes", "node"), [(["n2"], "n2"), (["n2", "n3"], None), ([], None)])
def test_a_hang_of_ranks_on_several_nodes_is_the_fault_of_none_of_them(
    run: RunDir, nodes: list[str], node: str | None
) -> None:
    run.new_attempt()
    record_hang(run.attempt(1), sentence="they wait for data", nodes=nodes, ranks=[1, 2])
    assert found_hang(run.attempt(1)) == Hang("they wait for data", node)


def test_a_hang_is_the_fault_of_no_node_that_slurm_does_not_know_by_that_name(run: RunDir) -> None:
    """Ranks of a torchrun that a program starts itself know the other nodes by their numbers alone."""
    for named, failed_on in (("n2", "n2"), ("node1", None)):
        attempt = add_attempt(run, nodes=["n1", "n2"])
        record_hang(run.attempt(attempt.number), sentence="it hangs", nodes=[named], ranks=[1])
        finish_attempt(run, attempt.number, 1, Config(), None)
        assert attempts.read_attempt(run, attempt.number).failed_on == failed_on


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
        ("srun: error: Aborting, io error and missing step on node 0\n", "io error and missing step on node 0"),
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
    assert SrunLog.read(AttemptDir(tmp_path)).killed_tasks == found


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
    assert cancelled_due_to(log, began) is None  # that was the attempt before
    for why in (" DUE TO JOB REQUEUE", " DUE TO PREEMPTION"):
        with log.open("a") as file:
            file.write(line.format(what="JOB 2", at=at(0), why=why))
        assert cancelled_due_to(log, began) == why.removeprefix(" DUE TO ")
    log.write_text(line.format(what="JOB 2", at=at(1), why=""))  # scancel
    assert cancelled_due_to(log, began) is None


def test_a_preemption_without_grace_is_told_from_a_requeue_by_the_jobs_log(run: RunDir) -> None:
    facts = JobFacts("COMPLETING", restarts=1, start_time=1.0)  # PreemptTime is gone
    for why, reason in (("JOB REQUEUE", Reason.REQUEUED), ("PREEMPTION", Reason.PREEMPTED)):
        attempt = begin(run, job_id="7", said="stopped")
        at = time.strftime("%Y-%m-%dT%H:%M:%S")
        (run.path / "slurm-7.log").write_text(NODES_WORDS["25.05"].format(what="JOB 7", at=at, why=f" DUE TO {why}"))
        outcome = finish_attempt(run, attempt.number, 75, Config(), SlurmSays(facts))
        assert (outcome.reason, outcome.verdict) == (reason, Verdict.RESTARTING)


# What a person asked.


def test_a_request_is_for_the_attempt_that_was_running_then(run: RunDir) -> None:
    earlier = begin(run)
    assert requests.take_request(run, earlier) is None
    requests.write_request(run, RunAction.PREEMPT)
    assert requests.take_request(run, earlier) == "preempt"
    requests.write_request(run, RunAction.PREEMPT)
    later = begin(run, started=time.time() + 60)
    assert requests.take_request(run, later) is None


@pytest.mark.parametrize("listing", ["as it is", "late"])
def test_a_cancel_that_is_typed_while_the_next_attempt_sets_itself_up_is_for_that_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    """A login node may see a new attempt late."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    begin(run, job_id="7", started=time.time() - 60)
    (run.attempt(run.new_attempt()).path / "job").write_text(f"7 1 {time.time():.9f}\n")
    with monkeypatch.context() as seen:
        if listing == "late":
            seen.setattr(RunDir, "attempt_numbers", lambda self: [1])
        requests.write_request(run, RunAction.CANCEL)
    attempts.write_attempt(run, Attempt(2, job_id="7", restart_count=1, started=time.time() + 1))
    close_abandoned(run, 2, Config(), None)
    assert attempts.read_attempt(run, 1).reason == Reason.NODE_FAILURE
    outcome = finish_attempt(run, 2, 143, Config(), SlurmSays(None))
    assert (outcome.reason, outcome.verdict) == (Reason.CANCELLED, Verdict.END)


def test_the_file_stop_ends_a_run_although_the_disk_was_too_full_for_the_request(run: RunDir) -> None:
    begin(run, job_id="7", said="stopped")
    attempts.record_stop(run.attempt(1), cause=StopCause.STOP_FILE, cause_time=1.0, seconds_left=None, facts=None)
    outcome = finish_attempt(run, 1, 75, Config(), SlurmSays(JobFacts("RUNNING")))
    assert (outcome.verdict, outcome.why) == (Verdict.END, "stopped by the file `stop` in its directory")


def test_a_cancel_that_comes_while_an_outcome_is_decided_is_not_used_up_by_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.info_file, {"job_ids": []})
    begin(run, job_id="7", said="stopped")

    def slow_decision(*arguments: Any) -> object:
        requests.write_request(run, RunAction.CANCEL)
        return decide_outcome(*arguments)

    monkeypatch.setattr(finish_module, "decide_outcome", slow_decision)
    assert finish_attempt(run, 1, 75, Config(), SlurmSays(JobFacts("RUNNING"))).verdict == Verdict.REQUEUE
    assert requests.cancelled_after(run, attempts.read_attempt(run, 1))
    assert ended_before(run, None, 1) == Verdict.END


# The outcome.


def test_settling_completes_the_record_and_uses_the_request_up(run: RunDir) -> None:
    begin(run, job_id="7", said="stopped")
    commit(run, 30)
    attempts.record_stop(run.attempt(1), cause="SIGTERM", cause_time=time.time(), seconds_left=None, facts=None)
    requests.write_request(run, RunAction.PREEMPT)
    client = SlurmSays(JobFacts("RUNNING", start_time=1.0))
    outcome = finish_attempt(run, 1, 75, Config(), client)
    assert (outcome.reason, outcome.verdict) == (Reason.ASKED, Verdict.REQUEUE)
    assert client.asked == ["7"]
    attempt = attempts.read_attempt(run, 1)
    assert (attempt.exit_code, attempt.reason, attempt.verdict, attempt.committed_step) == (75, "asked", "requeue", 30)
    assert attempt.progressed and attempt.last_step == 30 and attempt.ended is not None
    assert not run.request_file.exists()
    assert run.events()[-1]["verdict"] == "requeue"


def test_an_attempt_without_a_last_word_has_not_finished_whatever_srun_says(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is lost in an odd way leaves srun with exit code 0 and nothing in its log."""
    monkeypatch.setattr(finish_module, "WORD_S", 0.0)
    config = Config(requeue=RequeueConfig(max_attempts_without_progress=2))
    for number, verdict in ((1, Verdict.REQUEUE), (2, Verdict.END)):
        begin(run, job_id="7")
        outcome = finish_attempt(run, number, 0, config, SlurmSays(JobFacts("RUNNING")))
        assert (outcome.reason, outcome.verdict) == (Reason.CRASH, verdict)
        assert "ended without a word" in outcome.sentence
    assert "2 attempts in a row" in outcome.sentence


def test_a_last_word_that_a_shared_file_system_shows_late_is_heard(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begin(run, job_id="7")
    monkeypatch.setattr(time, "sleep", lambda _: attempts.write_attempt(run, attempt))
    attempt.said = "finished"
    assert finish_attempt(run, 1, 0, Config(), None).verdict == Verdict.DONE


def test_a_crash_loop_ends_and_a_checkpoint_resets_it(run: RunDir) -> None:
    config = Config(requeue=RequeueConfig(max_attempts_without_progress=2))

    def crash() -> Verdict:
        attempt = begin(run, first_step=reached_step.newest_checkpoint_step(run) or 0)
        record_failure(run.attempt(attempt.number), 0, Failure(1, "boom"))
        return finish_attempt(run, attempt.number, 1, config, None).verdict

    assert crash() == Verdict.REQUEUE
    attempt = begin(run)
    commit(run, 10)
    assert finish_attempt(run, attempt.number, 1, config, None).verdict == Verdict.REQUEUE
    assert crash() == Verdict.REQUEUE
    assert crash() == Verdict.END
    assert "2 attempts in a row" in (attempts.all_attempts(run)[-1].sentence or "")


def test_without_another_cause_the_rank_that_lost_its_peer_is_named(run: RunDir) -> None:
    begin(run)
    record_failure(run.attempt(1), 1, Failure(1, "Connection reset by peer", because_of_peer=True))
    assert "rank 1: Connection reset by peer" in finish_attempt(run, 1, 1, Config(), None).sentence
    (run.attempt(1).path / "srun.log").write_text("srun: error: n0: task 0: Killed\n")
    assert "n0: task 0: Killed" in finish_attempt(run, 1, 137, Config(), None).sentence


def test_the_job_is_known_by_its_own_array_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "70")
    assert own_job_id() == "70"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert own_job_id() == "70_3"
