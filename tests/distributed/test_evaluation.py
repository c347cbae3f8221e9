"""Evaluation: every sample once, the same numbers on any layout, and no trace of it afterwards."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.data.loading.batches import IGNORED_TARGET, Batch
from slurmtrain.data.sources.protocol import inspect_source
from slurmtrain.errors import ConfigError
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.jobs.build_model import build, build_model, distribute_model, fill
from slurmtrain.rank.jobs.train import build_evaluator
from slurmtrain.runs import attempts
from slurmtrain.system import signals
from slurmtrain.system.signals import StopCause
from slurmtrain.training.agreement import StopAgreement
from slurmtrain.training.forward_backward import build_forward_backward
from tests.distributed.test_training import alone, fit, go_on, hold, losses
from tests.support.gloo import GlooRanks, wait_until
from tests.support.local_runs import SMALL, Project


class Ragged:
    """Sequences with very different numbers of targets that count, which say which sample they are."""

    num_bytes = 1000

    def __init__(self, samples: int = 23, length: int = 64, **ignored: Any):
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(256, (self._length + 1,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        targets[1 + (index * index) % self._length :] = IGNORED_TARGET
        return {"inputs": tokens[:-1], "targets": targets, "sample": torch.tensor(index)}


class Packed(Ragged):
    """Rows of several documents, which do not see each other."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        documents = torch.arange(self._length, dtype=torch.int32) // (7 + index)
        return {**super().__getitem__(index), "documents": documents}


class Uneven(Ragged):
    """Samples of different length."""

    seq_len: Any = 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample, length = super().__getitem__(index), 20 + index * 5 % 29
        return {**sample, "inputs": sample["inputs"][:length], "targets": sample["targets"][:length]}


# Among them one of shorter sequences, of a length that two ranks cannot share.
SETS = {"short": Ragged(5, 33), "packed": Packed(5), "uneven": Uneven(5), "other": Ragged(1)}


class RaggedText:
    """As a `data._target_`."""

    def __init__(self, **ignored: Any):
        self.train = self.valid = Ragged()


class UnevenText:
    """As a `data._target_` that does not say how long its samples are."""

    valid = None

    def __init__(self, **ignored: Any):
        self.train = Uneven()
        vars(self.train)["seq_len"] = None


class TopFive:
    """A user's own metric: whole logits, and the batch that they are of."""

    def sums(self, logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        counts = targets != IGNORED_TARGET
        assert logits.shape == (*targets.shape, 256) and batch["inputs"].shape == targets.shape
        hits = (logits.topk(5, dim=-1).indices == targets[..., None]).any(dim=-1) & counts
        return torch.stack([hits.sum(), counts.sum(), (counts.sum(dim=1) * batch["sample"]).sum()])

    def value(self, sums: Tensor) -> dict[str, float]:
        hits, count, samples = sums.tolist()
        return {"hits": hits / count, "samples": samples}


SETTINGS = [
    "experiment=smoke",
    f"data._target_={__name__}.RaggedText",
    "train.micro_batch_size=2",
    "train.global_batch_size=12",
    "model.tie_embeddings=false",
    "eval.metrics.accuracy=true",
    f"+eval.metrics.top5._target_={__name__}.TopFive",
    *(
        f"+eval.sets.{name}={{_target_: {__name__}.{type(rows).__name__}, samples: {len(rows)}, length: {rows._length}}}"
        for name, rows in SETS.items()
    ),
]


def experiment(*overrides: str) -> Config:
    return compose([*SETTINGS, *overrides])


def measure(distributed: DistributedContext, overrides: list[str]) -> dict[str, float]:
    """The metrics of an untrained model. It is left as it was, also when one rank was told to stop in the middle."""
    torch.manual_seed(5)
    config = experiment(*overrides)
    dims = parallel_dims_of(config)
    laid, *_ = distribute_model(config, dims, distributed)
    forward_backward = build_forward_backward(
        laid, dims.micro_batches(config.train), dims.micro_batch_size(config.train)
    )
    told = signals.StopFlag()
    stop = StopAgreement(told, distributed.control_group)
    source = inspect_source(build("data", config.data))
    evaluator = build_evaluator(config, laid, forward_backward, source, distributed, stop)
    evaluator.prepare()
    before = torch.get_rng_state()
    measured = evaluator.evaluate()
    assert measured is not None
    assert evaluator.evaluate() == measured
    if distributed.environment.rank == distributed.environment.world_size - 1:
        told.request(StopCause.SIGTERM)
    assert evaluator.evaluate() is None
    assert laid.model.training and torch.equal(torch.get_rng_state(), before)
    if laid.mesh is not None:
        assert all(isinstance(parameter, DTensor) for parameter in laid.model.parameters())
    return measured


@pytest.fixture(scope="module")
def by_one() -> dict[str, float]:
    return measure(alone(), [])


def test_each_sample_counts_once(by_one: dict[str, float]) -> None:
    """Against sums over the samples, one by one."""
    config = experiment()
    model = fill(build_model(config), torch.device("cpu"), config.train.seed).eval()
    for name, dataset in {**SETS, "valid": Ragged()}.items():
        loss = count = correct = hits = samples = 0.0
        for index in range(len(dataset)):
            sample = dataset[index]
            with torch.no_grad():
                more = {"documents": sample["documents"][None]} if "documents" in sample else {}
                logits = model(sample["inputs"][None], **more)[0].double()
            targets = sample["targets"]
            counts = targets != IGNORED_TARGET
            loss += F.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="sum").item()
            correct += int((logits.argmax(dim=-1) == targets)[counts].sum())
            hits += int((logits.topk(5).indices == targets[:, None]).any(dim=-1)[counts].sum())
            count += int(counts.sum())
            samples += int(counts.sum()) * index
        found = {key.removeprefix(f"{name}_"): value for key, value in by_one.items() if key.startswith(f"{name}_")}
        assert found.pop("loss") == pytest.approx(loss / count, rel=1e-6)
        assert found.pop("perplexity") == pytest.approx(math.exp(loss / count), rel=1e-5)
        assert found.pop("bits_per_byte") == pytest.approx(loss / math.log(2) / 1000, rel=1e-6)
        exact = {"tokens": count, "accuracy": correct / count, "top5_hits": hits / count, "top5_samples": samples}
        assert found == exact


# Loss sums of n = 64 tokens x 2 sequences in float32, in another order or from matrices added up in another order, differ
# by about sqrt(n) * 2**-24 relative (Higham 2002, section 2.8), and are added up in float64.
TOLERANCE = 4 * 128**0.5 * 2**-24


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "3 replicas": (3, []),
    "FSDP": (2, ["parallel=fsdp"]),
    "TP": (2, ["parallel.tp=2"]),
    "TP alone": (2, ["parallel.tp=2", "parallel.sequence_parallel=false"]),
    "PP": (2, ["parallel.pp=2"]),
    "CP": (2, ["parallel.cp=2"]),
}
PIPELINE = ["parallel.pp=2", "cluster.tasks_per_node=2", "train.micro_batch_size=4", "train.steps=3"]
TOO_LONG = f"+eval.sets.longer={{_target_: {__name__}.Ragged, samples: 1, length: 65}}"
REFUSED = {
    "sequences of 65 tokens": [TOO_LONG],
    "the stages of the pipeline are set up for the": ["train.eval_every=0", f"data._target_={__name__}.UnevenText"],
}


def measure_all(distributed: DistributedContext, size: int) -> dict[str, dict[str, float]]:
    """By layout of so many ranks."""
    alike = {name: words for name, (ranks, words) in LAYOUTS.items() if ranks == size}
    return {name: measure(distributed, [*words, f"cluster.tasks_per_node={size}"]) for name, words in alike.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_the_numbers_are_those_of_one_process(gloo_ranks: GlooRanks, by_one: dict[str, float], size: int) -> None:
    first, *others = gloo_ranks(size, measure_all, size)
    assert all(each == first for each in others)
    for layout, found in first.items():
        assert found.keys() == by_one.keys()
        for name, value in by_one.items():
            if name.endswith(("_loss", "_perplexity", "_bits_per_byte")):
                bound = TOLERANCE * (6 if "perplexity" in name else 1)
                assert found[name] == pytest.approx(value, rel=bound), (layout, name)
            else:
                assert found[name] == value, (layout, name)


@pytest.mark.parametrize("refused", REFUSED)
def test_a_pipeline_refuses_sequences_of_another_length_than_it_is_set_up_for(
    gloo_ranks: GlooRanks, tmp_path: Path, refused: str
) -> None:
    for ending in gloo_ranks.start_joined(2, fit, tmp_path / "run", [*PIPELINE, *REFUSED[refused]]).endings():
        assert refused in str(ending.error)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="'none' holds no samples"):
        measure(alone(), [f"+eval.sets.none={{_target_: {__name__}.Ragged, samples: 0}}"])


@pytest.mark.parametrize(("metric", "known"), [("valid_accuracy", True), ("valid_acuracy", False)])
def test_checkpoints_are_kept_by_any_metric_that_is_measured(tmp_path: Path, metric: str, known: bool) -> None:
    words = ["train.steps=2", "train.eval_every=1", "checkpoint.every_steps=1", "eval.metrics.accuracy=true"]
    words += ["checkpoint.keep_best=1", f"checkpoint.best_metric={metric}", "checkpoint.best_mode=max"]
    if not known:
        with pytest.raises(ConfigError, match="best_metric=valid_acuracy is not measured") as refused:
            fit(alone(), tmp_path / "run", words)
        assert "valid_accuracy" in (refused.value.hint or "")
        assert losses(tmp_path / "run") == {}  # before the first step
        return
    fit(alone(), tmp_path / "run", words)
    saved = [read_manifest(path).metrics for path in committed(tmp_path / "run" / "checkpoints")]
    logged = losses(tmp_path / "run", "valid_accuracy")
    assert [metrics["valid_accuracy"] for metrics in saved] == [logged[1], logged[2]]


# By the verb, on this machine.

WAITING = """
import pathlib, time, torch

HERE = pathlib.Path(__file__).parent

class Rows:
    def sums(self, logits, targets, batch):
        (HERE / "measuring").touch()
        while (HERE / "hold").exists():
            time.sleep(0.01)
        return torch.tensor(float(len(targets)))

    def value(self, sums):
        return float(sums)
"""


def test_an_evaluation_that_is_stopped_begins_again_and_gives_what_the_training_has_measured(project: Project) -> None:
    run = project.submit(*SMALL, "train.steps=4", "train.eval_every=4").finish()
    (project.path / "waiting.py").write_text(WAITING)
    hold(project)
    words = ["evaluate", "last", "eval.metrics.rows._target_=waiting.Rows", "--json"]
    here = project.popen("slurmtrain", *words)
    wait_until((project.path / "measuring").exists, "measuring")
    (evaluation,) = run.run_dir.all_evaluations()
    rank_0 = attempts.read_attempt(evaluation, 1).pid
    assert rank_0 is not None
    os.kill(rank_0, signal.SIGTERM)
    wait_until((evaluation.attempt(1).path / "stop.json").exists, "stopping")
    go_on(project)
    output = here.communicate(timeout=180)[0]
    assert here.returncode == 0, output
    tries = attempts.all_attempts(evaluation)
    assert [(attempt.reason, attempt.verdict) for attempt in tries] == [("asked", "requeue"), ("finished", "done")]
    measured = evaluation.measured()
    logged = next(record for record in run.losses() if "valid_loss" in record)
    assert measured.pop("valid_rows") >= 138  # samples; and the rows of blank rounds
    assert measured == {name: value for name, value in logged.items() if name != "step"}
    (line,) = read_metrics(run.run_dir.evaluations_file)
    assert line["evaluation"] == evaluation.path.name
    # Once more is what it was, without measuring; and anew when that is asked for.
    words.remove("--json")
    kept = project.popen("slurmtrain", *words).communicate(timeout=180)[0]
    assert "--again measures anew" in kept and len(attempts.all_attempts(evaluation)) == 2
    anew = project.popen("slurmtrain", *words, "--again").communicate(timeout=180)[0]
    assert "measuring the weights of" in anew and "--again" not in anew and len(attempts.all_attempts(evaluation)) == 3
    lines = read_metrics(run.run_dir.evaluations_file)
    assert lines[0] == line and {**lines[1], "time": line["time"]} == line and lines[1]["time"] > line["time"]
