"""A user's project in a temporary folder, and runs submitted from it: what the tests of whole jobs are made of."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import process
from tests.support.children import children
from tests.support.local_runs import SeenRun
from tests.support.ranks import rank_pids
from tests.support.reading import checkpoint_tensors
from tests.support.slurm_cluster import Cluster

# A model of the user's own. Its pause gives tests the time to interfere: in each training forward pass of the first ten of
# an attempt, five times as long in later ones, so that who is held up for seconds is in time, too, and none when a file
# `quick` lies in the run directory; while a file `hold` does, none ends. It does not change a single bit.
PACED_MODEL = """
import os, pathlib, time
from slurmtrain.models import Decoder

RUN_DIR = pathlib.Path(os.environ.get("SLURMTRAIN_RUN_DIR", "."))
QUICK, HOLD = RUN_DIR / "quick", RUN_DIR / "hold"

class Paced(Decoder):
    def __init__(self, *, pause_s=0.0, **arguments):
        super().__init__(**arguments)
        self.pause_s, self.passes = pause_s, 0

    def forward(self, tokens):
        self.passes += self.training
        if self.training and self.pause_s and not QUICK.exists():
            time.sleep(self.pause_s if self.passes <= 10 else 5 * self.pause_s)
        while self.training and HOLD.exists():
            time.sleep(0.02)
        return super().forward(tokens)
"""

# A program of the user's own, without torch, which takes seconds to start: each rank counts to a number, saves how far it
# is when it is told to stop, and goes on from there; the first one adds a line to metrics.jsonl each step. Pauses as above.
COUNTING_PROGRAM = """
import json, os, pathlib, signal, sys, time

total, pause_s = int(sys.argv[1]), float(sys.argv[2])
run_dir = pathlib.Path(os.environ["SLURMTRAIN_RUN_DIR"])
rank, quick, hold, told = os.environ["RANK"], run_dir / "quick", run_dir / "hold", []
saved = run_dir / f"count-{rank}"
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
first = step = int(saved.read_text()) if saved.exists() else 0
while step < total and not told:
    time.sleep(0 if quick.exists() else pause_s if step - first < 10 else 5 * pause_s)
    while hold.exists() and not told:
        time.sleep(0.02)
    step += 1
    if rank == "0":
        with open(run_dir / "metrics.jsonl", "a") as log:
            log.write(json.dumps({"step": step, "loss": 1 / step}) + "\\n")
saved.write_text(str(step))
sys.exit(0 if step == total else 75)
"""

SMALL = [
    "+experiment=smoke",
    "model._target_=paced.Paced",
    "model.dropout=0.1",  # so that the random state matters
    "train.log_every=1",
    "train.eval_every=20",
    "train.tensorboard=false",
    "checkpoint.every_steps=10",
    "requeue.restart_delay_s=3",
]


@dataclass(frozen=True)
class Run(SeenRun):
    """One submitted run."""

    run_dir: RunDir
    cluster: Cluster
    project: Path

    @property
    def job_id(self) -> str:
        return str(self.run_dir.info()["job_ids"][-1])

    def cli(self, *words: str, check: bool = True) -> str:
        done = self.cluster.slurmtrain(*words, cwd=self.project, check=check)
        return done.stdout + done.stderr

    def status(self) -> str:
        return self.cli("status", self.run_dir.id)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not {what} after {timeout_s} s\n{self.status()}\n{self.logs()}")
            time.sleep(0.1)

    def wait_until_done(self) -> None:
        """Until its last attempt has finished the run."""
        self.wait_until(lambda: bool(self.attempts()) and self.attempts()[-1].verdict == "done", "finished")

    def wait_for_step(self, step: int, timeout_s: float = 180) -> None:
        self.wait_until(lambda: self.step() >= step, f"at step {step}", timeout_s)

    def wait_for_attempt(self, number: int, timeout_s: float = 180) -> None:
        """Until attempt `number` trains."""
        self.wait_until(
            lambda: len(self.attempts()) >= number and self.attempts()[number - 1].stepping is not None,
            f"in attempt {number}",
            timeout_s,
        )

    def wait_for_end(self, timeout_s: float = 300) -> Attempt:
        """Until the outcome of the last attempt is final; that attempt."""
        self.wait_until(
            lambda: bool(self.attempts()) and self.attempts()[-1].verdict in ("done", "end"), "ended", timeout_s
        )
        # PREEMPTED: from 24.05 on, whatever the script's exit code, where the job is not to be requeued.
        self.cluster.wait_for(self.job_id, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED"})
        return self.attempts()[-1]

    def wait_for_checkpoint(self) -> None:
        self.wait_until(lambda: bool(committed(self.run_dir.checkpoints)), "saved")

    def await_next_start(self) -> None:
        """Until the ranks of a counting program start again, which does not end before that."""
        number, hold = len(self.attempts()) + 1, self.run_dir.path / "hold"
        hold.touch()
        self.wait_until(lambda: len(self.attempts()) == number, "started again")
        hold.unlink()

    def go_on(self) -> None:
        """Nobody is to interfere any more: without pauses."""
        (self.run_dir.path / "quick").touch()

    def finish(self, timeout_s: float = 300) -> None:
        self.go_on()
        last = self.wait_for_end(timeout_s)
        assert last.reason == "finished", f"{self.status()}\n{self.logs()}"

    def preempt_by_high(self) -> None:
        """Let a job in partition `high` take this run's nodes, as a colleague would."""
        number = len(self.attempts())
        self.cluster.submit_high(nodes=self.attempts()[-1].nodes, seconds=0.1)
        self.wait_until(lambda: self.attempts()[number - 1].verdict is not None, "preempted")

    def rank_pids(self) -> list[int]:
        """Processes of this run's ranks, in their order, on all nodes of the sandbox, which are one machine."""
        return [*rank_pids(self.run_dir).values()]

    def supervisor_pids(self) -> list[int]:
        """The batch process of its job, and then the srun of its ranks."""
        path = str(self.run_dir.path)
        supervise = [pid for pid in psutil.pids() if f" supervise {path}" in process.command_line(pid)]
        (batch,) = (
            pid for pid in supervise if process.command_line(psutil.Process(pid).ppid()).startswith("slurmstepd")
        )
        return [batch, *(pid for pid in children(batch) if process.command_line(pid).startswith("srun "))]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the newest checkpoint: weights, optimiser, random state."""
        return checkpoint_tensors(self.run_dir.checkpoints)


def counting(steps: int, pause_s: float = 0.0) -> list[str]:
    """Overrides of a run of the program that counts, which has one rank."""
    return [
        "job=command",
        f"job.command='{sys.executable} counting.py {steps} {pause_s}'",
        "cluster.nodes=1",
        "cluster.tasks_per_node=1",
        "requeue.restart_delay_s=3",
    ]


@dataclass(frozen=True)
class Project:
    """A git work tree with the user's model in it."""

    path: Path
    cluster: Cluster

    def submit(
        self, *overrides: str, nodes: str | None = None, small: bool = True, words: tuple[str, ...] = (), **env: str
    ) -> Run:
        """Submit as a person would. `nodes` pins the run, so that tests do not disturb each other; `words` are options."""
        line = [
            *self.cluster.words,
            "requeue.restart_delay_s=3",  # SLURM waits for longer where this is over before the job has left its nodes
            *(SMALL if small else []),
            *([f"+cluster.sbatch.nodelist='{nodes}'"] if nodes else []),
            *overrides,
            "submit",
            *words,
        ]
        done = self.cluster.slurmtrain(*line, cwd=self.path, env=env)
        assert "submitted run" in done.stdout, done.stdout + done.stderr
        path = next(line.strip() for line in done.stdout.splitlines() if line.startswith("  /"))
        return Run(RunDir(Path(path)), self.cluster, self.path)


def make_project(path: Path, cluster: Cluster) -> Project:
    path.mkdir()
    (path / "paced.py").write_text(PACED_MODEL)
    (path / "counting.py").write_text(COUNTING_PROGRAM)
    (path / ".gitignore").write_text("runs/\n__pycache__/\n")
    for command in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(command, cwd=path, check=True)
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "mine"],
        cwd=path,
        check=True,
        env=os.environ,
    )
    return Project(path, cluster)


def assert_counted_once(run: Run, total: int) -> None:
    """The program that counts has done every step, and none twice."""
    assert [record["step"] for record in run.losses()] == list(range(1, total + 1))
