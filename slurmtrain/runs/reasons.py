"""The words that records have: for why an attempt ended, what happens next, and what happened to a run."""

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


class LastWord(StrEnum):
    """The last word of rank 0 on an attempt, for all ranks."""

    FINISHED = "finished"
    STOPPED = "stopped"


class Event(StrEnum):
    """The name of an event; its value is what is written to events.jsonl."""

    # Its jobs.
    RENDERED = "rendered"  # its batch script was written, for a person to submit
    SUBMITTING = "submitting"  # sbatch is about to be called
    SUBMITTED = "submitted"
    GONE_FROM_QUEUE = "gone from the queue"
    CHAIN_CANCELLED = "rest of the chain cancelled"
    DEPENDENTS_FREED = "dependents freed"  # jobs that waited for this run may start, or never will
    DEPENDENTS_PASSED_ON = "dependents passed on"  # they wait for the run's next job
    NODES_LEFT_OUT = "nodes left out"
    NODES_NOT_LEFT_OUT = "nodes not left out"

    # What a person asked for.
    CANCEL_ASKED = "cancel asked"
    PREEMPT_ASKED = "preempt asked"
    REQUEUE_ASKED = "requeue asked"
    RESUME_ASKED = "resume asked"
    PRUNE_ASKED = "prune asked"  # by its search
    STOP_FILE_FOUND = "the file stop was found"
    SAVE_FILE_FOUND = "the file save was found"
    CHANGED = "changed"  # its config or its code
    LENGTHENED = "lengthened"  # it had finished, and was given more steps

    # Its attempts.
    ATTEMPT_STARTED = "attempt started"
    ATTEMPT_ENDED = "attempt ended"
    PREFLIGHT = "preflight"  # the checks before training have found something
    LEFT_BEHIND = "left behind"  # processes of the user's own program had not ended in time
    CHECKPOINT_FOUND = "checkpoint found"  # of the user's own program, when it starts
    NO_CHECKPOINT_SEEN = "no checkpoint to be seen"  # of the user's own program, when it starts again
    INCOMPLETE_CHECKPOINT = "incomplete checkpoint"  # of the user's own program; it was moved aside
    KILLED_AFTER_GRACE = "killed after the grace time"  # the user's own program, which was told to stop
    FIRST_REPORT = "first report"  # of progress by the user's own program, in an attempt
    NOT_STARTED_AGAIN = "not started again"
    HOOK_ENDED = "hook ended"

    # Training.
    FRESH_START = "fresh start"
    RESTORED = "restored"
    TRAINING_STARTED = "training started"
    FIRST_STEP = "first step done"  # of an attempt
    CAUGHT_UP = "caught up"  # it is where an earlier attempt had been, or where it was before it was rolled back
    EVALUATED = "evaluated"
    TRAINING_FINISHED = "training finished"
    TRAINING_STOPPED = "training stopped"
    UPDATE_SKIPPED = "update skipped"  # of a step whose loss or gradient norm was not finite
    STRAGGLER = "straggler"  # ranks of a node are slower than the others
    STRAGGLER_OVER = "straggler over"  # they are not any more
    FLOPS_COUNTED = "flops counted"  # what the model's training takes, and the most that a device can do
    PROFILE_FILE_FOUND = "profile file found"  # somebody has asked for a profile by `touch RUN/profile`
    PROFILED = "profiled"  # steps, which a person or the config has asked for
    ROLLED_BACK = "rolled back"  # to a checkpoint from before a trouble
    CHECKPOINT = "checkpoint"
    CHECKPOINT_FAILED = "checkpoint failed"
    EVALUATION_SUBMITTED = "evaluation submitted"
    EVALUATION_NOT_SUBMITTED = "evaluation not submitted"


# They may be the fault of a node, and end none of SLURM's job.
FAILURES = (Reason.CRASH, Reason.HANG, Reason.NODE_FAILURE, Reason.BAD_NODE)
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
