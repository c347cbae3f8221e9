"""Training on a GPU: it never waits for it in a step, its parts add up, and an interruption changes no bit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from slurmtrain.observe.metrics import read_metrics
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import Environment
from slurmtrain.training.hooks import TrainingHook
from slurmtrain.training.hooks.base import StepResult, TrainingState
from tests.distributed.test_numbers import profiled, recorded_steps
from tests.distributed.test_training import losses, trainer
from tests.support.local_runs import Project, assert_same_bits, assert_steps_join

ON_GPU = ["train.device=cuda", "parallel.param_dtype=bfloat16", "train.eval_every=0", "checkpoint.every_steps=0"]
LARGER = [
    "model.dim=256",
    "model.n_layers=4",
    "model.max_seq_len=256",
    "data.seq_len=256",
    "train.global_batch_size=16",
]


def alone() -> DistributedContext:
    return DistributedContext(Environment(source="single"), torch.device("cuda", 0))


class NoWaiting(TrainingHook):
    """Lets each operation that waits for the GPU raise an error, in steps that are not logged."""

    def __init__(self, log_every: int):
        self._log_every, self.steps = log_every, 0

    def before_step(self, state: TrainingState) -> None:
        # The first steps allocate, and choose kernels.
        if state.step >= self._log_every and (state.step + 1) % self._log_every:
            torch.cuda.set_sync_debug_mode("error")
            self.steps += 1

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="plain"),
        pytest.param(["train.micro_batch_size=4"], id="accumulation"),
        pytest.param(["parallel.compile=true"], id="compiled"),
        pytest.param(["parallel.param_dtype=null"], id="float32"),
    ],
)
def test_no_step_waits_for_the_gpu(tmp_path: Path, overrides: list[str]) -> None:
    hook = NoWaiting(10)
    words = [*ON_GPU, *LARGER, "train.steps=40", "train.log_every=10", "observe.straggler_every=5", *overrides]
    try:
        trainer(alone(), tmp_path / "run", words, hooks=[hook]).fit()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hook.steps == 27 and losses(tmp_path / "run")[40] < losses(tmp_path / "run")[10]


def test_the_parts_of_a_step_add_up_and_memory_and_speed_are_known(tmp_path: Path) -> None:
    words = [*ON_GPU, *LARGER, "train.steps=60", "train.log_every=20"]
    trainer(alone(), tmp_path / "run", words).fit()
    last = [each for each in read_metrics(RunDir(tmp_path / "run").metrics_file) if "time_total_s" in each][-1]
    parts = sum(value for name, value in last.items() if name.startswith("time_") and name != "time_total_s")
    assert parts == pytest.approx(last["time_total_s"], rel=0.02)
    assert last["time_forward_backward_s"] > 0 and last["time_optimizer_s"] > 0
    assert 0 < last["memory_allocated_gb"] <= last["memory_reserved_gb"] < 4
    assert 0 < last["mfu_attended"] < last["mfu"] < 1


def test_a_profile_has_the_kernels_of_the_gpu_and_changes_no_bit(tmp_path: Path) -> None:
    words = [*ON_GPU, "train.deterministic=true"]
    profiled(alone(), tmp_path / "run", {2}, words)
    profiled(alone(), tmp_path / "plain", set(), words)
    (folder,) = (tmp_path / "run" / "profiles").iterdir()
    assert sorted(each.name for each in folder.iterdir()) == ["rank-0.trace.json.gz", "rank-0.txt"]
    with gzip.open(folder / "rank-0.trace.json.gz") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert "kernel" in kinds and recorded_steps(folder / "rank-0.trace.json.gz") == 2
    assert "CUDA" in (folder / "rank-0.txt").read_text()
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


DETERMINISTIC = [
    *("train.deterministic=true", "train.device=cuda", "cluster.gpus_per_node=1", "train.steps=24"),
    *("checkpoint.every_steps=8", "data.seq_len=256", "model.max_seq_len=256", "model.dim=128"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "null"])
def test_a_run_that_was_stopped_equals_one_that_was_not_to_the_last_bit(tmp_path: Path, dtype: str) -> None:
    words = [*DETERMINISTIC, f"parallel.param_dtype={dtype}"]
    whole, stopped = Project(tmp_path / "whole"), Project(tmp_path / "stopped")
    try:
        undisturbed = whole.submit(*words)
        (stopped.path / "pause").touch()
        run = stopped.submit(*words)
        run.wait_for_step(11)
        run.process.terminate()
        assert run.wait() == 75, run.output + run.logs()
        (stopped.path / "pause").unlink()
        resumed = stopped.resume().finish()
        assert_same_bits(resumed, undisturbed.finish())
        assert_steps_join(resumed, total=24)
    finally:
        whole.reap()
        stopped.reap()


def test_a_step_that_does_not_fit_into_the_gpu_is_said_in_a_sentence(project: Project) -> None:
    words = ["train.device=cuda", "model.dim=2048", "model.max_seq_len=16384", "data.seq_len=16384", "requeue.mode=off"]
    run = project.submit(*words, "train.global_batch_size=512", "train.steps=2", "cluster.gpu_memory_gb=null")
    assert run.wait() in (1, 78)  # 1: other tests have memory of the same GPU
    assert "Traceback" not in run.output, run.output[-3000:]
    assert "rank 0 on" in run.output and "ran out of GPU memory in step 1: " in run.output
    assert "a smaller train.micro_batch_size leaves the global batch as it is" in run.output
