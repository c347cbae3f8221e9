"""Runs without a job: run directories as `submit` and a job leave them, and what a job's batch script asks of one."""

from __future__ import annotations

import contextlib
import copy
import functools
import getpass
import io
import json
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.schema import Config
from slurmtrain.launch.submit import preparing
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.reasons import Event, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.end_of_attempt import finish_attempt
from slurmtrain.supervise.platforms.slurm import SlurmJob
from slurmtrain.supervise.requeue import over_before
from tests.support.fake_slurm import FakeSlurm
from tests.support.interrupted_run import RunFiles

RUN_ID = "20260101-000000-000aa"
# Whether time is that of a test. A default argument of a module that is first imported then stays bound to a function below,
# and is the real thing again afterwards.
_TIME = SimpleNamespace(is_short=False, moment=None)


def submitted_run(project: Path, *words: str, job_ids: Sequence[str] = ()) -> RunDir:
    """A run with these overrides, submitted as these jobs."""
    alone = not any(mark in word for word in words for mark in ("$", "/", "secrets."))  # they say all by themselves
    config = copy.deepcopy(_composed(words)) if alone else compose(words)
    with preparing(config, [*words], project) as run_dir:
        run_dir.update_info(job_ids=[*job_ids])
    for job_id in job_ids:
        run_dir.event(Event.SUBMITTED, job_id=job_id)
    return run_dir


@functools.cache
def _composed(words: tuple[str, ...]) -> Config:
    """Composing takes longer than all else of a run directory."""
    return compose(words)


def add_attempt(run: RunDir, **fields: Any) -> Attempt:
    """The run's next attempt, with these fields of its record; it has started now, unless they say otherwise."""
    attempt = Attempt(run.new_attempt(), **{"started": time.time(), **fields})
    attempts.write_attempt(run, attempt)
    return attempt


def printed(*words: str, code: int = 0) -> str:
    """What a command line prints, called in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words]) == code
    return out.getvalue()


def refused(*words: str, code: int = 2) -> str:
    """What a command line that ends with this code says on stderr, called in this process."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main([*words]) == code
    return err.getvalue()


def shown(*words: str) -> Any:
    """What a command line prints with --json."""
    return json.loads(printed(*words, "--json"))


def no_waiting(
    monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[float], object] = lambda waited_s: None, *, times: float = 1.0
) -> None:
    """Let waiting take no time, while the clock says that it did.

    Args:
        meanwhile: called at each wait, with the seconds that were waited so far.
        times: a wait counts so many times as long, so that whoever looks again and again gives up after a few looks.
    """
    clock, pause, await_signal, waited = time.monotonic, time.sleep, signal.sigtimedwait, [0.0]

    def passes(seconds: float) -> None:
        waited[0] += times * seconds
        pause(min(seconds, 1e-3))  # subprocess awaits the end of a process in this way, too
        meanwhile(waited[0])

    monkeypatch.setattr(_TIME, "is_short", True)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (waited[0] if _TIME.is_short else 0.0))
    monkeypatch.setattr(time, "sleep", lambda seconds: passes(seconds) if _TIME.is_short else pause(seconds))
    monkeypatch.setattr(
        signal, "sigtimedwait", lambda awaited, s: passes(s) if _TIME.is_short else await_signal(awaited, s)
    )


def at_moment(monkeypatch: pytest.MonkeyPatch, moment: float) -> None:
    """Let it be this moment, in unix seconds, by the clock of this process."""
    clock = time.time
    monkeypatch.setattr(_TIME, "moment", moment)
    monkeypatch.setattr(time, "time", lambda: clock() if _TIME.moment is None else _TIME.moment)


def judged(run: RunDir, number: int, exit_code: int, *, in_place: bool = False) -> str:
    """What becomes of an attempt whose ranks have left with this exit code, as far as its job does not go on: the verdict.

    Args:
        in_place: the ranks may start again in the same job; then the nodes follow on which they do.
    """
    job = SlurmJob(run, None)
    outcome = finish_attempt(run, number, exit_code, job.config, job.client, can_start_again=in_place)
    if outcome.verdict not in (Verdict.REQUEUE, Verdict.RESUBMIT):
        job.carry_out(number, outcome, exit_code)
    return " ".join([outcome.verdict, *outcome.nodes])


def started(run: RunDir) -> str:
    """What a job is told to do for a run that SLURM starts: "go", "done", "end" or, with another script, "resubmit"."""
    job = SlurmJob(run, None)
    return over_before(run, job.config, job.job_id, job.client) or "go"


@dataclass
class Job:
    """The job of a run that is made of files, as its batch script asks for it; SLURM knows of it what a test says.

    What the ranks of an attempt leave in its folder, the test writes.
    """

    files: RunFiles
    slurm: FakeSlurm
    monkeypatch: pytest.MonkeyPatch
    job_id: str = "7"

    @classmethod
    def waiting(cls, folder: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, **facts: object) -> Job:
        """Job 7 of a run that this person submitted, where the verbs look for runs. The test says what SLURM knows of it."""
        monkeypatch.setenv("SLURMTRAIN_RUNS", str(folder))
        mine = {"user": getpass.getuser(), "host": socket.gethostname(), "created": time.time() - 600}
        made = cls(RunFiles(folder / "train" / RUN_ID, **{**mine, **facts}), slurm, monkeypatch)
        made.run.event(Event.SUBMITTED, job_id="7")
        return made

    @property
    def run(self) -> RunDir:
        return self.files.run

    def is_on(self, node: str = "n0", *, job_id: str | None = None, restarts: int = 0) -> None:
        """This process is the batch script's from now on, on this node."""
        self.job_id = job_id or self.job_id
        facts = {"SLURM_JOB_ID": self.job_id, "SLURM_RESTART_COUNT": str(restarts), "SLURMD_NODENAME": node}
        for name, value in {**facts, "SLURM_CLUSTER_NAME": "fake"}.items():
            self.monkeypatch.setenv(name, value)

    def attempt(self, left: Mapping[str, object] | None = None, *, opened: bool = True, **fields: Any) -> int:
        """An attempt that was claimed now, and opened by its rank 0 with these fields of its record.

        With a verdict, it has ended.

        Args:
            left: what its ranks, srun and the batch script have left in its folder: text, or a record.
            opened: False: rank 0 never came so far.
        """
        number = len(self.run.attempt_numbers()) + 1
        now = time.time()
        over = {"ended": now} if "verdict" in fields else {}
        fields = {"job": self.job_id, "nodes": ["n0", "n1"], "started": now, **over, **fields}
        self.files.attempt(number, None if fields["job"] is None else now - 1e-3, **fields)
        if not opened:
            self.run.attempt(number).record_file.unlink()
        for name, content in (left or {}).items():
            text = content if isinstance(content, str) else json.dumps(content)
            (self.run.attempt(number).path / name).write_text(text)
        return number

    def ends(self, number: int, exit_code: int, *, in_place: bool = False) -> dict[str, Any]:
        """The record of an attempt that has been judged; `printed` is the verdict, and the nodes of another one in this job."""
        told = judged(self.run, number, exit_code, in_place=in_place)
        return {**self.record(number), "printed": told}

    def starts(self, *, restarts: int = 1) -> str:
        """What a job is told to do that SLURM starts: "go", "done", "end" or "resubmit"."""
        self.monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        return started(self.run)

    def record(self, number: int) -> dict[str, Any]:
        path = self.run.attempt(number).record_file
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def commit(self, step: int) -> None:
        """A committed checkpoint."""
        folder = self.run.checkpoints / f"checkpoint_{step:07d}"
        folder.mkdir()
        (folder / "COMPLETE").touch()


def failure(sentence: str, exit_code: int = 1, rank: int = 0, **facts: object) -> dict[str, object]:
    """What a rank leaves that failed just now: its failed-RANK.json."""
    return {"rank": rank, "exit_code": exit_code, "sentence": sentence, "time": time.time(), **facts}
