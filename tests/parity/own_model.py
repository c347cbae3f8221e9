"""A model of one's own, which brings its plans along. FSDP finds its units by their sizes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(x).relu())
        return x + down


class OwnModel(nn.Module):
    def __init__(self, **ignored: Any):
        super().__init__()
        self.tokens: nn.Module | None = nn.Embedding(256, 32)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(4)})
        self.head: nn.Module | None = nn.Linear(32, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)

    def tensor_plan(self, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "layers.*.up": ColwiseParallel(),
            "layers.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Shard(-1)),
        }

    def pipeline_part(self, numbers: Sequence[int], of: int) -> nn.Module:
        part = copy.copy(self)
        part._modules = dict(self._modules)
        each = 4 // of
        kept = [str(number * each + index) for number in numbers for index in range(each)]
        part.layers = nn.ModuleDict({name: self.layers[name] for name in kept})
        part.tokens = self.tokens if 0 in numbers else None
        part.head = self.head if of - 1 in numbers else None
        return part
