"""The norms of parameters and gradients, of all of them and of each layer, over all ranks, for any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slurmtrain.checkpoint.module_state import trained_parameters
from slurmtrain.training.state import TrainingState


class Norms:
    """Norms of the trained parameters. All ranks ask for them together; each answer waits for the device.

    Every rank adds up the squares of its own parts, where a part that n ranks hold counts 1/n on each, as in
    `parallel.gradients.clip_gradients`.
    """

    def __init__(self, state: TrainingState):
        self._ranks, self._waiting, self._parameters = state.ranks, state.phases.waiting, state.parameters
        self._sharded = state.distributed_model.mesh is not None
        named = trained_parameters({"model": state.distributed_model.model})
        names = {id(parameter): name.partition(".")[2] for name, parameter in named.items()}
        layers = [layer_of(names[id(parameter)]) for parameter in self._parameters]
        found = state.ranks.gather(list(dict.fromkeys(layers))) if self._sharded else [layers]
        self.layers = list(dict.fromkeys(str(layer) for each in found for layer in each))
        self._layer = torch.tensor([self.layers.index(layer) for layer in layers], dtype=torch.int64)
        self._share = torch.ones(len(self._parameters), dtype=torch.float64)
        if self._sharded:
            from slurmtrain.parallel.gradients import holders  # with DTensors, which take half a second to import

            twice = {id(parameter) for parameter in state.distributed_model.tied_parameters}
            counts = [holders(each) * (2 if id(each) in twice else 1) for each in self._parameters]
            self._share /= torch.tensor(counts, dtype=torch.float64)

    def of_parameters(self) -> dict[str, float]:
        """Return the norm of the parameters of each of `layers`."""
        return self._by_layer(torch._foreach_norm(self._local()) if self._parameters else [])

    def of_gradients(self, norms: Sequence[Tensor | None]) -> dict[str, float]:
        """Return the norm of the gradients of each of `layers`.

        Args:
            norms: that of each parameter's gradient, as far as this rank has it.
        """
        zero = next((torch.zeros_like(norm) for norm in norms if norm is not None), torch.zeros(()))
        return self._by_layer([zero if norm is None else norm for norm in norms])

    def _local(self) -> list[Tensor]:
        """Return this rank's part of each parameter."""
        detached: list[Any] = [parameter.detach() for parameter in self._parameters]
        return [each.to_local() for each in detached] if self._sharded else detached

    def _by_layer(self, norms: Sequence[Tensor]) -> dict[str, float]:
        squares = torch.zeros(len(self.layers), dtype=torch.float64)
        if norms:
            # One copy from the device for all of them.
            own = torch.stack(list(norms)).double().cpu().square() * self._share
            squares.index_add_(0, self._layer, own)
        if self._sharded:
            with self._waiting():
                squares = self._ranks.sum(squares)
        return dict(zip(self.layers, squares.sqrt().tolist(), strict=True))


def whole(norms: dict[str, float]) -> float:
    """Return the norm of all layers together."""
    return math.sqrt(sum(norm * norm for norm in norms.values()))


def layer_of(name: str) -> str:
    """Return the layer of a parameter: `blocks.3` of `blocks.3.attention.query.weight`, `norm` of `norm.weight`."""
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if numbered is not None:
        return ".".join(parts[: numbered + 1])
    return ".".join(parts[:-1]) or name
