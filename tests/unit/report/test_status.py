"""What a run is said to be doing, and what the verbs do about it: from its files and what SLURM says of its job."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.sandbox import default_directory
from slurmtrain.system import records
from tests.support.fake_slurm import FakeSlurm
from tests.support.report_runs import write_config
from tests.support.runs import RUN_ID, Job, add_attempt, no_waiting, printed, refused, shown, started, submitted_run

Out = pytest.CaptureFixture[str]
HERE, ELSEWHERE = socket.gethostname(), "another-host"
CHANGES = ("sbatch", "scancel")


@pytest.fixture
def job(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, project: Path) -> Job:
    """Job 7 of a run, of which SLURM knows nothing yet; whoever asks it again need not wait."""
    no_waiting(monkeypatch)
    return Job.waiting(tmp_path / "runs", slurm, monkeypatch)


@pytest.fixture
def alive_process() -> Iterator[subprocess.Popen[bytes]]:
    """It dies of a stop signal, whatever mask a test before this one has given to the processes that it starts."""
    code = "import signal, time; signal.pthread_sigmask(signal.SIG_SETMASK, []); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code])
    yield process
    process.kill()
    process.wait()


def queue(job: Job, state: str | None, reason: str = "None", job_id: str = "7", **facts: Any) -> None:
    """What SLURM says of a job from now on; None: it has forgotten it."""
    known = any(each["id"] == job_id for each in job.slurm.jobs)
    if state is None:
        if known:
            job.slurm.forget(job_id)
    elif known:
        job.slurm.change(job_id, state=state, reason=reason, **facts)
    else:
        job.slurm.add(job_id, state=state, reason=reason, **facts)


def said(run_id: str = RUN_ID) -> tuple[str, bool]:
    now = shown("status", run_id)
    return now["state"], now["alive"]


def sentence() -> str:
    return str(shown("status", RUN_ID)["sentence"])


def changes(job: Job) -> list[str]:
    """What SLURM was told to change."""
    told = [line for line in job.slurm.calls() if line.split()[0] in CHANGES or "show" not in line.split()]
    return [line for line in told if not line.startswith(("squeue", "sinfo", "sbatch --test-only"))]


def asked(job: Job) -> int:
    return len(job.slurm.calls("squeue"))


def ended(verdict: str, **fields: Any) -> dict[str, Any]:
    values = {"reason": "crash", "sentence": "crashed: x"}
    return {**values, "verdict": verdict, "host": ELSEWHERE, "pid": 1, **fields}


def running(**fields: Any) -> dict[str, Any]:
    return {"host": ELSEWHERE, "pid": 1, **fields}


NOT_OPENED = {"opened": False}
QUEUED_AGAIN = "SLURM has put job 7 into the queue once more, as SLURM does from 24.05 on"
SET_UP_FAILED = {"opened": False, "left": {"setup-failed": "set-up failed with code 1: false\n"}}

WAITED, PREEMPTED = ended("requeue"), ended("requeue", reason="preempted")
LEFT_ITS_PACK = ended("requeue", sentence="preempted; it is requeued", next_step="it is requeued")
PACKED: dict[str, Any] = {"packed": True}
BY_HAND: dict[str, Any] = {"job_ids": []}
RESUMED, BEFORE = {"job_ids": ["1", "7"]}, ended("end", job="1", started=1.0)
SAVED = f"attempt 1 was saved at step 12, but its supervisor was killed; `resume {RUN_ID}` continues it"
OTHERS = "preempted; it is requeued when the others of its pack have left job 7"
FINISHED_UNRECORDED = "attempt 1 finished, but its supervisor was killed before it recorded that"
ALIVE = {"waiting", "starting", "running", "suspended", "requeued", "held", "stopping"}

STATES: dict[str, tuple[list[dict[str, Any]], str | None, dict[str, Any], str, str]] = {
    # case: its attempts, what SLURM says of job 7, facts of run.json -> state, words
    "submitted": ([], "PENDING Resources", {}, "waiting", "Resources"),
    "about to begin": ([], "RUNNING", {}, "starting", "attempt 1 is about to begin, job 7"),
    "setting up": ([NOT_OPENED], "RUNNING", {}, "starting", "attempt 1 is setting up, job 7"),
    "running": ([running()], "RUNNING", {}, "running", "attempt 1, job 7"),
    "suspended": ([running()], "SUSPENDED", {}, "suspended", ""),
    "requeued": ([WAITED], "PENDING BeginTime", {}, "requeued", "crashed: x"),
    "held": ([WAITED], "PENDING JobHeldUser", {}, "held", ""),
    "job gone without a word": ([running()], None, {}, "lost", ""),
    # The supervisor was killed, by which SLURM ends the job
    "saved": ([running(said="stopped", last_step=12)], "FAILED", {}, "lost", SAVED),
    "finished": ([running(said="finished")], "FAILED", {}, "finished", FINISHED_UNRECORDED),
    "killed before it began": ([], "FAILED", {}, "failed", f"slurm-*.log. `resume {RUN_ID}` continues it"),
    "set-up lost its node": ([NOT_OPENED], "PENDING BeginTime", {}, "requeued", "ended while it was set up"),
    "set-up failed, and the job leaves": ([SET_UP_FAILED], "RUNNING", {}, "failed", "code 1: false"),
    "set-up failed": ([SET_UP_FAILED], "FAILED NonZeroExitCode", {}, "failed", "code 1: false"),
    # An allocation is not the run.
    "finished in an allocation that goes on": ([ended("done")], "RUNNING", BY_HAND, "finished", ""),
    "by hand in an allocation": ([running()], "RUNNING", BY_HAND, "running", ""),
    "by hand, after a job that never trained": ([NOT_OPENED, running(job="9", started=4e9)], None, {}, "running", "job 9"),
    # Cancelled while it waits
    "scancelled before it started": ([], "CANCELLED", {}, "stopped", "cancelled while it waited"),
    "scancelled before it started again": ([WAITED], "CANCELLED", {}, "stopped", "to start again"),
    "resumed, and scancelled": ([BEFORE], "CANCELLED", RESUMED, "stopped", ""),
    "resumed, and its job failed": ([BEFORE], "FAILED", RESUMED, "failed", "job 7 ended as FAILED"),
    "an earlier job died in set-up": ([{**NOT_OPENED, "job": "1"}], "PENDING Resources", RESUMED, "waiting", ""),
    # From 24.05 on SLURM starts a job once more after a preemption.
    "finished, and queued again": (
        [PREEMPTED, ended("done", restart=1)], "PENDING BeginTime", {}, "finished", QUEUED_AGAIN
    ),
    "failed, and queued again": ([PREEMPTED, ended("end", restart=1)], "PENDING BeginTime", {}, "failed", QUEUED_AGAIN),
    # A job shared with others (sweep.pack)
    "packed, finished": ([ended("done")], "RUNNING", PACKED, "finished", ""),
    "packed, failed": ([ended("end")], "PENDING", PACKED, "failed", ""),
    "packed, to go on": ([LEFT_ITS_PACK], "RUNNING", PACKED, "stopping", OTHERS),
    "packed, goes on": ([WAITED], "PENDING BeginTime", PACKED, "requeued", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_what_a_run_is_doing(case: str, job: Job) -> None:
    tries, slurm_says, facts, state, words = STATES[case]
    job.run.update_info(**facts)
    for fields in tries:
        job.attempt(**fields)
    if slurm_says is not None:
        queue(job, *slurm_says.split())
    if any(fields.get("job") == "9" for fields in tries):
        queue(job, "RUNNING", job_id="9")
    now = shown("status", RUN_ID)
    assert (now["state"], now["alive"]) == (state, state in ALIVE) and words in now["sentence"]
    if "once more" in words:  # it is not removed, and can be taken out of the queue
        assert "job 7 is in the queue once more" in printed("runs", "prune", "--state", state) and job.run.path.exists()
        assert main(["cancel", RUN_ID]) == 0
        assert changes(job) == ["scancel 7"] and not job.run.request_file.exists()


@pytest.mark.parametrize("tries", [[], [ended("requeue")], [ended("restarting")]])
def test_a_run_that_was_cancelled_while_it_waited_stays_stopped_when_slurm_has_forgotten_it(
    tries: list[dict[str, Any]], job: Job
) -> None:
    for fields in tries:
        job.attempt(**fields)
    queue(job, "PENDING", "BeginTime")
    assert main(["cancel", RUN_ID]) == 0
    queue(job, None)
    assert said() == ("stopped", False)
    assert "cancelled while it waited" in sentence() and "resume" in sentence()


# What the verbs tell SLURM.


STARTING = ("is still starting", "shows steps")
REFUSED: dict[str, tuple[dict[str, Any], list[dict[str, Any]], str, str, tuple[str, ...]]] = {
    # case: facts of run.json, its attempts, what SLURM says of job 7, the verbs -> what they say
    "an allocation is never ended for a run in it": (
        BY_HAND, [running()], "RUNNING", "cancel preempt requeue", ("by hand inside job 7", "Ctrl-C", "STEP")
    ),
    "suspended": ({}, [running()], "SUSPENDED", "preempt", ("is suspended, so it cannot save now",)),
    # A stop that would reach nobody
    "not begun": ({}, [], "RUNNING", "preempt requeue", STARTING),
    "setting up": ({}, [NOT_OPENED], "RUNNING", "preempt requeue", STARTING),
    "requeued": ({}, [WAITED], "RUNNING", "preempt requeue", STARTING),
    "between two attempts of a job": ({}, [ended("in-place")], "RUNNING", "preempt requeue", STARTING),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_verb_that_cannot_do_what_it_says_is_refused_and_tells_nobody(case: str, job: Job) -> None:
    facts, tries, state, verbs, sentences = REFUSED[case]
    job.run.update_info(**facts)
    for fields in tries:
        job.attempt(**fields)
    queue(job, state)
    for verb in verbs.split():
        error = refused(verb, RUN_ID, code=1)
        assert all(each in error for each in sentences)
        assert changes(job) == [] and not job.run.request_file.exists()


@pytest.mark.parametrize(
    ("verb", "words", "number"),
    [
        ("cancel", "does not come back", signal.SIGTERM),
        ("preempt", "`resume", signal.SIGTERM),
        ("requeue", "`resume", signal.SIGUSR2),
    ],
)
def test_a_run_by_hand_on_this_host_is_told_through_its_rank_0_and_promised_no_requeue(
    job: Job, alive_process: subprocess.Popen[bytes], verb: str, words: str, number: signal.Signals
) -> None:
    job.run.update_info(job_ids=[])
    job.attempt(pid=alive_process.pid, host=HERE)
    queue(job, "RUNNING")
    told = printed(verb, RUN_ID)
    assert words in told and "it is requeued" not in told
    assert alive_process.wait(60) == -number
    assert json.loads(job.run.request_file.read_text())["action"] == verb
    assert changes(job) == []
    assert said() == ("stopped" if verb == "cancel" else "lost", False)  # nobody is left in the allocation


def test_a_cancel_that_slurm_refused_leaves_no_request(job: Job) -> None:
    queue(job, "PENDING", "Resources")
    job.slurm.fail("scancel", "Access denied")
    assert "Access denied" in refused("cancel", RUN_ID, code=1) and not job.run.request_file.exists()
    queue(job, None)
    assert said()[0] == "lost"


@pytest.mark.parametrize("verb", ["cancel", "preempt", "resume", "resume on a read-only file system"])
def test_a_run_that_has_filled_the_disk_can_be_cancelled_and_what_needs_room_says_so(
    verb: str, job: Job, capsys: Out
) -> None:
    job.attempt(**running())
    if not verb.startswith("resume"):
        queue(job, "RUNNING")
    code = errno.EROFS if "read-only" in verb else errno.ENOSPC

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    job.monkeypatch.setattr(os, "fsync", fail)  # what a full disk says last
    job.monkeypatch.setattr(records, "append_line", fail)
    before = {*job.run.path.rglob("*"), job.run.path / "claim"}
    assert main([verb.split()[0], RUN_ID]) == (0 if verb == "cancel" else 1)
    told = capsys.readouterr()
    if verb == "cancel":
        assert changes(job) == ["scancel 7"] and "is told to end" in told.out
    else:
        room = "Read-only file system\n  hint: its file system is mounted read-only here"
        assert (room if code == errno.EROFS else "No space left on device\n  hint: `df -h`") in told.err
        assert changes(job) == [] and {*job.run.path.rglob("*")} <= before


@pytest.mark.parametrize("verb", ["preempt", "requeue"])
@pytest.mark.parametrize("action", ["stop", "cancel", "prune"])
def test_a_run_that_is_told_to_end_and_still_saves_is_not_brought_back(action: str, verb: str, job: Job) -> None:
    write_config(job.run)
    job.run.update_info(workdir=".", submit_dir="/", version="1", config_hash="0")
    number = job.attempt(**running())
    request = json.dumps({"action": action, "time": time.time(), "attempt": number})
    job.run.request_file.write_text(request)
    queue(job, "RUNNING")
    assert f"told to end for good ({action})" in refused(verb, RUN_ID, code=1)
    assert job.run.request_file.read_text() == request
    assert changes(job) == []


@pytest.mark.parametrize(
    ("mode", "promise"),
    [
        ("requeue", "it is requeued and resumes by itself"),
        ("resubmit", "it is submitted again and resumes by itself"),
        ("chain", "save and end; `resume"),  # the last of it
        ("off", "save and end; `resume"),
    ],
)
def test_only_what_will_happen_is_promised(mode: str, promise: str, job: Job) -> None:
    job.files.config(requeue={"mode": mode})
    job.attempt(**running())
    queue(job, "RUNNING")
    for verb, number in (("preempt", "TERM"), ("requeue", "USR2")):
        assert promise in printed(verb, RUN_ID)
        assert changes(job)[-1] == f"scancel --signal={number} 7"


@pytest.mark.parametrize("verb", ["cancel", "preempt", "requeue"])
def test_a_packed_run_is_reached_by_its_own_step_and_not_at_all_without_a_controller(verb: str, job: Job) -> None:
    job.run.update_info(packed=True)
    job.slurm.fail("squeue", times=1)
    if verb != "requeue":
        assert "SLURM cannot be asked" in refused(verb, RUN_ID, code=1) and not job.run.request_file.exists()
    job.attempt(**running(step_id="7.2"))
    queue(job, "RUNNING")
    assert said() == ("running", True) or verb == "requeue"
    assert main([verb, RUN_ID]) == 0
    assert changes(job) == [f"scancel --signal={'USR2' if verb == 'requeue' else 'TERM'} 7.2"]


# What is asked of SLURM, and without an answer.


def test_the_job_of_somebody_else_is_looked_for_among_that_persons_whatever_the_shell_has_set(
    job: Job, tmp_path: Path
) -> None:
    job.monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    theirs = Job.waiting(tmp_path / "theirs", job.slurm, job.monkeypatch, user="somebody", job_ids=["8"])
    queue(job, "PENDING", "Priority")
    queue(theirs, "PENDING", "Priority", job_id="8", user="somebody")
    assert said() == ("waiting", True)
    job.monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    assert said() == ("waiting", True)
    assert main(["resume", RUN_ID]) != 0 and job.slurm.calls("sbatch") == []


def test_without_a_controller_every_run_is_shown_and_the_doubt_is_said_once(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_waiting(monkeypatch)
    slurm.fail("squeue")
    slurm.fail("scontrol")
    submitted, again, setting_up, finished = (submitted_run(project, "cluster=a100x4", job_ids=[id]) for id in "1234")
    local = submitted_run(project, "cluster=local")
    add_attempt(again, **ended("requeue", job_id="2"))
    setting_up.new_attempt()
    add_attempt(finished, **ended("done", job_id="4"))
    add_attempt(local, **ended("done"))
    found = {each["id"]: (each["state"], each["alive"]) for each in shown("status")}
    runs = (submitted, again, setting_up, finished, local)
    assert [found[run.id] for run in runs] == [("unknown", True)] * 3 + [("finished", False)] * 2
    table = printed("status")
    assert all(run.id in table for run in runs) and table.count("SLURM cannot be asked: `squeue") == 1
    assert "Unable to contact slurm controller" in table
    assert "cannot be asked" not in printed("status", local.id)


@pytest.mark.parametrize(("then", "state"), [("RUNNING", ("running", True)), ("nobody answers", ("unknown", True))])
def test_one_empty_answer_of_squeue_is_not_believed(then: str, state: tuple[str, bool], job: Job) -> None:
    job.attempt(**running())

    def later(waited_s: float) -> None:
        if asked(job) == 1 and waited_s > 0.5:
            queue(job, then) if then == "RUNNING" else job.slurm.fail("squeue")

    no_waiting(job.monkeypatch, later)
    assert said() == state


def test_a_run_whose_slurm_conf_is_missing_may_be_alive_and_status_says_what_is_missing(
    job: Job, tmp_path: Path
) -> None:
    conf = tmp_path / "unmounted" / "slurm.conf"
    job.run.update_info(slurm_conf=str(conf))
    job.attempt(**running())
    queue(job, "RUNNING")
    assert said() == ("unknown", True)
    assert f"SLURM cannot be asked: the run's slurm.conf is missing: {conf}" in printed("status", RUN_ID)
    assert main(["resume", RUN_ID]) == 1
    assert job.slurm.calls() == []  # another cluster's answer would say nothing
    conf.parent.mkdir()
    conf.touch()
    assert said() == ("running", True)
    job.attempt(**ended("done"))
    conf.unlink()
    assert said() == ("finished", False) and shown("status", RUN_ID)["doubt"] is None


def test_the_jobs_of_a_sandbox_that_is_down_are_gone_with_it(job: Job, tmp_path: Path) -> None:
    job.monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job.run.update_info(slurm_conf=str(default_directory("default") / "slurm.conf"))
    job.attempt(**running())
    assert said() == ("lost", False)
    job.run.update_info(host=ELSEWHERE)  # whose sandbox of that name is another one
    assert said() == ("unknown", True)


# Local runs.


def local(job: Job) -> None:
    job.run.update_info(backend="local", job_ids=[])
    job.files.config(cluster={"backend": "local"})
    job.job_id = None  # type: ignore[assignment]


def long_ago(path: Path) -> None:
    os.utime(path, (1e9, 1e9))


def test_a_local_run_seen_from_another_host_is_unknown_and_left_alone(job: Job) -> None:
    local(job)
    job.attempt(**running())
    killed: list[int] = []
    job.monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    assert said() == ("unknown", True) and ELSEWHERE in sentence()
    told = "".join(refused(verb, RUN_ID, code=1) for verb in ("cancel", "preempt", "requeue", "resume"))
    assert f"`cancel {RUN_ID}` there" in told and "is gone for good" in told and killed == []
    job.run.attempt(1).record_file.unlink()  # the way out that was named
    long_ago(job.run.attempt(1).path)
    assert said() == ("lost", False)


def test_a_local_run_on_this_host_lives_as_long_as_its_process(
    job: Job, alive_process: subprocess.Popen[bytes]
) -> None:
    local(job)
    job.attempt({"rank-0.log": ""}, pid=alive_process.pid, host=HERE)
    assert said() == ("running", True)
    assert "resumes by itself" in printed("preempt", RUN_ID)
    alive_process.wait(60)
    assert said() == ("lost", False)


def test_a_process_that_only_has_the_pid_of_a_local_run_is_not_taken_for_it_and_not_signalled(
    job: Job, alive_process: subprocess.Popen[bytes]
) -> None:
    local(job)
    job.attempt(pid=alive_process.pid, born="1", host=HERE)
    assert said() == ("lost", False)
    job.attempt(pid=alive_process.pid, pid_namespace="pid:[1]", host=HERE)
    assert said() == ("running", True)  # as far as is seen here
    assert f"runs in another container on {HERE}" in refused("cancel", RUN_ID, code=1)
    assert alive_process.poll() is None and not job.run.request_file.exists()


def test_a_local_run_between_two_attempts_is_starting(job: Job) -> None:
    local(job)
    job.attempt(**ended("requeue"))
    assert (said()[0], sentence()) == ("starting", "attempt 2 is setting up")
    job.attempt(opened=False)
    assert said() == ("starting", True)
    assert main(["preempt", RUN_ID]) == main(["cancel", RUN_ID]) == 1
    long_ago(job.run.attempt(2).path)
    assert said() == ("lost", False)


# Following.


def log(job: Job, number: int, text: str, rank: int = 0) -> None:
    with (job.run.attempt(number).path / f"rank-{rank}.log").open("a", newline="") as file:
        file.write(text)


def at(moments: dict[float, Callable[[], object]]) -> Callable[[float], None]:
    """Do something once so many seconds have been waited."""

    def meanwhile(waited_s: float) -> None:
        for moment in [moment for moment in sorted(moments) if waited_s >= moment]:
            moments.pop(moment)()

    return meanwhile


def test_a_resumed_run_is_followed_into_its_next_attempt_and_one_attempt_to_its_own_end(job: Job, capsys: Out) -> None:
    job.run.update_info(job_ids=["1", "7"])
    log(job, job.attempt(**ended("end", job="1", started=1.0)), "first\n")
    queue(job, "PENDING", "Resources")
    no_waiting(job.monkeypatch, at({50.0: lambda: log(job, job.attempt(**ended("done")), "second\n")}))
    assert printed("logs", RUN_ID, "-f") == "first\nsecond\n"
    assert asked(job) in range(2, 5)
    assert capsys.readouterr().err.count("waiting: ") == 1  # what `status` says, once
    assert printed("logs", RUN_ID, "-f", "--attempt", "1") == "first\n"


def test_all_ranks_are_followed_line_by_line_and_into_the_next_attempt(job: Job) -> None:
    number = job.attempt(**running())
    queue(job, "RUNNING")
    log(job, number, "ten: begun\nten: ha", rank=10)
    two = job.run.attempt(number).path / "rank-2.log"
    grown = "two: gr\u00fcn\r\n".encode()

    def ends() -> None:
        log(job, number, "cut short", rank=10)
        log(job, job.attempt(**ended("done")), "again\n")

    def grows() -> None:
        two.write_bytes(grown)
        log(job, number, "lf a line\n", rank=10)

    no_waiting(job.monkeypatch, at({2.0: lambda: two.write_bytes(grown[:8]), 4.0: grows, 6.0: ends}))
    assert printed("logs", RUN_ID, "-f", "--rank", "all").splitlines() == [
        "[10] ten: begun",
        "[2] two: gr\u00fcn",
        "[10] ten: half a line",
        "[10] cut short",
        "[0] again",
    ]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"verdict": "done", "reason": "finished", "exit_code": 0}, 0),
        ({"verdict": "end", "reason": "config", "exit_code": 78}, EXIT_CONFIG),
        ({"verdict": "end", "reason": "time limit", "exit_code": 75}, EXIT_REQUEUE),
        ({"verdict": "end", "reason": "crash", "exit_code": 75}, 1),
        (None, 1),
    ],
)
def test_submit_that_follows_leaves_with_the_runs_own_code(
    fields: dict[str, Any] | None, code: int, project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends() -> None:
        (info,) = project.glob("runs/train/*/run.json")
        if fields is not None:
            add_attempt(RunDir(info.parent), **ended(**fields, job_id="101"))
        slurm.forget("101")

    no_waiting(monkeypatch, at({6.0: ends}))
    printed("+cluster=a100x4", "submit", "--follow", code=code)


# A finished run.


def test_a_finished_run_is_changed_only_to_train_on_and_the_job_of_its_further_steps_has_something_left_to_do(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted_run(project, "cluster=a100x4", "train.steps=500", job_ids=["1"])
    add_attempt(run, **ended("done", reason="finished", last_step=500, job_id="1"))
    before = run.info_file.read_text()
    for words in (["train.steps=500"], ["optim.lr=1"], ["--code"]):
        told = refused("resume", run.id, *words)
        assert "is finished, so it cannot be changed" in told and "checkpoint.restore_from=CHECKPOINT" in told
    assert run.info_file.read_text() == before
    assert main(["resume", run.id, "train.steps=900"]) == 0
    assert run.info()["job_ids"] == ["1", "101"] and run.info()["steps"] == 900
    now = shown("status", run.id)
    assert (now["state"], now["alive"]) == ("waiting", True)
    (first,) = now["attempts"]
    assert first["sentence"] == "finished after 500 steps, and was then given 900"
    assert first["reason"] == "finished"  # nobody has told it to stop: it is no interruption
    for name, value in (("SLURM_JOB_ID", "101"), ("SLURM_RESTART_COUNT", "0")):
        monkeypatch.setenv(name, value)
    assert started(run) == "go"
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert started(run) == "end"
    run.update_info(job_ids=["1"])  # as if its submission had been killed
    no_waiting(monkeypatch)
    assert said(run.id) == ("stopped", False)
