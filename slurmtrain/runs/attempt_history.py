"""What the attempts before one say about it: how many of them used up a budget, and which nodes were at fault.

Budgets end a run that crashes again and again. They are pure functions of the records; `outcome.budget_spent` decides.
"""

from __future__ import annotations

from slurmtrain.runs.attempts import Attempt, read_attempt
from slurmtrain.runs.batch_claim import failed_set_up
from slurmtrain.runs.outcome import QUICK_FAILURE_S
from slurmtrain.runs.reasons import Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.srun_log import cancelled_due_to
from slurmtrain.slurm.environment import own_job_id


def stalled_numbers(attempts: list[Attempt], number: int) -> list[int]:
    """Return the numbers of the attempts directly before `number` that used up the budget, the last one first.

    Progress starts the count anew, and so do a long attempt of a program that reports none, and a person who resumed a
    run that had ended. An attempt that ended for another reason does not count.
    """
    counted, moved_on = [], _moved_on(attempts, number)
    for attempt in reversed([attempt for attempt in attempts if attempt.number < number]):
        if (
            attempt.progressed
            or attempt.number in moved_on
            or attempt.lasted
            or attempt.verdict in (Verdict.DONE, Verdict.END)
        ):
            break
        if attempt.stalled and not attempt.unseen:
            counted.append(attempt.number)
    return counted


def _moved_on(attempts: list[Attempt], number: int) -> set[int]:
    """Return the attempts before `number` after which the next one began further on than any before it.

    That is progress, too, of which the run directory has no checkpoint: it was in a copy on the nodes.
    """
    found: set[int] = set()
    furthest, before = 0, None
    for attempt in [attempt for attempt in attempts if attempt.number <= number]:
        if (attempt.first_step or 0) > furthest:
            furthest = attempt.first_step or 0
            if before is not None:
                found.add(before.number)
        before = attempt
    return found


def unseen_before(attempts: list[Attempt], number: int) -> int:
    """Return how many long attempts before `number` used up the budget of those that show no progress."""
    count = 0
    for attempt in reversed([attempt for attempt in attempts if attempt.number < number]):
        if attempt.progressed or attempt.verdict in (Verdict.DONE, Verdict.END):
            break
        count += attempt.unseen
    return count


def failed_before(attempts: list[Attempt], attempt: Attempt) -> tuple[str, ...]:
    """Return the nodes at fault for attempts before this one in the same start of its job, the newest first."""
    found: dict[str, None] = {}
    for each in reversed([each for each in attempts if each.number < attempt.number]):
        if (each.job_id, each.restart_count) != (attempt.job_id, attempt.restart_count):
            break
        if each.failed_on is not None:
            found[each.failed_on] = None
    return tuple(found)


def failed_quickly(attempt: Attempt, how: str | None) -> bool:
    """Return whether the program of an attempt failed within seconds, and in this way (`failed_with`)."""
    if how is None or attempt.failed_with != how or attempt.ended is None:
        return False
    return attempt.ended - attempt.started < QUICK_FAILURE_S


def failed_alike(attempts: list[Attempt], attempt: Attempt) -> bool:
    """Return whether the program of the attempt directly before this one failed within seconds, and in the same way.

    An attempt that ended the run does not count: a person has resumed it since.
    """
    before = next((each for each in attempts if each.number == attempt.number - 1), None)
    if before is None or before.verdict == Verdict.END:
        return False
    return before.stalled and failed_quickly(before, attempt.failed_with)


def came_to_an_end(run_dir: RunDir, last: Attempt) -> bool:
    """Return whether the run ended for good with its last attempt.

    It did by its verdict, or in a set-up after which nobody could finish the record.
    """
    unfinished = last.verdict is None and failed_set_up(run_dir.attempt(last.number)) is not None
    return last.verdict == Verdict.END or unfinished


def was_preempted(run_dir: RunDir, attempt: Attempt) -> bool:
    """Return whether SLURM has said that it preempts this attempt, to rank 0 or in the job's log.

    Without a GraceTime, which is SLURM's default, only the log says so: the job is requeued in the same moment, and
    with that the time of its preemption is gone from what `scontrol show job` prints.
    """
    if attempt.facts_when_told is not None and attempt.facts_when_told.preempted:
        return True
    log = run_dir.job_log(attempt.job_id or own_job_id() or "")
    before = read_attempt(run_dir, attempt.number - 1) if attempt.number > 1 else None
    since = max(attempt.started, (before.ended or 0.0) if before is not None else 0.0)
    return log is not None and cancelled_due_to(log, since) == "PREEMPTION"
