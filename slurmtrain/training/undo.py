"""State that a forward or backward pass changes, and that is brought back when the step's update is skipped.

Running statistics (BatchNorm) have taken in the step's activations before its loss is known, and would stay NaN for good.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class RunningBuffers:
    """The buffers that forward passes change. Those that stay as they are, such as tables of positions, cost nothing.

    Which they are is seen in the first step of an attempt, among all that are saved in checkpoints. Their versions do not
    tell: a batch norm changes its statistics without counting theirs up.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        modules = list(modules)
        unsaved = {
            id(module._buffers[name])
            for root in modules
            for module in root.modules()
            for name in module._non_persistent_buffers_set
        }
        self._buffers = list(
            {id(buffer): buffer for root in modules for buffer in root.buffers() if id(buffer) not in unsaved}.values()
        )
        self._seen = False  # which of them change
        self._before: list[Tensor] = []

    def begin_step(self) -> None:
        """Keep what is there before the step."""
        self._before = [buffer.clone() for buffer in self._buffers]

    def end_step(self, skips: Tensor | None) -> None:
        """Bring back what was there where `skips`, a bool scalar on the device, is true, without waiting for it.

        None: it is known already that the step is not skipped.
        """
        pairs = list(zip(self._buffers, self._before, strict=True))
        if not self._seen:
            pairs = [(buffer, before) for buffer, before in pairs if not torch.equal(buffer, before)]
            self._buffers, self._seen = [buffer for buffer, _ in pairs], True
        if skips is not None:
            for buffer, before in pairs:
                buffer.copy_(torch.where(skips, before, buffer))
        self._before = []
