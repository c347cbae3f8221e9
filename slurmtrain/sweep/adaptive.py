"""A sweep whose points are chosen by earlier results: one process adds points to it, and waits for its runs.

On disk it is a sweep like any other, and every verb accepts it. One process at a time controls it. When that one dies,
its jobs go on; the next one finds the points that it asks for again, with their results, and nothing is run twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurmtrain.config.schema import Config
from slurmtrain.launch.arrays import plan_arrays
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.report.status.look import states
from slurmtrain.report.status.state import RunState
from slurmtrain.report.waiting import as_they_end
from slurmtrain.runs.create import new_run_id
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Point, Sweep
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.create import add_run, append_arrays, create_sweep, find_same
from slurmtrain.sweep.folder import note_jobs
from slurmtrain.sweep.jobs import Submission, check_submitted, submit_arrays
from slurmtrain.sweep.local import is_to_go_on, run_here
from slurmtrain.sweep.plan import SweepPlan, check_belongs, identity_of
from slurmtrain.sweep.throttle import throttle
from slurmtrain.system.paths import current_folder
from slurmtrain.system.records import read_tail

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """One point that is asked for.

    Attributes:
        varied: what distinguishes it, by key, as text.
    """

    varied: dict[str, str]
    config: Config


@dataclass(frozen=True)
class OpenSweep:
    """An open sweep in the process that controls it.

    Attributes:
        client: client of the cluster; None: the runs are processes of this machine.
        look: checks that the cluster has what a new point asks for, and raises ConfigError; None: it is not looked at.
    """

    sweep: Sweep
    sweep_plan: SweepPlan
    client: SlurmClient | None
    look: Callable[[Config], None] | None = None
    # What was read once: nobody else adds points, and an array that is submitted stays so. There may be thousands.
    _points: dict[str, Point] = field(default_factory=dict, repr=False)
    _submitted: set[int] = field(default_factory=set, repr=False)

    def run(
        self, wanted: Sequence[Wanted], on_end: Callable[[RunDir, RunState], None]
    ) -> list[tuple[RunDir, RunState]]:
        """Submit points that are not submitted, and return all when they have ended, in the order of `wanted`.

        Called within `alone`.

        Args:
            on_end: called with every run when it has ended, also with those that had ended before.
        """
        run_dirs = self.add(wanted)
        check_submitted(self.submit(run_dirs))
        ended: dict[str, RunState] = {}
        try:
            for run_dir, now in self._ended(run_dirs):
                ended[run_dir.id] = now
                on_end(run_dir, now)
        except KeyboardInterrupt:
            if self.client is not None:
                name = self.sweep.id
                log.info("the jobs of %s go on without this shell; sweep cancel %s ends them", name, name)
            raise
        return [(run_dir, ended[run_dir.id]) for run_dir in run_dirs]

    def check(self, config: Config) -> None:
        """Check that a config can be a point of this sweep. One that is a point already is not looked at again.

        Raises:
            ConfigError: it cannot.
        """
        config = with_absolute_paths(config, current_folder())
        self.sweep_plan.check(config)
        if self.look is not None and identity_of(config) not in self._by_identity():
            self.look(config)

    def add(self, wanted: Sequence[Wanted]) -> list[RunDir]:
        """Add the points that do not exist yet, and return the run of each of `wanted`. Called within `alone`.

        Each step may be cut short, and is done when the same points are asked for again.
        """
        sweep, sweep_plan = self.sweep, self.sweep_plan
        points = self._by_identity()
        stamp = new_run_id()
        chosen = []
        _remove_cut_line(sweep.points_file)
        with sweep.points_file.open("a") as file:
            for each in wanted:
                identity = sweep_plan.add(with_absolute_paths(each.config, current_folder()))
                if identity not in points:
                    number = len(points)
                    points[identity] = Point(
                        number, each.varied, identity, sweep_plan.shapes[identity], f"{stamp}-{number:04d}"
                    )
                    file.write(json.dumps(asdict(points[identity])) + "\n")
                    file.flush()
                chosen.append(points[identity])
        for point in chosen:
            if not sweep.run_dir(point.run_id).info_file.exists():
                add_run(sweep, point, sweep_plan)
        return [sweep.run_dir(point.run_id) for point in chosen]

    def submit(self, run_dirs: Sequence[RunDir]) -> Submission:
        """Submit those of these runs that have no job; with cluster=local there is nothing to submit.

        What a limit has kept out of the queue is submitted by the next call.

        Raises:
            ClusterError: sbatch refused, or the sweep was cancelled.
        """
        if self.client is None:
            return Submission([], [])
        chosen = {run_dir.id for run_dir in run_dirs}
        shapes = {point.run_id: point.shape for point in self._by_identity().values() if point.run_id in chosen}
        while True:
            numbers = self.sweep.array_numbers()
            open_numbers = self._not_submitted(numbers)
            planned = {run_id for number in open_numbers for run_id in self.sweep.planned(number)}
            # A run that was removed is made anew, and the job that it once had is no longer its own.
            new = [run_id for run_id in shapes if run_id not in planned and not self._has_job(run_id)]
            size = self.client.max_array_size()
            limit, pack = self.sweep.info()["parallelism"], self.sweep.pack
            arrays = plan_arrays([shapes[run_id] for run_id in new], max_size=size, parallelism=limit, pack=pack)
            if not new or append_arrays(self.sweep, len(numbers), new, arrays):
                break
        return submit_arrays(self.sweep, self.client, known=self._submitted)

    def _by_identity(self) -> dict[str, Point]:
        """Return the points by the identity of their config."""
        if not self._points:
            self._points.update((point.identity, point) for point in self.sweep.points())
        return self._points

    def _not_submitted(self, numbers: Iterable[int]) -> list[int]:
        """Return those of these arrays that have no job; the jobs of others are recorded in their runs."""
        found = []
        for number in numbers:
            if number in self._submitted:
                continue
            note_jobs(self.sweep, number)
            if self.sweep.job_id(number) is None:
                found.append(number)
            else:
                self._submitted.add(number)
        return found

    def _has_job(self, run_id: str) -> bool:
        return bool(self.sweep.run_dir(run_id).info()["job_ids"])

    def _ended(self, run_dirs: Sequence[RunDir]) -> Iterator[tuple[RunDir, RunState]]:
        """Yield every run, as it ends."""
        if self.client is None:
            before = states(run_dirs)
            left = [
                run_dir.id for run_dir in dict.fromkeys(run_dirs) if before[run_dir.id].alive or is_to_go_on(run_dir)
            ]
            at_once = self.sweep.info()["parallelism"] or self.sweep.pack
            if not run_here(self.sweep, left, at_once, show=at_once == 1, retry=False):
                raise KeyboardInterrupt  # they were told to stop, and so is this process
            now = states(run_dirs)
            yield from ((run_dir, now[run_dir.id]) for run_dir in dict.fromkeys(run_dirs))
            return
        yield from as_they_end(run_dirs, ask_first=False)


def _remove_cut_line(path: Path) -> None:
    """Remove what a shell that was cut short, or had no disk space, has left after the last whole line."""
    if read_tail(path, 1) in (b"", b"\n"):
        return
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def open_sweep(
    sweep_plan: SweepPlan,
    overrides: Sequence[str],
    client: SlurmClient | None,
    *,
    parallelism: int | None = None,
    after: Sequence[RunDir] = (),
    again: bool = False,
    ended: Callable[[Sweep], bool] = lambda sweep: False,
    look: Callable[[Config], None] | None = None,
) -> OpenSweep:
    """Return the sweep of this search: the one that exists, or a new one.

    Args:
        sweep_plan: a plan with a `search`, and no points.
        after: runs that have to finish before any of a new sweep begins.
        again: make another sweep.
        ended: returns whether the existing sweep is not to be continued.
        look: as in `OpenSweep`.

    Raises:
        ConfigError: its points cannot be those of a sweep.
    """
    check_belongs(sweep_plan.first, sweep_plan.first)  # before anything is made
    found = find_same(sweep_plan)
    if found is None or again or ended(found):
        found = create_sweep(
            sweep_plan,
            lambda number: {},
            overrides,
            current_folder(),
            parallelism=parallelism,
            after=after,
            again=found is not None,
        )
    else:
        if found.points():
            log.info("sweep %s is there already, with %d points; going on with it", found.id, len(found.points()))
        if parallelism not in (None, found.info()["parallelism"]):
            throttle(found, parallelism, client)
    return OpenSweep(found, sweep_plan, client, look)
