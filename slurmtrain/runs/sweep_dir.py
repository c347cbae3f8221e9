"""The folder of a sweep: its points, its arrays, and the runs in it. Paths and small files only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import UnavailableRecordError, UnreadableRecordError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import read_json
from slurmtrain.system.records import (
    COUNT,
    METRICS_BYTES,
    NOTHING,
    TEXT,
    TEXTS,
    TIME,
    Kind,
    check_fields,
    parse,
    read_bytes,
)

_INFO = {
    "created": TIME,
    "slurm_conf": TEXT | NOTHING,
    "backend": TEXT,
    "overrides": TEXTS,
    "pack": COUNT,
    "parallelism": COUNT | NOTHING,
    "after": TEXTS,
    "token": TEXT,
    "command": TEXT | NOTHING,
    "workdir": TEXT,
}


_TEXT_BY_KEY = Kind("text by key", lambda value: isinstance(value, dict) and TEXTS.holds(list(value.values())))


_POINT = {"number": COUNT, "varied": _TEXT_BY_KEY, "identity": TEXT, "shape": TEXT, "run_id": TEXT}


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
    def trials_file(self) -> Path:
        """The journal of a search, in Optuna's format, from which another process goes on with it; other sweeps have none."""
        return self.path / "trials.jsonl"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def arrays(self) -> Path:
        return self.path / "arrays"

    @property
    def tasks(self) -> Path:
        """The folder of the pickled functions and arguments of a sweep whose points are calls; other sweeps have none."""
        return self.path / "tasks"

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
            raise UnreadableRecordError(f"{self.path} is not a sweep: it has no readable sweep.json")
        missing = [name for name in ("created", "slurm_conf", "pack", "backend") if name not in info]
        if missing:
            raise UnreadableRecordError(f"{self.info_file} does not say {', '.join(missing)}")
        check_fields(info, _INFO, self.info_file)
        return info

    def points(self) -> list[Point]:
        """Return all points whose line is complete: a search adds lines, and may be cut short."""
        try:
            whole, _, _ = read_bytes(self.points_file, at_most=METRICS_BYTES).rpartition(b"\n")
        except OSError as error:
            raise UnavailableRecordError(f"{self.points_file} cannot be read: {error.strerror}", error) from None
        return [self._point(parse(line), number) for number, line in enumerate(whole.splitlines(), 1)]

    def _point(self, values: Any, line: int) -> Point:
        known = {name: values.get(name) for name in _POINT} if isinstance(values, dict) else dict.fromkeys(_POINT)
        if not all(kind.holds(known[name]) for name, kind in _POINT.items()) or "/" in str(known["run_id"]):
            raise UnreadableRecordError(f"{self.points_file}: line {line} is no point")
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
