"""One run, several jobs: all are ended together, and none is made by two at the same moment."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.launch import claims, submit_once
from slurmtrain.launch.claims import claimed, is_claimed
from slurmtrain.report.status import queued, state
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.supervise.platforms import local
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import add_attempt, submitted_run

Make = Callable[..., RunDir]
Out = pytest.CaptureFixture[str]


def in_queue(slurm: FakeSlurm, *rows: str) -> None:
    """All jobs that SLURM knows from now on; each row: a job, its state and its comment."""
    for job in slurm.jobs:
        slurm.forget(job["id"])
    for row in rows:
        job_id, state, comment = row.split(" ", 2)
        slurm.add(job_id, state=state, comment=comment.replace("(null)", ""))


def submitted(slurm: FakeSlurm) -> list[str]:
    return [script for script in slurm.submitted if script]


def cancelled(slurm: FakeSlurm) -> list[str]:
    return sorted(word for call in slurm.calls("scancel") for word in call.split()[1:])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued, "CONFIRM_EVERY_S", 0.0)


@pytest.fixture
def make(project: Path) -> Make:
    return lambda *job_ids, words=(): submitted_run(project, "cluster=a100x4", *words, job_ids=job_ids)


def failed(run: RunDir, job_id: str) -> None:
    add_attempt(run, job_id=job_id, verdict="end", reason="crash", sentence="crashed: x", ended=time.time())


def resuming(run: RunDir) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slurmtrain", "resume", str(run.path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# Starting it.


def test_two_resumes_at_the_same_moment_submit_one_job(make: Make, slurm: FakeSlurm) -> None:
    run = make("100")
    failed(run, "100")
    # The first waits inside of sbatch until the second has said that it waits, or has come to sbatch, too.
    until = 'until [ -e "$here/go" ] || (($(wc -l <"$here/in-sbatch") > 1)); do sleep 0.05; done'
    slurm.instead_of_sbatch(f'echo >>"$here/in-sbatch"; {until}; "$here/real/sbatch" "$@"')
    first = resuming(run)
    while not (slurm.directory / "in-sbatch").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    second = resuming(run)
    assert second.stderr is not None
    said = second.stderr.readline()
    (slurm.directory / "go").touch()
    out, err = second.communicate(timeout=120)
    assert first.wait(timeout=120) == 0
    first.communicate()
    assert len(submitted(slurm)) == 1 and run.info()["job_ids"] == ["100", "101"]
    assert f"process {first.pid} on " in said and "is resuming it" in said
    assert second.returncode != 0 and "has not ended: waiting, job 101 is pending" in err, out + err


def test_a_run_that_submit_has_started_here_is_not_started_once_more_beside_it(
    project: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start may be slow, and a hook between two attempts may take minutes, in which no rank shows that it is alive."""
    started: list[RunDir] = []

    def slow(run_dir: RunDir) -> int:
        started.append(run_dir)
        return main(["resume", str(run_dir.path)])

    monkeypatch.setattr(local, "run_local", slow)
    assert main(["+cluster=local", "+experiment=smoke", "submit"]) != 0
    assert f"process {os.getpid()} on" in (error := capsys.readouterr().err) and "is already running" in error
    assert len(started) == 1 and not is_claimed(started[0].path)


@pytest.mark.parametrize("accepted", [True, False])
def test_ctrl_c_while_it_is_submitted_says_where_the_run_stands(
    accepted: bool, project: Path, slurm: FakeSlurm
) -> None:
    accept = '"$here/real/sbatch" "$@" >/dev/null; ' if accepted else ""
    slurm.instead_of_sbatch(f'{accept}touch "$here/in-sbatch"; exec sleep 600')
    command = [sys.executable, "-m", "slurmtrain", "+cluster=a100x4", "submit"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (slurm.directory / "in-sbatch").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said = process.communicate(timeout=120)[1]
    (run_dir,) = all_runs(project / "runs")
    assert process.returncode == 130 and f"cancel {run_dir.id}" in said
    assert f"run {run_dir.id} may have a job already: resume {run_dir.id} looks for it" in said
    (slurm.directory / "real" / "sbatch").replace(slurm.directory / "sbatch")
    assert main(["resume", run_dir.id]) == 0
    assert run_dir.info()["job_ids"] == ["101"] and len(slurm.jobs) == 1


# Ending it.


def test_cancel_ends_every_job_of_the_run_that_is_left(make: Make, slurm: FakeSlurm) -> None:
    run, other = make("98", "99", "100"), make("50")
    in_queue(
        slurm,
        "98 RUNNING slurmtrain:x",
        "99 COMPLETED (null)",
        "100 PENDING (null)",
        f"101 PENDING mine slurmtrain:{run.id}:2",  # its submitter was killed before it could note it
        f"102 PENDING slurmtrain:{other.id}:1",
        "50 RUNNING (null)",
    )
    assert main(["cancel", run.id]) == 0
    assert cancelled(slurm) == ["100", "101", "98"]


def test_cancel_of_a_sweep_ends_every_job_of_its_runs(project: Path, slurm: FakeSlurm) -> None:
    assert main(["-m", "+cluster=a100x4", "train.seed=1,2", "submit"]) == 0
    sweep = Sweep(next(project.glob("runs/*.sweep-*")))
    one, two = sweep.run_dirs().values()
    one.update_info(job_ids=["101_0", "200", "201"])  # resumed twice
    in_queue(slurm, "101_1 PENDING x", "200 RUNNING x", "201 PENDING x", f"300 PENDING slurmtrain:{two.id}:1")
    assert main(["sweep", "cancel", "last"]) == 0
    assert cancelled(slurm) == ["101", "200", "201", "300"]


# SLURM gives an id twice: on a cluster that is set up again (`sandbox down`, `up`), and after MaxJobId.


def test_cancel_and_resume_of_an_old_run_leave_alone_another_runs_job_that_has_its_id(
    make: Make, slurm: FakeSlurm
) -> None:
    old, new = make("5", "2"), make("2")
    failed(old, "2")
    in_queue(slurm, f"2 RUNNING slurmtrain:{new.id}:s0")
    assert state.state(old).status == "failed" and state.state(new).alive
    assert main(["cancel", old.id]) == 0
    assert cancelled(slurm) == []
    assert main(["resume", old.id]) == 0
    assert old.info()["job_ids"] == ["5", "2", "101"]
    assert main(["cancel", new.id]) == 0
    assert cancelled(slurm) == ["2"]


@pytest.mark.parametrize(
    ("state", "began", "submits"), [("CANCELLED", False, True), ("FAILED", True, True), ("PENDING", False, False)]
)
def test_resume_submits_a_run_whose_only_job_has_ended_since_the_shell_that_submitted_it_was_killed(
    state: str, began: bool, submits: bool, make: Make, slurm: FakeSlurm, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM still remembers that job by the same token, and nothing would run if it was taken for the new one."""
    monkeypatch.setattr(submit_once, "CONFIRM_EVERY_S", 0.0)
    run = make()
    run.event(Event.SUBMITTING, token=f"{run.id}:s0")
    if began:
        failed(run, "90")
    in_queue(slurm, f"90 {state} slurmtrain:{run.id}:s0")
    assert main(["resume", run.id]) == 0
    job_id = "101" if submits else "90"
    assert f"as job {job_id}" in capsys.readouterr().out
    assert run.info()["job_ids"] == [job_id] and len(submitted(slurm)) == submits


# Claims.


def test_where_a_file_system_has_no_locks_a_claim_still_says_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.unlink(tmp_path / "none"))  # any OSError
    with claimed(tmp_path, print):
        assert claims.holder_here(tmp_path) == os.getpid()
    assert claims.holder_here(tmp_path) is None


def test_what_others_put_in_place_of_a_claim_or_lock_is_said(tmp_path: Path) -> None:
    """No look hangs at it."""
    claim = tmp_path / "claim"
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)):
        make(claim)
        assert not is_claimed(tmp_path)
        with pytest.raises(PermissionError, match="not a regular file of yours"), claimed(tmp_path, print):
            pass
        claim.rmdir() if claim.is_dir() else claim.unlink()
