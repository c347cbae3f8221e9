"""Words by which SLURM's commands say that the controller has not answered, as opposed to one that refuses.

In the words of slurm_errno.c (22.05 to 26.05).
"""

from __future__ import annotations

# Transient errors after which the request was certainly not processed: the controller was never reached, or has refused
# it unread.
NOT_THERE = (
    "unable to contact slurm controller (connect failure)",
    "connection refused",
    "slurm temporarily unable to accept job",
    "unable to create job record, try again",
    "rate limit exceeded",
    "in standby",
)
# After these the request had been sent, or was being sent: it may have been processed.
UNSURE = (
    "unable to contact slurm controller",  # send, receive and shutdown failure; 22.05 says it without a reason, too
    "message send failure",
    "message receive failure",
    "communication shutdown failure",
    "communication connection failure",
    "unspecified error",
    "protocol authentication error",
    "incompatible versions of client and server",
    "insane message length",
    "socket timed out",
    "transport endpoint is not connected",
    "zero bytes were transmitted",
    "unexpected message received",
    "unexpected missing socket",
    "broken pipe",
    "connection reset",
    "connection timed out",
    "resource temporarily unavailable",
)


def is_no_answer(words: str) -> bool:
    """Return whether a command's words say that the controller has not judged the request."""
    low = words.lower()
    return any(each in low for each in (*NOT_THERE, *UNSURE))
