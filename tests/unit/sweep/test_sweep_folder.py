"""Folders of sweeps: what a killed maker leaves, what belongs to somebody else, what was cancelled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.launch import submit_once
from slurmtrain.runs.sweep_dir import Sweep
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import add_attempt, no_waiting, printed, refused, shown

Out = pytest.CaptureFixture[str]
SWEEP = ["-m", "+cluster=a100x4", "cluster.nodes=1,2", "train.seed=1,2", "submit"]  # two arrays


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an sbatch that failed nobody waits between two looks for its job: the stand-in has it, or not."""
    monkeypatch.setattr(submit_once, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(submit_once, "CONFIRM_EVERY_S", 0.0)


def the_sweep(project: Path) -> Sweep:
    return Sweep(min(project.glob("runs/*.sweep-*")))


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
    assert shown(*words)["sweep"] == f"{first}.2" and len(slurm.jobs) == 2


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
