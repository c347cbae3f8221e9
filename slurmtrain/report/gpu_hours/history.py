"""What the files of a run say of its time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from slurmtrain.choices import Backend
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs import attempts
from slurmtrain.runs.attempt_dir import is_gpu_file
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records


class AttemptTimes(NamedTuple):
    """What the files say of one attempt. Times are unix seconds, None where nobody has recorded them.

    Attributes:
        begun: when its supervisor claimed it.
        record: attempt.json.
        job: the start of a job that it belongs to.
        last_sign: when it last wrote something; asked for only where `ended` does not say it.
        gpus: GPUs that it held.
        sampled: its folder holds records of how busy they were.
    """

    begun: float
    record: Attempt
    job: tuple[str | None, int]
    last_sign: float | None = None
    gpus: float = 0.0
    sampled: bool = False


@dataclass(frozen=True)
class History:
    """What the files of a run say of its time.

    Attributes:
        submitted: when it was submitted first; None if it never was.
        kind: job.kind; None if it is not known.
        local: it was started here, without SLURM.
        tries: its attempts, in order.
        events: its events, oldest first.
    """

    submitted: float | None
    kind: str | None
    local: bool
    tries: Sequence[AttemptTimes]
    events: Sequence[Mapping[str, Any]]

    @property
    def is_open(self) -> bool:
        """Whether only SLURM, or the host of a local run, can say if it still runs or waits."""
        last = self.tries[-1].record if self.tries else None
        return last is None or last.verdict not in (Verdict.DONE, Verdict.END)


def read_history(run_dir: RunDir) -> History:
    """Read what the files of a run say of its time.

    Raises:
        UnreadableRecordError: they cannot be used.
    """
    info, events = run_dir.info(), run_dir.events()
    numbers = run_dir.attempt_numbers()
    read = (_read_times(run_dir, number, is_last=number == numbers[-1]) for number in numbers)
    found = [each for each in read if each is not None]
    # An attempt that ended before it could say its GPUs had those of the others.
    gpus = max((each.gpus for each in found), default=0.0)
    found = [each if each.record.gpus is not None else each._replace(gpus=gpus) for each in found]
    for index, (each, after) in enumerate(pairwise(found)):
        # Closed by the next attempt, since nobody saw its end: it was over when it last wrote something.
        if each.last_sign is None and each.record.ended is not None and each.record.ended >= after.begun:
            found[index] = each._replace(last_sign=_last_sign(run_dir, each.record.number, with_log=False))
    kind = next((each.record.kind for each in reversed(found) if each.record.kind), None)
    first = next((event for event in events if event["event"] == Event.SUBMITTED), None)
    asked, created = (first or {}).get("submitted"), info.get("created")
    submitted = asked if records.is_time(asked) and asked > 0 else first["time"] if first is not None else None
    if first is None and records.is_time(created) and info.get("job_ids"):
        submitted = created
    return History(submitted, kind, info.get("backend") == Backend.LOCAL, found, events)


def _read_times(run_dir: RunDir, number: int, *, is_last: bool) -> AttemptTimes | None:
    folder = run_dir.attempt(number)
    names = folder.names()
    record = attempts.read_attempt_in(folder, number, names)
    job, begun = (record.job_id, record.restart_count), record.started
    claim = attempts.read_claim(folder)
    begun = begun if claim.time is None else claim.time
    if record.job_id is None and claim.job_id is not None and records.is_job_id(claim.job_id):
        job = claim.job_id, claim.restart_count
    if begun <= 0:  # neither its supervisor nor rank 0 has left a word
        return None
    sign = record.last_sign
    if sign is None and record.ended is None:
        sign = _last_sign(run_dir, number, with_log=is_last)
    if record.ended is None and is_last:
        record = _with_present_steps(run_dir, record)
    sampled = any(map(is_gpu_file, names or ()))
    return AttemptTimes(begun, record, job, sign, max(0.0, record.gpus or 0.0), sampled)


def _with_present_steps(run_dir: RunDir, record: Attempt) -> Attempt:
    """Return the record of an attempt that has not ended with what the log of metrics says of its steps until now."""
    last_step, last_logged = record.last_step, record.last_logged
    with contextlib.suppress(OSError, UnreadableRecordError):
        logged = os.lstat(run_dir.metrics_file).st_mtime
        if record.started and logged >= record.started:
            last_logged = logged if last_logged is None else last_logged
            last_step = attempts.last_logged_step(run_dir) if last_step is None else last_step
    return replace(record, last_step=last_step, last_logged=last_logged)


def _last_sign(run_dir: RunDir, number: int, *, with_log: bool) -> float | None:
    """Return when an attempt last wrote something: to the log of rank 0 or, the last one, to the metrics of the run."""
    paths = [run_dir.attempt(number).rank_log(0), run_dir.attempt(number).record_file]
    times = []
    for path in [*paths, run_dir.metrics_file] if with_log else paths:
        with contextlib.suppress(OSError):
            times.append(os.lstat(path).st_mtime)
    return max(times, default=None)
