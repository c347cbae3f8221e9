"""The words for why an attempt ended, what happens next, and what was requested of a run, as records have them."""

from __future__ import annotations

from enum import StrEnum

from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE

QUICK_FAILURE_S = 60.0  # an attempt that fails sooner has done nothing useful


class Reason(StrEnum):
    """The reason why an attempt ended."""

    FINISHED = "finished"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    NODE_FAILURE = "node failure"
    REQUEUED = "requeued"  # somebody used scontrol requeue
    ASKED = "asked"  # a person's signal, `preempt RUN` or `requeue RUN`
    PRUNED = "pruned"  # its search has ended it early
    CONFIG = "config"
    DIVERGED = "diverged"  # numbers are not finite, or the loss has jumped: no retry, and no node's fault
    BAD_NODE = "bad node"  # it could not start there, though an earlier attempt has trained elsewhere
    SUPERSEDED = "superseded"  # a newer attempt of the run, of another job, is at work
    CRASH = "crash"
    HANG = "hang"  # the watchdog has ended it; a crash in every other respect


class Verdict(StrEnum):
    """The decision what happens next to a run."""

    DONE = "done"
    IN_PLACE = "in-place"  # the ranks start again in the same job, which keeps its nodes
    REQUEUE = "requeue"  # we requeue the job
    RESUBMIT = "resubmit"  # we submit a new job
    NEXT = "next"  # the next job of the chain continues
    RESTARTING = "restarting"  # SLURM does it already
    END = "end"


class GoesOn(StrEnum):
    """The words for what happens next to a run that goes on."""

    REQUEUED = "it is requeued"
    SUBMITTED = "it is submitted again"
    CHAIN = "the next job of the chain continues"
    STARTS = "it starts again"  # where there is no queue
    SLURM = "SLURM starts it again"
    STARTED = "it was started again"
    IN_PLACE = "its ranks start again in the same job"  # and without which node, and after which pause


class LastWord(StrEnum):
    """The last word of rank 0 on an attempt, for all ranks."""

    FINISHED = "finished"
    STOPPED = "stopped"


class RunAction(StrEnum):
    """An action that a person, or the search that a run belongs to, has requested of it."""

    CANCEL = "cancel"
    STOP = "stop"  # by a file of this name in the run's directory
    PREEMPT = "preempt"
    REQUEUE = "requeue"
    PRUNE = "prune"  # by a search


# They may be the fault of a node, and end none of SLURM's job.
FAILURES = (Reason.CRASH, Reason.HANG, Reason.NODE_FAILURE, Reason.BAD_NODE)
ENDS_RUN = (RunAction.CANCEL, RunAction.STOP, RunAction.PRUNE)
STARTS_ANEW = (RunAction.PREEMPT, RunAction.REQUEUE)  # the run leaves its nodes, and goes on in a later start
PRUNED_BY_SEARCH = "pruned by its search"


def exit_code_of_run(verdict: str | None, reason: str | None, code: int | None) -> int:
    """Return the exit code of a command that has waited for the end of a run, given how the last attempt has ended.

    Args:
        code: the highest exit code of the attempt's ranks.

    Returns: 0 it has finished, 75 it has stopped and can be resumed, 78 the config or the environment is wrong, else 1.
    """
    if verdict == Verdict.DONE:
        return 0
    if reason in (Reason.CONFIG, Reason.DIVERGED):
        return EXIT_CONFIG
    # After a crash of one rank the others may have saved and exited with 75; the attempt still crashed.
    return EXIT_REQUEUE if code == EXIT_REQUEUE and reason not in (Reason.CRASH, Reason.HANG) else 1


def joined(why: str, next_step: str | None) -> str:
    """Return why an attempt ended and what happens next in one sentence."""
    return why if next_step is None else f"{why}; {next_step}"
