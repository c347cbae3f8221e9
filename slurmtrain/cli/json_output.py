"""The JSON of runs that `--json` prints. Programs rely on its shape: keys may be added, never renamed or removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurmtrain.report.status import RunState, RunStatus
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.json_text import json_text

if TYPE_CHECKING:
    from slurmtrain.runs.sweep_dir import Point


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json_text(value), end="")


def run_object(run_dir: RunDir, now: RunState) -> dict[str, Any]:
    """Return one run.

    `status RUN --json` prints one, `status --json` and `runs list --json` a list of them, oldest first.

    evaluations  in `status RUN --json` alone: see `evaluation_object`
    left_out     in `status RUN --json` alone: nodes that its latest job leaves out, with node, why and until (unix time)
    id, name, path
    state        one word: prepared, waiting, starting, running, suspended, stopping, requeued, held, unknown, finished,
                 stopped, failed, lost or unreadable
    sentence     why, and what comes next
    alive        whether SLURM or a local launcher has the run, or may have it
    step         number of steps done; null if not known
    job_id       id of the latest job, a string; null outside of SLURM and before it was submitted
    job_ids      ids of all jobs that the run was submitted as
    created      unix time
    doubt        why SLURM could not be asked; else null
    steps        number of steps of the whole run; null for a program of your own. So are the next six, and before anything is
                 logged
    loss, valid_loss  values logged last, in nats per token
    logged       unix time of the last line of its metrics
    tokens_per_s, step_time_s, eta_s  tokens of all ranks per second; seconds per step; seconds left. While it runs, else null
    reason       SLURM's word for why its job waits or is held; else null
    expected_start  unix time at which SLURM expects to start it; null while SLURM has not worked that out
    attempts     attempts, oldest first, each with number, job_id, nodes, started, ended (unix times), first_step, last_step,
                 reason, verdict, exit_code and sentence; null where it is not known
    """
    info = run_dir.info() if now.status != RunStatus.UNREADABLE else {"job_ids": []}
    return {
        "id": run_dir.id,
        "name": run_dir.path.parent.name,
        "path": str(run_dir.path),
        "state": now.status,
        "sentence": now.explanation,
        "alive": now.alive,
        "step": now.step,
        "job_id": now.job_id,
        "job_ids": info["job_ids"],
        "created": info.get("created"),
        "doubt": now.slurm_error,
        **_progress_object(now),
        "attempts": [_attempt_object(attempt) for attempt in now.attempts],
    }


def evaluation_object(evaluation: RunDir, now: RunState) -> dict[str, Any]:
    """Return one evaluation that a job of its own makes: `evaluations` of `status RUN --json`.

    name           name of its folder below evaluations/ of the run
    state, sentence, job_id, job_ids  as of a run
    metrics        metrics by name; {} before it is done
    """
    return {
        "name": evaluation.path.name,
        "state": now.status,
        "sentence": now.explanation,
        "job_id": now.job_id,
        "job_ids": evaluation.info()["job_ids"] if now.status != RunStatus.UNREADABLE else [],
        "metrics": evaluation.measured() if now.status != RunStatus.UNREADABLE else {},
    }


def point_object(point: Point, now: RunState) -> dict[str, Any]:
    """Return one point of a sweep, as in `sweep status SWEEP --json`: {"sweep", "states" (word -> count), "points"}.

    point, varied  its number, and what distinguishes it: key -> value, as text
    run            id of the run that computes it
    state, sentence, step, job_id, and steps to expected_start as of a run; state may also be removed
    attempts       number of attempts
    """
    return {
        "point": point.number,
        "varied": point.varied,
        "run": point.run_id,
        "state": now.status,
        "sentence": now.explanation,
        "step": now.step,
        "attempts": len(now.attempts),
        "job_id": now.job_id,
        **_progress_object(now),
    }


def _progress_object(now: RunState) -> dict[str, Any]:
    progress = now.progress
    return {
        "steps": progress.steps,
        "loss": progress.loss,
        "valid_loss": progress.valid_loss,
        "logged": progress.logged,
        "tokens_per_s": progress.tokens_per_s,
        "step_time_s": progress.step_time_s,
        "eta_s": progress.eta_s,
        "reason": now.reason,
        "expected_start": now.expected_start,
    }


def _attempt_object(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "job_id": attempt.job_id,
        "nodes": attempt.nodes,
        "started": attempt.started or None,
        "ended": attempt.ended,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "reason": attempt.reason,
        "verdict": attempt.verdict,
        "exit_code": attempt.exit_code,
        "sentence": attempt.sentence,
    }
