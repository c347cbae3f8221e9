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
from tests.support.fake_slurm import ENDED, ON_CPUS, FakeSlurm

KILLER = Path(tests.support.__file__).parent / "kill_at_change"
WORDS = (
    *(*ON_CPUS, "cluster.nodes=1"),
    *("job=command", "job.command='bash count.sh'", "job.snapshot=none", "requeue.in_place=false"),
    "requeue.max_attempts_without_progress=99",
)
# Each attempt adds a step, and wants to be started again until the last one.
COUNT = """cd {folder}
echo "$SLURMTRAIN_ATTEMPT" >>begun
echo $(($(wc -l <steps) + 1)) >>steps
[ -e last ] || exit 75
"""
# By requeue.mode, the changes of the loop before which supervisors are killed: whether those before the ranks start or after
# it, the first one's, and how much later that of each following job, until one is not killed. A run that is never started
# again has finished in its first attempt.
POINTS = (("requeue", "before", 1, 6), ("requeue", "after", 2, 6), ("resubmit", "after", 1, 6), ("off", "after", 5, 99))


@dataclass
class Run:
    """A run whose supervisors are killed, one after the other.

    Attributes:
        mode: its requeue.mode.
        phase, first, step: where they are killed, as in POINTS.
        at: the number of the change before which the next one is killed.
        job_id: the latest job that was started.
        said: what `status` said last, when no job was left.
    """

    folder: Path
    mode: str
    phase: str
    first: int
    step: int

    at: int = field(init=False)
    slurm: FakeSlurm = field(init=False)
    process: subprocess.Popen[str] = field(init=False)
    job_id: str = ""
    said: str = ""

    def __post_init__(self) -> None:
        self.at = self.first

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

    def start_job(self, *, killed: bool) -> bool:
        """Start the job that is in the queue, as SLURM does when the one before has ended; whether there is one."""
        queued = [job for job in self.slurm.jobs if job["state"] not in ENDED]
        assert len(queued) <= 1, (self, queued)
        variables = {"PYTHONPATH": str(KILLER), "KILL_AT": str(self.at), "PHASE": self.phase} if killed else {}
        for job in queued:
            self.job_id = job["id"]
            self.process = self.slurm.start(self.job_id, task=None, **variables)
        return bool(queued)

    def go_on(self, *, killed: bool = False) -> bool:
        """Start the job that is in the queue; where there is none, do what `status` says. Whether the run has a job."""
        if self.start_job(killed=killed):
            return True
        self.said = self.types("status", self.id)
        for words in re.findall(r"`resume (.*?)`", self.said):
            self.types("resume", words)
        return self.start_job(killed=killed)

    def end_job(self) -> int:
        return self.slurm.finish(self.process, self.job_id).returncode


def play(folder: Path, plan: Iterable[tuple[str, str, int, int]]) -> int:
    """Let runs go on until they have finished, and look at each; at how many points a supervisor was killed."""
    going = runs = [Run(folder / str(place), *each) for place, each in enumerate(plan)]
    killed = 0
    for run in runs:
        run.submit()
    while going := [run for run in going if run.go_on(killed=True)]:
        going = [run for run in going if run.end_job() == -signal.SIGKILL]
        killed += len(going)
        for run in going:
            run.at += run.step
    for run in runs:
        (run.folder / "last").touch()
    while going := [run for run in runs if run.go_on()]:
        assert [run.end_job() for run in going] == [0] * len(going)
    for run in runs:
        done, begun = run.lines("steps"), run.lines("begun")
        assert done == [*range(1, len(begun) + 1)], run
        assert all(earlier < later for earlier, later in pairwise(begun)), run
        assert "finished" in run.said, run
        assert run.mode != "off" or len(done) == 1, run
    return killed


def test_a_run_whose_supervisor_is_killed_goes_on_or_is_resumed_and_does_each_step_once(tmp_path: Path) -> None:
    assert play(tmp_path, POINTS) >= 7


@pytest.mark.slow
def test_every_point_of_the_loop(tmp_path: Path) -> None:
    whole = [(mode, phase, 1, 1) for mode in ("requeue", "resubmit") for phase in ("before", "after")]
    assert play(tmp_path, (*whole, *(("off", "after", at, 99) for at in range(1, 7)))) >= 40
