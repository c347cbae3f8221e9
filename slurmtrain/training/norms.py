"""The norm of all trained parameters over all ranks, for any layout."""

from __future__ import annotations

import math
from typing import Any

import torch

from slurmtrain.training.state import TrainingState


class ParameterNorm:
    """Measures the norm of the trained parameters. All ranks call it together; each answer waits for the device.

    Every rank adds up the squares of its own parts, where a part that n ranks hold counts 1/n on each, as in
    `parallel.gradients.clip_gradients`.
    """

    def __init__(self, state: TrainingState):
        self._ranks, self._waiting, self._parameters = state.ranks, state.phases.waiting, state.parameters
        self._sharded = state.distributed_model.mesh is not None
        self._share = torch.ones(len(self._parameters), dtype=torch.float64)
        if self._sharded:
            from slurmtrain.parallel.gradients import holders  # with DTensors, which take half a second to import

            twice = {id(parameter) for parameter in state.distributed_model.tied_parameters}
            counts = [holders(each) * (2 if id(each) in twice else 1) for each in self._parameters]
            self._share /= torch.tensor(counts, dtype=torch.float64)

    def measure(self) -> float:
        """Return the norm."""
        detached: list[Any] = [parameter.detach() for parameter in self._parameters]
        local = [each.to_local() for each in detached] if self._sharded else detached
        squares = torch.zeros((), dtype=torch.float64)
        if local:  # one copy from the device for all of them
            squares = (torch.stack(torch._foreach_norm(local)).double().cpu().square() * self._share).sum()
        if self._sharded:
            with self._waiting():
                squares = self._ranks.sum(squares)
        return math.sqrt(squares.item())
