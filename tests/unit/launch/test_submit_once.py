"""However SLURM answers, a submission makes one job, or none and says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.launch import submit_once
from slurmtrain.launch.submit_once import RefusedError, SubmitLimitError, UnclearError, error_of
from tests.support.fake_slurm import NO_REPLY, UNREACHABLE, FakeSlurm
from tests.support.runs import refused

FAILED = "sbatch: error: Batch job submission failed: "
LIMIT = "AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS policy (job submit limit)"
SUBMIT = ["+cluster=a100x4", "cluster.partition=low", "submit"]
Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_once, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(submit_once, "CONFIRM_EVERY_S", 0.0)


def asked(slurm: FakeSlurm) -> list[str]:
    """The submissions, and the questions for the job."""
    calls = [line for line in slurm.calls("sbatch", "squeue") if "--test-only" not in line]
    return [line.partition(" ")[0] for line in calls]


def test_a_job_that_was_accepted_in_silence_is_found_and_not_submitted_again(project: Path, slurm: FakeSlurm) -> None:
    slurm.fail("sbatch", NO_REPLY, done=True)
    assert main(SUBMIT) == 0
    assert asked(slurm) == ["sbatch", "squeue"] and len(slurm.jobs) == 1
    (run,) = project.glob("runs/train/*")
    assert json.loads((run / "run.json").read_text())["job_ids"] == ["101"]


def test_one_empty_answer_proves_nothing_and_one_that_does_not_come_is_none(project: Path, slurm: FakeSlurm) -> None:
    slurm.fail("sbatch", NO_REPLY, times=1)
    slurm.fail("squeue", times=2)
    assert main(SUBMIT) == 0
    assert asked(slurm) == ["sbatch", *["squeue"] * 5, "sbatch"] and len(slurm.jobs) == 1


def test_what_nobody_can_find_out_is_said_and_nothing_is_submitted_twice(project: Path, slurm: FakeSlurm) -> None:
    slurm.fail("sbatch", NO_REPLY)
    slurm.fail("squeue")
    error = refused(*SUBMIT, code=1)
    assert "it is not known whether the job was submitted: sbatch said: " in error and "imed out" in error
    assert asked(slurm).count("sbatch") == 1


def test_a_controller_that_was_never_reached_has_no_job_and_is_tried_again(
    project: Path, slurm: FakeSlurm, capsys: Out
) -> None:
    slurm.fail("sbatch", UNREACHABLE, times=2)
    assert main(SUBMIT) == 0
    assert asked(slurm) == ["sbatch"] * 3 and len(slurm.jobs) == 1
    slurm.fail("sbatch", UNREACHABLE)
    assert main(SUBMIT) == 1
    assert "sbatch failed 3 times, the last time with: " in (error := capsys.readouterr().err)
    assert "nothing was submitted" in error
    assert len(slurm.jobs) == 1 and len(list(project.glob("runs/train/*"))) == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (LIMIT, "wait until jobs have ended, then repeat the command"),
        (f"{FAILED}Invalid partition specified: low", "cluster.partition; `sinfo` lists the partitions"),
        (
            f"{FAILED}Invalid generic resource (gres) specification",
            "cluster.gpus_per_node and cluster.gpu_type; `sinfo",
        ),
        (f"{FAILED}Words of a version that nobody has seen", "see `man sbatch`"),
    ],
)
def test_a_refusal_is_said_in_slurms_words_and_leaves_nothing(
    words: str, hint: str, project: Path, slurm: FakeSlurm
) -> None:
    slurm.fail("sbatch", words)
    error = refused(*SUBMIT, code=1)
    assert "sbatch refused the job: " in error and hint in error
    assert asked(slurm).count("sbatch") == 1 and not (project / "runs").exists()


# What slurm_errno.c and sbatch.c have to say: the job may be there, is not there yet, or was refused.
MAY_BE_THERE, LATER, UNKNOWN = (True, True), (False, True), (True, False)
MEANING: dict[str, type[Exception] | tuple[bool, bool]] = {
    FAILED + "Protocol authentication error": MAY_BE_THERE,
    "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.\n"
    + FAILED
    + "Message receive failure": MAY_BE_THERE,
    FAILED + "Rate limit exceeded, please retry momentarily": LATER,
    "": UNKNOWN,
    f"sbatch: error: Memory specification\n{FAILED}Requested node configuration is not available": RefusedError,
    "sbatch: unrecognized option '--wrong'\nTry \"sbatch --help\" for more information": RefusedError,
    "sbatch: error: QOSMaxWallDurationPerJobLimit\n"
    + FAILED
    + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)": RefusedError,
    LIMIT: SubmitLimitError,
}


@pytest.mark.parametrize("words", MEANING)
def test_what_the_words_of_sbatch_mean(words: str) -> None:
    found, meaning = error_of(words, 1), MEANING[words]
    if isinstance(meaning, tuple):
        assert isinstance(found, UnclearError) and (found.may_be_there, found.again) == meaning
    else:
        assert type(found) is meaning


@pytest.mark.parametrize("code", [124, 137, -9])
def test_an_sbatch_that_was_killed_may_have_worked(code: int) -> None:
    found = error_of("", code)
    assert isinstance(found, UnclearError) and found.may_be_there and found.again


NO_NODES = "Requested node configuration is not available"


@pytest.mark.parametrize(
    ("said", "words", "lacking", "code"),
    [
        ("Requested nodes are busy", (), False, 0),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", (), False, 0),
        (NO_NODES, (), True, 0),  # as 22.05 says when all are drained
        (NO_NODES, (), False, 1),
        ("More processors requested than permitted", (), True, 1),
        ("Invalid partition name specified", (), False, 1),
        # It looks at the named nodes alone, and sbatch adds others; and by the limits of the first of several partitions.
        (NO_NODES, ("cluster.nodes=2", "+cluster.sbatch.nodelist=n0"), False, 0),
        (NO_NODES, ("cluster.partition='tiny,low'",), False, 0),
    ],
)
def test_only_what_sbatch_itself_would_refuse_is_refused_beforehand(
    said: str, words: tuple[str, ...], lacking: bool, code: int, project: Path, slurm: FakeSlurm, capsys: Out
) -> None:
    slurm.fail("sbatch --test-only", f"allocation failure: {said}")
    nodes = "up drained\n" if lacking else "up mixed\n"
    slurm.answer("sinfo --noheader --all --format=%a %T --partition=low", nodes)
    assert main([*SUBMIT[:-1], *words, "submit"]) == code
    assert len(slurm.jobs) == (code == 0) and (project / "runs").exists() == (code == 0)
    assert code == 0 or said in capsys.readouterr().err
