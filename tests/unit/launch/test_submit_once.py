"""What sbatch's words mean, and how often SLURM is asked before a job is taken for not there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurmtrain.errors import ClusterError
from slurmtrain.launch import submit_once
from slurmtrain.launch.submit_once import (
    Patience,
    RefusedError,
    SubmitLimitError,
    TransientError,
    check,
    refusal,
    submit_exactly_once,
)
from slurmtrain.slurm.client import SlurmClient

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
DOWN = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
LIMIT = "AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS policy (job submit limit)"


@dataclass
class Scheduler(SlurmClient):
    """What squeue answers to the question for the token, one answer a time: a job id, None, or no answer at all."""

    answers: list[str | ClusterError | None]
    asked: list[str] = field(default_factory=list)
    slurm_conf: str | None = None

    def find_by_comment(self, word: str, *, ended: bool = False, states: Collection[str] | None = None) -> list[str]:
        assert ended  # it may have been a short one
        self.asked.append(word)
        answer = self.answers.pop(0)
        if isinstance(answer, ClusterError):
            raise answer
        return [answer] if answer is not None else []


@pytest.fixture
def sbatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What sbatch says, one call a time: its error, or a job id."""
    words: list[str] = []

    def call(*arguments: object, **options: object) -> str:
        said = words.pop(0)
        if said.isdigit():
            return said
        raise refusal(said, 1, 90)

    monkeypatch.setattr(submit_once, "sbatch", call)
    yield words
    assert words == []  # all calls that were expected came


def submit(scheduler: Scheduler, **options: object) -> tuple[str, list[float]]:
    slept: list[float] = []
    arguments: dict[str, object] = {"sleep": slept.append, **options}
    job = submit_exactly_once("script", None, "token", scheduler, **arguments)  # type: ignore[arg-type]
    return job, slept


def test_a_job_that_was_accepted_in_silence_is_found_and_not_submitted_again(sbatch: list[str]) -> None:
    sbatch += [TIMED_OUT]
    scheduler = Scheduler([None, "17"])
    assert submit(scheduler)[0] == "17"
    assert scheduler.asked == ["slurmtrain:token"] * 2


def test_one_empty_answer_proves_nothing(sbatch: list[str]) -> None:
    sbatch += [TIMED_OUT, "18"]
    scheduler = Scheduler([None, None, None])
    job, slept = submit(scheduler)
    assert job == "18" and len(scheduler.asked) == 3
    assert slept[:2] == [2.0, 2.0] and 1.0 <= slept[2] <= 1.25  # between the questions, and before the second call


def test_an_answer_that_does_not_come_is_none(sbatch: list[str]) -> None:
    sbatch += [TIMED_OUT, "18"]
    down = ClusterError("squeue does not answer")
    assert submit(Scheduler([None, down, None, down, None]))[0] == "18"


def test_what_nobody_can_find_out_is_said_and_nothing_is_submitted(sbatch: list[str]) -> None:
    sbatch += [TIMED_OUT]
    down = ClusterError("squeue does not answer")
    with pytest.raises(
        ClusterError, match=r"not known whether the job was submitted: sbatch said: .*timed out.*squeue does not"
    ):
        submit(Scheduler([down] * 6))


def test_a_controller_that_was_never_reached_has_no_job(sbatch: list[str]) -> None:
    sbatch += [DOWN, "19"]
    scheduler = Scheduler([])
    assert submit(scheduler)[0] == "19" and scheduler.asked == []


def test_what_was_killed_may_have_worked() -> None:
    for code in (124, 137, -9):
        passing = refusal("", code, 90)
        assert isinstance(passing, TransientError) and passing.may_be_there


def test_it_gives_up_in_the_end(sbatch: list[str]) -> None:
    sbatch += [DOWN] * 3
    with pytest.raises(
        ClusterError, match=r"sbatch failed 3 times.*Unable to contact slurm controller.*nothing was submitted"
    ):
        submit(Scheduler([]))
    sbatch += [TIMED_OUT] * 2
    with pytest.raises(ClusterError, match="sbatch failed 2 times"):
        submit(Scheduler([None] * 2), patience=Patience(tries=2, confirmations=1))


def test_after_an_interrupted_submission_the_job_is_looked_for_first(sbatch: list[str]) -> None:
    assert submit(Scheduler([None, "20"]), looked_for_before=True)[0] == "20"
    sbatch += ["21"]
    assert submit(Scheduler([None, None, None]), looked_for_before=True)[0] == "21"


def test_a_limit_is_no_error_of_the_job_and_a_refusal_is_not_tried_again(sbatch: list[str]) -> None:
    sbatch += [LIMIT]
    with pytest.raises(SubmitLimitError, match="AssocMaxSubmitJobLimit"):
        submit(Scheduler([]))
    sbatch += ["sbatch: error: invalid partition specified: gpux"]
    with pytest.raises(ClusterError, match=r"sbatch refused the job: .*gpux") as refused:
        submit(Scheduler([]))
    assert not isinstance(refused.value, SubmitLimitError) and "sinfo" in (refused.value.hint or "")


# What slurm_errno.c and sbatch.c have to say.
FAILED = "sbatch: error: Batch job submission failed: "
MAY_BE_THERE = [
    FAILED + "Unable to contact slurm controller (receive failure)",
    FAILED + "Unable to contact slurm controller (send failure)",
    FAILED + "Message receive failure",
    FAILED + "Unspecified error",
    FAILED + "Zero Bytes were transmitted or received",
    FAILED + "Protocol authentication error",
    FAILED + "Socket timed out on send/recv operation",
    "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.\n"
    + FAILED
    + "Message receive failure",
    FAILED + "Words of a version that nobody has seen",
    "the site's own front for sbatch has something to say",
    "",
]
TURNED_AWAY = [
    FAILED + "Rate limit exceeded, please retry momentarily",
    FAILED + "Rate limit exceeded, please retry later",
    FAILED + "Slurm backup controller in standby mode",
    DOWN,
]
NEVER = [
    FAILED + "Invalid account or account/partition combination specified",
    FAILED + "More processors requested than permitted",
    "sbatch: error: Memory specification can not be satisfied\n"
    + FAILED
    + "Requested node configuration is not available",
    "sbatch: unrecognized option '--wrong'\nTry \"sbatch --help\" for more information",
    "sbatch: fatal: Could not establish a configuration source",
    "sbatch: error: QOSMaxWallDurationPerJobLimit\n"
    + FAILED
    + "Job violates accounting/QOS policy (job submit limit, user's "
    "size and/or time limits)",
]


@pytest.mark.parametrize("words", MAY_BE_THERE)
def test_after_words_that_leave_it_open_the_job_is_looked_for_and_found(words: str, sbatch: list[str]) -> None:
    sbatch += [words]
    assert submit(Scheduler([None, "17"]))[0] == "17"


@pytest.mark.parametrize("words", MAY_BE_THERE[-3:])
def test_words_that_nobody_knows_are_a_refusal_when_the_job_is_not_there(words: str, sbatch: list[str]) -> None:
    sbatch += [words]
    with pytest.raises(RefusedError, match="sbatch refused the job: "):
        submit(Scheduler([None, None, None]))


@pytest.mark.parametrize("words", TURNED_AWAY)
def test_a_controller_that_is_busy_is_asked_again_after_a_pause(words: str, sbatch: list[str]) -> None:
    sbatch += [words, "19"]
    job, slept = submit(Scheduler([]))
    assert job == "19" and len(slept) == 1


@pytest.mark.parametrize("words", NEVER)
def test_what_slurm_will_never_take_is_refused_at_once(words: str, sbatch: list[str]) -> None:
    sbatch += [words]
    with pytest.raises(RefusedError):
        submit(Scheduler([]))


# `sbatch --test-only`.


@dataclass
class Asked(SlurmClient):
    """What --test-only says, and whether the partition has all its nodes."""

    said: str
    lacking: bool = False

    def test_only(self, script: Path, options: Sequence[str] = (), *, without: Collection[str] = ()) -> tuple[int, str]:
        return 1, f"allocation failure: {self.said}"

    def lacks_nodes(self, partition: str | None) -> bool:
        assert partition == "low"
        return self.lacking


@pytest.mark.parametrize(
    ("said", "lacking", "refused"),
    [
        ("Requested nodes are busy", False, False),
        ("Requested reservation is in use", False, False),
        ("Required node not available (down, drained or reserved)", False, False),
        ("Partition in DOWN state", False, False),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", False, False),
        ("Requested node configuration is not available", True, False),  # as 22.05 says when all are drained
        ("Requested node configuration is not available", False, True),
        ("More processors requested than permitted", True, True),
        ("Invalid partition name specified", False, True),
    ],
)
def test_only_what_sbatch_itself_would_refuse_is_refused_beforehand(
    said: str, lacking: bool, refused: bool, tmp_path: Path
) -> None:
    assert refuses(tmp_path, "#SBATCH --partition=low\n", Asked(said, lacking)) == refused


def refuses(folder: Path, directives: str, asked: Asked) -> bool:
    script = folder / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{directives}")
    try:
        check(script, asked)
    except RefusedError:
        return True
    return False


@pytest.mark.parametrize(
    "directives",
    [
        # sbatch adds others, while --test-only looks at the named ones alone.
        "#SBATCH --partition=low\n#SBATCH --nodes=2\n#SBATCH --nodelist=n0\n",
        # sbatch takes it for the second one, while --test-only goes by the limits of the first.
        "#SBATCH --partition=tiny,low\n#SBATCH --nodes=2\n",
    ],
)
def test_a_job_with_fewer_nodes_than_it_needs_or_several_partitions_is_left_to_sbatch(
    directives: str, tmp_path: Path
) -> None:
    assert not refuses(tmp_path, directives, Asked("Requested node configuration is not available"))
