"""What a run is said to be doing, and what the verbs do about it: from its files and a squeue that is a script."""

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

from slurmtrain.cli import logs, main
from slurmtrain.control import stop as stop_module
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, EXIT_USAGE
from slurmtrain.report.status import queue as status_queue
from slurmtrain.report.status import sentences
from slurmtrain.report.status.look import is_over, state, states
from slurmtrain.report.status.state import RunState
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.reasons import RunAction, Verdict
from slurmtrain.runs.requests import take_request, write_request
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import begin_attempt
from slurmtrain.sandbox import default_directory
from slurmtrain.system import files, records
from slurmtrain.system.files import write_json
from tests.support.commands import FakeSlurm
from tests.support.runs import add_attempt, submitted_run

JOB = "4711"
ELSEWHERE = "another-host"


@pytest.fixture
def make(project: Path) -> Callable[..., RunDir]:
    """A run, submitted as these jobs."""
    return lambda *job_ids, overrides=(): submitted_run(project, "cluster=a100x4", *overrides, job_ids=job_ids)


@pytest.fixture
def queue(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, tuple[str, str]]], None]:
    """Lets squeue answer with these jobs. It, scancel and scontrol note down what they were asked."""
    monkeypatch.setattr(status_queue, "CONFIRM_EVERY_S", 0.0)
    for name in ("scancel", "scontrol"):
        fake_slurm.command(name, f'echo "{name} $*" >>"$here/asked"')

    def answer(jobs: dict[str, tuple[str, str]]) -> None:
        lines = "\n".join(f"{job}|{job}_N/A|{word}|N/A|{why}" for job, (word, why) in jobs.items())
        (fake_slurm.directory / "queue").write_text(lines + "\n")
        fake_slurm.command("squeue", 'echo squeue >>"$here/asked"; cat "$here/queue"')

    answer({})
    return answer


@pytest.fixture
def alive_process() -> Iterator[subprocess.Popen[bytes]]:
    """It dies of a stop signal, whatever mask a test before this one has given to the processes that it starts."""
    code = "import signal, time; signal.pthread_sigmask(signal.SIG_SETMASK, []); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code])
    yield process
    process.kill()
    process.wait()


def asked(fake: FakeSlurm, *, but: str = "squeue") -> list[str]:
    file = fake.directory / "asked"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if line not in (but, "scontrol show config")]  # which changes nothing


def attempt(run: RunDir, **fields: Any) -> Attempt:
    return add_attempt(run, **{"host": ELSEWHERE, "pid": 1, **fields})


def ended(run: RunDir, verdict: str, **fields: Any) -> Attempt:
    values = {"reason": "crash", "sentence": "crashed: x", "job_id": JOB, **fields}
    return attempt(run, verdict=verdict, ended=time.time(), **values)


def said(now: RunState) -> tuple[str, bool]:
    return now.status, now.alive


def test_the_job_of_somebody_else_is_looked_for_among_that_persons(
    make: Callable[..., RunDir], fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_queue, "CONFIRM_EVERY_S", 0.0)
    theirs, mine = make(JOB), make("4712")
    theirs.update_info(user="somebody")
    fake_slurm.command(
        "squeue",
        f'case "$*" in *--user=somebody*) echo "{JOB}|{JOB}_N/A|PENDING|N/A|Priority";; '
        '*--me*) echo "4712|4712_N/A|PENDING|N/A|Priority";; esac',
    )
    assert {now.status for now in states([theirs, mine]).values()} == {"waiting"}


Make = Callable[..., RunDir]
Queue = Callable[[dict[str, tuple[str, str]]], None]


# An allocation is not the run.


def test_a_run_is_alive_whatever_the_shell_has_set_for_squeue(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue({JOB: ("RUNNING", "None")})
    fake_slurm.command("squeue", 'if [ -z "$SQUEUE_PARTITION" ]; then cat "$here/queue"; fi')
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    run = make(JOB)
    assert said(state(run)) == ("starting", True)
    assert main(["resume", run.id]) != 0 and fake_slurm.submitted == []


@pytest.mark.parametrize(("verdict", "word"), [("done", "finished"), ("end", "failed")])
def test_a_run_that_has_ended_in_an_allocation_that_goes_on_is_over(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, verdict: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make()
    ended(run, verdict)
    queue({JOB: ("RUNNING", "None")})
    assert said(state(run)) == (word, False)
    assert is_over(run)
    assert main(["cancel", run.id]) == 0
    assert "is not running" in capsys.readouterr().out
    assert asked(fake_slurm) == []


@pytest.mark.parametrize("verb", ["cancel", "preempt", "requeue"])
def test_an_allocation_is_never_cancelled_or_signalled_for_a_run_in_it(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make()
    attempt(run, job_id=JOB)
    queue({JOB: ("RUNNING", "None")})
    assert said(state(run)) == ("running", True)
    assert main([verb, run.id]) == 1
    error = capsys.readouterr().err
    assert f"by hand inside job {JOB}" in error and "Ctrl-C" in error and "STEP" in error
    assert asked(fake_slurm) == []
    assert not run.request_file.exists()


@pytest.mark.parametrize(
    ("verb", "words", "number"),
    [
        ("cancel", "does not come back", signal.SIGTERM),
        ("preempt", "`resume", signal.SIGTERM),
        ("requeue", "`resume", signal.SIGUSR2),
    ],
)
def test_a_run_by_hand_on_this_host_is_told_through_its_rank_0_and_promised_no_requeue(
    make: Make,
    queue: Queue,
    fake_slurm: FakeSlurm,
    alive_process: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
    verb: str,
    words: str,
    number: signal.Signals,
) -> None:
    run = make()
    attempt(run, job_id=JOB, pid=alive_process.pid, host=socket.gethostname())
    queue({JOB: ("RUNNING", "None")})
    assert main([verb, run.id]) == 0
    printed = capsys.readouterr().out
    assert words in printed and "it is requeued" not in printed
    assert alive_process.wait(60) == -number
    assert json.loads(run.request_file.read_text())["action"] == verb
    assert asked(fake_slurm) == []
    assert said(state(run)) == (("stopped" if verb == "cancel" else "lost"), False)  # nobody is left in the allocation


def test_a_script_handed_to_sbatch_is_the_runs_own_job(make: Make, queue: Queue, fake_slurm: FakeSlurm) -> None:
    run = make()
    (run.path / f"slurm-{JOB}.log").touch()
    queue({JOB: ("RUNNING", "None")})
    run.new_attempt()
    assert state(run).explanation == f"attempt 1 is setting up, job {JOB}"
    assert main(["cancel", run.id]) == 0
    assert asked(fake_slurm) == [f"scancel {JOB}"]


def test_a_run_by_hand_after_a_job_that_never_trained_is_what_counts(make: Make, queue: Queue) -> None:
    run = make(JOB)
    run.new_attempt()
    attempt(run, job_id="9", started=time.time() + 5)
    queue({"9": ("RUNNING", "None")})
    assert (state(run).status, state(run).job_id) == ("running", "9")


# Cancelled while it waits.


@pytest.mark.parametrize("by", ["scancel", "the verb, and SLURM has forgotten"])
def test_a_run_cancelled_before_it_ever_started_is_stopped(
    make: Make, queue: Queue, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(JOB)
    if by == "scancel":
        queue({JOB: ("CANCELLED", "None")})
    else:
        queue({JOB: ("PENDING", "Resources")})
        assert main(["cancel", run.id]) == 0
        queue({})
    now = state(run)
    assert said(now) == ("stopped", False)
    assert "cancelled while it waited" in now.explanation and "resume" in now.explanation


@pytest.mark.parametrize("by", ["scancel", "the verb, and SLURM has forgotten"])
@pytest.mark.parametrize("verdict", ["requeue", "restarting"])
def test_a_run_cancelled_while_it_waited_to_start_again_is_stopped(
    make: Make, queue: Queue, by: str, verdict: str
) -> None:
    run = make(JOB)
    ended(run, verdict)
    if by == "scancel":
        queue({JOB: ("CANCELLED", "None")})
    else:
        queue({JOB: ("PENDING", "BeginTime")})
        assert main(["cancel", run.id]) == 0
        queue({})
    now = state(run)
    assert said(now) == ("stopped", False)
    assert "cancelled while it waited to start again" in now.explanation


def test_a_resumed_run_cancelled_while_it_waited_is_not_its_former_failure(make: Make, queue: Queue) -> None:
    run = make("1", JOB)
    ended(run, "end", job_id="1", started=1.0)
    queue({JOB: ("CANCELLED", "None")})
    assert said(state(run)) == ("stopped", False)
    queue({JOB: ("FAILED", "None")})
    assert state(run).status == "failed" and f"job {JOB} ended as FAILED" in state(run).explanation
    queue({})
    assert said(state(run)) == ("lost", False)


def test_a_request_of_an_earlier_attempt_cancels_nothing(make: Make, queue: Queue) -> None:
    run = make(JOB)
    write_json(run.request_file, {"action": "cancel", "time": 1.0})
    ended(run, "requeue")
    assert state(run).status == "lost"


def test_a_cancel_that_slurm_refused_leaves_no_request(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(JOB)
    queue({JOB: ("PENDING", "Resources")})
    fake_slurm.command("scancel", "echo 'Access denied' >&2; exit 1")
    assert main(["cancel", run.id]) == 1
    assert "Access denied" in capsys.readouterr().err
    assert not run.request_file.exists()
    queue({})
    assert state(run).status == "lost"


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_write", fail)
    monkeypatch.setattr(records, "append_line", fail)


def test_a_run_that_has_filled_the_disk_can_be_cancelled(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(JOB)
    attempt(run, job_id=JOB)
    queue({JOB: ("RUNNING", "None")})
    fill_the_disk(monkeypatch)
    assert main(["cancel", run.id]) == 0
    assert asked(fake_slurm) == [f"scancel {JOB}"]
    assert "is told to end" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["preempt", "resume"])
def test_what_needs_room_on_the_disk_says_so_in_a_sentence(
    make: Make,
    queue: Queue,
    fake_slurm: FakeSlurm,
    verb: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make(JOB)
    attempt(run, job_id=JOB)
    queue({JOB: ("RUNNING", "None")} if verb == "preempt" else {})
    fill_the_disk(monkeypatch)
    assert main([verb, run.id]) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error and "hint: " in error and asked(fake_slurm) == []


def test_a_suspended_run_is_shown_as_one_without_an_end_in_sight(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(JOB)
    attempt(run, job_id=JOB, stepping=time.time())
    run.metrics_file.write_text('{"step": 3, "time": 1.0, "loss": 1.0, "step_time_s": 0.5, "tokens_per_s": 10}\n')
    queue({JOB: ("SUSPENDED", "None")})
    now = state(run)
    assert (*said(now), now.progress.eta_s) == ("suspended", True, None)
    assert main(["preempt", run.id]) == 1
    assert "is suspended, so it cannot save now" in capsys.readouterr().err
    assert asked(fake_slurm) == []


# A job that SLURM starts again after the run has ended: from 24.05 on once more after a preemption.


@pytest.mark.parametrize(("verdict", "word"), [("done", "finished"), ("end", "failed")])
def test_a_run_that_has_ended_stays_so_while_slurm_has_its_job_in_the_queue_once_more(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], verdict: str, word: str
) -> None:
    run = make(JOB)
    ended(run, "requeue", reason="preempted", sentence="preempted; it is requeued")
    ended(run, verdict, restart_count=1)
    queue({JOB: ("PENDING", "BeginTime")})
    now = state(run)
    assert (*said(now), now.queued_again) == (word, False, True)
    assert f"SLURM has put job {JOB} into the queue once more, as SLURM does from 24.05 on" in now.explanation
    assert main(["runs", "prune", "--state", word]) == 0
    assert f"job {JOB} is in the queue once more" in capsys.readouterr().out and run.path.exists()
    assert main(["cancel", run.id]) == 0
    assert asked(fake_slurm) == [f"scancel {JOB}"] and not run.request_file.exists()


@pytest.mark.parametrize(("verdict", "word", "preempted"), [("done", "finished", True), ("end", "failed", False)])
def test_a_start_after_the_end_leaves_at_once_and_status_tells_of_it(
    make: Make,
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdict: str,
    word: str,
    preempted: bool,
) -> None:
    run = make(JOB)
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ended(run, "requeue", reason="preempted" if preempted else "crash")
    assert main(["begin-attempt", str(run.path)]) == 0
    assert capsys.readouterr().out == ""
    ended(run, verdict, restart_count=1, sentence="it was so")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert main(["begin-attempt", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{verdict}\n"
    assert len(run.attempt_numbers()) == 2
    queue({JOB: ("COMPLETED", "None")})
    assert said(state(run)) == (word, False)
    words = f"SLURM then queued job {JOB} once more{{}}: it left as soon as it had started"
    why = ", as SLURM does from 24.05 on with a job that was preempted before"
    assert words.format(why if preempted else "") in state(run).explanation


# A job shared with others (sweep.pack).


@pytest.fixture
def packed(make: Make) -> RunDir:
    run = make(JOB)
    run.update_info(packed=True)
    return run


def test_a_packed_run_ends_whatever_its_job_does_for_the_others(packed: RunDir, queue: Queue) -> None:
    ended(packed, "done")
    for word in ("RUNNING", "PENDING"):
        queue({JOB: (word, "None")})
        assert said(state(packed)) == ("finished", False)
    ended(packed, "end")
    assert said(state(packed)) == ("failed", False)


def test_a_packed_run_that_is_to_go_on_waits_for_the_others_to_leave(packed: RunDir, queue: Queue) -> None:
    ended(packed, "requeue", sentence="preempted; it is requeued")
    queue({JOB: ("RUNNING", "None")})
    now = state(packed)
    assert said(now) == ("stopping", True)
    assert now.explanation == f"preempted; it is requeued when the others of its pack have left job {JOB}"
    queue({JOB: ("PENDING", "BeginTime")})
    assert said(state(packed)) == ("requeued", True)


@pytest.mark.parametrize("verb", ["cancel", "preempt", "requeue"])
def test_a_packed_run_is_reached_by_its_own_step(
    packed: RunDir, queue: Queue, fake_slurm: FakeSlurm, verb: str
) -> None:
    attempt(packed, job_id=JOB, step_id=f"{JOB}.2")
    queue({JOB: ("RUNNING", "None")})
    assert main([verb, packed.id]) == 0
    assert asked(fake_slurm) == [f"scancel --signal={'USR2' if verb == 'requeue' else 'TERM'} {JOB}.2"]


@pytest.mark.parametrize("verb", ["cancel", "preempt"])
def test_without_a_controller_a_packed_run_is_not_told_to_end(
    packed: RunDir, fake_slurm: FakeSlurm, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, packed.id]) == 1
    assert "SLURM cannot be asked" in capsys.readouterr().err and not packed.request_file.exists()


@pytest.mark.parametrize("before", ["", "requeue"])
def test_a_packed_run_cancelled_while_it_waits_leaves_the_job_to_the_others(
    packed: RunDir, queue: Queue, fake_slurm: FakeSlurm, before: str
) -> None:
    if before:
        ended(packed, before)
    queue({JOB: ("PENDING", "Resources")})
    assert main(["cancel", packed.id]) == 0
    assert asked(fake_slurm) == []
    assert said(state(packed)) == ("stopped", False)
    assert begin_attempt.ended_before(packed, JOB, 0) is Verdict.END


def test_a_run_is_left_out_of_its_pack_when_it_has_ended_there_or_has_another_job(packed: RunDir) -> None:
    assert begin_attempt.ended_before(packed, JOB, 0) is None
    ended(packed, "requeue")
    assert begin_attempt.ended_before(packed, JOB, 1) is None
    ended(packed, "end")
    assert begin_attempt.ended_before(packed, JOB, 2) is Verdict.END
    packed.update_info(job_ids=[JOB, "4712"])  # `sweep retry`
    assert begin_attempt.ended_before(packed, "4712", 0) is None
    assert begin_attempt.ended_before(packed, "4712", 1) is None  # its node died before the run had begun
    assert begin_attempt.ended_before(packed, JOB, 3) is Verdict.END
    ended(packed, "done", job_id="4712")
    assert begin_attempt.ended_before(packed, JOB, 3) is Verdict.DONE


# Set-up.


def test_the_attempt_that_is_set_up_is_the_current_one(make: Make, queue: Queue) -> None:
    run = make(JOB)
    queue({JOB: ("RUNNING", "None")})
    assert state(run).explanation == f"attempt 1 is about to begin, job {JOB}"
    run.new_attempt()
    assert state(run).explanation == f"attempt 1 is setting up, job {JOB}"
    assert said(state(run)) == ("starting", True)
    attempts.write_attempt(run, Attempt(1, job_id=JOB, started=time.time()))
    assert state(run).explanation == f"attempt 1, job {JOB}"
    assert state(run).status == "running"


def test_a_job_that_lost_its_node_during_set_up_is_requeued_not_waiting(make: Make, queue: Queue) -> None:
    run = make(JOB)
    run.new_attempt()
    queue({JOB: ("PENDING", "BeginTime")})
    assert said(state(run)) == ("requeued", True)
    assert "attempt 1 ended while it was set up" in state(run).explanation


def test_a_resumed_job_that_has_not_run_yet_waits_although_an_earlier_one_died_in_set_up(
    make: Make, queue: Queue
) -> None:
    run = make("1", JOB)
    run.new_attempt()
    queue({JOB: ("PENDING", "Resources")})
    assert state(run).status == "waiting"
    (run.path / f"slurm-{JOB}.log").touch()
    assert state(run).status == "requeued"


def test_a_set_up_that_failed_is_said_in_its_own_words(make: Make, queue: Queue) -> None:
    run = make(JOB)
    (run.attempt(run.new_attempt()).path / "setup-failed").write_text("set-up failed with code 1: false\n")
    for jobs in ({JOB: ("RUNNING", "None")}, {JOB: ("FAILED", "NonZeroExitCode")}, {}):
        queue(jobs)
        assert (state(run).status, state(run).explanation) == ("failed", "set-up failed with code 1: false")


@pytest.mark.parametrize("verb", ["preempt", "requeue"])
@pytest.mark.parametrize("phase", ["no folder", "no record", "between two attempts"])
def test_a_stop_that_would_reach_nobody_is_refused(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, verb: str, phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(JOB)
    if phase == "no record":
        run.new_attempt()
    elif phase == "between two attempts":
        ended(run, "requeue")
    queue({JOB: ("RUNNING", "None")})
    assert main([verb, run.id]) == 1
    error = capsys.readouterr().err
    assert "is still starting" in error and "shows steps" in error
    assert asked(fake_slurm) == [] and not run.request_file.exists()


@pytest.mark.parametrize("words", [["preempt"], ["requeue"], ["requeue", "optim.lr=1e-4"]])
@pytest.mark.parametrize("action", [RunAction.STOP, RunAction.CANCEL, RunAction.PRUNE])
def test_a_run_that_is_told_to_end_and_still_saves_is_not_brought_back(
    make: Make,
    queue: Queue,
    fake_slurm: FakeSlurm,
    action: RunAction,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make(JOB)
    last = attempt(run, job_id=JOB)
    write_request(run, action)
    queue({JOB: ("RUNNING", "None")})
    assert main([words[0], run.id, *words[1:]]) == 1
    assert f"told to end for good ({action})" in capsys.readouterr().err
    assert take_request(run, last) == action
    assert asked(fake_slurm) == [] and not run.next_change_file.exists()


@pytest.mark.parametrize(("verb", "number"), [("preempt", "TERM"), ("requeue", "USR2")])
def test_a_stop_in_the_pause_between_two_attempts_of_a_job_waits_for_the_next_one(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, verb: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(JOB)
    ended(run, "in-place")
    queue({JOB: ("RUNNING", "None")})
    monkeypatch.setattr(time, "sleep", lambda seconds: attempt(run, job_id=JOB))
    assert main([verb, run.id]) == 0
    assert any(f"--signal={number}" in word for word in asked(fake_slurm)) and run.request_file.exists()


def test_a_stop_does_not_wait_for_ever_for_an_attempt_that_does_not_begin(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(JOB)
    ended(run, "in-place")
    queue({JOB: ("RUNNING", "None")})
    monkeypatch.setattr(stop_module, "PAUSE_WAITS_S", 0.01)
    monkeypatch.setattr(stop_module, "LOOK_EVERY_S", 0.02)
    assert main(["requeue", run.id]) == 1
    assert "is still starting" in capsys.readouterr().err and not run.request_file.exists()


@pytest.mark.parametrize(
    ("mode", "promise"),
    [
        ("requeue", "it is requeued and resumes by itself"),
        ("resubmit", "it is submitted again and resumes by itself"),
        ("chain", "save and end; `resume"),  # the last of it
        ("off", "save and end; `resume"),
    ],
)
@pytest.mark.parametrize(("verb", "number"), [("preempt", "TERM"), ("requeue", "USR2")])
def test_only_what_will_happen_is_promised(
    make: Make,
    queue: Queue,
    fake_slurm: FakeSlurm,
    mode: str,
    promise: str,
    verb: str,
    number: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make(JOB, overrides=(f"requeue.mode={mode}",))
    attempt(run, job_id=JOB)
    queue({JOB: ("RUNNING", "None")})
    assert main([verb, run.id]) == 0
    assert promise in capsys.readouterr().out
    assert asked(fake_slurm) == [f"scancel --signal={number} {JOB}"]


def test_requeue_of_a_held_job_releases_and_starts_it(make: Make, queue: Queue, fake_slurm: FakeSlurm) -> None:
    run = make(JOB)
    ended(run, "requeue")
    queue({JOB: ("PENDING", "JobHeldUser")})
    assert state(run).status == "held"
    assert main(["requeue", run.id]) == 0
    assert asked(fake_slurm) == [f"scontrol release {JOB}", f"scontrol update JobId={JOB} StartTime=now"]


# Without a controller.


def test_without_a_controller_every_run_is_shown_and_the_doubt_is_said_once(
    make: Make, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted, again, setting_up, finished = make("1"), make("2"), make("3"), make("4")
    local = make(overrides=("cluster.backend=local",))
    ended(again, "requeue", job_id="2")
    setting_up.new_attempt()
    ended(finished, "done", job_id="4")
    ended(local, "done", job_id=None)
    found = states([submitted, again, setting_up, finished, local])
    assert [said(found[run.id]) for run in (submitted, again, setting_up, finished, local)] == [
        ("unknown", True),
        ("unknown", True),
        ("unknown", True),
        ("finished", False),
        ("finished", False),
    ]
    assert main(["status"]) == 0
    printed = capsys.readouterr().out
    assert all(run.id in printed for run in (submitted, again, setting_up, finished, local))
    assert printed.count("SLURM cannot be asked: `squeue") == 1
    assert "Unable to contact slurm controller" in printed
    assert main(["status", local.id]) == 0
    assert "cannot be asked" not in capsys.readouterr().out


def test_a_machine_without_slurm_shows_its_runs(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(JOB)
    attempt(run, job_id=JOB)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["status", run.id]) == 0
    printed = capsys.readouterr().out
    assert "unknown" in printed and "there is no `squeue` on this machine" in printed
    assert main(["resume", run.id]) == 1


# Local runs.


def test_a_local_run_seen_from_another_host_is_unknown_and_left_alone(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(overrides=("cluster.backend=local",))
    attempt(run)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    now = state(run)
    assert said(now) == ("unknown", True) and ELSEWHERE in now.explanation
    for verb in ("cancel", "preempt", "requeue", "resume"):
        assert main([verb, run.id]) == 1
    said_to_user = capsys.readouterr().err
    assert f"`cancel {run.id}` there" in said_to_user and "is gone for good" in said_to_user
    assert killed == []
    (run.attempt(1).path / "attempt.json").unlink()  # the way out that was named
    monkeypatch.setattr(sentences, "LOCAL_START_S", 0.0)
    assert said(state(run)) == ("lost", False)


def test_a_local_run_on_this_host_lives_as_long_as_its_process(
    make: Make, alive_process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(overrides=("cluster.backend=local",))
    attempt(run, pid=alive_process.pid, host=socket.gethostname())
    (run.attempt(1).path / "rank-0.log").touch()  # as cluster=local does
    assert said(state(run)) == ("running", True)
    assert main(["preempt", run.id]) == 0
    assert "resumes by itself" in capsys.readouterr().out
    alive_process.wait(60)
    assert said(state(run)) == ("lost", False)


def test_a_process_that_only_has_the_pid_of_a_local_run_is_not_taken_for_it_and_not_signalled(
    make: Make,
    alive_process: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make(overrides=("cluster.backend=local",))
    attempt(run, pid=alive_process.pid, born="1", host=socket.gethostname())
    monkeypatch.setattr(sentences, "LOCAL_START_S", 0.0)
    assert said(state(run)) == ("lost", False)
    attempt(run, pid=alive_process.pid, pid_namespace="pid:[1]", host=socket.gethostname())
    assert said(state(run)) == ("running", True)  # as far as is seen here
    assert main(["cancel", run.id]) == 1
    assert f"runs in another container on {socket.gethostname()}" in capsys.readouterr().err
    assert alive_process.poll() is None and not run.request_file.exists()


def test_a_local_run_between_two_attempts_is_starting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(overrides=("cluster.backend=local",))
    ended(run, "requeue", job_id=None)
    assert (state(run).status, state(run).explanation) == ("starting", "attempt 2 is setting up")
    run.new_attempt()
    assert said(state(run)) == ("starting", True)
    monkeypatch.setattr(stop_module, "PAUSE_WAITS_S", 0.0)
    assert main(["preempt", run.id]) == main(["cancel", run.id]) == 1
    monkeypatch.setattr(sentences, "LOCAL_START_S", 0.0)
    assert said(state(run)) == ("lost", False)


# Following.


class Clock:
    """Stands in for the module time: sleeping takes no time, but counts."""

    def __init__(self, on_sleep: Callable[[int], None] = lambda count: None):
        self.now, self.sleeps, self._on_sleep = 1000.0, 0, on_sleep

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        self._on_sleep(self.sleeps)


def test_following_asks_the_queue_seldom_and_outlives_its_errors(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(JOB)
    attempt(run, job_id=JOB)
    queue({JOB: ("RUNNING", "None")})

    def later(count: int) -> None:
        if count == 100:
            fake_slurm.command("squeue", 'echo squeue >>"$here/asked"; exit 1')
        elif count == 200:
            (run.attempt(1).path / "rank-0.log").write_text("last words\n")
            attempts.write_attempt(run, Attempt(1, job_id=JOB, started=1.0, ended=2.0, verdict="end", sentence="x"))

    clock = Clock(later)
    monkeypatch.setattr(logs, "time", clock)
    assert "".join(logs.lines_as_they_come(run, 0, None)) == "last words\n"
    assert clock.sleeps in range(200, 203)
    assert len(asked(fake_slurm, but="")) in range(7, 10)  # 40 s, every 5 s


@pytest.mark.parametrize("word", ["COMPLETING", "RUNNING"])
def test_a_run_that_says_it_is_over_is_followed_no_longer_whatever_its_job_does(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    run = make(JOB)
    ended(run, "done")
    (run.attempt(1).path / "rank-0.log").write_text("all of it\n")
    queue({JOB: (word, "None")})
    monkeypatch.setattr(logs, "time", clock := Clock())
    assert "".join(logs.lines_as_they_come(run, 0, None)) == "all of it\n"
    assert clock.sleeps == 1
    assert asked(fake_slurm, but="") == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"verdict": "done", "reason": "finished", "exit_code": 0}, 0),
        ({"verdict": "end", "reason": "config", "exit_code": 78}, EXIT_CONFIG),
        ({"verdict": "end", "reason": "time limit", "exit_code": 75}, EXIT_REQUEUE),
        ({"verdict": "end", "reason": "cancelled", "exit_code": 75}, EXIT_REQUEUE),
        ({"verdict": "end", "reason": "crash", "exit_code": 75}, 1),
        ({"verdict": "end", "reason": "crash", "exit_code": 137}, 1),
        (None, 1),
    ],
)
def test_submit_that_follows_leaves_with_the_runs_own_code(
    fields: dict[str, Any] | None, code: int, make: Make, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(JOB)
    if fields is not None:
        ended(run, **fields)
    monkeypatch.setattr(logs, "time", Clock())
    assert logs.follow_to_the_end(run) == code


def test_a_resumed_run_is_followed_into_its_next_attempt(
    make: Make,
    queue: Queue,
    fake_slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = make("1", JOB)
    ended(run, "end", job_id="1", started=1.0)
    (run.attempt(1).path / "rank-0.log").write_text("first\n")
    queue({JOB: ("PENDING", "Resources")})

    def later(count: int) -> None:
        if count == 50:
            ended(run, "done")
            (run.attempt(2).path / "rank-0.log").write_text("second\n")

    monkeypatch.setattr(logs, "time", Clock(later))
    assert "".join(logs.lines_as_they_come(run, 0, None)) == "first\nsecond\n"
    assert len(asked(fake_slurm, but="")) in range(2, 5)
    (said,) = caplog.messages
    assert said.startswith("waiting: ") and "(Resources)" in said  # what `status` says, once


def test_one_attempt_is_followed_to_its_own_end(make: Make, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(JOB)
    ended(run, "requeue")
    attempt(run, job_id=JOB)
    (run.attempt(1).path / "rank-0.log").write_text("first\n")
    queue({JOB: ("RUNNING", "None")})
    monkeypatch.setattr(logs, "time", Clock())
    assert "".join(logs.lines_as_they_come(run, 0, 1)) == "first\n"


def test_all_ranks_are_followed_line_by_line_and_into_the_next_attempt(
    make: Make, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(JOB)
    attempt(run, job_id=JOB)
    queue({JOB: ("RUNNING", "None")})
    (run.attempt(1).path / "rank-10.log").write_text("ten: begun\nten: ha")

    def later(count: int) -> None:
        if count == 10:
            (run.attempt(1).path / "rank-2.log").write_bytes("two: gr\u00fc".encode()[:-1])
        elif count == 20:
            (run.attempt(1).path / "rank-2.log").write_text("two: gr\u00fcn\r\n", newline="")
            with (run.attempt(1).path / "rank-10.log").open("a") as log:
                log.write("lf a line\n")
        elif count == 30:
            with (run.attempt(1).path / "rank-10.log").open("a") as log:
                log.write("cut short")
            ended(run, "done")
            (run.attempt(2).path / "rank-0.log").write_text("again\n")

    monkeypatch.setattr(logs, "time", Clock(later))
    assert "".join(logs.lines_as_they_come(run, None, None)).splitlines() == [
        "[10] ten: begun",
        "[2] two: gr\u00fcn",
        "[10] ten: half a line",
        "[10] cut short",
        "[0] again",
    ]


def test_the_record_is_read_once_for_a_status(make: Make, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(JOB)
    ended(run, "requeue")
    write_request(run, RunAction.PREEMPT)
    read, calls = attempts.all_attempts, []

    def counted(run_dir: RunDir) -> list[Attempt]:
        calls.append(run_dir)
        return read(run_dir)

    monkeypatch.setattr(attempts, "all_attempts", counted)
    state(run)
    assert calls == [run]


# An answer with nothing in it.


def test_one_empty_answer_of_squeue_is_not_believed(make: Make, queue: Queue, fake_slurm: FakeSlurm) -> None:
    run = make(JOB)
    attempt(run, job_id=JOB)
    queue({JOB: ("RUNNING", "None")})
    fake_slurm.command("squeue", 'echo squeue >>"$here/asked"; [ "$(wc -l <"$here/asked")" = 1 ] || cat "$here/queue"')
    assert said(state(run)) == ("running", True)
    assert len(asked(fake_slurm, but="")) == 2


def test_an_empty_answer_after_which_nobody_answers_leaves_it_open(
    make: Make, queue: Queue, fake_slurm: FakeSlurm
) -> None:
    run = make(JOB)
    attempt(run, job_id=JOB)
    fake_slurm.command("squeue", 'echo squeue >>"$here/asked"; [ "$(wc -l <"$here/asked")" = 1 ]')
    assert said(state(run)) == ("unknown", True)


def test_a_run_whose_slurm_conf_is_missing_may_be_alive_and_status_says_what_is_missing(
    make: Make, queue: Queue, fake_slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, ended_run = make(JOB), make("4712")
    conf = tmp_path / "unmounted" / "slurm.conf"
    for each in (run, ended_run):
        each.update_info(slurm_conf=str(conf))
    ended(ended_run, "done", job_id="4712")
    assert said(state(ended_run)) == ("finished", False) and state(ended_run).slurm_error is None
    attempt(run, job_id=JOB)
    assert said(state(run)) == ("unknown", True)
    assert main(["status", run.id]) == 0
    assert f"SLURM cannot be asked: the run's slurm.conf is missing: {conf}" in capsys.readouterr().out
    assert main(["resume", run.id]) == 1 and fake_slurm.submitted == []
    assert asked(fake_slurm, but="") == []  # another cluster's answer would say nothing
    conf.parent.mkdir()
    conf.touch()
    queue({JOB: ("RUNNING", "None")})
    assert said(state(run)) == ("running", True)


def test_the_jobs_of_a_sandbox_that_is_down_are_gone_with_it(
    make: Make, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = make(JOB)
    run.update_info(slurm_conf=str(default_directory("default") / "slurm.conf"))
    attempt(run, job_id=JOB)
    assert said(state(run)) == ("lost", False)
    run.update_info(host=ELSEWHERE)  # whose sandbox of that name is another one
    assert said(state(run)) == ("unknown", True)


def test_a_job_that_is_gone_is_asked_for_three_times_and_then_once(
    make: Make, queue: Queue, fake_slurm: FakeSlurm
) -> None:
    run = make(JOB)
    attempt(run, job_id=JOB)
    assert said(state(run)) == ("lost", False)
    assert len(asked(fake_slurm, but="")) == 3
    assert said(state(run)) == ("lost", False)
    assert len(asked(fake_slurm, but="")) == 4
    queue({JOB: ("RUNNING", "None")})  # and believed when it is there after all
    assert said(state(run)) == ("running", True)


def test_status_opens_each_file_of_an_ended_run_once(
    make: Callable[..., RunDir], queue: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.touch()
    runs = [make(str(number)) for number in range(1, 4)]
    for number, run in enumerate(runs, 1):
        run.update_info(slurm_conf=str(conf))
        add_attempt(run, job_id=str(number), started=1.0, ended=2.0, verdict="done", reason="finished")
        run.metrics_file.write_text('{"step": 3, "loss": 2.0}\n')
    opened: list[Path] = []
    real = records.open_with_size

    def open_and_note(path: Path) -> tuple[int, int]:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(records, "open_with_size", open_and_note)
    found = states(runs)
    assert [found[run.id].status for run in runs] == ["finished"] * 3
    assert len(set(opened)) == len(opened) and {run.info_file for run in runs} < set(opened)


def test_the_job_of_a_finished_run_that_is_given_more_steps_has_something_left_to_do(make: Make, queue: Queue) -> None:
    run = make("1")
    ended(run, "done", reason="finished", last_step=500, job_id="1")
    assert main(["resume", run.id, "--set", "train.steps=900"]) == 0
    assert run.info()["job_ids"] == ["1", JOB] and run.info()["steps"] == 900
    queue({JOB: ("PENDING", "Priority")})
    assert begin_attempt.ended_before(run, JOB, 0) is None and begin_attempt.ended_before(run, "1", 1) == Verdict.END
    now = state(run)
    assert said(now) == ("waiting", True)
    assert now.attempts[0].sentence == "finished after 500 steps, and was then given 900"
    assert now.attempts[0].reason == "finished"  # nobody has told it to stop: it is no interruption


def test_a_finished_run_whose_further_steps_were_never_submitted_is_stopped(make: Make, queue: Queue) -> None:
    run = make("1")
    ended(run, "done", reason="finished", last_step=500, job_id="1")
    attempts.reopen(run, attempts.read_attempt(run, 1), 900)
    queue({})
    assert said(state(run)) == ("stopped", False)


def test_a_finished_run_is_not_changed_and_says_how_to_train_on(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(JOB)
    ended(run, "done", reason="finished", last_step=500)
    before = run.info_file.read_text()
    for words in (["--set", "train.steps=500"], ["--set", "optim.lr=1"], ["--code"]):
        assert main(["resume", run.id, *words]) == EXIT_USAGE
        told = capsys.readouterr().err
        assert "is finished, so it cannot be changed" in told and "checkpoint.restore_from=CHECKPOINT" in told
    assert run.info_file.read_text() == before
