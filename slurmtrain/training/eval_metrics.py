"""Metrics on held-out samples: sums over batches, and the numbers computed from them.

Sums are added up over all batches and ranks before anything is divided, so that every number is that of the whole set,
regardless of how its samples are distributed over ranks. A metric of your own is any object with

    sums(logits, targets, batch) -> Tensor [K]   of a batch: logits [B, S, V]; targets int64 [B, S], of which -100 does not
                                                 count; and the batch itself, with all that the data set gives
    value(sums) -> float, or name -> float       of the sums over the whole set, float64 [K]

named by its `_target_`: +eval.metrics.top5._target_=my_package.TopFive gives valid_top5. Whole numbers are added
exactly, up to 2**53. With parallel.cp each rank calls it with its part of every sequence; with pipelines, with a micro
batch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from slurmtrain.data.loading.batches import IGNORED_TARGET, Batch
from slurmtrain.errors import ConfigError
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.parallel.vocabulary import vocabulary_argmax, whole_vocabulary
from slurmtrain.training.forward_backward import loss_sum


class Metric(Protocol):
    """A metric of the user's own, as described above."""

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
        self._note([len(vector) for vector in vectors])
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

    def _note(self, sizes: list[int]) -> None:
        for name, before, size in zip(self._own, self.sizes[3:], sizes[3:], strict=True):
            if before not in (0, size):
                raise ConfigError(
                    f"eval.metrics.{name} gave {before} sums for one batch and {size} for another",
                    hint="sums() returns the same number of values for every batch",
                )
        self.sizes = sizes
