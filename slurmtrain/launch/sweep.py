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
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain import rundir
from slurmtrain.errors import ClusterError, UnreadableRecord, UsageError
from slurmtrain.launch.arrays import tasks_of
from slurmtrain.launch.state import RunState, states
from slurmtrain.paths import located
from slurmtrain.records import (
    COUNT,
    METRICS_BYTES,
    NOTHING,
    TEXT,
    TEXTS,
    TIME,
    Kind,
    check_fields,
    is_mine,
    parse,
    read_bytes,
)
from slurmtrain.rundir import RunDir, read_json, write_json
from slurmtrain.runtime.slurm import SlurmClient

_INFO = {
    "created": TIME,
    "slurm_conf": TEXT | NOTHING,
    "backend": TEXT,
    "overrides": TEXTS,
    "pack": COUNT,
    "parallelism": COUNT | NOTHING,
    "after": TEXTS,
    "token": TEXT,
    "workdir": TEXT,
}
_TEXT_BY_KEY = Kind("text by key", lambda value: isinstance(value, dict) and TEXTS.holds(list(value.values())))
_POINT = {"number": COUNT, "varied": _TEXT_BY_KEY, "identity": TEXT, "shape": TEXT, "run_id": TEXT}
REMOVED = RunState("removed", "its run directory is gone", False, [], None)


@dataclass(frozen=True)
class Point:
    """One line of points.jsonl.

    Attributes:
        varied: what distinguishes it, by key, as text.
        identity: identity of its config.
        shape: digest of what it asks of the cluster; points that differ in it need different arrays.
        run_id: id of the run that computes it; points with the same config share one.
    """

    number: int
    varied: dict[str, str]
    identity: str
    shape: str
    run_id: str


@dataclass(frozen=True)
class Sweep:
    """The paths and small files of one sweep. Holds no state of its own."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def info_file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def points_file(self) -> Path:
        return self.path / "points.jsonl"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def arrays(self) -> Path:
        return self.path / "arrays"

    @property
    def cancelled_file(self) -> Path:
        """The file that exists from `sweep cancel` to `sweep retry`: arrays that are not submitted then are not submitted."""
        return self.path / "cancelled"

    def array(self, number: int) -> Path:
        return self.arrays / f"{number:04d}"

    def info(self) -> dict[str, Any]:
        """Return the contents of sweep.json.

        Raises:
            UsageError: this is not a sweep.
        """
        info = read_json(self.info_file)
        if info is None:
            raise UnreadableRecord(f"{self.path} is not a sweep: it has no readable sweep.json")
        missing = [name for name in ("created", "slurm_conf", "pack", "backend") if name not in info]
        if missing:
            raise UnreadableRecord(f"{self.info_file} does not say {', '.join(missing)}")
        check_fields(info, _INFO, self.info_file)
        return info

    def points(self) -> list[Point]:
        """Return all points whose line is complete: a search adds lines, and may be cut short."""
        try:
            whole, _, _ = read_bytes(self.points_file, at_most=METRICS_BYTES).rpartition(b"\n")
        except OSError as error:
            raise UnreadableRecord(f"{self.points_file} cannot be read: {error.strerror}") from None
        return [self._point(parse(line), number) for number, line in enumerate(whole.splitlines(), 1)]

    def _point(self, values: Any, line: int) -> Point:
        known = {name: values.get(name) for name in _POINT} if isinstance(values, dict) else dict.fromkeys(_POINT)
        if not all(kind.holds(known[name]) for name, kind in _POINT.items()) or "/" in str(known["run_id"]):
            raise UnreadableRecord(f"{self.points_file}: line {line} is no point")
        return Point(**known)  # type: ignore[arg-type]

    def point_count(self) -> int:
        return len(self.points())

    def run_dir(self, run_id: str) -> RunDir:
        return RunDir(self.path / run_id)

    def run_dirs(self) -> dict[str, RunDir]:
        """Return the runs of all points, by id; each once."""
        return {point.run_id: self.run_dir(point.run_id) for point in self.points()}

    def array_numbers(self) -> list[int]:
        """Return the numbers of the arrays, from 0 on, without a gap."""
        return sorted(int(path.name) for path in self.arrays.iterdir() if path.name.isdigit())

    @property
    def pack(self) -> int:
        """The number of runs that share a task of an array."""
        return int(self.info()["pack"])

    def members(self, number: int) -> list[str]:
        """Return the run ids of an array, in the order of its tasks."""
        return list((read_json(self.array(number) / "plan.json") or {})["members"])

    def planned(self, number: int) -> list[str]:
        """Return the run ids of an array, and of the part of it that is being made an array of its own (see `halve_array`)."""
        plan = read_json(self.array(number) / "plan.json") or {}
        return [*plan["members"], *plan.get("rest", [])]

    def part_of(self, number: int) -> int | None:
        """Return the array of which this one was a part until a limit was reached."""
        part_of: int | None = (read_json(self.array(number) / "plan.json") or {}).get("part_of")
        return part_of

    def lineage(self, number: int) -> tuple[int, ...]:
        """Return the sort key by which an array comes right after the arrays of which it was a part."""
        part_of = self.part_of(number)
        return (number,) if part_of is None else (*self.lineage(part_of), number)

    def elements(self, number: int, job_id: str) -> dict[str, str]:
        """Return the task of every run of an array, as SLURM names it, when the array is this job."""
        members, pack = self.members(number), self.pack
        if tasks_of(len(members), pack) == 1:
            return dict.fromkeys(members, job_id)
        return {run_id: f"{job_id}_{index // pack}" for index, run_id in enumerate(members)}

    def job_id(self, number: int) -> str | None:
        job = read_json(self.array(number) / "job.json")
        return str(job["job_id"]) if job is not None else None

    def token(self, number: int) -> str:
        """Return the token by which the job of an array is found."""
        return f"sweep-{self.info()['token']}:{number:04d}"


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
            run_dir.event("submitted", job_id=element, submitted=submitted)
    write_json(path, {**job, "noted": True})


def all_sweeps(runs: Path) -> list[Sweep]:
    """Return every sweep under `runs`, oldest first."""
    files = [file for file in runs.glob("*/sweep.json") if os.access(file, os.R_OK)]
    found = [Sweep(located(file.parent)) for file in files if not rundir.foreign_link(file.parent)]
    dated = []
    for sweep in found:
        try:
            dated.append((float(sweep.info()["created"]), sweep))
        except UsageError as error:
            print(f"slurmtrain: left out: {error.message}", file=sys.stderr)
    return [sweep for _, sweep in sorted(dated, key=lambda pair: pair[0])]


def find(reference: str, runs: Path) -> Sweep:
    """Return the sweep that a person means: its name, a part of it that no other has, a path, or "last".

    Raises:
        UsageError: none or several match.
    """
    path = Path(reference)
    if rundir.is_sweep(path):
        return Sweep(located(path))
    sweeps = all_sweeps(runs)
    if not sweeps:
        rundir.refuse_unreadable(reference, runs)
        raise rundir.nothing_under(runs, "sweeps")
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
        rundir.refuse_unreadable(reference, runs)
        raise UsageError(f"no sweep is called {reference!r}", hint=f"the latest are: {names}")
    raise UsageError(
        f"{len(matching)} sweeps are called something like {reference!r}", hint=f"write more of it: {names}"
    )


def states_of(sweep: Sweep) -> dict[str, RunState]:
    """Return the state of every run of the sweep, by run id; one squeue call."""
    ((_, now),) = states_of_all([sweep])
    return now


def states_of_all(found: Sequence[Sweep]) -> list[tuple[Sweep, dict[str, RunState]]]:
    """Return the state of every run of each sweep; one squeue call for all."""
    for sweep in found:
        with contextlib.suppress(PermissionError, UnreadableRecord):  # it belongs to somebody else
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
            hint=f"sweep retry {sweep.id} goes on with all that has not finished; --again makes another of the same points",
        )


def check_not_planned(run_dir: RunDir) -> None:
    """Raise ClusterError if this run is in an array that is still to be submitted: submitted alone it would exist twice."""
    sweep = Sweep(run_dir.path.parent)
    for number in sweep.array_numbers():
        if sweep.job_id(number) is None and run_dir.id in sweep.planned(number):
            raise ClusterError(
                f"run {run_dir.id} is to be submitted with others of its sweep", hint=f"sweep retry {sweep.id} does it"
            )


def require_own(sweep: Sweep) -> None:
    """Check that a sweep belongs to this user, before its points are submitted or cancelled: their scripts would be run.

    Raises:
        UsageError: it belongs to somebody else.
    """
    for path in (sweep.path, sweep.info_file, sweep.points_file, sweep.arrays):
        if os.path.lexists(path) and not is_mine(path):
            whose = os.lstat(path).st_uid
            raise UsageError(
                f"{path} belongs to user {whose}: only who has submitted a sweep may change it, or go on with it",
                hint="`sweep status` and `sweep collect` show it",
            )


def client_of(sweep: Sweep) -> SlurmClient:
    """Return a client of the cluster that a sweep is on."""
    return SlurmClient(rundir.trusted_slurm_conf(sweep.info()["slurm_conf"], named_by=sweep.info_file))
