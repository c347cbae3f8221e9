"""Runs that go on in further jobs: what sbatch gets, what is noted, what happens when it is killed in between."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.errors import ClusterError, ConfigError, UnavailableRecordError, UsageError
from slurmtrain.launch import resubmit
from slurmtrain.launch.dependencies import starting_after, with_dependency
from slurmtrain.launch.directives import directive, without_past
from slurmtrain.launch.submit import submit
from slurmtrain.report.status.look import state
from slurmtrain.runs import attempts, chain
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import RunAction, Verdict
from slurmtrain.runs.requests import write_request
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.begin_attempt import ended_before
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_facts import JobFacts
from tests.support.commands import FakeSlurm
from tests.support.runs import add_attempt, submitted_run

Make = Callable[..., RunDir]


@pytest.fixture
def slurm(fake_slurm: FakeSlurm) -> FakeSlurm:
    """sbatch counts the ids up from 101 and notes its options down; squeue knows nothing; scancel notes what it is told."""
    fake_slurm.command(
        "sbatch",
        'case " $* " in *" --test-only "*) exit 0;; esac\n'
        'n=$(ls "$here" | grep -c "^script-"); cp "${!#}" "$here/script-$n"; env -0 >"$here/environment"\n'
        'echo "${@:1:$#-1}" >>"$here/options"; echo "Submitted batch job $((101 + n))"',
    )
    fake_slurm.command("squeue", 'cat "$here/queue" 2>/dev/null || true')
    fake_slurm.command("scancel", 'echo "$*" >>"$here/cancelled"')
    return fake_slurm


def lines(slurm: FakeSlurm, name: str) -> list[str]:
    file = slurm.directory / name
    return file.read_text().splitlines() if file.exists() else []


def in_queue(slurm: FakeSlurm, *rows: str) -> None:
    (slurm.directory / "queue").write_text("".join(f"{row}\n" for row in rows))


@pytest.fixture
def make(project: Path) -> Make:
    return partial(submitted_run, project, "cluster=a100x4")


def stopped(run: RunDir, verdict: str, job_id: str = "100", **fields: Any) -> Attempt:
    values = {"ended": time.time(), "reason": "preempted", "sentence": "preempted", **fields}
    return add_attempt(run, job_id=job_id, verdict=verdict, **values)


def no_sleep(seconds: float) -> None:
    pass


# requeue.mode=resubmit.


def test_the_next_job_has_the_same_script_a_token_and_waits_for_this_one(make: Make, slurm: FakeSlurm) -> None:
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit")
    assert resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep) == "101"
    assert slurm.submitted == [run.script.read_text()]
    assert lines(slurm, "options") == [f"--comment=slurmtrain:{run.id}:1 --dependency=afterany:100"]
    assert run.info()["job_ids"] == ["100", "101"]
    assert run.events()[-1] | {"time": 0} == {"time": 0, "event": "submitted", "job_id": "101", "after_attempt": 1}


def test_a_comment_and_a_singleton_of_the_users_own_are_kept_and_what_it_waited_for_is_not(
    make: Make, slurm: FakeSlurm
) -> None:
    run = make(
        "requeue=resubmit",
        "job.singleton=true",
        "+cluster.sbatch.comment=mine",
        "+cluster.sbatch.dependency='afterok:7'",
        job_ids=("100",),
    )
    assert directive(run.script.read_text(), "dependency") == "afterok:7,singleton"
    stopped(run, "resubmit")
    resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep)
    assert lines(slurm, "options") == [f"--comment=mine slurmtrain:{run.id}:1 --dependency=afterany:100,singleton"]
    assert directive(slurm.submitted[0], "dependency") == "singleton"


def test_a_job_that_was_submitted_but_never_noted_is_found_and_not_submitted_twice(
    make: Make, slurm: FakeSlurm
) -> None:
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit")
    in_queue(slurm, "100|RUNNING|(null)", f"101|PENDING|slurmtrain:{run.id}:1")
    assert resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep) == "101"
    assert slurm.submitted == []
    assert run.info()["job_ids"] == ["100", "101"]


def test_a_sbatch_that_worked_without_an_answer_is_found_out(make: Make, slurm: FakeSlurm) -> None:
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit")
    slurm.command(
        "sbatch", f'echo "101|PENDING|slurmtrain:{run.id}:1" >"$here/queue"; echo "Socket timed out" >&2; exit 1'
    )
    assert resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep) == "101"


def test_a_job_that_a_full_disk_does_not_let_be_noted_counts_as_submitted_and_is_found(
    make: Make, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error would have the batch script requeue this job beside the new one."""
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit")
    no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as full:
        full.setattr(RunDir, "add_job", lambda *given, **more: (_ for _ in ()).throw(no_room))
        assert resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep) == "101"
    assert "job 101 is submitted, but cannot be noted" in caplog.text and len(slurm.submitted) == 1
    assert attempts.read_attempt(run, 1).verdict == "resubmit"
    in_queue(slurm, f"101|PENDING|slurmtrain:{run.id}:1")
    assert resubmit.resume(run, SlurmClient()) == ["101"] and run.info()["job_ids"] == ["100", "101"]


def test_a_sbatch_without_an_answer_is_not_repeated_after_one_empty_answer_of_squeue(
    make: Make, slurm: FakeSlurm
) -> None:
    """A controller that is too busy to answer may take the job a little later; then two would train the run."""
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit")
    slurm.command("sbatch", 'echo >>"$here/calls"; echo "Socket timed out" >&2; exit 1')
    slurm.command(
        "squeue",
        '[ -e "$here/calls" ] || exit 0; echo >>"$here/looks"; [ "$(wc -l <"$here/looks")" -lt 3 ] || '
        f'echo "101|PENDING|slurmtrain:{run.id}:1"',
    )
    assert resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep) == "101"
    assert len(lines(slurm, "calls")) == 1 and run.info()["job_ids"] == ["100", "101"]


def test_a_resume_takes_the_job_that_was_never_noted(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit")
    in_queue(slurm, f"101|PENDING|slurmtrain:{run.id}:1")
    assert main(["resume", run.id]) == 0
    assert "as job 101" in capsys.readouterr().out
    assert slurm.submitted == [] and run.info()["job_ids"] == ["100", "101"]


def test_a_resume_does_not_take_the_job_that_is_just_leaving(make: Make, slurm: FakeSlurm) -> None:
    run = make("requeue=resubmit", job_ids=("100", "90"))
    stopped(run, "end", job_id="90", reason="crash")
    in_queue(slurm, f"90|COMPLETING|slurmtrain:{run.id}:1")
    assert resubmit.resume(run, SlurmClient()) == ["101"]


def test_where_no_new_job_is_taken_the_run_says_so_and_can_be_resumed(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit", sentence="preempted; it is submitted again")
    pauses: list[float] = []
    slurm.refuse("sbatch: error: Batch job submission failed: Invalid account")
    with pytest.raises(ClusterError, match="Invalid account"):
        resubmit.submit_again(run, 1, "100", SlurmClient(), pauses.append)
    assert pauses == list(resubmit.TRIES_S)
    now = state(run)
    assert (now.status, now.alive) == ("stopped", False)
    assert "preempted; no new job could be submitted: sbatch refused the job: " in now.explanation
    assert f"`resume {run.id}`" in now.explanation


@pytest.mark.parametrize("when", ["before", "while sbatch works"])
def test_a_cancel_in_the_last_moment_wins(make: Make, slurm: FakeSlurm, when: str) -> None:
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit")
    if when == "before":
        write_request(run, RunAction.CANCEL)
    else:
        slurm.command(
            "sbatch", f"echo '{{\"action\": \"cancel\"}}' >{run.request_file}; echo 'Submitted batch job 101'"
        )
    assert resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep) is None
    assert lines(slurm, "cancelled") == ([] if when == "before" else ["101"])
    assert attempts.read_attempt(run, 1).verdict == Verdict.END


def test_jobs_that_wait_for_the_run_are_passed_on_to_its_next_job(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit")
    slurm.command("squeue", 'case "$*" in *%E*) echo "55|afterok:100(unfulfilled)"; echo "56|(null)";; esac')
    slurm.command("scontrol", 'echo "$*" >>"$here/updates"')
    assert resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep) == "101"
    assert lines(slurm, "updates")[-1] == "update JobId=55 Dependency=afterok:101"
    slurm.command("scontrol", "exit 1")
    assert resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep) == "102"
    assert "may never start" in capsys.readouterr().err


# requeue.mode=requeue.


class Requeued:
    """A job 100 in a SLURM of which `scontrol` answers from files: its state and how often it was started again."""

    def __init__(self, slurm: FakeSlurm, make: Make, *, refuse: int = 0, words: str = "Connection refused"):
        self.slurm, self.run = slurm, make(job_ids=("100",))
        stopped(self.run, "requeue", sentence="preempted; it is requeued")
        self.file("state", "RUNNING")
        self.file("restarts", "0")
        self.file("refuse", str(refuse))
        slurm.command(
            "scontrol",
            'echo "$*" >>"$here/calls"; n=$(cat "$here/refuse")\n'
            'if [ "$1" = requeue ] && [ "$n" -gt 0 ]; then echo $((n - 1)) >"$here/refuse"\n'
            f'  echo "{words}" >&2; exit 1; fi\n'
            'if [ "$1" = requeue ]; then bash "$here/before" 2>/dev/null\n'
            '  if [ "$2" != incomplete ] || [ "$(cat "$here/state")" = RUNNING ]; then echo 1 >"$here/restarts"; fi\n'
            '  bash "$here/meanwhile" 2>/dev/null; fi\n'
            'if [ "$1" = show ]; then\n'
            '  echo "JobId=100 JobState=$(cat "$here/state") Reason=None Restarts=$(cat "$here/restarts") '
            '$(cat "$here/times" 2>/dev/null)"\n'
            "fi; exit 0",
        )

    def file(self, name: str, text: str) -> None:
        (self.slurm.directory / name).write_text(text)

    def go_on(self) -> str:
        self.pauses: list[float] = []
        run = [(self.run, 1)]
        return resubmit.requeue(run, "100", SlurmClient(), restart_count=0, delay_s=8, sleep=self.pauses.append)

    @property
    def changes(self) -> list[str]:
        return [call for call in lines(self.slurm, "calls") if not call.startswith("show")]

    @property
    def last(self) -> Attempt:
        return attempts.read_attempt(self.run, 1)


def test_a_stopped_run_is_requeued_seen_to_be_and_started_soon(make: Make, slurm: FakeSlurm) -> None:
    job = Requeued(slurm, make)
    assert job.go_on() == "job 100 is requeued"
    assert job.changes == ["requeue incomplete 100", "update JobId=100 StartTime=now+8"]
    assert (job.pauses, job.last.verdict, slurm.submitted) == ([], "requeue", [])


def test_a_requeue_that_fails_is_tried_again(make: Make, slurm: FakeSlurm) -> None:
    job = Requeued(slurm, make, refuse=2)
    assert job.go_on() == "job 100 is requeued"
    assert job.changes[:3] == ["requeue incomplete 100"] * 3 and job.pauses == list(resubmit.TRIES_S)
    assert (job.last.verdict, slurm.submitted) == ("requeue", [])


def test_a_requeue_that_worked_without_an_answer_is_not_done_twice(make: Make, slurm: FakeSlurm) -> None:
    job = Requeued(slurm, make, refuse=1)
    body = (slurm.directory / "scontrol").read_text().replace(">&2; exit 1", '>&2; echo 1 >"$here/restarts"; exit 1')
    (slurm.directory / "scontrol").write_text(body)
    assert job.go_on() == "job 100 is requeued"
    assert job.changes[0] == "requeue incomplete 100" and "requeue incomplete 100" not in job.changes[1:]


def test_where_slurm_refuses_to_requeue_the_run_gets_a_new_job(make: Make, slurm: FakeSlurm) -> None:
    job = Requeued(slurm, make, refuse=99, words="Requested operation is presently disabled")
    assert job.go_on() == "submitted again as job 101"
    assert job.changes == ["requeue incomplete 100"] * 3 and len(slurm.submitted) == 1
    assert f"--comment=slurmtrain:{job.run.id}:1 --dependency=afterany:100" in lines(slurm, "options")[0]
    assert (job.last.verdict, job.last.sentence) == ("resubmit", "preempted; it is submitted again")
    assert ended_before(job.run, "100", 1) == Verdict.END  # should the requeue have worked all the same


def test_an_outage_of_the_controller_is_waited_for(make: Make, slurm: FakeSlurm) -> None:
    job = Requeued(slurm, make)
    working = (slurm.directory / "scontrol").read_text()
    slurm.command("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            (slurm.directory / "scontrol").write_text(working)

    said = resubmit.requeue([(job.run, 1)], "100", SlurmClient(), restart_count=0, sleep=sleep)
    assert said == "job 100 is requeued" and pauses == sorted(pauses) and slurm.submitted == []


def test_a_run_whose_job_nobody_requeues_says_so_and_can_be_resumed(make: Make, slurm: FakeSlurm) -> None:
    job = Requeued(slurm, make)
    slurm.command("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    clock = iter(range(0, 100000, 300))
    with pytest.raises(ClusterError, match="Unable to contact"):
        resubmit.requeue(
            [(job.run, 1)], "100", SlurmClient(), restart_count=0, sleep=no_sleep, clock=lambda: float(next(clock))
        )
    assert job.last.verdict == "end" and "could not be requeued" in (job.last.sentence or "")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_cancelled_run_stays_cancelled(make: Make, slurm: FakeSlurm, when: str) -> None:
    """`scontrol requeue` revives a cancelled job."""
    job = Requeued(slurm, make)
    if when == "before":
        write_request(job.run, RunAction.CANCEL)
    else:
        job.file("meanwhile", f'echo \'{{"action": "cancel"}}\' >{job.run.request_file}')
    assert job.go_on().startswith("cancelled")
    assert ("requeue incomplete 100" in job.changes) == (when == "meanwhile")
    assert lines(slurm, "cancelled") == (["100"] if when == "meanwhile" else [])
    assert (job.last.verdict, job.last.sentence) == ("end", "preempted; cancelled by `cancel RUN`")


def test_a_cancelled_run_stays_cancelled_although_the_disk_is_too_full_to_record_that(
    make: Make, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Requeued(slurm, make)
    job.file("meanwhile", f'echo \'{{"action": "cancel"}}\' >{job.run.request_file}')
    no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(attempts, "write_attempt", lambda *given: (_ for _ in ()).throw(no_room))
    assert job.go_on() == "cancelled: taken out of the queue again"
    assert lines(slurm, "cancelled") == ["100"]


def test_a_job_that_scancel_has_ended_meanwhile_is_not_requeued(make: Make, slurm: FakeSlurm) -> None:
    job = Requeued(slurm, make)
    job.file("state", "COMPLETING")
    assert job.go_on() == "cancelled: not requeued"
    assert job.changes == [] and job.last.verdict == "end" and "scancel" in (job.last.sentence or "")


def test_a_scancel_between_the_last_look_and_the_requeue_wins(make: Make, slurm: FakeSlurm) -> None:
    job = Requeued(slurm, make)
    job.file("before", f"echo COMPLETING >{slurm.directory}/state")
    assert job.go_on() == "cancelled: not requeued"
    assert job.changes == ["requeue incomplete 100"] and (slurm.directory / "restarts").read_text() == "0"
    assert (job.last.verdict, job.last.sentence) == ("end", "preempted; cancelled by scancel before it was requeued")


def test_a_job_whose_time_is_up_between_the_last_look_and_the_requeue_is_requeued_all_the_same(
    make: Make, slurm: FakeSlurm
) -> None:
    job = Requeued(slurm, make)
    job.file("before", f"echo COMPLETING >{slurm.directory}/state; echo Reason=TimeLimit >{slurm.directory}/times")
    text = (slurm.directory / "scontrol").read_text().replace("Reason=None ", "")
    (slurm.directory / "scontrol").write_text(text)
    assert job.go_on() == "job 100 is requeued"
    assert job.changes[:2] == ["requeue incomplete 100", "requeue 100"]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("ended", "cancelled"), [("12:00:05", True), ("12:00:10", False)])
def test_a_scancel_in_the_grace_time_of_a_preemption_is_told_from_its_end(
    make: Make, slurm: FakeSlurm, told: bool, ended: str, cancelled: bool
) -> None:
    """PreemptMode=CANCEL, where SLURM itself does not requeue; at the end of a grace it sets the time of preemption anew."""
    job, day = Requeued(slurm, make), "2026-11-22T"
    if told:
        began, over = (time.mktime((2026, 11, 22, 12, 0, second, 0, 0, -1)) for second in (0, 10))
        facts = JobFacts("RUNNING", start_time=began - 60, preempt_time=began, end_time=over)
        attempts.record_stop(job.run.attempt(1), cause="SIGTERM", cause_time=began, seconds_left=10.0, facts=facts)
    job.file("state", "COMPLETING")
    preempted = "12:00:00" if cancelled else ended
    job.file("times", f"StartTime={day}11:59:00 EndTime={day}{ended} PreemptTime={day}{preempted}")
    assert (job.go_on() == "cancelled: not requeued") == cancelled
    assert ("requeue 100" in job.changes) == (not cancelled)


def test_a_scancel_before_the_next_job_is_submitted_wins(make: Make, slurm: FakeSlurm) -> None:
    run = make("requeue=resubmit", job_ids=("100",))
    stopped(run, "resubmit", sentence="preempted; it is submitted again")
    slurm.command("scontrol", 'echo "JobId=100 JobState=COMPLETING Reason=None Restarts=0"')
    assert resubmit.submit_again(run, 1, "100", SlurmClient(), no_sleep) is None
    assert lines(slurm, "cancelled") == ["101"]
    last = attempts.read_attempt(run, 1)
    assert last.verdict == "end" and "cancelled by scancel" in (last.sentence or "")


@pytest.mark.parametrize("mode", ["resubmit", "chain"])
@pytest.mark.parametrize(
    ("state_before", "resumed", "over"),
    [("CANCELLED", False, True), ("PREEMPTED", False, False), ("TIMEOUT", False, False), ("CANCELLED", True, False)],
)
def test_a_scancel_of_the_job_before_ends_the_one_that_was_to_go_on_when_it_starts(
    make: Make,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    state_before: str,
    resumed: bool,
    over: bool,
) -> None:
    """It came after that job had handed over. Whoever resumes the run since wants it to go on."""
    run = make(f"requeue={mode}", job_ids=("100",))
    stopped(run, {"resubmit": "resubmit", "chain": "next"}[mode], sentence="hung: rank 1; 3 ranks waited")
    run.add_job("101")
    run.event(Event.SUBMITTED, job_id="101", **({} if resumed or mode == "chain" else {"after_attempt": 1}))
    if mode == "chain":
        run.update_info(chain=["101"] if resumed else ["100", "101"], chain_after=1 if resumed else 0)
    slurm.command("scontrol", f'echo "JobId=100 JobState={state_before} Reason=None Restarts=0"')
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert main(["begin-attempt", str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == ("end" if over else "")
    cancelled = "; cancelled by scancel before its next job began" if over else ""
    assert attempts.read_attempt(run, 1).sentence == f"hung: rank 1; 3 ranks waited{cancelled}"


def test_a_node_that_was_bad_is_left_out_unless_no_other_is_left(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Requeued(slurm, make)
    bad = job.last
    bad.bad_nodes = ["n2"]
    attempts.write_attempt(job.run, bad)
    slurm.command(
        "sbatch", 'echo "$*" >>"$here/tested"; [ ! -e "$here/full" ] || { echo "not available" >&2; exit 1; }'
    )
    assert job.go_on() == "job 100 is requeued, without n2"
    assert "update JobId=100 ExcNodeList=n2" in job.changes
    assert "--test-only --exclude=n2" in lines(slurm, "tested")[0]
    job.file("full", "")
    job.file("calls", "")
    assert job.go_on() == "job 100 is requeued"
    assert not any("ExcNodeList" in call for call in job.changes)
    assert "n2 cannot be excluded, since the job might then never start: not available" in capsys.readouterr().err


def test_every_run_of_a_pack_has_its_bad_nodes_left_out(make: Make, slurm: FakeSlurm) -> None:
    job = Requeued(slurm, make)
    others = [make(job_ids=("100",)) for _ in range(2)]
    for run, nodes in zip([job.run, *others], ([], ["n2"], ["n3"]), strict=True):
        if run is not job.run:
            stopped(run, "requeue")
        record = attempts.read_attempt(run, 1)
        record.bad_nodes = nodes
        attempts.write_attempt(run, record)
    runs = [(run, 1) for run in (job.run, *others)]
    said = resubmit.requeue(runs, "100", SlurmClient(), restart_count=0, sleep=no_sleep)
    assert said == "job 100 is requeued, without n2,n3"
    assert "update JobId=100 ExcNodeList=n2,n3" in job.changes


def test_where_slurm_refuses_to_requeue_a_pack_each_run_gets_a_job_or_says_why_it_has_none(
    make: Make, slurm: FakeSlurm
) -> None:
    job = Requeued(slurm, make, refuse=99, words="Requested operation is presently disabled")
    others = [make(job_ids=("100",)) for _ in range(2)]
    for run in others:
        stopped(run, "requeue", sentence="preempted; it is requeued")
    runs = [job.run, *others]
    submitted = (slurm.directory / "sbatch").read_text()
    refusal = f'case "$*" in *:{job.run.id}:1*) echo "sbatch: error: Invalid account" >&2; exit 1;; esac\n'
    slurm.command("sbatch", refusal + submitted.partition("here=")[2].partition("\n")[2])
    with pytest.raises(ClusterError, match=f"for 1 of 3 runs: run {job.run.id}: .*Invalid account") as raised:
        resubmit.requeue([(run, 1) for run in runs], "100", SlurmClient(), restart_count=0, sleep=no_sleep)
    assert "submitted again as job 101, 102" in raised.value.message
    records = [attempts.read_attempt(run, 1) for run in runs]
    assert [record.verdict for record in records] == ["end", "resubmit", "resubmit"]
    assert "preempted; no new job could be submitted: " in (records[0].sentence or "")
    assert [run.info()["job_ids"][1:] for run in runs] == [[], ["101"], ["102"]]


# requeue.mode=chain.


def test_a_chain_is_submitted_at_once_and_each_job_waits_for_all_before_it(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["+cluster=a100x4", "requeue=chain", "requeue.chain_length=3", "job.singleton=true", "submit"]) == 0
    assert "as job 101, followed by 102, 103" in capsys.readouterr().out
    (run,) = [RunDir(path) for path in project.glob("runs/train/*")]
    assert lines(slurm, "options") == [
        f"--comment=slurmtrain:{run.id}:s0",
        f"--comment=slurmtrain:{run.id}:s1 --dependency=afterany:101,singleton",
        f"--comment=slurmtrain:{run.id}:s2 --dependency=afterany:101:102,singleton",
    ]
    assert (run.info()["job_ids"], run.info()["chain"]) == (["101", "102", "103"], ["101", "102", "103"])
    assert len(set(slurm.submitted)) == 1
    assert "#SBATCH --no-requeue" in slurm.submitted[0]


def test_a_chain_that_cannot_be_completed_is_taken_back(project: Path, slurm: FakeSlurm) -> None:
    slurm.command(
        "sbatch",
        'case " $* " in *" --test-only "*) exit 0;; esac\n'
        'n=$(ls "$here" | grep -c "^script-"); cp "${!#}" "$here/script-$n"; [ "$n" = 2 ] && exit 1\n'
        'echo "Submitted batch job $((101 + n))"',
    )
    assert main(["+cluster=a100x4", "requeue=chain", "submit"]) == 1
    assert lines(slurm, "cancelled") == ["102 101"]
    assert not (project / "runs").exists()


def test_runs_of_an_array_cannot_be_chains(make: Make, slurm: FakeSlurm) -> None:
    with pytest.raises(ConfigError, match="for 2 runs at once"):
        submit([make("requeue=chain"), make("requeue=chain")], compose(["cluster=a100x4", "requeue=chain"]))
    assert slurm.submitted == []


CHAIN = ("101", "102", "103")


def chained(make: Make) -> RunDir:
    run = make("requeue=chain", job_ids=CHAIN)
    run.update_info(chain=list(CHAIN), chain_after=0)
    return run


@pytest.mark.parametrize(
    ("queue", "word", "words"),
    [
        ({"101": "PENDING", "102": "PENDING", "103": "PENDING"}, "waiting", "job 101, 1 of 3 of its chain, is pending"),
        ({"101": "RUNNING", "102": "PENDING", "103": "PENDING"}, "starting", "attempt 1 is about to begin, job 101"),
        ({"101": "CANCELLED", "102": "PENDING"}, "waiting", "job 102, 2 of 3"),
        ({"101": "CANCELLED"}, "stopped", "cancelled while it waited"),
        ({}, "lost", "left no attempt"),
    ],
)
def test_a_chain_before_its_first_attempt(
    make: Make, slurm: FakeSlurm, queue: dict[str, str], word: str, words: str
) -> None:
    run = chained(make)
    for job_id in CHAIN[2:] if queue == {"101": "CANCELLED"} else ():
        queue = {**queue, "102": "CANCELLED", job_id: "CANCELLED"}
    in_queue(slurm, *(f"{job}|{job}_N/A|{each}|N/A|Dependency" for job, each in queue.items()))
    assert state(run).status == word
    assert words in state(run).explanation


def test_a_chain_between_two_jobs_says_which_one_goes_on(make: Make, slurm: FakeSlurm) -> None:
    run = chained(make)
    stopped(run, "next", job_id="101", sentence="preempted; the next job of the chain continues")
    in_queue(
        slurm,
        "101|101_N/A|RUNNING|N/A|None",
        "102|102_N/A|PENDING|N/A|Dependency",
        "103|103_N/A|PENDING|N/A|Dependency",
    )
    assert (state(run).status, state(run).following) == ("stopping", ("102", "103"))
    in_queue(
        slurm, "101|101_N/A|FAILED|N/A|None", "102|102_N/A|PENDING|N/A|Priority", "103|103_N/A|PENDING|N/A|Dependency"
    )
    now = state(run)
    assert (now.status, now.job_id, now.following) == ("requeued", "102", ("103",))
    assert (
        "waiting to start again as job 102, 2 of 3 of its chain: jobs of higher priority come first (Priority)"
        in now.explanation
    )
    in_queue(slurm, "101|101_N/A|FAILED|N/A|None", "102|102_N/A|RUNNING|N/A|None", "103|103_N/A|PENDING|N/A|Dependency")
    assert (state(run).status, state(run).job_id) == ("starting", "102")
    add_attempt(run, job_id="102")
    assert (state(run).status, state(run).job_id) == ("running", "102")
    assert main(["cancel", run.id]) == 0
    assert lines(slurm, "cancelled") == ["103 102"]
    in_queue(slurm)
    assert not state(run).alive


@pytest.mark.parametrize(
    ("left", "promise"), [(("102",), "the next job of its chain, 102, resumes it"), ((), "save and end; `resume")]
)
def test_a_drill_promises_what_the_chain_will_do(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], left: tuple[str, ...], promise: str
) -> None:
    run = chained(make)
    add_attempt(run, job_id="101")
    in_queue(slurm, "101|101_N/A|RUNNING|N/A|None", *(f"{job}|{job}_N/A|PENDING|N/A|Dependency" for job in left))
    assert main(["preempt", run.id]) == 0
    assert promise in capsys.readouterr().out


def test_a_finished_chain_is_finished_whatever_is_left_of_it_in_the_queue(make: Make, slurm: FakeSlurm) -> None:
    run = chained(make)
    stopped(run, "done", job_id="101", reason="finished", sentence="finished")
    in_queue(slurm, "102|102_N/A|PENDING|N/A|Dependency", "103|103_N/A|PENDING|N/A|Dependency")
    assert (state(run).status, state(run).alive) == ("finished", False)
    chain.cancel_rest(run, "101", SlurmClient())
    assert lines(slurm, "cancelled") == ["103 102"]


def test_only_what_ended_in_this_chain_or_finished_ends_a_link_at_its_start(make: Make, slurm: FakeSlurm) -> None:
    run = chained(make)
    assert chain.ended_before(run) is None
    stopped(run, "next", job_id="101")
    assert chain.ended_before(run) is None
    stopped(run, "end", job_id="102")
    assert chain.ended_before(run) is Verdict.END
    run.update_info(chain=["201", "202"], chain_after=2)  # resumed
    assert chain.ended_before(run) is None
    (run.attempt(run.new_attempt()).path / "setup-failed").write_text("set-up failed")
    assert chain.ended_before(run) is Verdict.END
    stopped(run, "next", job_id="201")
    assert chain.ended_before(run) is None
    write_request(run, RunAction.CANCEL)  # when no rank was at work
    assert chain.ended_before(run) is Verdict.END
    stopped(run, "done", job_id="201")
    assert chain.ended_before(run) is Verdict.DONE


def test_begin_prints_its_word_and_takes_the_rest_out_of_the_queue(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = chained(make)
    monkeypatch.setenv("SLURM_JOB_ID", "102")
    assert main(["begin-attempt", str(run.path)]) == 0
    assert capsys.readouterr().out == ""
    stopped(run, "done", job_id="101")
    in_queue(slurm, "103|103_N/A|PENDING|N/A|Dependency")
    assert main(["begin-attempt", str(run.path)]) == 0
    assert capsys.readouterr().out == "done\n"
    assert lines(slurm, "cancelled") == ["103"]


def test_begin_asks_again_while_the_storage_fails(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script takes no answer for "go on", and a run that has finished would be trained once more."""
    run = make(job_ids=("101",))
    stopped(run, "done", job_id="101")
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    errors = [OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle")]
    read = attempts.read_attempt

    def failing(of: RunDir, number: int) -> Attempt:
        if errors:
            raise UnavailableRecordError("it cannot be read", errors.pop())
        return read(of, number)

    monkeypatch.setattr(attempts, "read_attempt", failing)
    assert main(["begin-attempt", str(run.path)]) == 0
    assert capsys.readouterr().out == "done\n"


def test_finish_attempt_counts_the_links_that_are_left_and_ends_the_chain_with_the_run(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = chained(make)
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    words = ["finish-attempt", str(run.path), "--exit-code", "75", "--attempt"]
    in_queue(
        slurm, "101|101_N/A|RUNNING|N/A|None", "102|102_N/A|CANCELLED|N/A|None", "103|103_N/A|PENDING|N/A|Dependency"
    )
    assert main([*words, str(run.new_attempt())]) == 0
    assert capsys.readouterr().out == "next\n"
    in_queue(slurm, "101|101_N/A|RUNNING|N/A|None")
    assert main([*words, str(run.new_attempt())]) == 0
    assert capsys.readouterr().out == "end\n"
    assert "the chain has no jobs left" in (attempts.read_attempt(run, 2).sentence or "")


# submit --after, job.singleton.


@pytest.mark.parametrize(
    ("version", "restarts", "preempted", "mode", "freed"),
    [
        ("25.05.9", 1, False, "requeue", True),
        ("25.05.9", 0, True, "requeue", True),  # it came to its end within the grace time
        ("25.05.9", 0, True, "resubmit", True),
        ("25.05.9", 0, False, "requeue", False),
        ("22.05.8", 1, True, "requeue", False),
    ],
)
def test_who_waits_for_a_run_is_freed_when_it_has_finished_in_a_job_that_slurm_will_not_let_end_as_a_success(
    make: Make, slurm: FakeSlurm, version: str, restarts: int, preempted: bool, mode: str, freed: bool
) -> None:
    run = make(f"requeue.mode={mode}", job_ids=("7",))
    add_attempt(run, job_id="7", said="finished", restart_count=restarts)
    if preempted:
        at = time.strftime("%Y-%m-%dT%H:%M:%S")
        (run.path / "slurm-7.log").write_text(
            f"[{at}.1] error: *** JOB 7 ON n0 CANCELLED AT {at} DUE TO PREEMPTION ***"
        )
    slurm.command("squeue", 'case "$*" in *%E*) echo "55|afterok:7(unfulfilled)";; esac')
    slurm.command(
        "scontrol",
        f'case "$*" in "show config") echo "SLURM_VERSION = {version}";; update*) echo "$*" >>"$here/updates";; esac',
    )
    assert main(["finish-attempt", str(run.path), "--attempt", "1", "--exit-code", "0"]) == 0
    assert lines(slurm, "updates") == (["update JobId=55 Dependency="] if freed else [])


def test_a_run_that_is_in_the_queue_is_waited_for_and_one_that_has_finished_is_not(
    make: Make, slurm: FakeSlurm
) -> None:
    running, finished, waiting = make(job_ids=("7",)), make(job_ids=("8",)), make(job_ids=("9_1",))
    stopped(finished, "done", job_id="8")
    in_queue(slurm, "7|7_N/A|RUNNING|N/A|None", "12|9_1|PENDING|N/A|Resources")
    config = starting_after(compose(["cluster=a100x4"]), f"{running.id},{finished.id},{waiting.id}", Path("runs"))
    assert config.cluster.sbatch == {"dependency": "afterok:7,afterok:9_1"}
    config = starting_after(compose(["cluster=a100x4"]), finished.id, Path("runs"))
    assert config.cluster.sbatch == {}


def test_of_a_chain_the_job_that_finishes_the_run_is_waited_for(make: Make, slurm: FakeSlurm) -> None:
    run = chained(make)
    in_queue(slurm, *(f"{job}|{job}_N/A|PENDING|N/A|Dependency" for job in CHAIN))
    config = starting_after(compose(["cluster=a100x4"]), run.id, Path("runs"))
    assert config.cluster.sbatch == {"dependency": "afterok:101?afterok:102?afterok:103"}
    with pytest.raises(UsageError, match="cannot wait for one of several"):
        with_dependency(config, ["afterok:7"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("failed", "will not finish: failed"),
        ("prepared", "has not been submitted yet"),
        ("elsewhere", "is on another cluster"),
    ],
)
def test_what_cannot_be_waited_for_is_refused_and_nothing_is_left(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], case: str, words: str, project: Path
) -> None:
    run = make(job_ids=() if case == "prepared" else ("7",))
    if case == "failed":
        stopped(run, "end", job_id="7", reason="crash", sentence="crashed: x")
    elif case == "elsewhere":
        (project / "slurm.conf").touch()
        run.update_info(slurm_conf=str(project / "slurm.conf"))
    in_queue(slurm, "7|7_N/A|RUNNING|N/A|None")
    assert main(["+cluster=a100x4", "submit", "--after", run.id]) == 2
    error = capsys.readouterr().err
    assert words in error and "hint: " in error
    assert slurm.submitted == [] and len(list(project.glob("runs/train/*"))) == 1


def test_after_and_singleton_are_in_the_script_and_in_a_dry_run(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(job_ids=("7",))
    in_queue(slurm, "7|7_N/A|RUNNING|N/A|None")
    words = ["+cluster=a100x4", "job.singleton=true", "submit", "--after", run.id]
    assert main([*words, "--dry-run"]) == 0
    assert "#SBATCH --dependency=afterok:7,singleton\n" in capsys.readouterr().out
    assert main(words) == 0
    assert "#SBATCH --dependency=afterok:7,singleton\n" in slurm.submitted[0]


def test_a_job_that_can_never_start_says_so(make: Make, slurm: FakeSlurm) -> None:
    run = make(job_ids=("7",))
    in_queue(slurm, "7|7_N/A|PENDING|N/A|DependencyNeverSatisfied")
    assert "will never start" in state(run).explanation and f"cancel {run.id}" in state(run).explanation


def test_a_script_is_submitted_again_without_what_it_waited_for() -> None:
    script = "#!/bin/bash\n#SBATCH --job-name=a\n#SBATCH --dependency=afterok:1?afterok:2\n\nsrun x\n"
    assert without_past(script) == "#!/bin/bash\n#SBATCH --job-name=a\n\nsrun x\n"
    assert without_past("#SBATCH --dependency=singleton,afterok:1\n") == "#SBATCH --dependency=singleton\n"
    assert without_past("#!/bin/bash\n") == "#!/bin/bash\n"


def test_local_runs_take_no_part(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+cluster=local", "submit", "--after", "last"]) == 2
    assert "has no queue" in capsys.readouterr().err
    assert os.listdir(project) == []


@pytest.mark.parametrize("sbatch", ["accepts", "refuses"])
@pytest.mark.parametrize("ending", ["done", "end"])
def test_a_run_that_ends_while_one_is_submitted_after_it(
    make: Make, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], sbatch: str, ending: str, project: Path
) -> None:
    """SLURM remembers a job for a while only: then it takes what waits for it as free to start, or refuses it."""
    run = make(job_ids=("7",))
    in_queue(slurm, "7|7_N/A|RUNNING|None")
    record = run.attempt(1).path / "attempt.json"
    stopped(run, ending, job_id="7", reason="finished" if ending == "done" else "crash")
    record.rename(project / "ended")
    attempts.write_attempt(run, Attempt(1, job_id="7", started=time.time()))
    refusal = 'echo "sbatch: error: Batch job submission failed: Job dependency problem" >&2; exit 1'
    slurm.command(
        "sbatch",
        f'if [ -e {project}/ended ]; then mv {project}/ended {record}; : >"$here/queue"\n'
        f"{refusal if sbatch == 'refuses' else ':'}; fi\n"
        'n=$(ls "$here" | grep -c "^script-"); cp "${!#}" "$here/script-$n"; echo "Submitted batch job 101"',
    )
    code = main(["+cluster=a100x4", "submit", "--after", run.id])
    error = capsys.readouterr().err
    if ending == "done":
        assert code == 0, error
        assert ("#SBATCH --dependency" in slurm.submitted[0]) == (sbatch == "accepts")
    else:
        assert code == 2 and f"run {run.id} will not finish: failed" in error
        assert lines(slurm, "cancelled") == (["101"] if sbatch == "accepts" else [])
