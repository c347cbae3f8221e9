"""A sweep whose points are chosen by earlier results: one process adds points to it, and waits for its runs.

On disk it is a sweep like any other, and every verb accepts it. One process at a time controls it. When that one dies,
its jobs go on; the next one finds the points that it asks for again, with their results, and nothing is run twice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.report.status.look import is_over, states
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.report.waiting import EndWatch
from slurmtrain.runs.create import new_run_id
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Point, Sweep
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.folder import add_run, create_sweep, find_same
from slurmtrain.sweep.jobs import REMOVED, Submission, submit_runs
from slurmtrain.sweep.local import LocalRuns, alone
from slurmtrain.sweep.plan import SweepPlan, check_belongs, identity_of
from slurmtrain.system.paths import current_folder
from slurmtrain.system.records import read_tail

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5  # at the logs of runs on this machine, if somebody reads them


@dataclass(frozen=True)
class OpenSweep:
    """A sweep in the process that controls it. All else is called within `alone`.

    Attributes:
        client: client of the cluster; None: the runs are processes of this machine.
        look: called with the config of each new point; it raises if the point cannot run.
        parallelism: number of points that may run at the same time; None: no limit.
        points: its points by the identity of their config: nobody else adds any.
    """

    sweep: Sweep
    sweep_plan: SweepPlan
    client: SlurmClient | None
    look: Callable[[Config], None] = lambda config: None
    parallelism: int | None = None
    points: dict[str, Point] = field(default_factory=dict, repr=False)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the process that controls the sweep, and go on with the points that are there.

        Raises:
            ClusterError: another process controls it.
        """
        with alone(self.sweep):
            remove_cut_line(self.sweep.points_file)
            self.points.update((point.identity, point) for point in self.sweep.points())
            yield

    def add(self, varied: dict[str, str], config: Config) -> RunDir:
        """Add a point unless it exists, and return its run.

        It may be cut short, and is done when the same point is asked for again.

        Args:
            varied: what distinguishes the point, by key, as text.

        Raises:
            SlurmtrainError: the config cannot be a point of this sweep, or it could not run.
        """
        config = with_absolute_paths(config, current_folder())
        check_belongs(config, self.sweep_plan.first)
        if identity_of(config) not in self.points:
            self.look(config)
        identity = self.sweep_plan.add(config)
        if identity not in self.points:
            number = len(self.points)
            run_id = f"{new_run_id()}-{number:04d}"
            point = Point(number, varied, identity, self.sweep_plan.shapes[identity], run_id)
            with self.sweep.points_file.open("a") as file:
                file.write(json.dumps(asdict(point)) + "\n")
            self.points[identity] = point
        run_dir = self.sweep.run_dir(self.points[identity].run_id)
        if not run_dir.info_file.exists():
            add_run(self.sweep, self.points[identity], self.sweep_plan)
        return run_dir

    def run(self, run_dirs: Sequence[RunDir]) -> list[RunState]:
        """Submit or start runs that are not, and return how each has ended."""
        at_once = self.parallelism or self.sweep.pack
        with Runs(self, show=at_once == 1, at_once=at_once) as runs:
            runs.start(run_dirs).check()
            ended: dict[RunDir, RunState] = {}
            while not ended.keys() >= set(run_dirs):
                ended.update(runs.ended())
        return [ended[run_dir] for run_dir in run_dirs]


class Runs:
    """The runs of an open sweep, as jobs of a cluster or as processes of this machine. Used within `with` and `alone`.

    A run whose directory is removed has ended, too: nothing more is to be expected of it.

    Args:
        show: print what the ranks of a run on this machine print.
        at_once: number of runs on this machine at the same time.
    """

    def __init__(self, opened: OpenSweep, *, show: bool, at_once: int):
        self._opened = opened
        self._watch = EndWatch(ask_first=False)
        self._here = LocalRuns(opened.sweep, show=show, at_once=at_once) if opened.client is None else None
        self._started = set[RunDir]()  # on this machine
        self._over: list[RunDir] = []  # before they could be started here
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Runs:
        if self._here is not None:
            self._stack.enter_context(self._here)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is not None and issubclass(kind, KeyboardInterrupt) and self._here is None:
                name = self._opened.sweep.id
                log.info("the jobs of %s go on without this shell; sweep cancel %s ends them", name, name)

    @property
    def in_queue(self) -> bool:
        """Whether jobs are waited for, whose end makes room for others."""
        return bool(self._watch.waiting)

    def start(self, run_dirs: Iterable[RunDir]) -> Submission:
        """Submit or start those that have no job or process; all of them are reported when they have ended."""
        run_dirs = list(dict.fromkeys(run_dirs))
        there = [run_dir for run_dir in run_dirs if run_dir.info_file.exists()]
        if self._opened.client is not None:
            submission = submit_runs(self._opened.sweep, self._opened.client, there)
            self._watch.add(each for each in run_dirs if each not in there or each.info()["job_ids"])
            return submission
        assert self._here is not None
        for run_dir in run_dirs:
            if run_dir not in self._started:
                self._started.add(run_dir)
                stopped = run_dir in there and states([run_dir])[run_dir.id].status == RunStatus.STOPPED
                if run_dir in there and (stopped or not is_over(run_dir)):
                    self._here.start(run_dir)
                else:
                    self._over.append(run_dir)
        return Submission([], [])

    def ended(self, *, soon: bool = False) -> list[tuple[RunDir, RunState]]:
        """Wait a moment, or on this machine until a run has ended, and return those that have, in that order.

        Args:
            soon: wait only for a moment on this machine, too, since somebody reads the logs of the runs.

        Raises:
            UnreadableRecordError: the files of a run cannot be used.
            ClusterError: a run cannot be started on this machine.
            KeyboardInterrupt: a person has stopped this process, and the runs on this machine with it.
        """
        if self._here is None:
            gone = [run_dir for run_dir in self._watch.waiting if not run_dir.path.exists()]
            self._watch.forget(gone)
            found = [*((run_dir, REMOVED) for run_dir in gone), *self._watch.look()]
            if not found:
                time.sleep(self._watch.pause_s)
            return found
        run_dir = self._over.pop() if self._over else self._here.ended(LOOK_EVERY_S if soon else math.inf)
        if run_dir is None:
            return []
        self._started.remove(run_dir)  # another trial may have the same config
        now = states([run_dir])[run_dir.id] if run_dir.info_file.exists() else REMOVED
        if now.alive:  # since its processes of before are still there, as after a kill
            raise ClusterError(
                f"run {run_dir.id} cannot be continued here yet: {now.explanation}",
                hint="repeat the command when it has ended",
            )
        return [(run_dir, now)]


def remove_cut_line(path: Path) -> None:
    """Remove what a shell that was cut short, or had no disk space, has left after the last whole line."""
    if read_tail(path, 1) not in (b"", b"\n"):
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def open_sweep(
    sweep_plan: SweepPlan,
    overrides: Sequence[str],
    client: SlurmClient | None,
    *,
    parallelism: int | None = None,
    after: Sequence[RunDir] = (),
    again: Callable[[Sweep], bool] = lambda sweep: False,
    look: Callable[[Config], None] = lambda config: None,
) -> OpenSweep:
    """Return the sweep of this search: the one that exists, or a new one.

    Args:
        sweep_plan: a plan with a `search`, and no points.
        after: runs that have to finish before any of a new sweep begins.
        again: returns whether another sweep is to be made, and the existing one not to be continued.
        look: as in `OpenSweep`.

    Raises:
        ConfigError: its points cannot be those of a sweep.
    """
    check_belongs(sweep_plan.first, sweep_plan.first)  # before anything is made
    found = find_same(sweep_plan)
    if found is None or again(found):
        new = found is not None
        found = create_sweep(
            sweep_plan,
            lambda number: {},
            overrides,
            current_folder(),
            parallelism=parallelism,
            after=after,
            again=new,
        )
    elif count := found.point_count():
        log.info("sweep %s is there already, with %d points; going on with it", found.id, count)
    return OpenSweep(found, sweep_plan, client, look, parallelism or found.info()["parallelism"])
