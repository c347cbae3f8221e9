"""Initial parameters that do not depend on the layout: the same seed gives the same bits on one rank and on any mesh.

A parameter is cut into tiles, a fixed grid over its global shape. Each tile has a stream of random numbers of its own,
determined by (seed, the parameter's name, the tile's number) in a counter-based generator: Philox (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"). So a rank draws the tiles that its part of the parameter touches and
nothing else, in any order and by any number of threads. Numbers are drawn on the CPU also for a GPU, whose own
generator would give others.

torch's CPU generator would not do: it takes 32 bits of a seed, too few for the tiles of a large model to have streams
of their own, and what it makes of them differs with the vector unit.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from slurmtrain.checkpoint.format.manifest import Box
from slurmtrain.checkpoint.tensors import box_of, local
from slurmtrain.errors import ConfigError

# A rank draws whole tiles, so they are small; below this, setting up the generator would cost more than drawing.
TILE = (32, 1024)
# What torch adds to the names of a module's parameters when it wraps the module, and peft to those beside an adapter.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer.")


@dataclass(frozen=True)
class Normal:
    """The initial distribution of a parameter: mean + std * a standard normal number; a constant if `std` is 0."""

    mean: float = 0.0
    std: float = 0.0


def initialize(model: nn.Module, seed: int) -> None:
    """Draw all parameters of `model`, whole or sharded (DTensor), or of a stage of it with the names of the whole.

    Every module with parameters has a method `initial()` that returns the `Normal` of each of them by its name.

    Raises:
        ConfigError: a module has no such method, or has buffers.
    """
    initialize_layers(model.named_modules(), seed)


def initialize_layers(layers: Iterable[tuple[str, nn.Module]], seed: int) -> None:
    """Draw the parameters of some modules of a model, without those of their children; otherwise as `initialize`.

    Args:
        layers: the modules by their names in the whole model.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for path, module in layers:
            starts = _starts(path, module)
            for name, parameter in module.named_parameters(recurse=False):
                full_name = f"{path}.{name}" if path else name
                for wrapper in WRAPPERS:
                    full_name = full_name.replace(wrapper, "")
                _fill(parameter, starts[name], _key(seed, full_name), pool)


def _starts(path: str, module: nn.Module) -> dict[str, Normal]:
    starts: dict[str, Normal] = getattr(module, "initial", dict)()
    unknown = [name for name, _ in module.named_parameters(recurse=False) if name not in starts]
    unknown += [name for name, _ in module.named_buffers(recurse=False)]
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} {path!r} does not define how to initialise {', '.join(unknown)}",
            hint="give it a method initial(), like slurmtrain.models.initial.Linear, or the model a method initialize(seed)",
        )
    return starts


def _fill(parameter: nn.Parameter, start: Normal, key: int, pool: ThreadPoolExecutor) -> None:
    box, piece = box_of("a parameter", parameter), local(parameter.detach())
    if not start.std:
        piece.fill_(start.mean)
        return
    mean, std = np.float32(start.mean), np.float32(start.std)
    in_place = piece.device.type == "cpu" and piece.dtype == torch.float32
    values = piece.numpy() if in_place else np.empty(box.size, dtype=np.float32)

    def draw(tile: tuple[int, Box]) -> None:
        number, area = tile
        stream = np.random.Generator(np.random.Philox(key=key, counter=[0, number, 0, 0]))
        drawn = stream.standard_normal(area.size, dtype=np.float32)
        drawn *= std
        drawn += mean
        common = box.intersection(area)
        assert common is not None  # or it would not be touched
        values[common.within(box)] = drawn[common.within(area)]

    list(pool.map(draw, _tiles(box, parameter.shape)))  # as a list, for the sake of exceptions
    if not in_place:
        piece.copy_(torch.from_numpy(values))


def _key(seed: int, name: str) -> int:
    """Return a key of 128 bits for a parameter."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")


def _tiles(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Yield the tiles of a tensor of this shape that `box` touches, each with its number among all tiles."""
    extents = (*(1 for _ in shape[:-2]), *TILE[-len(shape) :])
    touched = [
        range(first // extent, -(-(first + size) // extent))
        for first, size, extent in zip(box.start, box.size, extents, strict=False)
    ]
    for place in itertools.product(*touched) if 0 not in box.size else ():
        number = 0
        for at, whole, extent in zip(place, shape, extents, strict=False):
            number = number * -(-whole // extent) + at
        start = tuple(at * extent for at, extent in zip(place, extents, strict=False))
        yield number, Box(start, tuple(map(min, extents, map(operator.sub, shape, start))))


# Layers that know how they begin.

INIT_STD = 0.02  # GPT-2 (Radford et al. 2019)


class Linear(nn.Linear):
    """A linear layer y = W x + b with W ~ normal(0, std); b starts at zero, or does not exist."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, std: float = INIT_STD):
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def initial(self) -> dict[str, Normal]:
        return {"weight": Normal(std=self.std), "bias": Normal()}

    def reset_parameters(self) -> None:
        _draw(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding of one vector per token, ~ normal(0, 0.02)."""

    def initial(self) -> dict[str, Normal]:
        return {"weight": Normal(std=INIT_STD)}

    def reset_parameters(self) -> None:
        _draw(self.weight, INIT_STD)


def _draw(weight: Tensor, std: float) -> None:
    if not weight.is_meta:  # on the meta device, drawing would only take time
        nn.init.normal_(weight, std=std)


class RMSNorm(nn.RMSNorm):
    """The norm x / sqrt(mean(x^2) + eps) * g (Zhang & Sennrich 2019, arXiv:1910.07467); g starts at one."""

    def initial(self) -> dict[str, Normal]:
        return {"weight": Normal(mean=1.0)}
