"""What sbatch's words mean, and how often SLURM is asked before a job is taken for not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from slurmtrain.errors import ClusterError
from slurmtrain.launch import handover
from slurmtrain.launch.handover import Passing, Patience, SubmitLimit, hand_over, refusal
from slurmtrain.runtime.slurm import SlurmClient

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
DOWN = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
LIMIT = "AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS policy (job submit limit)"


@dataclass
class Scheduler(SlurmClient):
    """What squeue answers to the question for the token, one answer a time: a job id, None, or no answer at all."""

    answers: list[str | ClusterError | None]
    asked: list[str] = field(default_factory=list)
    slurm_conf: str | None = None

    def find_by_comment(self, word: str, *, ended: bool = False) -> list[str]:
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

    monkeypatch.setattr(handover, "sbatch", call)
    yield words
    assert words == []  # all calls that were expected came


def submit(scheduler: Scheduler, **options: object) -> tuple[str, list[float]]:
    slept: list[float] = []
    arguments: dict[str, object] = {"sleep": slept.append, **options}
    job = hand_over("script", None, "token", scheduler, **arguments)  # type: ignore[arg-type]
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


def test_what_was_killed_may_have_worked_and_what_failed_without_a_word_has_not() -> None:
    for code in (124, 137, -9):
        passing = refusal("", code, 90)
        assert isinstance(passing, Passing) and passing.may_be_there
    silent = refusal("", 1, 90)
    assert not isinstance(silent, Passing) and "exit code 1, without a word" in silent.message


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
    with pytest.raises(SubmitLimit, match="AssocMaxSubmitJobLimit"):
        submit(Scheduler([]))
    sbatch += ["sbatch: error: invalid partition specified: gpux"]
    with pytest.raises(ClusterError, match=r"sbatch refused the job: .*gpux") as refused:
        submit(Scheduler([]))
    assert not isinstance(refused.value, SubmitLimit) and "sinfo" in (refused.value.hint or "")
