"""What `--json` prints of runs. The shapes below are for programs: keys are added at most, never renamed or removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurmtrain.launch.json_text import json_text
from slurmtrain.launch.state import RunState
from slurmtrain.rundir import RunDir
from slurmtrain.runtime.attempts import Attempt

if TYPE_CHECKING:
    from slurmtrain.launch.sweep import Point


def print_json(value: Any) -> None:
    print(json_text(value), end="")


def run_object(run_dir: RunDir, now: RunState) -> dict[str, Any]:
    """One run. `status RUN --json` prints one, `status --json` and `runs list --json` a list of them, oldest first.

    id, name, path
    state        one word: prepared, waiting, starting, running, stopping, requeued, held, unknown, finished, stopped,
                 failed or lost
    sentence     why, and what comes next
    alive        SLURM or a local launcher has it, or may have it
    step         steps done, as far as is known; else null
    job_id       of the latest job, a string; null outside of SLURM and before it was submitted
    job_ids      of all jobs it was submitted as
    created      unix time
    doubt        why SLURM could not be asked; else null
    attempts     oldest first, each with number, job_id, nodes, started, ended (unix times), first_step, last_step,
                 reason, verdict, exit_code and sentence; null where it is not known
    """
    info = run_dir.info()
    return {
        "id": run_dir.id,
        "name": run_dir.path.parent.name,
        "path": str(run_dir.path),
        "state": now.word,
        "sentence": now.sentence,
        "alive": now.alive,
        "step": now.step,
        "job_id": now.job_id,
        "job_ids": info["job_ids"],
        "created": info.get("created"),
        "doubt": now.doubt,
        "attempts": [_attempt_object(attempt) for attempt in now.attempts],
    }


def point_object(point: Point, now: RunState) -> dict[str, Any]:
    """One point of a sweep, as in `sweep status SWEEP --json`: {"sweep", "states" (word -> count), "points"}.

    point, varied  its number, and what distinguishes it: key -> value, as text
    run            id of the run that computes it
    state, sentence, step, job_id as of a run; state may also be removed
    attempts       how many there were
    """
    return {
        "point": point.number,
        "varied": point.varied,
        "run": point.run_id,
        "state": now.word,
        "sentence": now.sentence,
        "step": now.step,
        "attempts": len(now.attempts),
        "job_id": now.job_id,
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
