"""The numbers of a training over several ranks: where its time went, its norms, and ranks that are slow."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.models import Decoder
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.observe.phases import HostTimer
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.signals import StopCause, StopFlag
from slurmtrain.training.hooks import TrainingHook
from slurmtrain.training.hooks.base import StepResult, TrainingState
from slurmtrain.training.trainer import Outcome
from tests.distributed.test_training import alone, fit, losses, trainer
from tests.support.gloo import GlooRanks
from tests.support.local_runs import clean_environment
from tests.support.runs import submitted_run

PARTS = "data forward_backward communication optimizer checkpoint evaluation other".split()


def logged(run_path: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(RunDir(run_path).metrics_file) if "loss" in record]


def events(run_path: Path, name: str) -> list[dict[str, Any]]:
    lines = (run_path / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


# The time of a rank on which only the work below takes any: what else this machine does has no say in it.
OWN_TIME: list[float] = []  # of this process, if it has a clock of its own


def work(seconds: float) -> None:
    """Take so long, by the clock of this rank."""
    if OWN_TIME:
        OWN_TIME[0] += seconds
    else:
        time.sleep(seconds)


def fit_by_own_clock(distributed: DistributedContext, run_path: Path, overrides: list[str]) -> None:
    OWN_TIME.append(0.0)  # the process ends with the test
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurmtrain.rank.jobs.train.HostTimer", lambda: HostTimer(lambda: OWN_TIME[0]))
        fit(distributed, run_path, overrides)


class SlowSamples:
    """Random tokens; to fetch a batch takes a while."""

    def __init__(self, seconds: float, length: int = 4096):
        self._seconds, self._length = seconds, length

    def __len__(self) -> int:
        return self._length

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        work(self._seconds)
        tokens = torch.from_numpy((indices[:, None] * 31 + np.arange(33)) % 256)
        return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


class SlowData:
    """As a `data._target_`: so many seconds for each batch, on the slow rank more."""

    def __init__(self, seconds: float = 0.0, slow: float = 0.0, valid: bool = False, **ignored: Any):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.train = SlowSamples(slow if slow and rank == 1 else seconds)
        self.valid = SlowSamples(0.05, length=16) if valid else None


class SlowModel(Decoder):
    """As a `model._target_`: each pass of training takes so many seconds, on the slow rank more."""

    def __init__(self, seconds: float = 0.0, slow: float = 0.0, **sizes: Any):
        super().__init__(**sizes)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self._seconds = slow if slow and rank == 1 else seconds

    def forward(self, tokens_BS: Tensor, *more: Any, **named: Any) -> Tensor:
        if self.training and tokens_BS.device.type != "meta":
            work(self._seconds)
        return super().forward(tokens_BS, *more, **named)


class Hook(TrainingHook):
    """As one of train.hooks."""

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        time.sleep(0.01)


DATA, MODEL = f"data._target_={__name__}.SlowData", f"model._target_={__name__}.SlowModel"
SHARDED = "cluster.tasks_per_node=2 parallel.dp_replicate=1 parallel.dp_shard=2".split()
REPLICAS = ["cluster.tasks_per_node=2"]


@pytest.mark.parametrize("layout", [REPLICAS, SHARDED], ids=["DDP", "FSDP"])
def test_the_parts_add_up_to_the_step_and_each_gets_its_own_time(
    gloo_ranks: GlooRanks, tmp_path: Path, layout: list[str]
) -> None:
    sleeps = [
        "+data.seconds=0.02",
        "+data.valid=true",
        "+model.seconds=0.04",
        f"train.hooks=[{{_target_: {__name__}.Hook}}]",
    ]
    often = ["train.steps=24", "train.log_every=8", "train.eval_every=12", "checkpoint.every_steps=10"]
    gloo_ranks(2, fit, tmp_path / "run", [DATA, MODEL, *sleeps, *often, *layout])
    records = logged(tmp_path / "run")
    assert [record["step"] for record in records] == [8, 16, 24]
    for record in records:
        parts = {part: record[f"time_{part}_s"] for part in PARTS}
        assert sum(parts.values()) == pytest.approx(record["time_total_s"], rel=0.02)
        assert min(parts.values()) >= 0
        assert parts["data"] >= 0.02 and parts["forward_backward"] >= 0.04 and parts["other"] >= 0.01 * 7 / 8
        assert (parts["evaluation"] >= 0.05 / 8) == (record["step"] == 16)
        pauses = parts["checkpoint"] + parts["evaluation"]
        share = parts["communication"] / (sum(parts.values()) - pauses)
        assert record["communication_share"] == pytest.approx(share, rel=1e-3)
    assert records[1]["time_checkpoint_s"] > 2 * records[0]["time_checkpoint_s"]


@pytest.mark.parametrize("layout", [REPLICAS, SHARDED], ids=["DDP", "FSDP"])
def test_waiting_for_a_slow_rank_is_communication_and_no_work_of_this_rank(
    gloo_ranks: GlooRanks, tmp_path: Path, layout: list[str]
) -> None:
    slow = ["+model.seconds=0.01", "+model.slow=0.31", "train.steps=8", "train.log_every=4", "train.eval_every=0"]
    gloo_ranks(2, fit, tmp_path / "run", [DATA, MODEL, *slow, *layout])
    record = logged(tmp_path / "run")[-1]
    assert record["time_communication_s"] > 0.2 > 0.15 > record["time_forward_backward_s"]
    assert record["communication_share"] > 0.4


def test_operations_per_second_follow_from_the_tokens_of_all_ranks(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    peak = ["train.steps=4", "train.log_every=4", "cluster.peak_tflops=0.5", "train.eval_every=0"]
    gloo_ranks(2, fit, tmp_path / "run", [*peak, *REPLICAS])
    record = logged(tmp_path / "run")[-1]
    tiny = Decoder(vocab_size=256, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=128)
    per_token = tiny.training_flops().of(1, 64)
    assert record["tokens_per_s_per_gpu"] == pytest.approx(record["tokens_per_s"] / 2, rel=1e-6)
    assert record["samples_per_s"] == pytest.approx(record["tokens_per_s"] / 64, rel=1e-6)
    assert record["tflops_per_gpu"] == pytest.approx(record["tokens_per_s"] / 2 * per_token / 1e12, rel=1e-6)
    assert record["mfu"] == pytest.approx(record["tflops_per_gpu"] / 0.5, rel=1e-6)
    attended = tiny.training_flops().of(1, 0) + tiny.training_flops().per_pair * 65 / 2
    assert record["mfu_attended"] / record["mfu"] == pytest.approx(attended / per_token, rel=1e-5)


def test_without_a_known_peak_there_is_no_mfu_and_the_run_says_why(tmp_path: Path) -> None:
    fit(alone(), tmp_path / "run", ["train.steps=2", "train.log_every=2"])
    (record,) = logged(tmp_path / "run")
    assert record["tflops_per_gpu"] > 0 and "mfu" not in record
    (told,) = events(tmp_path / "run", "flops counted")
    assert told["peak_tflops"] is None and "cluster.peak_tflops states one" in told["why"]


WATCHED = "train.log_every=50 train.eval_every=0 observe.straggler_every=5 checkpoint.every_steps=0".split()


@pytest.mark.parametrize(
    ("phase", "layout"),
    [("data", REPLICAS), ("forward_backward", SHARDED)],
    ids=["DDP-data", "FSDP-forward_backward"],
)
def test_a_rank_that_is_slowed_by_half_is_named_with_its_part(
    gloo_ranks: GlooRanks, tmp_path: Path, phase: str, layout: list[str]
) -> None:
    # Steps of 20 ms for data and 40 ms for the passes; on the slow rank half as much more for one of them.
    data, passes = ("0.03", "0.04") if phase == "data" else ("0.02", "0.06")
    slow = ["+data.seconds=0.02", f"+data.slow={data}", "+model.seconds=0.04", f"+model.slow={passes}"]
    gloo_ranks(2, fit_by_own_clock, tmp_path / "run", [DATA, MODEL, *slow, *WATCHED, *layout, "train.steps=40"])
    (told,) = events(tmp_path / "run", "straggler")
    assert (told["ranks"], told["phase"]) == ([1], phase)
    assert (told["step"], told["ratio"]) == (26, 1.5)  # five windows of five steps, looked at one step later


PROFILED = ["train.steps=8", "train.eval_every=3", "checkpoint.every_steps=3"]


class Asks(TrainingHook):
    """Asks for a profile after a step, as rank 0's watch does when a person has touched RUN/profile."""

    def __init__(self, run: RunDir, wishes: set[int], stop: StopFlag, stop_at: int | None):
        self._run, self._wishes = run, wishes
        self._stop, self._stop_at = stop, stop_at

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if state.step in self._wishes:
            self._stop.profile_asked.set()
        if state.step == self._stop_at:
            self._stop.request(StopCause.SIGTERM)


def profiled(
    distributed: DistributedContext,
    path: Path,
    wishes: set[int],
    overrides: list[str] | None = None,
    attempt: int = 1,
    stop_at: int | None = None,
) -> Outcome:
    path.mkdir(exist_ok=True)
    run, stop, words = RunDir(path), StopFlag(), [*PROFILED, *(overrides or [])]
    hooks: list[TrainingHook] = []
    if distributed.environment.rank == 0:
        hooks.insert(0, Asks(run, wishes, stop, stop_at))
    return trainer(distributed, path, words, stop, attempt, hooks).fit()


def profile_names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path / "profiles")) for file in (path / "profiles").rglob("*"))


def recorded_steps(trace: Path) -> int:
    with gzip.open(trace) as file:
        found = json.load(file)["traceEvents"]
    return len({each["name"] for each in found if str(each.get("name", "")).startswith("ProfilerStep#")})


def test_a_touch_profiles_the_next_steps_on_the_chosen_ranks_once_and_no_bit_changes(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    two = ["cluster.tasks_per_node=2", "observe.profile_ranks=[]"]
    gloo_ranks(2, profiled, tmp_path / "run", {2, 3}, two)
    gloo_ranks(2, profiled, tmp_path / "plain", set(), two)
    folder = tmp_path / "run" / "profiles" / "step_0000005"
    assert profile_names(tmp_path / "run") == [
        "step_0000005",
        *(f"step_0000005/rank-{rank}.{end}" for rank in range(2) for end in ("trace.json.gz", "txt")),
    ]
    assert [recorded_steps(folder / f"rank-{rank}.trace.json.gz") for rank in range(2)] == [3, 3]
    assert "aten::" in (folder / "rank-1.txt").read_text()
    (event,) = events(tmp_path / "run", "profiled")
    assert (event["first"], event["last"], event["ranks"], event["attempt"]) == (5, 7, [], 1)
    assert not (tmp_path / "run" / "profile").exists() and not (tmp_path / "plain" / "profiles").exists()
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_a_preemption_during_a_profile_saves_first_and_drops_it(tmp_path: Path) -> None:
    stopped = profiled(alone(), tmp_path / "run", {1}, stop_at=4)
    assert not stopped.finished and stopped.saved is not None
    assert not (tmp_path / "run" / "profile").exists() and not (tmp_path / "run" / "profiles").exists()


LOOP = """
import slurmtrain, torch
run = slurmtrain.init(device="cpu")
from slurmtrain.rank import api
api.LOOK_EVERY_S = 0
x = torch.ones(8, 8)
for step in range(20):
    if step in (3, 17):
        (run.directory / "profile").touch()
    x = x @ x.T / 8
    assert not slurmtrain.should_stop()
"""


def test_an_own_loop_is_profiled_between_its_calls_of_should_stop(tmp_path: Path) -> None:
    run = submitted_run(tmp_path, "cluster=local", f"job.runs_dir={tmp_path}/runs")
    number = run.new_attempt()
    variables = {"SLURMTRAIN_RUN_DIR": str(run.path), "SLURMTRAIN_ATTEMPT": str(number)}
    done = subprocess.run(
        [sys.executable, "-c", LOOP],
        env={**clean_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = run.profiles.iterdir()
    assert recorded_steps(folder / "rank-0.trace.json.gz") == 3 and not run.profile_switch.exists()
    assert "aten::mm" in (folder / "rank-0.txt").read_text()
    steps = [(each["first"], each["last"]) for each in run.events() if each["event"] == "profiled"]
    assert [last - first for first, last in steps] == [2]  # the second one was not done when the program ended
