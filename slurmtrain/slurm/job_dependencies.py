"""Change the dependency of a job, as squeue prints it, when the job that it waits for has a successor or has succeeded."""

from __future__ import annotations

import re


def moved_dependency(text: str, job_id: str, successor: str) -> str | None:
    """Replace the job's success by its successor's in a dependency as squeue prints it; return None if it does not have it.

    As in "afterok:12(unfulfilled),afterany:13(unfulfilled)": SLURM does not accept the parts in brackets as input.
    """
    words = [re.sub(r"\(\w+\)", "", word) for word in re.split(r"([,?])", text)]
    changed = [f"afterok:{successor}" if word == f"afterok:{job_id}" else word for word in words]
    return "".join(changed) if changed != words else None


def met_dependency(text: str, job_id: str) -> str | None:
    """Remove the job's success, which is certain, from a dependency as squeue prints it; return None if it does not have it.

    The result may be empty: then nothing is waited for.
    """
    words = [re.sub(r"\(\w+\)", "", word) for word in re.split("[,?]", text)]
    left = [word for word in words if word != f"afterok:{job_id}"]
    if left == words:
        return None
    return "" if "?" in text else ",".join(left)  # "?": one of them is enough
