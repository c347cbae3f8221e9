"""Evaluation: every sample of some held-out sets exactly once, over any number of ranks.

Evaluation does not affect training: afterwards the model is in training mode and sharded as before, and random states
are untouched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slurmtrain.config.schema import CheckpointConfig
from slurmtrain.data.loading.batches import IGNORED_TARGET, Batch, blank, fetch
from slurmtrain.data.loading.loader import eval_batches
from slurmtrain.data.sources.protocol import DatasetSpec, MapDataset, inspect_dataset
from slurmtrain.errors import ConfigError, nearest
from slurmtrain.observe.phases import Phase
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.parallel.vocabulary import vocabulary_argmax, whole_vocabulary
from slurmtrain.runs.reasons import Event
from slurmtrain.training.agreement import StopAgreement
from slurmtrain.training.forward_backward import ForwardBackward, loss_sum
from slurmtrain.training.hooks.base import TrainingHook, TrainingState


class Evaluator:
    """Evaluates a distributed model on named sets.

    Args:
        distributed_model: the model on this rank.
        forward_backward: runs batches through the model.
        sets: data sets by name; a metric of a set is called <set>_<metric>. May be empty.
        measures: the metrics, and the sums that they need.
        control_group: a gloo group of all ranks; None for a single one.
        stop_check: asked in every round whether to stop.

    Raises:
        ConfigError: a set is empty.
    """

    def __init__(
        self,
        distributed_model: DistributedModel,
        forward_backward: ForwardBackward,
        sets: Mapping[str, MapDataset],
        measures: MetricSums,
        *,
        control_group: dist.ProcessGroup | None,
        stop_check: StopAgreement,
    ):
        self._distributed_model, self._forward_backward = distributed_model, forward_backward
        self.sets = {name: inspect_dataset(dataset, f"the evaluation set {name!r}") for name, dataset in sets.items()}
        self._measures, self._control_group, self._stop_check = measures, control_group, stop_check
        for name, dataset in self.sets.items():
            if not len(dataset):
                raise ConfigError(
                    f"the evaluation set {name!r} holds no samples", hint="give it more data, or shorter sequences"
                )

    def prepare(self) -> None:
        """Set the model up for the length of the sets' samples, before the first evaluation but after the first training pass.

        Raises:
            ConfigError: sequences are too long for this layout.
        """
        if self.sets:
            self._forward_backward.prepare_evaluation(max(map(_longest, self.sets.values())))

    def check_best_metric(self, metric: str) -> None:
        """Check, before anything is computed, that an evaluation can give this metric.

        Raises:
            ConfigError: no evaluation can give it.
        """
        names = [
            f"{name}_{measure}"
            for name, dataset in self.sets.items()
            for measure in self._measures.names(dataset.num_bytes)
        ]
        if metric not in names and not metric.startswith(tuple(f"{name}_" for name in names)):
            raise not_measured(metric, names)

    def evaluate(self) -> dict[str, float] | None:
        """Return every metric of every set, the same on all ranks; None when a stop was requested before it was done."""
        found: dict[str, float] = {}
        with self._evaluating():
            for name, dataset in self.sets.items():
                total = self._total(dataset)
                if total is None:
                    return None
                values = self._measures.values(total, dataset.num_bytes)
                found |= {f"{name}_{metric}": value for metric, value in values.items()}
        return found

    def _total(self, dataset: DatasetSpec) -> Tensor | None:
        """Return all sums of a set, over all ranks; None when a stop was requested."""
        batch_size, dims = self._forward_backward.eval_batch_size, self._distributed_model.dims
        share = -(-len(dataset) // dims.dp)
        batches = eval_batches(dataset, batch_size, dims.dp_rank(self._distributed_model.rank), dims.dp)
        own: Tensor | None = None
        # The same number of rounds on all ranks, so that they can agree on stopping in each, and since a model that is
        # shared needs all ranks for a forward pass.
        for _ in range(-(-share // batch_size)):
            self._stop_check.begin()
            batch = next(batches, None)
            sums = self._forward_backward.evaluate(
                batch or blank(fetch(dataset, np.zeros(1, dtype=np.int64))), self._measures
            )
            if sums is not None:
                own = sums.cpu() if own is None else own + sums.cpu()
            if self._stop_check.finish().stop:
                return None
        return self._summed(own)

    def _summed(self, own: Tensor | None) -> Tensor:
        """Return the sum over all ranks.

        Ranks that measured nothing, such as all but the last stage's, learn the number of sums here.
        """
        if self._control_group is None:
            assert own is not None
            return own
        sizes = torch.tensor(self._measures.sizes)
        dist.all_reduce(sizes, dist.ReduceOp.MAX, self._control_group)
        self._measures.sizes = sizes.tolist()
        total = own if own is not None else torch.zeros(sum(self._measures.sizes), dtype=torch.float64)
        dist.all_reduce(total, group=self._control_group)
        return total

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        device = self._distributed_model.device
        self._distributed_model.model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                yield
        finally:
            self._distributed_model.model.train()
            if self._distributed_model.mesh is not None:
                from slurmtrain.parallel.sharded import reshard  # with FSDP, which takes half a second to import

                reshard(self._distributed_model.stages)


class EvaluationJobs(Protocol):
    """The jobs that evaluate checkpoints (eval.mode=job), so that training goes on."""

    def ask(self, step: int) -> None:
        """Have the checkpoint of this step evaluated once it is committed."""

    def close(self, *, finished: bool) -> None:
        """End with training: if all steps are done (`finished`), wait until every evaluation is submitted."""


class Evaluation(TrainingHook):
    """Evaluates every train.eval_every steps and after the last one. On all ranks.

    It does so while training waits, or by another job, from the step's checkpoint.

    Args:
        by_jobs: by another job (eval.mode=job).
        jobs: rank 0's, which ask for that; None on the others.
        baseline: (name, nats per token) of a simple model on the same text, shown beside every validation loss.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        checkpoint: CheckpointConfig,
        *,
        by_jobs: bool = False,
        jobs: EvaluationJobs | None = None,
        baseline: tuple[str, float] | None = None,
    ):
        self._evaluator = evaluator
        self._by_jobs, self._jobs, self._baseline = by_jobs, jobs, baseline
        self._best_metric = checkpoint.best_metric if checkpoint.keep_best else None
        if self._best_metric is not None:
            evaluator.check_best_metric(self._best_metric)

    def start(self, state: TrainingState) -> None:
        if not self._by_jobs:
            self._evaluator.prepare()

    def close(self, state: TrainingState) -> None:
        if self._jobs is not None:
            self._jobs.close(finished=state.finished)

    def evaluate(self, state: TrainingState) -> None:
        """Evaluate at `state.step`, unless it was done, or training stops."""
        step = state.step
        if not (self._evaluator.sets and step > state.evaluated_at) or state.stopping:
            return
        if self._by_jobs:
            state.evaluated_at, state.save_requested = step, True
            if self._jobs is not None:
                self._jobs.ask(step)
        else:
            with state.phases.within(Phase.EVALUATION):
                self._evaluate(state)

    def _evaluate(self, state: TrainingState) -> None:
        """Measure every held-out sample; a stop that is requested before it is done ends training."""
        began = time.monotonic()
        measured = self._evaluator.evaluate()
        if measured is None:
            state.stopping = True
            return
        if self._best_metric is not None and self._best_metric not in measured:
            raise not_measured(self._best_metric, measured)
        step = state.step
        state.metrics, state.evaluated_at = measured, step
        state.hooks.evaluated(step, measured)
        state.hooks.event(Event.EVALUATED, {"step": step, "seconds": round(time.monotonic() - began, 3)})
        for name in self._evaluator.sets:
            what = "validation" if name == "valid" else name
            beside = f" ({self._baseline[0]}: {self._baseline[1]:.4f})" if self._baseline and name == "valid" else ""
            state.hooks.message(f"step {step}: {what} loss {measured[f'{name}_loss']:.4f} nats per token{beside}")
        state.throughput.start()


def not_measured(metric: str, names: Collection[str]) -> ConfigError:
    """Return the error for a metric that no evaluation gives."""
    hint = nearest(metric, names) if names else "there is no evaluation set: eval.sets.NAME._target_=..."
    return ConfigError(f"checkpoint.best_metric={metric} is not measured", hint=hint)


def _longest(dataset: DatasetSpec) -> int:
    """Return the tokens of the longest sample; of a data set that does not say so, those of its first one."""
    if dataset.seq_len is not None:
        return int(dataset.seq_len)
    return int(fetch(dataset, np.zeros(1, dtype=np.int64))["inputs"].shape[1])


# Metrics.


class Metric(Protocol):
    """A metric of the user's own, named by its `_target_`: +eval.metrics.top5._target_=my_package.TopFive gives valid_top5.

    Sums are added up over all batches and ranks before anything is divided, so that every number is that of the whole set,
    regardless of how its samples are distributed over ranks. Whole numbers are added exactly, up to 2**53. With
    parallel.cp each rank calls it with its part of every sequence; with pipelines, with a micro batch at a time.

        sums(logits, targets, batch) -> Tensor [K]   of a batch: logits [B, S, V]; targets int64 [B, S], of which -100 does
                                                     not count; and the batch itself, with all that the data set gives
        value(sums) -> float, or name -> float       of the sums over the whole set, float64 [K]
    """

    def sums(self, logits: Tensor, targets: Tensor, batch: Batch) -> Tensor: ...

    def value(self, sums: Tensor) -> float | Mapping[str, float]: ...


class MetricSums:
    """All sums of a batch as one vector, float64 [K]: loss, tokens, correct guesses, then the sums of the user's metrics.

    Args:
        built_in: which of perplexity, bits_per_byte and accuracy are wanted besides the loss.
        own: the user's metrics by name.
    """

    def __init__(self, distributed_model: DistributedModel, built_in: Sequence[str], own: Mapping[str, Metric]):
        self._distributed_model, self._built_in, self._own = distributed_model, built_in, own
        self.sizes = [1, 1, 1, *(0 for _ in own)]  # how many sums each has; unknown until a batch was measured

    def __call__(self, logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        """Return the sums of a batch, float64 [K], on its device.

        `logits` may be this rank's share of the vocabulary.
        """
        counts = targets != IGNORED_TARGET
        found = [
            loss_sum(self._distributed_model, logits, targets),
            counts.sum(),
            self._correct(logits, targets, counts),
        ]
        if self._own:
            whole = (
                whole_vocabulary(logits, self._distributed_model.group("tp"))
                if self._distributed_model.dims.tp > 1
                else logits
            )
            found += [metric.sums(whole, targets, batch) for metric in self._own.values()]
        vectors = [torch.as_tensor(sums, device=targets.device).double().reshape(-1) for sums in found]
        sizes = [len(vector) for vector in vectors]
        if self.sizes[-1] and sizes != self.sizes:
            raise ConfigError(
                f"eval.metrics: sums() has given {self.sizes[3:]} numbers for a batch, and {sizes[3:]} for another",
                hint="as many for every batch; they are added up over all batches and ranks",
            )
        self.sizes = sizes
        return torch.cat(vectors)

    def values(self, total: Tensor, num_bytes: int | None) -> dict[str, float]:
        """Return the metrics by name, computed from the sums over a whole set.

        Args:
            num_bytes: bytes of text that the set's targets stand for; None: not known.
        """
        loss, tokens, correct, *own = total.split(self.sizes)
        count = max(1, int(tokens.item()))
        values = {"loss": loss.item() / count, "tokens": int(tokens.item())}
        if "perplexity" in self._built_in:
            values["perplexity"] = (loss / count).exp().item()
        if "bits_per_byte" in self._built_in and num_bytes:
            values["bits_per_byte"] = loss.item() / math.log(2) / num_bytes
        if "accuracy" in self._built_in:
            values["accuracy"] = correct.item() / count
        for (name, metric), sums in zip(self._own.items(), own, strict=True):
            value = metric.value(sums)
            named = (
                {f"{name}_{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
            )
            values |= {key: float(each) for key, each in named.items()}
        return values

    def names(self, num_bytes: int | None) -> list[str]:
        """Return the names of the metrics.

        A user's metric that gives several numbers is listed by its own name, which is followed by `_` in the name of
        each number.

        Args:
            num_bytes: as in `values`.
        """
        built_in = [name for name in self._built_in if name != "bits_per_byte" or num_bytes]
        return ["loss", "tokens", *built_in, *self._own]

    def _correct(self, logits: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        if "accuracy" not in self._built_in:
            return torch.zeros(())
        tp = self._distributed_model.dims.tp
        guesses = vocabulary_argmax(logits, self._distributed_model.group("tp")) if tp > 1 else logits.argmax(dim=-1)
        return ((guesses == targets) & counts).sum()
