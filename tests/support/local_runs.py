"""Small runs with cluster=local, started and stopped as a person would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from tests.support.gloo import wait_until
from tests.support.ranks import rank_pids
from tests.support.reading import checkpoint_tensors

# The fields of metrics.jsonl that depend on the clock, or on what an attempt has done before, or what they begin with.
TIMING = (
    *("tokens_per_s", "samples_per_s", "step_time_s", "data_wait_s", "time_", "tflops_per_gpu", "mfu"),
    *("communication_share", "memory_"),
)

# A model of the user's own, found because the working directory is on the path of the ranks. While a file `pause` lies
# beside it, each training forward pass takes longer, from the eleventh of an attempt on very long: whoever is to interfere
# within the first steps is in time, also on a machine that is held up for seconds. While a file `hold` does, none ends.
# No bit changes by it.
PACED_MODEL = """
import pathlib, time
from slurmtrain.models import Decoder

HERE = pathlib.Path(__file__).parent

class Paced(Decoder):
    passes = 0

    def forward(self, tokens):
        self.passes += self.training
        if self.training and (HERE / 'pause').exists():
            time.sleep(0.05 if self.passes <= 10 else 1)
        while self.training and (HERE / 'hold').exists():
            time.sleep(0.01)
        return super().forward(tokens)
"""


SMALL = [
    *("+cluster=local", "+experiment=smoke", "cluster.cpus_per_task=1", "cluster.srun_wait_s=20"),
    *("train.tensorboard=false", "train.log_every=1", "model._target_=paced.Paced"),
    "model.dropout=0.1",  # so that the random state matters
]


class SeenRun:
    """A run that is seen through its run directory."""

    if TYPE_CHECKING:

        @property
        def run_dir(self) -> RunDir: ...

    def attempts(self) -> list[Attempt]:
        return attempts.all_attempts(self.run_dir)

    def step(self) -> int:
        return max((int(record["step"]) for record in read_metrics(self.run_dir.metrics_file)), default=0)

    def losses(self) -> list[dict[str, Any]]:
        """metrics.jsonl without what depends on the clock."""
        return without_timing(self.run_dir.metrics_file)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.run_dir.events() if event["event"] == name]

    def logs(self) -> str:
        path = self.run_dir.path
        logs = sorted([*path.glob("slurm-*.log"), *path.glob("attempts/*/*.log")])
        return "\n".join(f"--- {log.relative_to(path)}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


class LocalRun(SeenRun):
    """A run of cluster=local, seen through the process of its launcher, too."""

    def __init__(self, project: Path, process: subprocess.Popen[str]):
        self._project, self.process = project, process
        self.output = ""

    @property
    def run_dir(self) -> RunDir:
        """The run directory; waits for it, since it is made by the launcher."""
        return wait_until(lambda: all_runs(self._project / "runs"), "in its run directory")[-1]

    def rank_pid(self, rank: int) -> int:
        return self.rank_pids()[rank]

    def rank_pids(self) -> dict[int, int]:
        """Processes of the ranks by rank: children of whichever launcher has this run."""
        return rank_pids(self.run_dir)

    def processes(self) -> list[int]:
        """Every process that runs for this run: ranks and their children."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and str(self.run_dir.path).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step or self.process.poll() is not None, f"at step {step}")
        assert self.step() >= step, self.logs()

    def wait(self, timeout_s: float = 180) -> int:
        """The launcher's exit code."""
        self.output += self.process.communicate(timeout=timeout_s)[0]
        return self.process.returncode

    def finish(self, timeout_s: float = 180) -> LocalRun:
        assert self.wait(timeout_s) == 0, self.output + self.logs()
        assert self.attempts()[-1].reason == "finished"
        return self


class Project:
    """A user's folder. The command line is called from it as a person would."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir()
        (path / "paced.py").write_text(PACED_MODEL)
        self.runs: list[LocalRun] = []

    def popen(self, *words: str, **changes: Any) -> subprocess.Popen[str]:
        both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **changes}
        return subprocess.Popen([sys.executable, "-m", *words], cwd=self.path, env=clean_environment(), **both)

    def cli(self, *words: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        process = self.popen("slurmtrain", *words)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def submit(self, *overrides: str, small: bool = True) -> LocalRun:
        """Start a run; one folder holds one, so that `last` is it."""
        words = [*(SMALL if small else []), *overrides, "submit"]
        self.runs.append(LocalRun(self.path, self.popen("slurmtrain", *words)))
        return self.runs[-1]

    def resume(self, *words: str) -> LocalRun:
        self.runs.append(LocalRun(self.path, self.popen("slurmtrain", "resume", "last", *words)))
        return self.runs[-1]

    def reap(self) -> None:
        for run in self.runs:
            run.process.terminate()  # torchrun ends its workers, a launcher its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(60)
            run.process.kill()
            run.process.wait()
            if run.process.stdout is not None:
                run.process.stdout.close()
        if all_runs(self.path / "runs"):
            for pid in LocalRun(self.path, self.runs[-1].process).processes() if self.runs else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def clean_environment() -> dict[str, str]:
    """Ours without what a job that we may run in ourselves, or another test, has left."""
    leftover = ("SLURM_", "SLURMTRAIN_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(leftover)}
    return {**mine, "OMP_NUM_THREADS": "1"}


def without_timing(metrics_file: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without what depends on the clock."""
    records = read_metrics(metrics_file)
    return [{key: value for key, value in record.items() if not key.startswith(TIMING)} for record in records]


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_bits(one: SeenRun, other: SeenRun) -> None:
    """Two finished runs are equal to the last bit: loss log, weights, optimiser, random state, place in the data, counters."""
    assert_same_run(one.run_dir.path, other.run_dir.path)


def assert_same_run(*paths: Path) -> None:
    """As `assert_same_bits`, of two run directories."""
    one, other = map(RunDir, paths)
    assert without_timing(one.metrics_file) == without_timing(other.metrics_file)
    assert_same_tensors(checkpoint_tensors(one.checkpoints), checkpoint_tensors(other.checkpoints))
    states = [read_manifest(committed(run.checkpoints)[-1]).state for run in (one, other)]
    assert json.dumps(states[0], sort_keys=True) == json.dumps(states[1], sort_keys=True)


def assert_steps_join(run: SeenRun, *, total: int) -> None:
    """Every attempt began where the one before had ended: no step was lost, none was done twice."""
    tries = run.attempts()
    ends = [0, *(attempt.last_step for attempt in tries)]
    assert [attempt.first_step for attempt in tries] == ends[:-1]
    assert ends[-1] == total
