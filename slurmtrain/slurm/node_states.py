"""What sinfo's words for the state of a node mean for a job."""

from __future__ import annotations

AT_WORK = ("idle", "mixed", "allocated", "completing", "planned")  # states of nodes on which jobs can run now or soon


def is_dead(state: str) -> bool:
    """Return whether a node that a job has is dead, by sinfo's word for its state (`man sinfo`, NODE STATE CODES).

    A star says that it does not answer.
    """
    return "*" in state or state.startswith(("down", "error", "unknown", "no_respond", "power"))


def is_silent(state: str) -> bool:
    """Return whether a node only does not answer, as when its slurmd restarts: SLURM has not taken it out of service."""
    return state.endswith("*") and not is_dead(state.rstrip("*"))


def is_usable(state: str) -> bool:
    """Return whether ranks should be started on a node that a job has: it is not dead, and nobody wants it to be left alone.

    A node that has registered with less than slurm.conf says, as without one of its GPUs, is drained; but its state is then
    "inval", which hides that.
    """
    return not is_dead(state) and not state.startswith(("drain", "fail", "inval"))
