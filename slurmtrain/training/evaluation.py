"""Evaluation: every sample of some held-out sets exactly once, over any number of ranks.

Evaluation does not affect training: afterwards the model is in training mode and sharded as before, and random states
are untouched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slurmtrain.data.loading.batches import blank
from slurmtrain.data.loading.loader import eval_batches
from slurmtrain.data.loading.samples import fetch
from slurmtrain.data.sources.protocol import DatasetSpec, MapDataset, inspect_dataset
from slurmtrain.errors import ConfigError, nearest
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.training.agreement import StopAgreement
from slurmtrain.training.eval_metrics import MetricSums
from slurmtrain.training.forward_backward import ForwardBackward


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


def not_measured(metric: str, names: Collection[str]) -> ConfigError:
    """Return the error for a metric that no evaluation gives."""
    hint = nearest(metric, names) if names else "there is no evaluation set: eval.sets.NAME._target_=..."
    return ConfigError(f"checkpoint.best_metric={metric} is not measured", hint=hint)


def _longest(dataset: DatasetSpec) -> int:
    """Return the tokens of the longest sample; a data set is only asked for each sample's length if it has no `seq_len`."""
    if dataset.seq_len is not None:
        return int(dataset.seq_len)
    if dataset.lengths is not None:
        return int(dataset.lengths(np.arange(len(dataset), dtype=np.int64)).max())
    return int(fetch(dataset, np.zeros(1, dtype=np.int64))["inputs"].shape[1])
