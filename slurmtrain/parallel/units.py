"""Units: the modules whose parameters FSDP2 gathers together, and that are compiled and recomputed one by one.

A model names them by its attribute `parallel_units`, a tuple of class names; a config by `parallel.units`. If neither
does, they follow from the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from slurmtrain.errors import ConfigError

# A unit has at most this share of the model's parameters, so that little has to be gathered at a time, and at least that
# one, so that not every norm is gathered for itself.
LARGEST, SMALLEST = 0.25, 0.002


def units(model: nn.Module, class_names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the units of `model`, in order; none contains another, and none shares a parameter with a module outside it.

    Raises:
        ConfigError: no module is of such a class.
    """
    names = set(class_names) or set(getattr(model, "parallel_units", ()))
    if not names:
        return list(_by_size(model))
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ConfigError(
            f"parallel.units={sorted(names)}: {type(model).__name__} has no such modules",
            hint=f"it has {', '.join(sorted({type(module).__name__ for module in model.modules()}))}",
        )
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inner]


def _by_size(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the first modules, from the top down, that are small enough.

    No embedding is a unit: its matrix may be used for the output, too, long after its own forward pass.
    """
    total = _size(model)
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def shares(module: nn.Module) -> bool:
        own = sum(1 for child in module.modules() for _ in child.parameters(recurse=False))
        return own != sum(uses[id(parameter)] for parameter in module.parameters())

    def search(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if is_container or _size(child) > LARGEST * total or shares(child):
                yield from search(child)
            elif _size(child) >= SMALLEST * total and not isinstance(child, nn.Embedding):
                yield child

    return search(model)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
