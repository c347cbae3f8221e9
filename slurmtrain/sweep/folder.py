"""A sweep on disk: which point is which run, which run is in which array, and who submits it.

    runs/<name>.sweep-<identity>/
      sweep.json       overrides, options, who and when
      points.jsonl     one line a point: number, what varies, identity, run id
      arrays/0000/     plan.json: its runs; claim-0001.json: who submits it; job.sbatch; job.json: SLURM's answer
      code/            the snapshot that all points run from
      <run id>/        a run directory like any other

The identity is that of the points, so the same command means the same sweep, from whichever shell: missing parts are
submitted, and nothing twice. Every step can be cut short at any moment and is completed by the next command: the folder
appears complete or not at all, an array has one claimant, and a job that a dead claimant has submitted is found by its
token.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.errors import ClusterError, UnreadableRecordError, UsageError
from slurmtrain.report.status.look import states
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.slurm import trusted_conf
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system import user
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.paths import located
from slurmtrain.system.trust import is_mine

log = logging.getLogger(__name__)

REMOVED = RunState(RunStatus.REMOVED, "its run directory is gone", False, [], None)


def note_jobs(sweep: Sweep, number: int) -> None:
    """Record the job of an array in each of its runs, if that has not been completed."""
    path = sweep.array(number) / "job.json"
    job = read_json(path)
    if job is None or job.get("noted") or not is_mine(sweep.path):
        return
    conf, submitted = sweep.info()["slurm_conf"], float(job.get("time", time.time()))
    for run_id, element in sweep.elements(number, str(job["job_id"])).items():
        run_dir = sweep.run_dir(run_id)
        if not run_dir.info_file.exists():  # removed by `runs prune`
            continue
        if run_dir.make_up_job(element, submitted, slurm_conf=conf):
            run_dir.event(Event.SUBMITTED, job_id=element, submitted=submitted)
    write_json(path, {**job, "noted": True})


def all_sweeps(runs: Path) -> list[Sweep]:
    """Return every sweep under `runs`, oldest first."""
    files = [file for file in runs.glob("*/sweep.json") if os.access(file, os.R_OK)]
    found = [Sweep(located(file.parent)) for file in files if not ownership.foreign_link(file.parent)]
    dated = []
    for sweep in found:
        try:
            dated.append((float(sweep.info()["created"]), sweep))
        except UsageError as error:
            log.warning("left out: %s", error.message)
    return [sweep for _, sweep in sorted(dated, key=lambda pair: pair[0])]


def find(reference: str, runs: Path) -> Sweep:
    """Return the sweep that a person means: its name, a part of it that no other has, a path, or "last".

    Raises:
        UsageError: none or several match.
    """
    path = Path(reference)
    if lookup.is_sweep(path):
        return Sweep(located(path))
    sweeps = all_sweeps(runs)
    if not sweeps:
        lookup.refuse_unreadable(reference, runs)
        raise lookup.nothing_under(runs, "sweeps")
    if reference == "last":
        own = [sweep for sweep in sweeps if is_mine(sweep.path)]
        if not own:
            raise UsageError(
                f"none of the sweeps under {runs.resolve()} is yours", hint=f"the latest is {sweeps[-1].id}"
            )
        return own[-1]
    matching = [sweep for sweep in sweeps if sweep.id == reference] or [
        sweep for sweep in sweeps if reference in sweep.id
    ]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(sweep.id for sweep in (matching or sweeps)[-5:])
    if not matching:
        lookup.refuse_unreadable(reference, runs)
        raise UsageError(f"no sweep is called {reference!r}", hint=f"the latest are: {names}")
    raise UsageError(
        f"{len(matching)} sweeps are called something like {reference!r}", hint=f"write more of the name: {names}"
    )


def states_of(sweep: Sweep) -> dict[str, RunState]:
    """Return the state of every run of the sweep, by run id; one squeue call."""
    ((_, now),) = states_of_all([sweep])
    return now


def states_of_all(found: Sequence[Sweep]) -> list[tuple[Sweep, dict[str, RunState]]]:
    """Return the state of every run of each sweep; one squeue call for all."""
    for sweep in found:
        with contextlib.suppress(PermissionError, UnreadableRecordError):  # it belongs to somebody else
            for number in sweep.array_numbers():
                note_jobs(sweep, number)
    runs = [(sweep, sweep.run_dirs()) for sweep in found]
    there = [run_dir for _, members in runs for run_dir in members.values() if run_dir.info_file.exists()]
    now = states(there)
    return [(sweep, {run_id: now.get(run_id, REMOVED) for run_id in members}) for sweep, members in runs]


def check_not_cancelled(sweep: Sweep) -> None:
    """Raise ClusterError if the sweep was cancelled, and nobody has asked for it to go on."""
    if sweep.cancelled_file.exists():
        raise ClusterError(
            f"sweep {sweep.id} was cancelled, so nothing of it is submitted",
            hint=f"sweep retry {sweep.id} continues all unfinished points; --again submits another sweep of the same points",
        )


def check_not_planned(run_dir: RunDir) -> None:
    """Raise ClusterError if this run is in an array that is still to be submitted: submitted alone it would exist twice."""
    sweep = Sweep(run_dir.path.parent)
    for number in sweep.array_numbers():
        if sweep.job_id(number) is None and run_dir.id in sweep.planned(number):
            raise ClusterError(
                f"run {run_dir.id} has to be submitted together with its sweep", hint=f"sweep retry {sweep.id} does it"
            )


def require_own(sweep: Sweep) -> None:
    """Check that a sweep belongs to this user, before its points are submitted or cancelled: their scripts would be run.

    Raises:
        UsageError: it belongs to somebody else.
    """
    for path in (sweep.path, sweep.info_file, sweep.points_file, sweep.arrays):
        if os.path.lexists(path) and not is_mine(path):
            whose = user.in_words(os.lstat(path).st_uid)
            raise UsageError(
                f"{path} belongs to {whose}: only the user who submitted a sweep may change or continue it",
                hint="`sweep status` and `sweep collect` show it",
            )


def client_of(sweep: Sweep) -> SlurmClient:
    """Return a client of the cluster that a sweep is on."""
    return SlurmClient(trusted_conf.trusted_slurm_conf(sweep.info()["slurm_conf"], named_by=sweep.info_file))
