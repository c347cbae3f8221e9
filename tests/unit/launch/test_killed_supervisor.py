"""A supervisor that is killed at any moment: its run goes on or can be resumed, and nothing is done twice or forgotten.

SLURM ends the job of a batch process that is killed, and does not bring it back. The runs here have a cluster each.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

import tests.support
from slurmtrain.cli import main
from tests.support.fake_slurm import ENDED, FakeSlurm

KILLER = Path(tests.support.__file__).parent / "kill_at_change"
WORDS = (
    *("+cluster=a100x4", "cluster.nodes=1", "cluster.tasks_per_node=1", "cluster.gpus_per_node=0"),
    *("cluster.gpu_type=null", "cluster.gpu_memory_gb=null", "cluster.network_interface=lo"),
    *("job=command", "job.command='bash count.sh'", "job.snapshot=none", "requeue.in_place=false"),
    "requeue.max_attempts_without_progress=99",
)
# Each attempt adds a step, and wants to be started again until the last one.
COUNT = """cd {folder}
echo "$SLURMTRAIN_ATTEMPT" >>begun
echo $(($(wc -l <steps) + 1)) >>steps
[ -e last ] || exit 75
"""
# By requeue.mode, the changes of the loop before which the supervisors of the first, the second, ... job are killed; where a
# run is never started again, those of one run, and of another.
POINTS = (
    ("requeue", (1, 3, 5, 7, 9, 11, 13, 15)),
    ("resubmit", (2, 5, 8, 11, 14, 16, 19, 22, 25)),
    ("off", (2, 7)),
    ("off", (4, 10)),
)
CANCELLED_AT = (("requeue", (4, 10, 14)), ("resubmit", (12, 16)))


@dataclass
class Run:
    """A run whose supervisors are killed, one after the other.

    Attributes:
        mode: its requeue.mode.
        points: the numbers of the changes before which they are.
        job_id: the latest job that was started.
        said: what `status` said whenever no job was left.
    """

    folder: Path
    mode: str
    points: tuple[int, ...]

    slurm: FakeSlurm = field(init=False)
    process: subprocess.Popen[str] | None = None
    job_id: str = ""
    said: list[str] = field(default_factory=list)

    def submit(self) -> None:
        (self.folder / "project").mkdir(parents=True)
        self.slurm = FakeSlurm.install(self.folder / "slurm")
        (self.folder / "project" / "count.sh").write_text(COUNT.format(folder=shlex.quote(str(self.folder))))
        for name in ("begun", "steps", *["last"] * (self.mode == "off")):
            (self.folder / name).touch()
        self.types(*WORDS, f"requeue.mode={self.mode}", "submit")

    def types(self, *words: str) -> str:
        """What a command prints."""
        with pytest.MonkeyPatch.context() as here, contextlib.redirect_stdout(io.StringIO()) as out:
            here.chdir(self.folder / "project")
            here.setenv("PATH", f"{self.slurm.directory}:{os.environ['PATH']}")
            assert main([*words]) == 0, (self, words)
        return out.getvalue()

    @property
    def id(self) -> str:
        (attempts,) = self.folder.glob("project/runs/*/*/attempts")
        return attempts.parent.name

    def lines(self, name: str) -> list[int]:
        return [int(line) for line in (self.folder / name).read_text().split()]

    def start_job(self, at: int | None = None, **variables: str) -> bool:
        """Start the job that is in the queue, as SLURM does when the one before has ended; whether there is one.

        Args:
            at: the number of the change before which its supervisor is killed; None: it is not.
        """
        queued = [job for job in self.slurm.jobs if job["state"] not in ENDED]
        assert len(queued) <= 1, (self, queued)
        if at is not None:
            variables |= {"PYTHONPATH": str(KILLER), "KILL_AT": str(at), "CHANGES": str(self.folder / f"changes-{at}")}
        for job in queued:
            self.job_id = job["id"]
            self.process = self.slurm.start(self.job_id, task=None, **variables)
        return bool(queued)

    def end_job(self) -> int:
        assert self.process is not None
        code = self.slurm.finish(self.process, self.job_id).returncode
        self.process = None
        return code

    def resume(self) -> None:
        """Do what `status` says."""
        self.said.append(self.types("status", self.id))
        for words in re.findall(r"`resume (.*?)`", self.said[-1]):
            self.types("resume", words)

    def go_on(self, at: int | None) -> bool:
        """Start the job that is in the queue; where there is none, do what `status` says. Whether the run has a job."""
        if self.start_job(at):
            return True
        self.resume()
        return self.start_job(at)

    def is_killed(self) -> bool:
        return self.end_job() == -signal.SIGKILL


def play(folder: Path, plan: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Let runs with these points go on until they have finished, and look at each."""
    runs = [Run(folder / str(place), mode, points) for place, (mode, points) in enumerate(plan)]
    for run in runs:
        run.submit()
    for turn in range(max(len(run.points) for run in runs)):
        going = [run for run in runs if turn < len(run.points)]
        for run in going:
            assert run.go_on(run.points[turn]), run
        for run in going:
            assert run.is_killed(), f"{run.mode}: the loop does not come to change {run.points[turn]}"
    for run in runs:
        (run.folder / "last").touch()
    while runs_with_a_job := [run for run in runs if run.go_on(None)]:
        for run in runs_with_a_job:
            assert run.end_job() == 0, run
    for run in runs:
        check_finished(run)


def check_finished(run: Run) -> None:
    done, begun = run.lines("steps"), run.lines("begun")
    assert done == [*range(1, len(begun) + 1)], run
    assert all(earlier < later for earlier, later in pairwise(begun)), run
    assert "finished" in run.said[-1], run
    assert run.mode != "off" or len(done) == 1, run


def test_a_run_whose_supervisor_is_killed_goes_on_or_is_resumed_and_does_each_step_once(tmp_path: Path) -> None:
    play(tmp_path, POINTS)


def test_a_cancelled_run_whose_supervisor_is_killed_does_not_go_on(tmp_path: Path) -> None:
    """Not even where its job comes back, as by a requeue that the supervisor had begun; and `resume` continues it."""
    play_cancelled(tmp_path, CANCELLED_AT)


def play_cancelled(folder: Path, plan: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Cancel runs at these points, directly before their supervisors are killed, and resume them."""
    runs = [Run(folder / str(place), mode, points) for place, (mode, points) in enumerate(plan)]
    for run in runs:
        run.submit()
    for turn in range(max(len(run.points) for run in runs)):
        going = [run for run in runs if turn < len(run.points)]
        for run in going:
            assert run.start_job(run.points[turn], CANCEL="yes")
        for run in going:
            assert run.is_killed(), f"{run.mode}: the loop does not come to change {run.points[turn]}"
        begun = [run.lines("begun") for run in going]
        for run in going:
            assert not run.start_job(), run
            run.slurm.change(run.job_id, state="PENDING", restarts=run.slurm.job(run.job_id)["restarts"] + 1)
            assert run.start_job()
        for run in going:
            assert run.end_job() != 0 and not run.start_job(), run
            run.resume()
            assert "cancelled" in run.said[-1] and f"`resume {run.id}` continues it" in run.said[-1], run
        assert [run.lines("begun") for run in going] == begun


@pytest.mark.slow
def test_every_point_of_the_loop(tmp_path: Path) -> None:
    play(tmp_path, [("requeue", (*range(1, 16),)), ("resubmit", (*range(1, 26),))])
    play(tmp_path / "off", [("off", (at, at + 5)) for at in range(1, 6)] + [("off", (11,))])
    play_cancelled(tmp_path / "cancelled", [("requeue", (*range(1, 16),)), ("resubmit", (*range(1, 26),))])
