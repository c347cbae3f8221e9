"""Ranks as processes of this machine: bare ones that meet through gloo, and whole local runs started by the command line."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmtrain.checkpoint.commit import committed, read_manifest
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.observe import read_metrics
from slurmtrain.rundir import RunDir, all_runs
from slurmtrain.runtime import attempts, signals
from slurmtrain.runtime.attempts import Attempt
from slurmtrain.runtime.environment import LAUNCHER_VARIABLE, Environment
from slurmtrain.runtime.world import join
from tests.reading import checkpoint_tensors

# Importing torch takes seconds. The fork server does it once, stays single-threaded, and each rank is a fork of it:
# cheap, and without a lock that some thread of the test process held.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["pytest", "slurmtrain.runtime.training_job", "slurmtrain.runtime.main", "slurmtrain.config.compose"]
# What DDP, FSDP and Hydra load when they are first used, seconds for each rank.
PRELOADED += ["hydra.utils", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
CONTEXT.set_forkserver_preload(PRELOADED)

TIMING = ("tokens_per_s", "step_time_s", "data_wait_s")  # the fields of metrics.jsonl that depend on the clock


@dataclass(frozen=True)
class Ending:
    """How a rank process ended: with a value, with a traceback, or without a word."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = 0


class Ranks:
    """Processes that were started together."""

    def __init__(self, directory: Path, size: int, function: Callable[..., Any], args: Sequence[Any], only: list[int]):
        self.directory = directory
        self._readers: dict[int, multiprocessing.connection.Connection] = {}
        self._processes: dict[int, Any] = {}
        self._add(size, function, args, only)

    def _add(self, size: int, function: Callable[..., Any], args: Sequence[Any], only: list[int]) -> None:
        for rank in only:
            reader, writer = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_be_rank, args=(writer, rank, size, self.directory, function, args))
            process.start()
            writer.close()
            self._readers[rank], self._processes[rank] = reader, process

    def pid(self, rank: int) -> int:
        return int(self._processes[rank].pid)

    def endings(self, timeout_s: float = 180) -> list[Ending]:
        """Wait for all; in the order of ranks. The first traceback ends the wait for the others."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, Ending] = {}
        by_reader = {reader: rank for rank, reader in self._readers.items()}
        while len(found) < len(self._readers):
            waiting = [reader for reader, rank in by_reader.items() if rank not in found]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(self._readers.keys() - found.keys())} are not done after {timeout_s} s"
            for reader in ready:
                rank = by_reader[reader]  # type: ignore[index]
                try:
                    found[rank] = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
                except EOFError:  # it was killed
                    self._processes[rank].join(60)
                    found[rank] = Ending(exit_code=self._processes[rank].exitcode)
        return [found[rank] for rank in sorted(found)]

    def results(self, timeout_s: float = 180) -> list[Any]:
        """What the function returned on each rank; the first failure fails the test with that rank's traceback."""
        endings = self.endings(timeout_s)
        for rank, ending in enumerate(endings):
            if ending.error is not None:
                pytest.fail(f"rank {rank}:\n{ending.error}", pytrace=False)
            assert ending.exit_code == 0, f"rank {rank} ended with {ending.exit_code}"
        return [ending.value for ending in endings]

    def reap(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()


def _be_rank(
    writer: multiprocessing.connection.Connection,
    rank: int,
    size: int,
    directory: Path,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    os.environ.update(rank_variables(rank, size))
    try:
        ending = Ending(function(directory, *args))
    except BaseException:
        ending = Ending(error=traceback.format_exc())
    # Plain bytes: torch would send tensors as handles to shared memory that is gone when this process is.
    writer.send_bytes(pickle.dumps(ending))
    writer.close()
    os._exit(0)


def rank_variables(rank: int, size: int) -> dict[str, str]:
    """What cluster=local tells its ranks."""
    return {
        LAUNCHER_VARIABLE: "local",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }


def cluster_config(timeout_s: int = 120) -> ClusterConfig:
    return ClusterConfig(network_interface="lo", rendezvous_timeout_s=timeout_s, collective_timeout_s=120)


def _joined(directory: Path, function: Callable[..., Any], *args: Any) -> Any:
    world = join(cluster_config(), "cpu", Environment.detect(), directory, signals.arm())
    value = function(world, *args)
    world.leave_together()
    return value


@dataclass
class GlooRanks:
    """`gloo_ranks(n, function, *args)`: n processes meet, each calls function(world, *args); what they returned."""

    tmp_path: Path
    started: list[Ranks] = field(default_factory=list)

    def __call__(self, n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 180) -> list[Any]:
        return self.start(n, _joined, function, *args).results(timeout_s)

    def start_joined(self, n: int, function: Callable[..., Any], *args: Any) -> Ranks:
        """As a call, without waiting for the end."""
        return self.start(n, _joined, function, *args)

    def start(
        self,
        n: int,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        directory: Path | None = None,
    ) -> Ranks:
        """Start `ranks` (default: all) of a world of n, without making them meet: function(directory, *args)."""
        directory = directory or self.tmp_path / f"world-{len(self.started)}"
        directory.mkdir(exist_ok=True)
        self.started.append(Ranks(directory, n, function, args, list(range(n) if ranks is None else ranks)))
        return self.started[-1]


@pytest.fixture
def gloo_ranks(tmp_path: Path) -> Iterator[GlooRanks]:
    ranks = GlooRanks(tmp_path)
    try:
        yield ranks
    finally:
        for started in ranks.started:
            started.reap()


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 120) -> Any:
    """Poll a file or a process: there is no event to await. Returns the condition's first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not {what} after {timeout_s} s"
        time.sleep(0.02)
    return value


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
    "+cluster=local",
    "+experiment=smoke",
    "cluster.cpus_per_task=1",
    "cluster.srun_wait_s=20",
    "train.tensorboard=false",
    "train.log_every=1",
    "model._target_=paced.Paced",
    "model.dropout=0.1",  # so that the random state matters
]


class LocalRun:
    """A run of cluster=local, seen through its run directory and the process of its launcher."""

    def __init__(self, project: Path, process: subprocess.Popen[str]):
        self._project, self.process = project, process
        self.output = ""

    @property
    def run_dir(self) -> RunDir:
        """The run directory; waits for it, since it is made by the launcher."""
        return wait_until(lambda: all_runs(self._project / "runs"), "in its run directory")[-1]

    def attempts(self) -> list[Attempt]:
        return attempts.all_attempts(self.run_dir)

    def step(self) -> int:
        return max((int(record["step"]) for record in read_metrics(self.run_dir.metrics_file)), default=0)

    def losses(self) -> list[dict[str, Any]]:
        """metrics.jsonl without what depends on the clock."""
        records = read_metrics(self.run_dir.metrics_file)
        return [{key: value for key, value in record.items() if key not in TIMING} for record in records]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.run_dir.events() if event["event"] == name]

    def rank_pid(self, rank: int) -> int:
        return self.rank_pids()[rank]

    def rank_pids(self) -> dict[int, int]:
        """Processes of the ranks by rank: children of whichever launcher has this run."""
        found: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"train" not in words or str(self.run_dir.path).encode() not in words:
                    continue
                pairs = (entry / "environ").read_bytes().split(b"\0")
                rank = int(dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)[b"RANK"])
            except (OSError, KeyError):
                continue
            found[rank] = min(found.get(rank, 1 << 30), int(entry.name))  # data workers are later children
        return found

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

    def logs(self) -> str:
        logs = sorted(self.run_dir.attempts.glob("*/*.log"))
        return "\n".join(f"--- {log.parent.name}/{log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


class Project:
    """A user's folder. The command line is called from it as a person would."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir()
        (path / "paced.py").write_text(PACED_MODEL)
        self.runs: list[LocalRun] = []

    def popen(self, *words: str, **changes: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=self.path,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **changes,
        )

    def cli(self, *words: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "slurmtrain", *words],
            cwd=self.path,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

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


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path / "project")
    try:
        yield project
    finally:
        project.reap()


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_bits(one: LocalRun, other: LocalRun) -> None:
    """Loss log, weights, optimiser and random state of two finished runs are equal to the last bit."""
    assert one.losses() == other.losses()
    assert_same_tensors(checkpoint_tensors(one.run_dir.checkpoints), checkpoint_tensors(other.run_dir.checkpoints))
    states = [read_manifest(committed(run.run_dir.checkpoints)[-1]).state for run in (one, other)]
    assert json.dumps(states[0], sort_keys=True) == json.dumps(states[1], sort_keys=True)


def assert_steps_join(run: LocalRun, *, total: int) -> None:
    """Every attempt began where the one before had ended: no step was lost, none was done twice."""
    tries = run.attempts()
    ends = [0, *(attempt.last_step for attempt in tries)]
    assert [attempt.first_step for attempt in tries] == ends[:-1]
    assert ends[-1] == total
