"""SLURM's accounting: how long jobs have held their nodes and GPUs. Parsing only; `SlurmClient.accounted` asks sacct.

Many clusters keep no accounting, and on others it is slow: whoever asks goes on without an answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMAT = "JobID,ElapsedRaw,Start,AllocTRES"


@dataclass(frozen=True)
class Allocation:
    """One start of a job, as accounting has it: a requeued job has several.

    Attributes:
        seconds: for which it held its nodes.
        start: when it began, as SLURM writes it; "Unknown" if it has not begun.
        gpus: GPUs on all its nodes.
    """

    job_id: str
    seconds: float
    start: str
    gpus: int

    @property
    def gpu_seconds(self) -> float:
        """GPUs x seconds."""
        return self.gpus * self.seconds


def parse_sacct(text: str) -> list[Allocation]:
    """Return the allocations in the output of `sacct --parsable2 --noheader --format=FORMAT`; other lines are left out."""
    found = []
    for line in text.splitlines():
        job_id, seconds, start, tres = [*line.strip().split("|", 3), "", "", "", ""][:4]
        if not re.fullmatch(r"[0-9]+([_+][0-9]+)?", job_id) or not seconds.isdigit():
            continue
        match = re.search(r"(?:^|,)gres/gpu=([0-9]{1,6})(?:,|$)", tres)
        found.append(Allocation(job_id, float(seconds), start, int(match[1]) if match else 0))
    return found
