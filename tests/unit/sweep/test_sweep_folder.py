"""Folders of sweeps: what a killed maker leaves, what belongs to somebody else, what was cancelled."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.launch import submit_once
from slurmtrain.runs.create import PREPARING
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.sweep import jobs
from slurmtrain.system.files import write_json
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import add_attempt, no_waiting, printed, refused, shown, started

Out = pytest.CaptureFixture[str]
SWEEP = ["-m", "+cluster=a100x4", "cluster.nodes=1,2", "train.seed=1,2", "submit"]  # two arrays
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an sbatch that failed nobody waits between two looks for its job: the stand-in has it, or not."""
    monkeypatch.setattr(submit_once, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(submit_once, "CONFIRM_EVERY_S", 0.0)


def the_sweep(project: Path) -> Sweep:
    return Sweep(min(project.glob("runs/*.sweep-*")))


# In the making.


def test_what_a_killed_maker_has_left_goes_with_the_next_submission_and_nothing_else(
    project: Path, slurm: FakeSlurm
) -> None:
    folder = project / "runs" / PREPARING
    folder.mkdir(parents=True)
    left, kept = ["a.sweep-1.17-old"], ["a.sweep-2.abcdef"]
    for name in (*left, *kept):
        (folder / name / "code").mkdir(parents=True)
        if name.endswith("-old"):
            os.utime(folder / name, (0, 0))
    assert main(SWEEP) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)


# Somebody else's.


def as_others_see_it(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the rights by which root reads what is not meant for it."""

    def drop() -> None:
        libc = ctypes.CDLL(None)
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)

    return subprocess.run(
        [sys.executable, "-m", "slurmtrain", *words], preexec_fn=drop, capture_output=True, text=True, check=False
    )


@pytest.fixture
def closed(project: Path, slurm: FakeSlurm) -> Iterator[list[Path]]:
    """A sweep of two arrays and a run that were given away: mode 000 to those who own it is 0700 to those who do not."""
    for line in (SWEEP, ["+cluster=a100x4", "submit"]):
        assert main(line) == 0
    paths = [the_sweep(project).path, next(project.glob("runs/train/*"))]
    for path in paths:
        path.chmod(0)
    yield paths
    for path in paths:
        path.chmod(0o700)


def test_what_others_keep_unreadable_is_left_out_and_asked_for_it_is_an_error_in_one_sentence(
    project: Path, closed: list[Path]
) -> None:
    assert main(["-m", "+cluster=a100x4", "job.name=mine", "submit"]) == 0
    mine = next(project.glob("runs/mine.sweep-*")).name
    for words in ("status", "runs prune --dry-run"):
        done = as_others_see_it(*words.split())
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert ("prune" in words or mine in done.stdout) and "train.sweep" not in done.stdout
    for verb, path in zip((["sweep", "status"], ["status"]), closed, strict=True):
        for named in (path.name, str(path)):
            done = as_others_see_it(*verb, named)
            assert done.returncode != 0 and done.stdout == "" and "Traceback" not in done.stderr
            assert done.stderr.startswith("slurmtrain: error: ") and path.name in done.stderr, done.stderr


def test_a_sweep_of_somebody_else_with_the_same_points_is_not_in_the_way(closed: list[Path]) -> None:
    done = as_others_see_it(*SWEEP)
    assert done.returncode == 0, done.stderr
    assert f"sweep {closed[0].name}.2 of 4 points is submitted" in done.stdout
    assert f"sweep {closed[0].name}.2 is there already" in as_others_see_it(*SWEEP).stdout


# Cancelled.


def test_a_cancelled_sweep_is_not_submitted_by_the_same_command_but_by_retry(
    project: Path, slurm: FakeSlurm, capsys: Out
) -> None:
    slurm.fail("sbatch", "MaxSubmitJobsPerUser: submit limit", after=1)  # the second array does not fit
    assert main(SWEEP) == 1
    slurm.mend()
    sweep = the_sweep(project)
    assert [sweep.job_id(0), sweep.job_id(1)] == ["101", None]
    assert main(["sweep", "cancel", sweep.id]) == 0
    capsys.readouterr()
    error = refused(*SWEEP, code=1)
    assert "was cancelled, so nothing of it is submitted" in error
    assert f"sweep retry {sweep.id}" in error and "--again" in error
    assert len(slurm.submitted) == 1
    assert f"cancelled, sweep retry {sweep.id} goes on" in printed("sweep", "status", sweep.id)
    assert main(["sweep", "retry", sweep.id]) == 0
    assert sweep.job_id(1) is not None and len(slurm.submitted) == 3  # what was lost, and what was left out
    assert main(SWEEP) == 0
    assert len(slurm.submitted) == 3


def ends(verdict: str, reason: str, sentence: str = "x", **fields: object) -> dict[str, object]:
    return {"verdict": verdict, "reason": reason, "sentence": sentence, "started": 1.0, "ended": 6.0, **fields}


def test_a_retry_submits_what_failed_and_says_what_will_fail_again_and_what_helps(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_waiting(monkeypatch)
    assert main(["-m", "+cluster=a100x4", "train.seed=range(7)", "submit"]) == 0
    sweep = the_sweep(project)
    bad = ends("end", "crash", "ValueError: bad", failed_with="3: ValueError: bad")
    refused = ends("end", "config", "data.path=/x is missing", exit_code=78)
    history: list[list[dict[str, object]]] = [[ends("done", "finished")], [bad, bad], [refused], [bad], [refused]]
    history += [[ends("end", "asked")], [{}]]
    for point, attempts in zip(sweep.points(), history, strict=True):
        for attempt in attempts:
            place = {"job_id": f"101_{point.number}", "host": "elsewhere", "pid": 1}
            add_attempt(sweep.run_dir(point.run_id), **place, **attempt)
    slurm.forget("101")
    states = [point["state"] for point in shown("sweep", "status", "last")["points"]]
    assert states == ["finished", *["failed"] * 4, "stopped", "lost"]
    said = printed("status", sweep.points()[2].run_id)
    assert "Other values need a sweep of their own" in said and "KEY=VALUE" not in said
    said = printed("sweep", "retry", "last")
    assert "6 runs of" in said and sweep.members(1) == [point.run_id for point in sweep.points()[1:]]
    assert "point 1 will probably fail again for the same reason: ValueError: bad\n" in said
    assert "points 2, 4 will probably fail again for the same reason: data.path=/x is missing\n" in said
    assert "they keep their config; after a change of it, submit another sweep: -m ... submit --again" in said


def test_a_sweep_that_is_cancelled_while_it_is_submitted_stops_there(project: Path, slurm: FakeSlurm) -> None:
    slurm.instead_of_sbatch(f'"$here/real/sbatch" "$@"; touch $(echo {project}/runs/train.sweep-*)/cancelled')
    assert "was cancelled" in refused(*SWEEP, code=1)
    assert len(slurm.submitted) == 1
    assert slurm.calls("scancel") == ["scancel 101"]


def test_an_array_waits_for_no_array_that_has_ended(project: Path, slurm: FakeSlurm) -> None:
    """SLURM may have forgotten it, and some versions refuse to wait for what they do not know."""
    slurm.configure(MaxArraySize="1")
    slurm.fail("sbatch", "MaxSubmitJobsPerUser: submit limit", after=1)
    words = ["-m", "+cluster=a100x4", "train.seed=1,2,3", "submit", "--array-parallelism", "1"]
    assert main(words) == 1
    slurm.mend()
    (run_id,) = the_sweep(project).members(0)
    add_attempt(the_sweep(project).run_dir(run_id), job_id="101", ended=time.time(), verdict="done", reason="finished")
    assert main(words) == 0
    assert ["--dependency=afterany" in script for script in slurm.submitted] == [False, False, True]


def test_the_status_of_a_point_says_which_it_is_and_how_it_is_submitted(project: Path, slurm: FakeSlurm) -> None:
    """Not with the script of its array, which would be all of it once more; its overrides are those of all points."""
    slurm.fail("sbatch", "MaxSubmitJobsPerUser: submit limit", after=1)
    assert main(SWEEP) == 1
    sweep = the_sweep(project)
    waiting = [
        point["sentence"] for point in shown("sweep", "status", "last")["points"] if point["state"] == "prepared"
    ]
    assert waiting == [f"not submitted yet: the command that made the sweep, or `sweep retry {sweep.id}`, does it"] * 2
    assert f"  sweep: point 1 of {sweep.id}: cluster.nodes=1 train.seed=2\n" in printed(
        "status", sweep.points()[1].run_id
    )
    error = refused("resume", sweep.points()[2].run_id, code=1)
    assert "has to be submitted together with its sweep" in error and f"sweep retry {sweep.id}" in error


def test_the_same_points_in_another_order_are_the_same_sweep_unless_it_is_to_be_another(
    project: Path, slurm: FakeSlurm
) -> None:
    first = shown("-m", "+cluster=a100x4", "train.seed=1,2", "optim.lr=0.1,0.2", "submit")["sweep"]
    words = ["-m", "optim.lr=0.2,0.1", "+cluster=a100x4", "train.seed=2,1", "submit"]
    assert shown(*words)["sweep"] == first and len(slurm.jobs) == 1
    assert shown(*words, "--again")["sweep"] == f"{first}.2" and len(slurm.jobs) == 2


def test_an_array_that_sbatch_would_refuse_keeps_all_from_being_submitted(project: Path, slurm: FakeSlurm) -> None:
    slurm.fail("sbatch --test-only", "allocation failure: Invalid license specification")
    assert "sbatch refused the job: Invalid license" in refused(*SWEEP, code=1)
    assert slurm.jobs == [] and not list(project.glob("runs/*/sweep.json"))


def test_every_array_waits_for_the_run_that_has_to_finish_first(project: Path, slurm: FakeSlurm) -> None:
    assert main(["+cluster=a100x4", "submit"]) == 0
    assert main([*SWEEP, "--after", "last", "--array-parallelism", "1"]) == 0
    assert [job["dependency"] for job in slurm.jobs] == ["", "afterok:101", "afterok:101,afterany:102"]


# Above a limit on jobs.

LIMITED = r"""
last=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\).*/\1/p' "${!#}")
queued=$(($(cat "$here/queued" 2>/dev/null || echo 0) + ${last:-0} + 1))
[ "$queued" -le 3 ] || { echo "sbatch: error: AssocMaxSubmitJobLimit" >&2; exit 1; }
echo "$queued" >"$here/queued"
"$here/real/sbatch" "$@"
"""


@pytest.fixture
def limited(slurm: FakeSlurm) -> Callable[[], None]:
    """Three tasks may be in the queue. Calling it lets all end."""
    slurm.instead_of_sbatch(LIMITED)

    def end() -> None:
        (slurm.directory / "queued").unlink()
        for job in slurm.jobs:
            slurm.change(job["id"], state="COMPLETED")

    return end


def elements(sweep: Sweep) -> list[str]:
    return [job for run_dir in sweep.run_dirs().values() for job in run_dir.info()["job_ids"]]


@pytest.mark.parametrize("parallelism", [None, 1])
def test_a_sweep_above_the_submit_limit_is_submitted_in_parts_each_run_once(
    parallelism: int | None, project: Path, slurm: FakeSlurm, limited: Callable[[], None]
) -> None:
    limit = [] if parallelism is None else ["--array-parallelism", str(parallelism)]
    words = ["-m", "+cluster=a100x4", "train.seed=range(7)", "submit", *limit]
    for left in (4, 1):
        assert f"{left} runs could not be submitted" in refused(*words, code=1)
        assert len(elements(the_sweep(project))) == 7 - left
        limited()
    assert main(words) == 0
    sweep = the_sweep(project)
    assert len(set(elements(sweep))) == len(elements(sweep)) == 7
    members = [run_id for number in sweep.array_numbers() for run_id in sweep.members(number)]
    assert sorted(members) == sorted(sweep.run_dirs())
    if parallelism == 1:  # no two parts at the same time
        assert [("--dependency=afterany" in script) for script in slurm.submitted] == [
            number > 0 for number in range(len(slurm.submitted))
        ]


def test_a_sweep_whose_shell_was_killed_right_before_sbatch_loses_no_run(
    project: Path, slurm: FakeSlurm, limited: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object, **options: object) -> str:
        raise KeyboardInterrupt

    words = ["-m", "+cluster=a100x4", "train.seed=range(4)", "submit"]
    with monkeypatch.context() as patch:
        patch.setattr("slurmtrain.sweep.jobs.submit_exactly_once", killed)
        assert main(words) == 130
    sweep = the_sweep(project)
    assert main(words) == 1 and len(elements(sweep)) == 3
    limited()
    assert main(words) == 0
    assert len(set(elements(sweep))) == len(elements(sweep)) == 4


# Which job is a run's latest.


@pytest.mark.parametrize(("later_s", "job_ids"), [(60.0, ["101_0", "3_0"]), (-60.0, ["3_0", "101_0"])])
def test_jobs_are_noted_in_the_order_of_their_submission_whatever_their_ids_are(
    later_s: float, job_ids: list[str], project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids begin anew on a cluster that is set up again. The latest is the one that may work; the others leave at once."""
    assert main(SWEEP) == 0
    sweep = the_sweep(project)
    run = sweep.run_dir(sweep.members(0)[0])
    assert run.info()["job_ids"] == ["101_0"]
    write_json(sweep.array(0) / "job.json", {"job_id": "3", "time": time.time() + later_s})
    jobs.note_jobs(sweep, 0)
    jobs.note_jobs(sweep, 0)
    assert run.info()["job_ids"] == job_ids
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    for job_id, told in zip(job_ids, ("end", "go"), strict=True):
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", job_id.removesuffix("_0"))
        assert started(run) == told
