"""Two ranks that talk over NCCL: every layout computes what one GPU computes, and what happens to a rank is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmtrain.config.schema import Config
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.addresses import hold_port
from slurmtrain.runtime.distributed_context import DistributedContext, init_distributed
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals
from slurmtrain.system.signals import StopCause, StopFlag
from slurmtrain.training.hooks import TrainingHook
from slurmtrain.training.seeds import use_deterministic_kernels
from slurmtrain.training.state import StepResult, TrainingState
from tests.distributed.test_training import losses, trainer
from tests.parity.matrix import ROWS, Row, compare, config_of, reference_name, train_row, train_rows
from tests.support.gloo import GlooRanks, cluster_config
from tests.support.local_runs import clean_environment
from tests.support.reading import checkpoint_tensors

# NCCL refuses two ranks on one GPU of a host, so each of these is told that it is on a host of its own; then they talk over
# the loopback. This is slow, because the GPU runs the kernels of one process at a time, but it is all of NCCL that one GPU
# can show.


def nccl_variables(rank: int) -> dict[str, str]:
    """What a rank is told so that it is alone on its node."""
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
    }


def joined_by_nccl(directory: Path, function: Callable[..., Any], *args: Any) -> Any:
    """As `tests.support.gloo.joined`, on the GPU."""
    os.environ.update(nccl_variables(int(os.environ["RANK"])))
    stop_flag = signals.install_signal_handlers()
    world = init_distributed(cluster_config(), "cuda", Environment.detect(), directory, stop_flag)
    value = function(world, *args)
    world.leave_together()
    return value


NAMES = (
    *("DDP 2", "FSDP 2", "FSDP 2, full checkpointing", "FSDP 2, bfloat16", "FSDP 2, packed"),
    *("TP 2", "TP 2 without sequence parallel", "CP 2", "CP 2, ulysses", "PP 2, 1F1B, accumulation"),
)
LAYOUTS = [row for row in ROWS if row.name in NAMES]


def alone_on_gpu(folder: Path, config: Config) -> None:
    train_row(DistributedContext(Environment(source="single"), torch.device("cuda", 0)), folder, config)


def test_each_layout_computes_over_nccl_what_one_gpu_computes(ranks: GlooRanks, tmp_path: Path) -> None:
    assert len(LAYOUTS) == len(NAMES)
    for model in {row.model for row in LAYOUTS}:
        alone_on_gpu(tmp_path / reference_name(model), config_of(Row("alone", 1, (), model)))
    configs = {row.name: config_of(row) for row in LAYOUTS}
    ranks.start(2, joined_by_nccl, train_rows, tmp_path, configs).results(timeout_s=240)
    found = {row.name: (compare(tmp_path, row), row.bound) for row in LAYOUTS}
    for name, (differences, bound) in found.items():
        print(f"{name:<44}", {key: f"{value:.1e}" for key, value in differences.items()}, f"bound {bound:.0e}")
    assert [name for name, (differences, bound) in found.items() if max(differences.values()) > bound] == []


class StopsAt(TrainingHook):
    def __init__(self, flag: StopFlag, step: int):
        self._flag, self._step = flag, step

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if state.step == self._step:
            self._flag.request(StopCause.SIGTERM)


SHARDED = [
    *("cluster.tasks_per_node=2", "parallel.dp_replicate=1", "parallel.dp_shard=2", "train.steps=16"),
    *("train.deterministic=true", "parallel.param_dtype=bfloat16", "train.eval_every=8", "checkpoint.every_steps=5"),
]


def stopped_at(distributed: DistributedContext, path: Path, step: int | None, attempt: int) -> bool:
    """On every rank; rank 1 alone is told to stop."""
    use_deterministic_kernels()
    flag = StopFlag()
    hooks = [StopsAt(flag, step)] if step is not None and distributed.environment.rank == 1 else []
    path.mkdir(exist_ok=True)
    return trainer(distributed, path, SHARDED, stop=flag, attempt=attempt, hooks=hooks).fit().finished


def test_a_stop_on_one_rank_saves_on_both_and_the_resumed_run_has_the_same_bits(
    ranks: GlooRanks, tmp_path: Path
) -> None:
    runs: list[tuple[str, int | None, int]] = [("whole", None, 1), ("stopped", 7, 1), ("stopped", None, 2)]
    ended = [ranks.start(2, joined_by_nccl, stopped_at, tmp_path / name, *how).results() for name, *how in runs]
    assert ended == [[True, True], [False, False], [True, True]]
    assert losses(tmp_path / "whole") == losses(tmp_path / "stopped")
    one, other = (checkpoint_tensors(tmp_path / name / "checkpoints") for name in ("whole", "stopped"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


FAULTY = """
import os, pathlib, time
from slurmtrain.models import Decoder

HERE = pathlib.Path(__file__).parent

def dig():
    while True:
        pass

class Faulty(Decoder):
    passes = 0

    def forward(self, tokens):
        self.passes += self.training
        if self.training:
            time.sleep(0.3)
        if self.training and self.passes == 8 and os.environ["RANK"] == "1":
            (HERE / "there").write_text(str(os.getpid()))
            dig()
        return super().forward(tokens)
"""


class Pair:
    """A training of two ranks, started by hand in a folder."""

    def __init__(self, folder: Path, *overrides: str):
        self.folder = folder
        (folder / "faulty.py").write_text(FAULTY)
        self._port = hold_port(None, "here")
        words = [
            "+experiment=smoke",
            "train.device=cuda",
            "train.log_every=1",
            "train.steps=40",
            "train.tensorboard=false",
        ]
        words += ["parallel.dp_replicate=1", "parallel.dp_shard=2", *overrides]
        port = str(self._port.getsockname()[1])
        self.processes = []
        for rank in range(2):
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "slurmtrain", *words, "train"],
                    cwd=folder,
                    env={**clean_environment(), **variables, **nccl_variables(rank), "TORCHELASTIC_RUN_ID": "pair"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def ended(self, timeout_s: float) -> list[tuple[int, str]]:
        """Exit code and output of each rank."""
        until = time.monotonic() + timeout_s
        return [_ended(process, until) for process in self.processes]

    @property
    def run_dir(self) -> RunDir:
        return all_runs(self.folder / "runs")[-1]

    def reap(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _ended(process: subprocess.Popen[str], until: float) -> tuple[int, str]:
    output = process.communicate(timeout=max(1.0, until - time.monotonic()))[0]
    return process.returncode, output


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[list[Pair]]:
    made: list[Pair] = []
    try:
        yield made
    finally:
        for pair in made:
            pair.reap()


def test_a_rank_that_hangs_is_named_with_the_collective_that_nccl_waits_in(tmp_path: Path, pairs: list[Pair]) -> None:
    words = ["model._target_=faulty.Faulty", "watchdog.min_s=4", "watchdog.factor=1", "watchdog.first_step_s=60"]
    pairs.append(pair := Pair(tmp_path, *words))
    ended = pair.ended(120)
    print(*(f"--- rank {rank}: {code}\n{output[-2500:]}" for rank, (code, output) in enumerate(ended)), sep="\n")
    assert all(code not in (0, 75, 78) for code, _ in ended)
    attempt = pair.run_dir.attempt(1)
    page = (attempt.path / "hang.md").read_text()
    print(page)
    assert "rank 1" in page and "dig" in page


def test_a_rank_that_is_killed_ends_the_other_one_soon(tmp_path: Path, pairs: list[Pair]) -> None:
    pairs.append(pair := Pair(tmp_path, "model._target_=faulty.Faulty", "watchdog.min_s=60"))
    until = time.monotonic() + 90
    while not (tmp_path / "there").exists():
        assert time.monotonic() < until and pair.processes[1].poll() is None
        time.sleep(0.05)
    time.sleep(1)
    os.kill(int((tmp_path / "there").read_text()), signal.SIGKILL)
    killed = time.monotonic()
    (code, output), _ = pair.ended(60)
    print(f"rank 0 left {time.monotonic() - killed:.1f} s after rank 1 was killed, with {code}\n{output[-2500:]}")
    assert code not in (0, 75, 78) and time.monotonic() - killed < 30
