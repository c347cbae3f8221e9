"""What training knows of the ranks: this one's number, and sums and agreements over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.system.activity import waiting


@dataclass(frozen=True)
class TrainingRanks:
    """This rank and its process groups, as far as training needs to know them.

    Attributes:
        device_group: all ranks, for tensors on the model's device; None for a single rank.
        control_group: a gloo group of all ranks for small sums on the CPU; None for a single rank.
    """

    rank: int = 0
    device_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.control_group is None else self.control_group.size()

    @waiting()
    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks, in float64 on the CPU."""
        total = value.double().cpu()
        if self.control_group is not None:
            dist.all_reduce(total, group=self.control_group)
        return total

    @waiting()
    def sum_integers(self, values: Tensor) -> Tensor:
        """Return the sum of integers (int64, on the CPU) over all ranks."""
        total = values.clone()
        if self.control_group is not None:
            dist.all_reduce(total, group=self.control_group)
        return total

    @waiting()
    def most(self, values: Sequence[float]) -> list[float]:
        """Return the greatest of each of these numbers over all ranks."""
        common = torch.tensor(values, dtype=torch.float64)
        if self.control_group is not None:
            dist.all_reduce(common, dist.ReduceOp.MAX, self.control_group)
        found: list[float] = common.tolist()
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order; each is JSON."""
        return RankGroup(self.control_group).gather(lambda: value)

    @waiting()
    def all_true(self, value: bool) -> bool:
        """Return whether `value` is true on all ranks."""
        common = torch.tensor(int(value))
        if self.control_group is not None:
            dist.all_reduce(common, dist.ReduceOp.MIN, self.control_group)
        return bool(common)

    @waiting()
    def of_rank_0(self, value: int) -> int:
        """Return rank 0's value on all ranks."""
        common = torch.tensor([value])
        if self.control_group is not None:
            dist.broadcast(common, group=self.control_group, group_src=0)
        return int(common.item())
