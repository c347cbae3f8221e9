"""What the supervisor writes into an attempt's folder before its ranks start: who has claimed it, a failed set-up."""

from __future__ import annotations

import contextlib

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import read_attempt
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records


def failed_set_up(attempt_dir: AttemptDir) -> str | None:
    """Return the message about a set-up that failed before any rank was started; None if there is none."""
    try:
        return attempt_dir.setup_failure_file.read_text(errors="replace").strip()
    except OSError:
        return None


def claimed_by(attempt_dir: AttemptDir) -> tuple[str | None, int]:
    """Return job and restart count of the supervisor that has claimed an attempt; the job is None if none has."""
    try:
        job_id, restart_count, *_ = attempt_dir.claim_file.read_text().split()
        return job_id, int(restart_count)
    except (OSError, ValueError):
        return None, 0


def claimed_at(run_dir: RunDir, number: int) -> float | None:
    """Return when an attempt was claimed by its supervisor, or opened by rank 0, in unix seconds; None if not known."""
    with contextlib.suppress(OSError, UnreadableRecordError, ValueError, IndexError):
        claimed = float(records.read_bytes(run_dir.attempt(number).claim_file).split()[2])
        if records.is_time(claimed):
            return claimed
    return read_attempt(run_dir, number).started or None
