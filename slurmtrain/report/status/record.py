"""The facts in a run's own files, read once."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.choices import Backend
from slurmtrain.errors import UnavailableRecordError
from slurmtrain.runs.attempts import Attempt, all_attempts
from slurmtrain.runs.ownership import check_parts
from slurmtrain.runs.reasons import Event, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.records import is_job_id


@dataclass(frozen=True)
class Record:
    """The facts in a run's own files, read once.

    Attributes:
        job_id: its latest job, as far as is known; None before it was submitted, and outside of SLURM. In a chain, the
            job whose turn it is.
        last: its newest attempt; None before the first one.
        chain: the jobs of the chain, if the latest job belongs to one.
        copied_from: the path of the original, if this is a copy that nobody has resumed: its jobs and processes are not
            its own.
        following: jobs of the chain that wait for the latest job.
    """

    run_dir: RunDir
    info: dict[str, Any]
    attempts: list[Attempt]
    last: Attempt | None
    job_id: str | None
    chain: list[str]
    local: bool
    in_pods: bool
    packed: bool
    copied_from: str | None
    following: tuple[str, ...] = ()

    @property
    def possible_jobs(self) -> list[str]:
        """The jobs of which one should be in the queue, if the run has not ended."""
        return self.chain or ([self.job_id] if self.job_id is not None else [])

    @property
    def has_begun(self) -> bool:
        """Whether the last attempt belongs to the latest job, or to one that it continues, rather than to an earlier one."""
        if self.last is None or self.job_id is None:
            return self.last is not None
        if self.chain:
            return self.last.number > int(self.info.get("chain_after") or 0)
        if self.last.verdict == Verdict.RESUBMIT:
            return True
        if self.last.job_id is not None:
            return self.last.job_id == self.job_id
        # Rank 0 never recorded the job, so the evidence is whether the job's script has run at all.
        return self.info["job_ids"] in ([], [self.job_id]) or self.run_dir.job_log(self.job_id) is not None

    @property
    def setup_failed(self) -> Path | None:
        """The file with the message of a set-up that failed, if nobody could finish the record of the attempt; else None."""
        if self.last is None or self.last.verdict is not None:
            return None
        path = self.run_dir.attempt(self.last.number).setup_failure_file
        return path if os.path.lexists(path) else None

    @property
    def setting_up(self) -> bool:
        """Whether the last attempt has its folder, but neither has rank 0 opened its record nor has anybody closed it."""
        last = self.last
        return last is not None and not last.started and last.verdict is None and self.setup_failed is None

    @property
    def waits(self) -> bool:
        """Whether no attempt is under way, as far as the run's files say."""
        return self.last is None or not self.has_begun or self.last.verdict is not None

    @property
    def over(self) -> bool:
        """Whether the last attempt is the last there will be."""
        if self.last is None or not self.has_begun:
            return False
        return self.last.verdict in (Verdict.DONE, Verdict.END) or self.setup_failed is not None

    @property
    def ended_by(self) -> str | None:
        """The `RunAction` by which somebody ended it after the last attempt could notice; None if nobody did."""
        from slurmtrain.runs.requests import ended_after  # which most runs do without

        return ended_after(self.run_dir, self.last)


def read_record(run_dir: RunDir) -> Record:
    """Read the record of a run."""
    check_parts(run_dir)
    info, tries = run_dir.info(whole=True), all_attempts(run_dir)
    job_id = None if info.get("copied_from") else _latest_job_id(run_dir, info["job_ids"], tries)
    chain: list[str] = info.get("chain") or []
    return Record(
        run_dir,
        info,
        tries,
        tries[-1] if tries else None,
        job_id,
        chain if job_id in chain else [],
        local=info["backend"] == Backend.LOCAL,
        in_pods=info["backend"] == Backend.KUBERNETES,
        packed=bool(info.get("packed")),
        copied_from=info.get("copied_from"),
    )


def _latest_job_id(run_dir: RunDir, submitted: list[str], tries: list[Attempt]) -> str | None:
    """Return the last job: one that was submitted, one that an attempt names, or one that somebody passed to sbatch."""
    ran = [attempt.job_id for attempt in tries if attempt.job_id]
    opened = tries[-1].started if tries else 0.0
    if submitted and submitted[-1] not in ran:
        at = [float(event["time"]) for event in run_dir.events() if event["event"] == Event.SUBMITTED] if opened else []
        if not at or at[-1] > opened:  # otherwise somebody started the run by hand since
            return submitted[-1]
    logs = []
    try:
        names = os.listdir(run_dir.path)
    except OSError as error:
        raise UnavailableRecordError(f"{run_dir.path} cannot be read: {error.strerror}", error) from None
    for name in names:
        logged = name.removeprefix("slurm-").removesuffix(".log")
        if len(logged) + len("slurm-.log") == len(name) and is_job_id(logged):
            with contextlib.suppress(OSError):
                logs.append((os.lstat(os.path.join(run_dir.path, name)).st_mtime, logged))
    if logs and max(logs)[0] > opened and max(logs)[1] not in ran:
        return max(logs)[1]
    return ran[-1] if ran else None
