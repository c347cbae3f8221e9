"""What the files of a run say of its time."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from slurmtrain.choices import Backend
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs import attempts, reached_step
from slurmtrain.runs.attempt_dir import is_gpu_file
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import read_json

FAILURES_READ = 32  # records of failed ranks that are looked at: of a thousand ranks the first ones tell enough


class AttemptTimes(NamedTuple):
    """What the files say of one attempt. Times are unix seconds, None where nobody has recorded them.

    Attributes:
        begun: when its supervisor claimed it.
        record: attempt.json.
        job: the start of a job that it belongs to.
        hung_since: when ranks got on for the last time before a hang.
        failed: when the first rank failed.
        last_sign: when it last wrote something; asked for only where `ended` does not say it.
        gpus: GPUs that it held.
        sampled: its folder holds records of how busy they were.
    """

    begun: float
    record: Attempt
    job: tuple[str | None, int]
    hung_since: float | None = None
    failed: float | None = None
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
    local = info.get("backend") == Backend.LOCAL
    found: list[AttemptTimes] = []
    numbers = run_dir.attempt_numbers()
    for number in numbers:
        each = _read_times(run_dir, number, is_last=number == numbers[-1])
        if each is not None and each.record.gpus is None:
            of_node = _gpus_of_script(run_dir, packed=bool(info.get("packed")))
            each = each._replace(gpus=of_node * max(1, len(each.record.nodes)))
        if each is not None:
            found.append(each)
    for index, (each, after) in enumerate(pairwise(found)):
        # Closed by the next attempt, since nobody saw its end: it was over when it last wrote something.
        if each.last_sign is None and each.record.ended is not None and each.record.ended >= after.begun:
            found[index] = each._replace(last_sign=_last_sign(run_dir, each.record.number, with_log=False))
    kind = next((each.record.kind for each in reversed(found) if each.record.kind), None)
    return History(_submitted(events, info), kind, local, found, events)


def _submitted(events: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> float | None:
    first = next((event for event in events if event["event"] == Event.SUBMITTED), None)
    if first is not None:
        asked = first.get("submitted")
        return float(asked) if records.is_time(asked) and asked > 0 else float(first["time"])
    created = info.get("created")
    return float(created) if records.is_time(created) and info.get("job_ids") else None


def _read_times(run_dir: RunDir, number: int, *, is_last: bool) -> AttemptTimes | None:
    folder = run_dir.attempt(number)
    names = folder.names()
    record = attempts.read_attempt_in(folder, number, names)
    job, claimed = (record.job_id, record.restart_count), None
    with contextlib.suppress(OSError, UnreadableRecordError, ValueError):
        words = records.read_bytes(folder.claim_file).split()
        if len(words) >= 3 and records.is_time(at := float(words[2])):
            claimed = at
        if record.job_id is None and len(words) >= 2 and records.is_job_id(name := words[0].decode("ascii", "replace")):
            job = name, int(words[1])
    begun = claimed if claimed is not None else record.started
    if begun <= 0:  # neither its supervisor nor rank 0 has left a word
        return None
    hung_since = failed = sign = None
    if record.reason == Reason.HANG:
        hung_since = _hung_since(run_dir, record)
    if record.reason in (Reason.CRASH, Reason.DIVERGED, Reason.BAD_NODE):
        failed = _first_failure(folder.path)
    if record.last_sign is not None:
        sign = record.last_sign
    elif record.ended is None:
        sign = _last_sign(run_dir, number, with_log=is_last)
    if record.ended is None and is_last:
        record = _with_present_steps(run_dir, record)
    sampled = any(map(is_gpu_file, names or ()))
    return AttemptTimes(begun, record, job, hung_since, failed, sign, max(0.0, record.gpus or 0.0), sampled)


def _with_present_steps(run_dir: RunDir, record: Attempt) -> Attempt:
    """Return the record of an attempt that has not ended with what the log of metrics says of its steps until now."""
    last_step, last_logged = record.last_step, record.last_logged
    with contextlib.suppress(OSError, UnreadableRecordError):
        logged = os.lstat(run_dir.metrics_file).st_mtime
        if record.started and logged >= record.started:
            last_logged = logged if last_logged is None else last_logged
            last_step = reached_step.last_logged_step(run_dir) if last_step is None else last_step
    return replace(record, last_step=last_step, last_logged=last_logged)


def _hung_since(run_dir: RunDir, record: Attempt) -> float | None:
    """Return when the ranks got on for the last time, or the next best that is known: when the hang was found."""
    found = read_json(run_dir.attempt(record.number).hang_file) or {}
    for moment in (found.get("since"), record.last_logged, found.get("time")):
        if records.is_time(moment):
            return float(moment)
    return None


def _first_failure(folder: Path) -> float | None:
    """Return when the first rank of an attempt failed, by the records of the first ranks in the folder."""
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if re.fullmatch(r"failed-[0-9]{1,9}\.json", entry.name):
                names.append(entry.name)
            if len(names) >= FAILURES_READ:
                break
    times = []
    for name in names:
        with contextlib.suppress(UnreadableRecordError):
            moment = (read_json(folder / name) or {}).get("time")
            if records.is_time(moment):
                times.append(float(moment))
    return min(times, default=None)


def _last_sign(run_dir: RunDir, number: int, *, with_log: bool) -> float | None:
    """Return when an attempt last wrote something: to the log of rank 0 or, the last one, to the metrics of the run."""
    paths = [run_dir.attempt(number).rank_log(0), run_dir.attempt(number).record_file]
    times = []
    for path in [*paths, run_dir.metrics_file] if with_log else paths:
        with contextlib.suppress(OSError):
            times.append(os.lstat(path).st_mtime)
    return max(times, default=None)


def _gpus_of_script(run_dir: RunDir, *, packed: bool) -> float:
    """Return the GPUs of a node by the job's script, for attempts that ended before they could say theirs."""
    try:
        text = records.read_text(run_dir.script)
        pack = (read_json(run_dir.path.parent / "sweep.json") or {}).get("pack") if packed else 1
    except (OSError, UnreadableRecordError):
        return 0.0
    match = re.search(r"^#SBATCH --gpus-per-node=(?:[\w.-]{1,64}:)?([0-9]{1,4})\s*$", text, re.MULTILINE)
    sharing = pack if isinstance(pack, int) and records.is_count(pack) and pack > 0 else 1
    return int(match[1]) / sharing if match else 0.0
