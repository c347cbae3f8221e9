"""The folder of a sweep: its points, its arrays, and the runs in it. Paths and small files only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict

from slurmtrain.errors import UnavailableRecordError, UnreadableRecordError
from slurmtrain.runs.attempt_dir import path_below
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.records import METRICS_BYTES, Count, Time, parse, read_bytes, read_json, typed, typed_or_none


class SweepInfo(TypedDict, total=False):
    """The contents of sweep.json."""

    created: Required[Time]
    slurm_conf: Required[str | None]
    backend: Required[str]
    pack: Required[Count]
    overrides: list[str]
    parallelism: Count | None
    after: list[str]
    token: str
    command: str | None
    workdir: str


@dataclass(frozen=True)
class Point:
    """One line of points.jsonl.

    Attributes:
        varied: what distinguishes it, by key, as text.
        identity: identity of its config.
        shape: digest of what it asks of the cluster; points that differ in it need different arrays.
        run_id: id of the run that computes it; points with the same config share one.
    """

    number: Count
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

    info_file = path_below("sweep.json")
    points_file = path_below("points.jsonl")
    code = path_below("code")
    arrays = path_below("arrays")
    trials_file = path_below("trials.jsonl")  # of a search: its journal in Optuna's format, with which it continues
    tasks = path_below("tasks")  # of a sweep whose points are calls: pickled functions and arguments
    cancelled_file = path_below("cancelled")  # from `sweep cancel` to `sweep retry`: further arrays are not submitted

    def array(self, number: int) -> Path:
        return self.arrays / f"{number:04d}"

    def info(self) -> dict[str, Any]:
        """Return the contents of sweep.json.

        Raises:
            UsageError: this is not a sweep.
        """
        info = read_json(self.info_file)
        if info is None:
            raise UnreadableRecordError(f"{self.path} is not a sweep: it has no readable sweep.json")
        typed(SweepInfo, info, self.info_file)
        return info

    def points(self) -> list[Point]:
        """Return all points whose line is complete: a search adds lines, and may be cut short."""
        try:
            whole, _, _ = read_bytes(self.points_file, at_most=METRICS_BYTES).rpartition(b"\n")
        except OSError as error:
            raise UnavailableRecordError(f"{self.points_file} cannot be read: {error.strerror}", error) from None
        points = [typed_or_none(Point, parse(line)) for line in whole.splitlines()]
        for number, point in enumerate(points, 1):
            if point is None or "/" in point.run_id:
                raise UnreadableRecordError(f"{self.points_file}: line {number} is no point")
        return [point for point in points if point is not None]

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


def tasks_of(members: int, pack: int = 1) -> int:
    """Return the number of tasks of an array with so many runs."""
    return -(-members // pack)
