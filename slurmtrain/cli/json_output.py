"""The JSON that `--json` prints. Programs rely on its shape: keys may be added, never renamed or removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurmtrain.system.texts import json_text

if TYPE_CHECKING:
    from slurmtrain.report.goodput import Goodput
    from slurmtrain.report.status.state import RunState
    from slurmtrain.report.usage import Row
    from slurmtrain.runs.run_dir import RunDir
    from slurmtrain.runs.sweep_dir import Point


def print_json(value: Any) -> None:
    """Print a value as JSON; a dataclass is an object of its fields."""
    print(json_text(value), end="")


def emit(value: Any, text: str, *, as_json: bool) -> None:
    """Print an answer: the value for a program, or the text for a person."""
    if as_json:
        print_json(value)
    else:
        print(text)


def fields_of(found: object, names: str) -> dict[str, Any]:
    """Return these attributes of an object by name."""
    return {name: getattr(found, name) for name in names.split()}


def run_object(run_dir: RunDir, now: RunState) -> dict[str, Any]:
    """Return one run.

    `status RUN --json` prints one, `status --json` a list of them, oldest first.

    evaluations  in `status RUN --json` alone: see `evaluation_object`
    goodput      in `status RUN --json` alone: see `goodput_object`; null if its files cannot be read
    left_out     in `status RUN --json` alone: nodes that its latest job leaves out, with node, why and until (unix time)
    slow_ranks   in `status RUN --json` alone: ranks that were slower than the others, oldest first, with node, ranks, phase,
                 ratio, share (of a step, by which they take longer), since, until (steps) and attempt
    id, name, path
    state        one word: prepared, waiting, starting, running, suspended, stopping, requeued, held, unknown, finished,
                 stopped, pruned (its search has ended it early), failed, lost or unreadable
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
    info = run_dir.info() if now.readable else {"job_ids": []}
    return {
        "id": run_dir.id,
        "name": run_dir.path.parent.name,
        "path": str(run_dir.path),
        **now.facts(),
        "alive": now.alive,
        "job_ids": info["job_ids"],
        "created": info.get("created"),
        "doubt": now.slurm_error,
        "attempts": [fields_of(each, _ATTEMPT) | {"started": each.started or None} for each in now.attempts],
    }


_ATTEMPT = "number job_id nodes started ended first_step last_step reason verdict exit_code sentence"


def point_object(point: Point, now: RunState) -> dict[str, Any]:
    """Return one point of a sweep, as in `sweep status SWEEP --json`: {"sweep", "states" (word -> count), "points"}.

    point, varied  its number, and what distinguishes it: key -> value, as text
    run            id of the run that computes it
    state, sentence, step, job_id, and steps to expected_start as of a run; state may also be removed
    attempts       number of attempts
    """
    about = {"point": point.number, "varied": point.varied, "run": point.run_id}
    return {**about, **now.facts(), "attempts": len(now.attempts)}


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
        "job_ids": evaluation.info()["job_ids"] if now.readable else [],
        "metrics": evaluation.measured() if now.readable else {},
    }


def goodput_object(found: Goodput) -> dict[str, Any]:
    """Return where time went: `goodput` of `status RUN --json`, and in each object of `usage --json`.

    seconds       wall-clock seconds by cause: queue, stopped, startup, productive, redone, checkpoint, evaluation, hung, lost,
                  idle_end, between and unknown; a cause without any is left out. They add up to wall_s
    gpu_seconds   GPUs x seconds by cause, of those in which GPUs were held; {} on CPUs
    goodput       productive part of gpu_seconds, without those of unknown cause; on CPUs of the seconds in which nodes were
                  held; null if none are known
    lost_s, lost_gpu_seconds  seconds, and GPUs x seconds, lost, by why an attempt ended, or "rolled back"
    interruptions number of attempts that ended before the run had finished, by why
    gpu_hours, held_s, gpu_count, running  sums; seconds in which nodes were held; GPUs of the newest attempt
    """
    return {
        "goodput": found.share,
        **fields_of(found, "wall_s held_s gpu_count gpu_hours running"),
        **fields_of(found, "seconds gpu_seconds lost_s lost_gpu_seconds interruptions"),
    }


def usage_object(row: Row) -> dict[str, Any]:
    """Return one row of `usage`: `usage --json` prints {"by", "since", "rows", "total", "left_out"}.

    who, runs     id of the run, or name of the user; number of runs. Beside them all of `goodput_object`
    """
    return {**fields_of(row, "who runs"), **goodput_object(row.goodput)}
