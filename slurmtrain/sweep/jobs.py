"""From the arrays of a sweep to jobs, each submitted once, despite kills, refusals and late answers; retry and cancel."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import ClusterError
from slurmtrain.launch import evaluations, node_exclusion
from slurmtrain.launch.arrays import plan_arrays
from slurmtrain.launch.changes import undo_unfinished
from slurmtrain.launch.dependencies import waiting_for_runs, with_dependency
from slurmtrain.launch.own_jobs import in_queue
from slurmtrain.launch.script import render_script
from slurmtrain.launch.submit import job_paths
from slurmtrain.launch.submit_once import (
    RefusedError,
    SubmitLimitError,
    check,
    export_option,
    submit_exactly_once,
)
from slurmtrain.report.status.look import is_over
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs import attempts, requests, staging_dir
from slurmtrain.runs.events import Event
from slurmtrain.runs.job_tokens import TOKEN_PREFIX
from slurmtrain.runs.reasons import ENDS_RUN
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.create import append_arrays, finish_halving, halve_array
from slurmtrain.sweep.folder import check_not_cancelled, note_jobs, states_of
from slurmtrain.system import files
from slurmtrain.system.file_claims import claimed, claims
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.process_mark import ProcessMark

log = logging.getLogger(__name__)

RETRIED = (RunStatus.FAILED, RunStatus.LOST, RunStatus.STOPPED)


@dataclass(frozen=True)
class Submission:
    """The result of submitting a sweep.

    Attributes:
        submitted: job ids of arrays that were submitted now.
        found: job ids of arrays that had been submitted before.
        waiting: number of runs that could not be submitted, because of `limit`.
    """

    submitted: list[str]
    found: list[str]
    waiting: int = 0
    limit: SubmitLimitError | None = None


def check_arrays(sweep: Sweep, client: SlurmClient, *, known: Collection[int] = ()) -> None:
    """Ask SLURM whether it would accept every array that has not been submitted.

    Args:
        known: as for `submit_arrays`.

    Raises:
        RefusedError: it would not. A sweep that nobody has begun to submit is removed again.
    """
    numbers = sweep.array_numbers()
    for number in [each for each in numbers if each not in known and sweep.job_id(each) is None]:
        path = sweep.array(number) / f".test-{os.getpid()}.sbatch"
        try:
            path.write_text(_script(sweep, number))
            check(path, client)
        except RefusedError:
            if not any(claims(sweep.array(each)) or sweep.job_id(each) for each in numbers):
                remove(sweep)
            raise
        finally:
            path.unlink(missing_ok=True)


def remove(sweep: Sweep) -> None:
    """Remove a sweep. It is renamed first, so that nobody finds half of it."""
    gone = staging_dir.folder(sweep.path.parent, sweep.id)
    sweep.path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def submit_arrays(
    sweep: Sweep,
    client: SlurmClient,
    *,
    known: Collection[int] = (),
) -> Submission:
    """Submit every array that has not been submitted. Several shells may do it at the same time.

    One that is above a limit on jobs is halved until a part fits; the next command goes on from there. SLURM is asked
    first whether it would accept all of them, so that no half of a sweep is submitted while the other needs a
    correction.

    Args:
        known: arrays of which the caller knows that they are submitted; they are not looked at, nor in the result.

    Raises:
        ClusterError: the sweep was cancelled; or sbatch refused, or it is not known whether a job exists. Arrays that
            were submitted stay.
    """
    check_not_cancelled(sweep)
    check_arrays(sweep, client, known=known)
    submitted: list[str] = []
    found: list[str] = []
    done = set(known)
    lineage = functools.cache(sweep.lineage)  # it is read from the plans of the arrays, which keep it
    while left := [number for number in sweep.array_numbers() if number not in done]:
        number = min(left, key=lineage)
        try:
            job_id, new = _submit_array(sweep, number, client)
        except SubmitLimitError as limit:
            waiting = sum(len(sweep.members(each)) for each in sweep.array_numbers() if each not in done)
            return Submission(submitted, found, waiting, limit)
        (submitted if new else found).append(job_id)
        done.add(number)
    return Submission(submitted, found)


def _submit_array(sweep: Sweep, number: int, client: SlurmClient) -> tuple[str, bool]:
    """Return the job id of an array, and whether it was submitted by this call."""
    job_id = sweep.job_id(number)
    if job_id is None:

        def busy(owner: ProcessMark) -> None:
            log.info("process %s on %s is submitting this array; waiting for it", owner.pid, owner.host)

        with claimed(sweep.array(number), busy) as somebody_before:
            job_id = sweep.job_id(number)  # the one who had the claim may have finished
            if job_id is None and somebody_before:
                job_id = _job_of_attempts(sweep, number)
                if job_id is not None:
                    _write_job(sweep, number, job_id)
            finish_halving(sweep, number)
            if job_id is None:
                job_id = _hand_over_what_fits(sweep, number, client, somebody_before)
                note_jobs(sweep, number)
                if sweep.cancelled_file.exists():  # while sbatch was at work: whoever cancelled did not find it
                    cancel(sweep, client)
                    check_not_cancelled(sweep)
                return job_id, True
    note_jobs(sweep, number)
    return job_id, False


def _hand_over_what_fits(sweep: Sweep, number: int, client: SlurmClient, somebody_before: bool) -> str:
    """Hand an array to sbatch, or the first half of it as often as that is above a limit; return the job id.

    Raises:
        SubmitLimitError: a single run is above the limit, too.
        ClusterError: the sweep was cancelled meanwhile, or sbatch refused.
    """
    while True:
        check_not_cancelled(sweep)
        try:
            return _hand_over(sweep, number, client, somebody_before)
        except SubmitLimitError as limit:
            if not halve_array(sweep, number):
                raise
            somebody_before = False  # whatever it has submitted would have been found
            log.info("%s; trying with %d of its runs", limit.message, len(sweep.members(number)))


def _hand_over(sweep: Sweep, number: int, client: SlurmClient, somebody_before: bool) -> str:
    path = sweep.array(number)
    script = _script(sweep, number)
    files.write_text(path / "job.sbatch", script)
    for run_id in sweep.members(number):
        _link_script(path / "job.sbatch", sweep.run_dir(run_id))
    members = [sweep.run_dir(run_id) for run_id in sweep.members(number)]
    config = load_frozen(members[0].config_file, with_secrets=False)
    exclusion = node_exclusion.for_new_job(members, path / "job.sbatch", client, config)
    exclusion.tell()
    job_id = submit_exactly_once(
        script,
        path / "submitit",
        sweep.token(number),
        client,
        options=[*export_option(config), *exclusion.options],
        looked_for_before=somebody_before,
    )
    _write_job(sweep, number, job_id)
    for run_id, element in sweep.elements(number, job_id).items() if exclusion.blamed else ():
        if sweep.run_dir(run_id).path.exists():
            exclusion.record(sweep.run_dir(run_id), element)
    return job_id


def _write_job(sweep: Sweep, number: int, job_id: str) -> None:
    write_json(sweep.array(number) / "job.json", {"job_id": job_id, "time": time.time()})


def _link_script(script: Path, run_dir: RunDir) -> None:
    """Link the array's script into a run's directory, since thousands of runs may share a long one."""
    if not run_dir.path.exists():  # removed by `runs prune`
        return
    link = files.temporary_beside(run_dir.script)
    try:
        os.link(script, link)
    except OSError:  # not every file system can
        files.write_text(link, script.read_text())
    link.replace(run_dir.script)
    link.unlink(missing_ok=True)  # a rename to another link of the same file does nothing (rename(2))


def _job_of_attempts(sweep: Sweep, number: int) -> str | None:
    """Return the job of an array whose submitter was killed, from what its tasks have left.

    SLURM soon forgets jobs that ended.
    """
    known = {sweep.job_id(each) for each in sweep.array_numbers()}
    elements = sweep.elements(number, "")
    for run_id, suffix in elements.items():
        run_dir = sweep.run_dir(run_id)
        if not suffix:  # one task is no array
            folder = run_dir.path if len(elements) == 1 else sweep.path
            logs = [path.stem.removeprefix("slurm-") for path in folder.glob("slurm-*.log")] if run_dir.exists() else []
            jobs = [job_id for job_id in logs if job_id.isdigit() and job_id not in run_dir.info()["job_ids"]]
        else:
            ran = (attempt.job_id or "" for attempt in attempts.all_attempts(run_dir))
            jobs = [job_id.removesuffix(suffix) for job_id in ran if job_id.endswith(suffix)]
        for job_id in jobs:
            if job_id not in known:
                return job_id
    return None


def _script(sweep: Sweep, number: int) -> str:
    """Return the script of an array; it waits for arrays before it that are submitted and have not finished."""
    plan = read_json(sweep.array(number) / "plan.json") or {}
    run_dirs = [sweep.run_dir(run_id) for run_id in plan["members"]]
    config = load_frozen(run_dirs[0].config_file, with_secrets=False)
    info = sweep.info()
    runs = [RunDir(Path(path)) for path in info["after"]]
    config = waiting_for_runs(config, [run for run in runs if run.info_file.exists()], info["slurm_conf"])
    after = plan["after"]
    others = [each for each in sweep.array_numbers() if each != number] if after is not None else []
    parts = [each for each in others if after in sweep.lineage(each)]
    before = [job for each in parts if (job := sweep.job_id(each)) is not None and not _is_over(sweep, each)]
    if before:
        config = with_dependency(config, [f"afterany:{':'.join(before)}"])
    paths = dataclasses.replace(
        job_paths([run_dir.path for run_dir in run_dirs], info), parallelism=plan["parallelism"], pack=info["pack"]
    )
    return render_script(config, paths)


def _is_over(sweep: Sweep, number: int) -> bool:
    """Return whether all runs of an array have ended. SLURM may have forgotten it, and then refuse to wait for it."""
    run_dirs = [sweep.run_dir(run_id) for run_id in sweep.members(number)]
    return all(is_over(run_dir) for run_dir in run_dirs if run_dir.info_file.exists())


def add_retry(sweep: Sweep) -> list[str]:
    """Plan an array of the runs that have ended without a result, and return their ids; `submit_arrays` submits it.

    A sweep that was cancelled goes on. Two who retry at the same moment get different runs: the second finds them
    planned.
    """
    with claimed(sweep.arrays, busy=lambda owner: None):  # no other process resumes one of them meanwhile
        return _plan_retry(sweep)


def _plan_retry(sweep: Sweep) -> list[str]:
    shapes = {point.run_id: point.shape for point in sweep.points()}
    sweep.cancelled_file.unlink(missing_ok=True)
    while True:
        numbers = sweep.array_numbers()
        planned = {run_id for number in numbers if sweep.job_id(number) is None for run_id in sweep.planned(number)}
        now = states_of(sweep)
        chosen = [run_id for run_id, state in now.items() if state.status in RETRIED and run_id not in planned]
        if not chosen:
            return []
        for run_id in chosen:
            undo_unfinished(sweep.run_dir(run_id))
            sweep.run_dir(run_id).request_file.unlink(missing_ok=True)
        arrays = plan_arrays(
            [shapes[run_id] for run_id in chosen], parallelism=sweep.info()["parallelism"], pack=sweep.pack
        )
        if sweep.pack > 1:  # again, where they have had a job of their own since
            for run_id in chosen:
                sweep.run_dir(run_id).update_info(packed=True)
        if append_arrays(sweep, len(numbers), chosen, arrays):
            return chosen


def still_ending(sweep: Sweep, now: Mapping[str, RunState]) -> list[str]:
    """Return the ids of runs that were told to end and have not ended yet, which `retry` cannot start again so far.

    Args:
        now: the state of each run, by its id.
    """
    alive = [run_id for run_id, state in now.items() if state.alive]
    found = {run_id: requests.read_request(sweep.run_dir(run_id).request_file) for run_id in alive}
    return [run_id for run_id, request in found.items() if request is not None and request.action in ENDS_RUN]


def cancel(sweep: Sweep, client: SlurmClient) -> int:
    """End all runs of the sweep that have not ended, with one scancel, and return how many there were.

    Arrays that are not submitted will not be, neither by a shell that is submitting nor by the same command, until
    `retry`.
    """
    try:
        sweep.cancelled_file.touch()
    except OSError as error:
        # What waits for the limit on jobs is still submitted then, and what SLURM has is cancelled.
        log.warning("%s cannot be made: %s", sweep.cancelled_file, error.strerror or error)
    for number in sweep.array_numbers():
        if sweep.job_id(number) is None and claims(sweep.array(number)):  # its submitter may have been killed
            found = client.find_by_comment(TOKEN_PREFIX + sweep.token(number))
            if found:
                _write_job(sweep, number, found[0])
    now = states_of(sweep)
    # A run that somebody started by hand in an allocation is not ours to cancel.
    alive = {run_id: state.job_id for run_id, state in now.items() if state.alive and state.own_job and state.job_id}
    for run_id in alive:
        requests.ask_to_cancel(sweep.run_dir(run_id))
        with contextlib.suppress(OSError):
            sweep.run_dir(run_id).event(Event.CANCEL_ASKED)
    known = [run_dir for run_dir in map(sweep.run_dir, now) if run_dir.info_file.exists()]
    left = {job_id for jobs in in_queue(known, client).values() for job_id in jobs}
    jobs = sorted({job_id.partition("_")[0] for job_id in left.union(filter(None, alive.values()))})
    if jobs:  # whole arrays: thousands of ids make a line too long
        client.cancel(*jobs)
    evaluations.cancel_all([run_dir for run_dir in map(sweep.run_dir, now) if run_dir.evaluations.exists()], client)
    return len(alive)


def check_submitted(submission: Submission) -> None:
    """Raise ClusterError if a limit kept runs out of the queue."""
    if submission.limit is not None:
        raise ClusterError(
            f"{submission.waiting} runs could not be submitted: {submission.limit.message}", hint=submission.limit.hint
        )
