"""The events of a run: the words that events.jsonl has for what happened."""

from __future__ import annotations

from enum import StrEnum


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
