"""What a run is doing and what it will do next, from its own files and one look at the queue.

The run's files come first: they are there without sacct, without history, and when SLURM's answer is late.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.rundir import RunDir
from slurmtrain.runtime import attempts
from slurmtrain.runtime.attempts import Attempt
from slurmtrain.runtime.judge import Verdict
from slurmtrain.runtime.slurm import SlurmClient

GONE = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
)


@dataclass(frozen=True)
class RunState:
    """Attributes:
    word: one of "prepared", "waiting", "running", "stopping", "requeued", "held", "finished", "stopped", "failed", "lost".
    sentence: why, and what comes next.
    alive: SLURM or a local launcher still has it.
    """

    word: str
    sentence: str
    alive: bool
    attempts: list[Attempt]
    job_id: str | None
    step: int | None


def states(run_dirs: Iterable[RunDir]) -> dict[str, RunState]:
    """State of every run, by id, with one squeue call for each cluster they are on."""
    infos = {run_dir: run_dir.info() for run_dir in run_dirs}
    by_cluster: dict[str | None, list[str]] = {}
    for run_dir, info in infos.items():
        job_id = latest_job_id(run_dir)
        if info["backend"] == "slurm" and job_id:
            by_cluster.setdefault(info["slurm_conf"], []).append(job_id)
    queues = {conf: _queue(conf, ids) for conf, ids in by_cluster.items()}
    return {run_dir.id: _state(run_dir, info, queues.get(info["slurm_conf"])) for run_dir, info in infos.items()}


def state(run_dir: RunDir) -> RunState:
    return states([run_dir])[run_dir.id]


def latest_job_id(run_dir: RunDir) -> str | None:
    """The last job of this run: from its attempts, which also know of a job that somebody handed to sbatch by hand."""
    submitted = run_dir.info()["job_ids"]
    ran = [attempt.job_id for attempt in attempts.all_attempts(run_dir) if attempt.job_id]
    if submitted and (not ran or submitted[-1] not in ran):
        return str(submitted[-1])
    return ran[-1] if ran else None


def _queue(slurm_conf: str | None, job_ids: list[str]) -> dict[str, tuple[str, str]] | None:
    """squeue's answer, or None when it cannot be had: then the run's own files are all there is."""
    if slurm_conf and not Path(slurm_conf).exists():
        return {}  # a sandbox that is down, and its jobs with it
    client = SlurmClient(slurm_conf)
    return client.queue(job_ids) if client.available else None


def _state(run_dir: RunDir, info: dict[str, object], queue: dict[str, tuple[str, str]] | None) -> RunState:
    tries = attempts.all_attempts(run_dir)
    last = tries[-1] if tries else None
    job_id = latest_job_id(run_dir)
    step = max(
        (value for value in (attempts.newest_checkpoint_step(run_dir), attempts.last_logged_step(run_dir)) if value),
        default=None,
    )

    def result(word: str, sentence: str, alive: bool) -> RunState:
        return RunState(word, sentence, alive, tries, job_id, step)

    if info["backend"] == "local" or (job_id is None and last is not None):
        if last is not None and last.ended is None and _process_lives(last):
            return result("running", f"attempt {last.number} on {last.host}", True)
        return result(*_ended(run_dir, last), False)
    if job_id is None:
        return result("prepared", f"not submitted yet: sbatch {run_dir.script}", False)
    queued, why = (queue or {}).get(job_id, ("", ""))
    if queued == "PENDING" and last is not None and job_id == last.job_id:
        if "held" in why.lower() or why == "JobHoldMaxRequeue":
            return result("held", f"SLURM holds it ({why}); `requeue {run_dir.id}` releases it", True)
        return result("requeued", f"{last.sentence or 'was requeued'}; waiting to start again ({why})", True)
    if queued == "PENDING":
        return result("held" if "held" in why.lower() else "waiting", f"job {job_id} is pending: {why}", True)
    if queued == "COMPLETING":
        return result("stopping", f"job {job_id}: the last ranks are leaving", True)
    if queued and queued not in GONE:
        number = last.number if last is not None and last.job_id == job_id else len(tries) + 1
        return result("running", f"attempt {number}, job {job_id}", True)
    if queue is None and last is not None and last.ended is None:
        return result(
            "unknown", "SLURM cannot be asked from here; the last attempt has not ended as far as its files say", True
        )
    return result(*_ended(run_dir, last, queued), False)


def _ended(run_dir: RunDir, last: Attempt | None, queued: str = "") -> tuple[str, str]:
    """Word and sentence for a run that nobody runs any more."""
    if last is None:
        return (
            ("failed", f"job ended as {queued} before its first attempt; see {run_dir.path}/slurm-*.log")
            if queued
            else (
                "lost",
                "its job is gone and left no attempt; `resume` submits it again",
            )
        )
    setup = run_dir.attempt(last.number) / "setup-failed"
    if setup.exists():
        return "failed", setup.read_text().strip()
    if last.verdict == Verdict.DONE:
        return "finished", "finished"
    if last.verdict == Verdict.END:
        word = "stopped" if last.reason in ("cancelled", "asked", "time limit", "preempted") else "failed"
        return word, f"{last.sentence}. `resume {run_dir.id}` continues it"
    if last.verdict is None:
        return "lost", f"attempt {last.number} ended without a word; `resume {run_dir.id}` continues it"
    return "lost", f"{last.sentence}, but its job is gone; `resume {run_dir.id}` continues it"


def _process_lives(attempt: Attempt) -> bool:
    if attempt.pid is None or attempt.host != socket.gethostname():
        return False
    try:
        os.kill(attempt.pid, 0)
        # One whose launcher was killed stays as a zombie where nobody collects orphans, as in many containers.
        return Path(f"/proc/{attempt.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True
