"""Evaluations of a run's checkpoints, each in a folder of the run's directory.

The folder is like a run's own: with a frozen config, a script, attempts, and in the end a result. It uses the run's
code.

Its name follows from the checkpoint and the overrides, so the same command means the same evaluation: one that is done
is not made again, one that waits is not submitted twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.store import retention
from slurmtrain.choices import Backend, JobKind
from slurmtrain.config.evaluation import CHANGEABLE, evaluation_config
from slurmtrain.config.frozen import freeze, load_frozen
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.errors import SlurmtrainError, UsageError
from slurmtrain.launch.changes import parse_override
from slurmtrain.launch.claims import claimed
from slurmtrain.launch.code_source import CodeSource
from slurmtrain.launch.job import in_queue, submit
from slurmtrain.launch.script import render_script
from slurmtrain.launch.submit import job_paths, run_info
from slurmtrain.report.status.state import states
from slurmtrain.runs import requests
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir, made_at
from slurmtrain.runs.software import CodeRecord
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system import files
from slurmtrain.system.files import folder_mode


def prepare(
    run_dir: RunDir, checkpoint: Path, overrides: Sequence[str] = (), *, here: bool, again: bool = False
) -> RunDir:
    """Return the folder of an evaluation, ready to be started or submitted; unchanged if it is done or under way already.

    Args:
        overrides: key=value of eval, cluster and parallel.
        here: evaluate on this machine.
        again: evaluate anew even if it is done.

    Raises:
        UsageError: an override is of another group, or cannot be read.
        ConfigError: the overrides cannot work.
    """
    config = _config(run_dir, checkpoint, overrides, here=here)
    if not here and config.cluster.backend != Backend.SLURM:
        raise UsageError(
            f"`evaluate --submit` needs SLURM, but cluster.backend={config.cluster.backend}",
            hint=f"`evaluate {run_dir.path}` measures it at once, on this machine or in a pod that has the run's volume",
        )
    text = "\n".join(sorted(overrides))
    evaluation = run_dir.evaluation(step_of(checkpoint), hashlib.sha256(text.encode()).hexdigest()[:6] if text else "")
    with _alone(evaluation):
        if again:  # its result stays in the run's evaluations.jsonl
            evaluation.result_file.unlink(missing_ok=True)
        if not _is_done_or_under_way(evaluation):
            _write(evaluation, run_dir, config, overrides)
    return evaluation


def submit_evaluation(evaluation: RunDir) -> str | None:
    """Submit a prepared evaluation and return its job, unless it is in the queue or done: then None.

    Raises:
        ClusterError: sbatch is missing or refused.
    """
    run_dir, config = evaluation.evaluated_run, load_frozen(evaluation.config_file, with_secrets=False)
    assert run_dir is not None
    with _alone(evaluation):
        if _is_done_or_under_way(evaluation):
            return None
        retention.hold(run_dir.checkpoints, step_of(Path(str(config.checkpoint.restore_from))), evaluation.path.name)
        evaluation.request_file.unlink(missing_ok=True)  # a cancel of what it was before
        return submit(evaluation, config, SlurmClient(evaluation.slurm_conf()))[0]


def submit_due(run_dir: RunDir) -> None:
    """Submit an evaluation for every checkpoint that the training holds for one and that has had none.

    Checkpoints whose evaluation has ended without releasing them are released.

    Raises:
        SlurmtrainError: an evaluation cannot be submitted. The next call tries again.
    """
    there = {step_of(path): path for path in committed(run_dir.checkpoints)}
    submitted = []
    for step, by in retention.held(run_dir.checkpoints):
        evaluation = RunDir(run_dir.evaluations / by)
        if _job_ids(evaluation):
            submitted.append((step, evaluation))
        elif step in there:
            if evaluation.id == run_dir.evaluation(step).id and not _is_cancelled(run_dir):
                _submit_first(run_dir, there[step])
        elif there and step < max(there):  # its save has failed
            retention.release(run_dir.checkpoints, step, by)
    found = states(evaluation for _, evaluation in submitted)
    for step, evaluation in submitted:
        if not found[evaluation].alive:
            retention.release(run_dir.checkpoints, step, evaluation.path.name)


def cancel_all(run_dirs: Iterable[RunDir], client: SlurmClient) -> list[RunDir]:
    """Cancel the jobs that evaluate checkpoints of these runs, with one scancel, and return the evaluations that had any."""
    evaluations = [evaluation for run_dir in run_dirs for evaluation in run_dir.all_evaluations()]
    left = in_queue([each for each in evaluations if each.info_file.exists()], client)
    alive = [each for each in evaluations if left.get(each.id)]
    for evaluation in alive:
        requests.ask_to_cancel(evaluation)
        with contextlib.suppress(OSError):
            evaluation.event(Event.CANCEL_ASKED)
    if alive:
        client.cancel(*(job_id for each in alive for job_id in left[each.id]))
    for evaluation in alive:  # one that waited has nobody who would
        run_dir = evaluation.evaluated_run
        assert run_dir is not None
        for step, by in retention.held(run_dir.checkpoints):
            if by == evaluation.path.name:
                retention.release(run_dir.checkpoints, step, by)
    return alive


def _submit_first(run_dir: RunDir, checkpoint: Path) -> None:
    step = step_of(checkpoint)
    try:
        evaluation = prepare(run_dir, checkpoint, here=False)
        job_id = submit_evaluation(evaluation)
    except SlurmtrainError as error:
        run_dir.event(Event.EVALUATION_NOT_SUBMITTED, step=step, error=error.message)
        raise
    if job_id is None:  # another process has submitted it meanwhile
        return
    run_dir.event(Event.EVALUATION_SUBMITTED, step=step, job_id=job_id)
    if _is_cancelled(run_dir):  # while sbatch was at work
        SlurmClient(evaluation.slurm_conf()).cancel(job_id)


def _is_cancelled(run_dir: RunDir) -> bool:
    """Return whether the last request to the run was to end it."""
    ends = (Event.CANCEL_ASKED, Event.STOP_FILE_FOUND)
    words = [
        event["event"] for event in run_dir.events() if event["event"] in (*ends, Event.SUBMITTED, Event.RESUME_ASKED)
    ]
    return bool(words) and words[-1] in ends


def _config(run_dir: RunDir, checkpoint: Path, overrides: Sequence[str] = (), *, here: bool) -> Config:
    trained = load_frozen(run_dir.config_file, with_secrets=False)
    if trained.job.kind != JobKind.TRAIN:
        raise UsageError(
            f"run {run_dir.id} is a program of your own: slurmtrain cannot evaluate its checkpoints",
            hint="evaluate works with runs of the trainer",
        )
    config = evaluation_config(trained, str(checkpoint), changes=_changes(overrides), here=here)
    validate(config)
    if config.cluster.container.kind:  # the container has the evaluation's folder only
        mounts = [*config.cluster.container.mounts, f"{run_dir.path}:{run_dir.path}"]
        container = replace(config.cluster.container, mounts=mounts)
        config = replace(config, cluster=replace(config.cluster, container=container))
    return replace(config, job=replace(config.job, kind=JobKind.EVALUATE))


def _changes(overrides: Sequence[str]) -> dict[str, Any]:
    """Return overrides in Hydra's grammar as nested values."""
    changes: dict[str, Any] = {}
    for word in overrides:
        override = parse_override(word)
        path = override.key_or_group.split(".")
        if path[0] not in CHANGEABLE:
            raise UsageError(
                f"evaluate cannot take {word!r}: the run is evaluated as it was trained",
                hint=f"single fields of {', '.join(CHANGEABLE)}, such as cluster.tasks_per_node=2",
            )
        inside = changes
        for part in path[:-1]:
            inside = inside.setdefault(part, {})
        inside[path[-1]] = override.value()
    return changes


def _write(evaluation: RunDir, run_dir: RunDir, config: Config, overrides: Sequence[str] = ()) -> None:
    for folder in (evaluation.attempts, evaluation.checkpoints):
        folder.mkdir(mode=folder_mode(evaluation.path), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        evaluation.code.symlink_to(os.path.relpath(run_dir.code, evaluation.path))
    trained = run_dir.info()
    source = CodeSource(None, trained["workdir"], roots=tuple(trained.get("import_roots", ())))
    info = run_info(config, overrides, CodeRecord(), source, Path(trained["submit_dir"]))
    info |= {"code": trained["code"], "version": trained["version"], "job_ids": _job_ids(evaluation)}
    info |= {"made_at": made_at(evaluation.path), **({"copy": trained["copy"]} if trained.get("copy") else {})}
    files.write_text(evaluation.config_file, freeze(config))
    files.write_text(evaluation.script, render_script(config, job_paths([evaluation.path], trained)))
    files.write_json(evaluation.info_file, {"id": evaluation.id, **info})


def _job_ids(evaluation: RunDir) -> list[str]:
    """Return the job ids that an evaluation was submitted as; none if it was not prepared."""
    return list(evaluation.info()["job_ids"]) if os.path.lexists(evaluation.info_file) else []


def _is_done_or_under_way(evaluation: RunDir) -> bool:
    if evaluation.result_file.exists():
        return True
    return evaluation.info_file.exists() and states([evaluation])[evaluation].alive


@contextlib.contextmanager
def _alone(evaluation: RunDir) -> Iterator[None]:
    """Claim the right to prepare or submit this evaluation."""
    for folder in (evaluation.path.parent, evaluation.path):
        folder.mkdir(mode=folder_mode(folder.parent), exist_ok=True)
    with claimed(evaluation.path, busy=lambda owner: None):
        yield
