"""Attempts, from what their ranks, srun, SLURM and persons leave to their records and to what the job does next."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.config.schema import Config
from slurmtrain.supervise.end_of_attempt import close_abandoned
from slurmtrain.system import files
from tests.support.fake_slurm import ON_CPUS, FakeSlurm
from tests.support.runs import RUN_ID, Job, failure, no_waiting, shown


def stamp(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment))


@pytest.fixture
def job(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, project: Path) -> Job:
    """Job 7 of a run, which runs on n0 and n1 and has not had an attempt yet."""
    slurm.add("7", state="RUNNING", nodes="n[0-1]", start=stamp(time.time() - 300))
    made = Job.waiting(tmp_path / "runs", slurm, monkeypatch)
    made.files.config(cluster={"nodes": 2})
    made.is_on("n0")
    return made


def taken_cancel(job: Job, number: int) -> None:
    """A `cancel` that the outcome of an attempt had taken, and never recorded."""
    asked = {"action": "cancel", "time": time.time(), "attempt": number}
    (job.run.attempt(number).path / "request.json").write_text(json.dumps(asked))


def fill_disk(monkeypatch: pytest.MonkeyPatch, number_of_error: int = errno.ENOSPC) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(number_of_error, os.strerror(number_of_error))

    monkeypatch.setattr(files, "write_new", full)


def budget(job: Job, attempts: int, **sections: object) -> None:
    job.files.config(cluster={"nodes": 2}, requeue={"max_attempts_without_progress": attempts}, **sections)


# A whole life, with the batch script itself.

PROGRAM = """
if [ $SLURMTRAIN_ATTEMPT = 1 ]; then exit 3; fi
if [ $SLURM_PROCID = 0 ]; then $PYTHON -m slurmtrain progress $((4 * SLURMTRAIN_ATTEMPT - 3)) --of 9; fi
# Both ranks leave together.
touch here-$SLURMTRAIN_ATTEMPT-$SLURM_PROCID
until [ -e here-$SLURMTRAIN_ATTEMPT-0 ] && [ -e here-$SLURMTRAIN_ATTEMPT-1 ]; do sleep 0.05; done
if [ $SLURMTRAIN_ATTEMPT = 2 ]; then exit 75; fi
"""


def test_a_run_crashes_goes_on_in_its_job_is_requeued_and_finishes_and_its_job_has_nothing_left_to_do_then(
    project: Path, slurm: FakeSlurm
) -> None:
    (project / "p.sh").write_text(PROGRAM.replace("$PYTHON", sys.executable))
    words = ["cluster.nodes=2", "requeue.restart_delay_s=0", "job=command", "job.command=bash p.sh"]
    assert main([*ON_CPUS, *words, "submit"]) == 0
    ran = slurm.run("101")
    assert (ran.returncode, slurm.job("101")["state"]) == (75, "PENDING"), ran.stdout
    now = shown("status", "last")
    assert (now["state"], now["step"], now["steps"], now["alive"]) == ("requeued", 5, 9, True)
    assert slurm.run("101").returncode == 0
    now = shown("status", "last")
    assert now["state"] == "finished" and now["step"] == 9
    said = [(each["reason"], each["verdict"], each["nodes"]) for each in now["attempts"]]
    both = ["n1", "n2"]
    assert said == [("crash", "in-place", both), ("asked", "requeue", both), ("finished", "done", both)]
    slurm.change("101", state="PENDING", restarts=2)  # as SLURM does from 24.05 on after a preemption
    again = slurm.run("101")
    assert again.returncode == 0 and "has ended before this start of job 101: done" in again.stdout
    assert len(shown("status", "last")["attempts"]) == 3


# How an attempt ends.

PREEMPTED_BY_LOG = "[{at}.008] error: *** JOB 7 ON n0 CANCELLED AT {at} DUE TO {why} ***\n"  # as 25.05 writes it
OF_22_05 = "slurmstepd-n0: error: *** JOB 7 ON n0 CANCELLED AT {at} DUE TO {why} ***\n"
REQUEUED = {"state": "COMPLETING", "restarts": 1}
LOST_PEER = failure("Connection reset by peer", rank=1, because_of_peer=True)

ENDS: list[tuple[str, dict[str, Any], dict[str, object], dict[str, Any], int, tuple[str, str, str]]] = [
    # what happened; fields of its record; what it left; what SLURM says -> exit code; reason, verdict, words
    ("preempted, with a grace time", {"said": "stopped"},
     {"stop.json": {"cause": "SIGTERM", "cause_time": 1.0, "facts": None}}, {"preempted": "2099-01-01T00:00:00"}, 75,
     ("preempted", "requeue", "preempted; it is requeued")),
    ("the file `stop`, whose request a full disk did not take", {"said": "stopped"},
     {"stop.json": {"cause": "the file stop", "cause_time": 1.0, "facts": None}}, {}, 75,
     ("cancelled", "end", "stopped by the file `stop` in its directory")),
    ("nobody said that it has finished", {}, {}, {}, 0, ("crash", "requeue", "ended without a word")),
    ("a rank lost its peer", {}, {"failed-1.json": LOST_PEER}, {}, 1, ("crash", "requeue", "rank 1: Connection")),
    ("a rank was killed, and another one lost it", {},
     {"failed-1.json": LOST_PEER, "srun.log": "srun: error: n0: task 0: Killed\n"}, {}, 137,
     ("crash", "requeue", "n0: task 0: Killed")),
    ("its nodes cannot be asked for", {}, {"failed-0.json": failure("ValueError: no")}, {"state": "COMPLETED"}, 1,
     ("crash", "requeue", "crashed: rank 0: ValueError: no")),
    ("a set-up that fails", {}, {"setup-failed": "set-up failed: x\n"}, {}, 78, ("config", "end", "set-up failed: x")),
    ("finished", {"said": "finished"}, {}, {}, 0, ("finished", "done", "finished")),
]  # fmt: skip


@pytest.mark.parametrize("case", ENDS, ids=[row[0] for row in ENDS])
def test_each_end_is_on_record_with_what_comes_next(
    case: tuple[str, dict[str, Any], dict[str, object], dict[str, Any], int, tuple[str, str, str]], job: Job
) -> None:
    _, record, left, slurm_says, exit_code, end = case
    no_waiting(job.monkeypatch)
    job.slurm.change("7", **slurm_says)
    found = job.ends(job.attempt(left, **record), exit_code)
    assert (found["reason"], found["verdict"]) == end[:2] and end[2] in found["sentence"]
    assert found["printed"] == end[1] and found["exit_code"] == exit_code and found["ended"] is not None
    (row,) = shown("status", RUN_ID)["attempts"]
    assert (row["reason"], row["verdict"], row["sentence"]) == (*end[:2], found["sentence"])


@pytest.mark.parametrize("line", [PREEMPTED_BY_LOG, OF_22_05])
@pytest.mark.parametrize(("why", "reason"), [("PREEMPTION", "preempted"), ("JOB REQUEUE", "requeued")])
def test_a_preemption_without_grace_is_told_from_a_requeue_by_the_jobs_log(
    line: str, why: str, reason: str, job: Job
) -> None:
    job.slurm.change("7", **REQUEUED)
    log = job.run.path / "slurm-7.log"
    log.write_text(OF_22_05.format(at=stamp(time.time() - 60), why="PREEMPTION"))  # that was the attempt before
    assert job.ends(job.attempt(said="stopped"), 75)["reason"] == "requeued"
    number = job.attempt(said="stopped")
    with log.open("a") as file:
        file.write(line.format(at=stamp(time.time()), why=why))
    found = job.ends(number, 75)
    assert (found["reason"], found["verdict"]) == (reason, "restarting")
    assert "SLURM starts it again" in found["sentence"]


def test_a_last_word_that_a_shared_file_system_shows_late_is_heard(job: Job) -> None:
    number = job.attempt()
    record = job.record(number)
    written = json.dumps({**record, "said": "finished"})
    no_waiting(job.monkeypatch, lambda waited_s: job.run.attempt(number).record_file.write_text(written))
    assert job.ends(number, 0)["verdict"] == "done"


@pytest.mark.parametrize(
    ("newer", "fenced", "end"),
    [
        ({"verdict": "end", "reason": "config"}, False, ("preempted", "requeue", "requeued")),
        ({"verdict": "end", "reason": "config"}, True, ("superseded", "end", "`resume` continues it")),
        ({"verdict": "end", "reason": "cancelled"}, False, ("superseded", "end", "attempt 2 in job 8 has ended")),
        ({"verdict": "done", "reason": "finished"}, False, ("superseded", "end", "attempt 2 in job 8 has ended")),
        ({"verdict": "requeue", "reason": "preempted"}, False, ("superseded", "end", "attempt 2 in job 8 goes on")),
        ({}, False, ("superseded", "end", "attempt 2 in job 8 goes on")),
    ],
)
def test_a_newer_attempt_supersedes_unless_it_has_failed_for_good_and_the_old_job_does_not_start_again(
    newer: dict[str, Any], fenced: bool, end: tuple[str, str, str], job: Job
) -> None:
    job.slurm.change("7", preempted="2099-01-01T00:00:00")
    left: dict[str, object] = {"failed-0.json": failure("may not commit", superseded=True)} if fenced else {}
    number = job.attempt(left, said="stopped")
    job.attempt(job="8", **newer)
    found = job.ends(number, 1 if fenced else 75)
    assert (found["reason"], found["verdict"]) == end[:2] and end[2] in found["sentence"]
    has_ended = "done" if newer.get("verdict") == "done" else "end"
    assert job.starts() == (has_ended if end[0] == "superseded" else "go")


# What a person asks.


REQUESTS = [
    *(("preempt", 75, "asked", "requeue"), ("requeue", 75, "asked", "requeue"), ("cancel", 75, "cancelled", "end")),
    *(("stop", 75, "cancelled", "end"), ("prune", 75, "pruned", "end"), ("cancel", 0, "finished", "done")),
]


@pytest.mark.parametrize(("action", "exit_code", "reason", "printed"), REQUESTS)
def test_a_request_is_for_the_attempt_that_was_running_then_and_is_used_up_by_it(
    action: str, exit_code: int, reason: str, printed: str, job: Job
) -> None:
    said = "finished" if exit_code == 0 else "stopped"
    number = job.attempt(said=said)
    asked = {"action": action, "time": time.time(), "attempt": number}
    job.run.request_file.write_text(json.dumps({**asked, "time": 1.0, "attempt": 0}))
    if said == "stopped":
        assert f"`{action}" not in job.ends(number, exit_code)["sentence"]  # it was an earlier attempt's
        number = job.attempt(said=said)
        asked = {**asked, "time": time.time(), "attempt": number}
    job.run.request_file.write_text(json.dumps(asked))
    found = job.ends(number, exit_code)
    assert (found["reason"], found["printed"]) == (reason, printed)
    assert not job.run.request_file.exists()


@pytest.mark.parametrize("listing", ["as it is", "late"])
def test_a_cancel_that_is_typed_while_the_next_attempt_sets_itself_up_is_for_that_one(job: Job, listing: str) -> None:
    """A login node may see a new attempt late."""
    job.attempt(started=time.time() - 60)
    second = job.run.attempt(2).path
    if listing == "as it is":
        second.mkdir()
        (second / "job").write_text(f"7 1 {time.time():.9f}\n")
        assert main(["cancel", RUN_ID]) == 0
    else:
        claimed = time.time()
        assert main(["cancel", RUN_ID]) == 0
        second.mkdir()
        (second / "job").write_text(f"7 1 {claimed:.9f}\n")
    assert job.slurm.calls("scancel") == ["scancel 7"]
    job.slurm.change("7", state="RUNNING", restarts=1)
    job.is_on("n0", restarts=1)
    assert list(close_abandoned(job.run, 2, Config(), None)) == [1]  # as rank 0 does when it opens the second
    assert job.record(1)["reason"] == "node failure"
    (second / "attempt.json").write_text(json.dumps({"job_id": "7", "restart_count": 1, "started": time.time() + 1}))
    found = job.ends(2, 143)
    assert (found["reason"], found["printed"]) == ("cancelled", "end")


def test_a_cancel_that_comes_after_the_outcome_was_decided_keeps_the_job_from_its_next_start(job: Job) -> None:
    number = job.attempt(said="stopped")
    assert job.ends(number, 75)["printed"] == "requeue"
    assert main(["cancel", RUN_ID]) == 0
    assert job.starts() == "end"
    assert shown("status", RUN_ID)["state"] == "stopped"


@pytest.mark.parametrize("ended", ["cancel", "finished", "finished, and the disk is full"])
def test_what_had_ended_stays_so_although_whoever_was_to_record_it_was_killed(job: Job, ended: str) -> None:
    number = job.attempt(said="stopped" if ended == "cancel" else "finished", cause="SIGTERM")
    verdict = "end" if ended == "cancel" else "done"
    if ended == "cancel":
        taken_cancel(job, number)
    if "full" in ended:
        fill_disk(job.monkeypatch)
    assert job.starts() == verdict
    if "full" not in ended:
        assert job.record(number)["verdict"] == verdict and job.starts() == verdict


# Attempts that ended without a word: the next start of the job closes them.


def test_an_attempt_whose_node_died_is_closed_once_by_the_next_start_and_what_has_ended_is_left_alone(job: Job) -> None:
    ended = job.attempt(reason="crash", verdict="requeue", sentence="x")
    failed = job.attempt({"setup-failed": "no module"}, opened=False)
    before = [job.record(number) for number in (ended, failed)]
    lost = job.attempt(first_step=0)
    job.commit(30)
    job.run.metrics_file.write_text('{"step": 33}\n')
    assert job.starts() == "go"
    closed = job.record(lost)
    assert (closed["reason"], closed["verdict"]) == ("node failure", "restarting")
    assert (closed["committed_step"], closed["last_step"]) == (30, 33) and closed["ended"] is not None
    assert closed["sentence"].startswith("ended without a word: its node failed, or it was killed")
    assert [job.record(number) for number in (ended, failed)] == before
    job.starts()
    assert [event["attempt"] for event in job.run.events() if event["event"] == "attempt ended"] == [lost]


TOLD = {"cause": "SIGTERM", "cause_time": 5.0}


@pytest.mark.parametrize(
    ("left_behind", "record", "reason"),
    [
        ({"stop.json": {**TOLD, "cause": "SIGUSR2", "seconds_left": 60.0}}, {"said": "stopped"}, "time limit"),
        ({"stop.json": TOLD}, {"said": "stopped"}, "asked"),
        ({}, {"said": "finished"}, "finished"),
        ({"failed-0.json": failure("ValueError: no")}, {"said": "finished"}, "crash"),
        ({"failed-0.json": failure("ValueError: no")}, {}, "crash"),
        ({"stop.json": TOLD, "cancel": ""}, {}, "cancelled"),
        ({"stop.json": {**TOLD, "facts": {"state": "RUNNING", "preempt_time": 5.0}}}, {}, "preempted"),
        ({}, {}, "node failure"),
    ],
)
def test_the_outcome_of_an_attempt_that_nobody_judged_is_decided_by_what_it_left_behind(
    left_behind: dict[str, object], record: dict[str, Any], reason: str, job: Job
) -> None:
    number = job.attempt({name: left for name, left in left_behind.items() if name != "cancel"}, **record)
    if "cancel" in left_behind:
        taken_cancel(job, number)
    job.starts()
    assert job.record(number)["reason"] == reason


@pytest.mark.parametrize("number_of_error", [errno.ENOSPC, errno.EDQUOT])
def test_an_attempt_whose_end_a_full_disk_did_not_record_has_crashed_of_that(job: Job, number_of_error: int) -> None:
    number = job.attempt()
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, number_of_error)
        told = job.ends(number, 1)
    assert (told["printed"], told["reason"]) == ("requeue", None)
    assert job.starts() == "go"  # by now there is room again
    closed = job.record(number)
    assert closed["reason"] == "crash"
    assert closed["sentence"].startswith("crashed: the disk of its run directory was full")


HERE = socket.gethostname()
MAY_LIVE: list[tuple[str, dict[str, Any], dict[str, Any] | str | None, bool]] = [
    # what the record is of; its fields; what SLURM says of its job (None: forgotten) -> may still be at work
    ("another job that runs", {"job": "8"}, {"state": "RUNNING"}, True),
    ("another job that leaves", {"job": "8"}, {"state": "COMPLETING"}, True),
    ("another job that has ended", {"job": "8"}, {"state": "NODE_FAIL"}, False),
    ("another job that was started again", {"job": "8"}, {"state": "RUNNING", "restarts": 1}, False),
    ("another job that SLURM has forgotten", {"job": "8"}, None, False),
    ("another job, and nobody answers", {"job": "8"}, "silent", True),
    ("another job, and nobody to ask", {"job": "8"}, "none", True),
    ("an earlier life of this job", {}, "silent", False),
    ("another step that runs", {"restart": 1, "step_id": "7.0"}, {"step": "7.0"}, True),
    ("another step that is gone", {"restart": 1, "step_id": "7.0"}, None, False),
    ("a process of this host", {"job": None, "pid": os.getpid(), "host": HERE}, None, True),
    ("a process that has ended", {"job": None, "pid": 1 << 22, "host": HERE}, None, False),
    ("a process of before a reboot", {"job": None, "pid": os.getpid(), "born": "1", "host": HERE}, None, False),
    ("a process of another host", {"job": None, "pid": 1, "host": "elsewhere"}, None, True),
    ("whose rank 0 never came", {"job": None, "opened": False}, None, False),
    ("that another job is setting up", {"job": "8", "opened": False}, {"state": "RUNNING"}, True),
    ("that another job was setting up", {"job": "8", "opened": False}, {"state": "NODE_FAIL"}, False),
    ("that this job was setting up", {"opened": False}, {"state": "RUNNING"}, False),
]


@pytest.mark.parametrize(
    ("fields", "slurm_says", "alive"), [row[1:] for row in MAY_LIVE], ids=[row[0] for row in MAY_LIVE]
)
def test_an_attempt_that_may_still_run_is_never_closed(
    fields: dict[str, Any], slurm_says: dict[str, Any] | str | None, alive: bool, job: Job
) -> None:
    no_waiting(job.monkeypatch)
    number = job.attempt(**fields)
    if slurm_says == "silent":
        job.slurm.fail("scontrol")
    elif slurm_says == "none":
        job.monkeypatch.setenv("PATH", "/nowhere")
    elif isinstance(slurm_says, dict) and "step" in slurm_says:
        job.slurm.answer("scontrol show step -o 7.0", "StepId=7.0 UserId=1000 State=RUNNING Partition=gpu\n")
    elif isinstance(slurm_says, dict) and fields.get("job"):
        job.slurm.add("8", **slurm_says)
    job.starts()
    assert (job.record(number).get("reason") is None) == alive


# The budget of attempts without progress.


def test_a_crash_loop_ends_and_a_checkpoint_resets_it(job: Job) -> None:
    budget(job, 2)
    job.commit(5)

    def crash(newest: int, **fields: Any) -> str:
        left: dict[str, object] = {"failed-0.json": failure("boom")}
        return str(job.ends(job.attempt(left, committed_before=newest, **fields), 1)["printed"])

    assert crash(5) == "requeue"
    number = job.attempt(committed_before=5)
    job.commit(10)
    assert job.ends(number, 1)["printed"] == "requeue"
    # What was saved before is no progress of one that crashes before its first step, or before its rank 0 opens it.
    assert [crash(10), crash(10, opened=False)] == ["requeue", "end"]
    assert "2 attempts in a row without a new checkpoint: giving up" in job.record(4)["sentence"]


# Restart in place.

KILLED = "srun: error: n1: task 3: Killed\n"


def crashes(job: Job, *, spare: int = 0, **fields: Any) -> dict[str, Any]:
    """The end of an attempt on n0 and n1 of which a rank was killed; the script can start its ranks again."""
    no_waiting(job.monkeypatch)
    job.files.config(cluster={"nodes": 2, "spare_nodes": spare})
    return job.ends(job.attempt({"srun.log": KILLED}, step_id="7.0", **fields), 137, in_place=True)


def states(job: Job, nodes: str, **words: str) -> None:
    shown_as = {f"n{index}": "mixed" for index in range(3)} | words
    text = "".join(f"{node} {word}\n" for node, word in shown_as.items())
    job.slurm.answer(f"sinfo --noheader --all --Node --nodes={nodes} --format=%N %T", text)


@pytest.mark.parametrize(
    ("nodes", "words", "reason", "printed"),
    [
        ("n[0-2]", {}, "crash", "in-place n0 n2"),
        ("n[0,2]", {}, "node failure", "in-place n0 n2"),  # SLURM has taken n1 out of the job
        ("n[0-2]", {"n1": "down*"}, "node failure", "in-place n0 n2"),
        ("n[0-2]", {"n1": "mixed*"}, "node failure", "in-place n0 n2"),
        ("n[0-2]", {"n2": "draining"}, "crash", "in-place n0 n1"),
        ("n[0-2]", {"n0": "mixed-", "n2": "maint"}, "crash", "in-place n0 n2"),
        ("n[0-2]", {"n1": "down*", "n2": "draining"}, "node failure", "requeue"),
        ("n[1-2]", {}, "node failure", "requeue"),  # the node of the batch script itself
    ],
)
def test_what_slurm_says_of_the_nodes_decides_where_the_ranks_start_again(
    nodes: str, words: dict[str, str], reason: str, printed: str, job: Job
) -> None:
    job.slurm.change("7", nodes=nodes)
    states(job, nodes, **words)
    found = crashes(job, spare=1)
    assert (found["reason"], found["failed_on"]) == (reason, "n0" if nodes == "n[1-2]" else "n1")
    assert found["printed"] == printed and found["verdict"] == printed.split()[0]


@pytest.mark.parametrize(("left_s", "verdict"), [(1800, "in-place"), (200, "requeue")])
def test_the_time_that_a_start_in_the_same_job_has_left_is_slurm_s_and_not_that_of_a_clock_an_hour_ahead(
    job: Job, left_s: float, verdict: str
) -> None:
    job.slurm.set_clock(-3600)
    job.slurm.change("7", end=job.slurm.at(left_s))
    states(job, "n[0-1]")
    assert crashes(job)["verdict"] == verdict


def test_a_node_whose_slurmd_is_just_restarting_has_not_failed(job: Job) -> None:
    states(job, "n[0-1]", n1="mixed*")
    no_waiting(job.monkeypatch, lambda waited_s: states(job, "n[0-1]") if waited_s > 4 else None)
    found = job.ends(job.attempt({"srun.log": KILLED}), 137, in_place=True)
    assert (found["reason"], found["verdict"]) == ("crash", "in-place") and found["printed"] == "in-place n0 n1"


AFTER_A_KILL = {"a rank was killed": "in-place", "killed ranks that do not go away": "requeue"}
AFTER_A_KILL["nobody can start ranks again"] = "requeue"
AFTER_A_KILL["rank 0 says that it was stopped, by the signal after the crash"] = "in-place"


@pytest.mark.parametrize(("what", "verdict"), AFTER_A_KILL.items())
def test_ranks_start_again_in_the_same_job_once_those_before_are_gone(job: Job, what: str, verdict: str) -> None:
    no_waiting(job.monkeypatch, times=50)
    fields: dict[str, Any] = {"step_id": "7.0"}
    if "go away" in what:
        job.slurm.answer("scontrol show step -o 7.0", "StepId=7.0 UserId=1000 State=RUNNING Partition=gpu\n")
    if "stopped" in what:
        fields |= {"said": "stopped", "cause": "SIGTERM"}
    left = {"failed-1.json": failure("python ended with signal 9 (SIGKILL)", 137, 1)}
    assert job.ends(job.attempt(left, **fields), 137, in_place="nobody" not in what)["verdict"] == verdict


@pytest.mark.parametrize(
    ("during", "printed", "words"),
    [
        ("nothing", "in-place", "its ranks start again in the same job after 20 s"),
        ("cancel", "end", "; then cancelled by `cancel RUN`"),
        ("stop", "end", "; then stopped by the file `stop`"),
        ("preempt", "requeue", "; then asked to stop by `preempt RUN`; it is requeued"),
        ("requeue", "requeue", "; then asked to stop by `requeue RUN`; it is requeued"),
        ({"state": "COMPLETING"}, "end", "; then cancelled by scancel"),
        ({"preempted": "2099-01-01T00:00:00"}, "requeue", "; then preempted; it is requeued"),
        (REQUEUED, "restarting", "; SLURM starts it again"),
        (None, "requeue", "; it is requeued"),
    ],
)
def test_what_comes_in_the_pause_between_two_attempts_of_a_job_decides(
    during: str | dict[str, Any] | None, printed: str, words: str, job: Job
) -> None:
    budget(job, 20)
    for _ in range(2):
        job.attempt(reason="crash", verdict="in-place", sentence="crashed: x", stalled=True)
    number, waits = job.attempt({"failed-0.json": failure("boom")}), [0.0]

    def meanwhile(waited_s: float) -> None:
        waits.append(waited_s)
        if waited_s < 4:  # not yet the pause, of 20 s
            return
        if during == "stop":
            job.run.stop_switch.touch()
        elif isinstance(during, dict):
            job.slurm.change("7", **during)
        elif during is None:
            job.slurm.fail("scontrol show job")
        elif during != "nothing":
            job.run.request_file.write_text(json.dumps({"action": during, "time": time.time(), "attempt": number}))

    no_waiting(job.monkeypatch, meanwhile)
    found = job.ends(number, 1, in_place=True)
    assert found["printed"].split()[0] == printed == found["verdict"]
    assert found["reason"] == "crash" and found["sentence"].startswith("crashed: rank 0: boom")
    assert words in found["sentence"] and (waits[-1] < 15) == (during != "nothing")
    assert not job.run.stop_switch.exists()
    if printed == "end":
        assert shown("status", RUN_ID)["alive"] is False


# Whose fault it was.


def test_the_first_rank_that_failed_by_itself_is_the_cause_and_its_node(job: Job) -> None:
    """However late it is on record what a rank died of; one that has lost its peer was no cause."""
    now = time.time()
    left: dict[str, object] = {
        "failed-0.json": {**failure("Connection closed by peer", because_of_peer=True), "time": now - 9, "node": "n0"},
        "failed-2.json": {**failure("ValueError: later", rank=2), "time": now, "node": "n0"},
        "failed-3.json": {**failure("ended with signal 9", -9, 3), "time": now - 5, "node": "n1"},
    }
    found = job.ends(job.attempt(left), 1)
    assert found["sentence"].startswith("crashed: rank 3: ended with signal 9;") and found["failed_on"] == "n1"
    assert found["idle_since"] == pytest.approx(now - 9)  # from then on the others stood still


@pytest.mark.parametrize(
    ("left", "nodes", "node"),
    [
        ({"failed-0.json": {**LOST_PEER, "node": "n0"}}, ["n0", "n1"], None),  # ranks that only lost another one
        ({"failed-0.json": {**LOST_PEER, "node": "n0"}}, ["n0"], "n0"),
        ({"hang.json": {"sentence": "they wait", "nodes": ["n1"], "ranks": [1, 2]}}, ["n0", "n1"], "n1"),
        ({"hang.json": {"sentence": "they wait", "nodes": ["n0", "n1"], "ranks": [1, 2]}}, ["n0", "n1"], None),
        ({"hang.json": {"sentence": "all wait", "nodes": [], "ranks": []}}, ["n0", "n1"], None),
        # Ranks of a torchrun that a program starts itself know the other nodes by their numbers alone.
        ({"hang.json": {"sentence": "it hangs", "nodes": ["node1"], "ranks": [1]}}, ["n0", "n1"], None),
    ],
)
def test_no_node_is_blamed_that_may_not_be_at_fault(
    left: dict[str, object], nodes: list[str], node: str | None, job: Job
) -> None:
    assert job.ends(job.attempt(left, nodes=nodes), 1)["failed_on"] == node


SRUN_SAYS = [
    # srun's log -> what it crashed of, if srun says so, and the node at fault
    (KILLED, "n1: task 3: Killed", "n1"),
    ("srun: error: n[0-1]: tasks 0-3: Killed\n", "n[0-1]: tasks 0-3: Killed", None),
    ("srun: error: n1: task 12: Segmentation fault (core dumped)\n", "n1: task 12: Segmentation fault", "n1"),
    ("srun: error: Aborting, io error and missing step on node 0\n", "io error and missing step on node 0", None),
    ("srun: error: n1: task 1: Segmentation fault\nsrun: error: n0: task 0: Terminated\n", "n1: task 1: Segm", "n1"),
    ("srun: error: n1: task 1: Exited with exit code 3\nsrun: error: n0: task 0: Terminated\n", None, "n1"),
    ("srun: error: n[0-1]: tasks 0-1: Exited with exit code 3\n", None, None),
    ("srun: error: n0: task 1: Terminated\n", None, None),
    ("", None, None),
]


def test_sruns_words_on_tasks_that_left_no_word_are_found_with_their_node(job: Job) -> None:
    for log, found, node in SRUN_SAYS:
        record = job.ends(job.attempt({"srun.log": "srun: job 5 queued\n" + log}), 3)
        assert record["sentence"].startswith(f"crashed: {found or 'exit code 3'}"), log
        assert record["failed_on"] == node, log
    record = job.ends(job.attempt({"srun.log": "srun: error: Node failure on n1\n"}), 3)
    assert (record["reason"], record["failed_on"]) == ("node failure", "n1")


def test_where_a_run_has_trained_a_start_that_fails_is_the_nodes_fault_and_before_it_is_the_configs(job: Job) -> None:
    budget(job, 3)

    def bad_start(node: str, left: dict[str, object], **fields: Any) -> tuple[str, list[str]]:
        job.is_on(node)
        record = job.ends(job.attempt(left, **fields), 78)
        return record["verdict"], record["bad_nodes"]

    set_up: dict[str, object] = {"setup-failed": "set-up failed with code 1: module load cuda\n"}
    no_gpu: dict[str, object] = {"failed-0.json": failure("no GPU is visible", 78)}
    assert bad_start("n3", set_up, opened=False) == ("end", [])
    trained = job.attempt(stepping=time.time(), said="stopped")
    job.commit(10)
    assert job.ends(trained, 75)["verdict"] == "requeue"
    assert bad_start("n3", set_up, opened=False) == ("requeue", ["n3"])
    # A checkpoint that does not fit is no node's fault; nor is what a config does that was changed since.
    misfit: dict[str, object] = {"failed-0.json": failure("another model", 78, on_any_node=True)}
    assert bad_start("n4", misfit, committed_before=10) == ("end", [])
    assert bad_start("n4", no_gpu, committed_before=10) == ("requeue", ["n4"])
    assert [each["node"] for each in shown("nodes", "list")] == ["n3", "n4"]
    job.run.update_info(changes=[{"time": time.time(), "set": ["optim.lr=1"]}])
    assert bad_start("n5", no_gpu, committed_before=10) == ("end", [])


@pytest.mark.parametrize(
    ("bad", "nodes", "trained", "end", "bad_nodes"),
    [
        (["n2", "n3"], 4, False, ("bad node", "requeue"), ["n2", "n3"]),  # also if it has never trained
        (["n7"], 4, False, ("config", "end"), []),  # a name that is not of this attempt
        (["n0", "n1", "n2"], 4, False, ("config", "end"), []),  # most of its nodes: no other start would mend that
        (["n0", "n1", "n2"], 3, True, ("bad node", "requeue"), []),
    ],
)
def test_nodes_that_the_checks_before_training_find_unfit_are_left_out_unless_they_are_most(
    bad: list[str], nodes: int, trained: bool, end: tuple[str, str], bad_nodes: list[str], job: Job
) -> None:
    if trained:
        job.attempt(stepping=time.time(), said="stopped", verdict="requeue", reason="preempted", sentence="x")
    left: dict[str, object] = {
        "failed-3.json": failure("rank 0 exited before all ranks had connected", rank=3),
        "failed-0.json": failure("preflight, gpu_missing: 7 GPUs are visible", 78, bad_nodes=bad),
    }
    found = job.ends(job.attempt(left, nodes=[f"n{index}" for index in range(nodes)]), 78)
    assert (found["reason"], found["verdict"], found["bad_nodes"]) == (*end, bad_nodes)
    if bad_nodes:
        said = "rank 0: preflight, gpu_missing: 7 GPUs are visible (the fault of n2, n3)"
        assert found["sentence"].startswith(said)
        budget(job, 2)
        assert job.ends(job.attempt(left, nodes=["n0", "n1", "n2", "n3"]), 78)["verdict"] == "end"


def left_out() -> dict[str, bool]:
    """The nodes that something is on record against, and whether all runs leave them out."""
    return {each["node"]: each["until"] is not None for each in shown("nodes", "list")}


def crash_on(job: Job, node: str) -> dict[str, Any]:
    """The end of an attempt that crashes within seconds, by an error of a rank there."""
    job.is_on(node)
    left: dict[str, object] = {"failed-0.json": failure("OSError: /data is not there", node=node)}
    return job.ends(job.attempt(left, nodes=[node, "n9"]), 1)


@pytest.mark.parametrize(("trains_on", "proven"), [("n3", False), ("n4", True)])
def test_the_ledger_hears_of_a_crash_and_a_later_attempt_that_trains_elsewhere_proves_it(
    trains_on: str, proven: bool, job: Job
) -> None:
    for _ in range(2):
        assert crash_on(job, "n3")["reason"] == "crash"
    assert left_out() == {"n3": False}  # it may be the program's fault
    (found,) = shown("nodes", "list")
    assert [each["said"] for each in found["records"]] == ["rank 0: OSError: /data is not there"] * 2
    job.is_on(trains_on)
    assert job.ends(job.attempt(nodes=[trains_on], stepping=time.time(), said="finished"), 0)["verdict"] == "done"
    assert left_out() == {"n3": proven}


# As torch 2.11 ends a process in which CUDA has failed, on a GPU (H200).
ABORTED = """
[rank3]:[E1127 18:46:06.8 ProcessGroupNCCL.cpp:2073] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread \
terminated with exception: CUDA error: uncorrectable ECC error encountered
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: \
uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call
""".replace("\\\n", "")
SRUN_OF_ABORTED = "srun: error: n1: task 3: Aborted (core dumped)\nsrun: error: n0: tasks 0-1: Killed\n"
SIGABRT = "python ended with signal 6 (SIGABRT)"


ECC = "(CUDA error: uncorrectable ECC error encountered)"
ABORTS: list[tuple[dict[str, object], str, dict[str, bool]]] = [
    # It is killed by SIGABRT before it can leave a record.
    ({"srun.log": SRUN_OF_ABORTED, "rank-3.log": ABORTED}, f"n1: task 3: Aborted (core dumped) {ECC}", {"n1": True}),
    (
        {"failed-3.json": failure(SIGABRT, -6, 3, node="n1"), "rank-3.log": ABORTED},
        f"rank 3: {SIGABRT} {ECC}",
        {"n1": True},
    ),
    (
        {"srun.log": "srun: error: n1: tasks 0-3: Aborted\n", "rank-0.log": "terminate called without an exception\n"},
        "n1: tasks 0-3: Aborted",
        {},
    ),
]


@pytest.mark.parametrize(("left", "said", "blamed"), ABORTS)
def test_what_a_rank_says_that_torch_aborts_is_evidence_against_its_node(
    left: dict[str, object], said: str, blamed: dict[str, bool], job: Job
) -> None:
    found = job.ends(job.attempt(left, started=time.time() - 1000), 134)
    assert found["reason"] == "crash" and found["sentence"] == f"crashed: {said}; it is requeued"
    assert left_out() == blamed
