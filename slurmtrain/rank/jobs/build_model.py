"""From a config to objects: those of classes that it names by `_target_`, and this rank's part of a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurmtrain.checkpoint.restore.restorer import Restored
from slurmtrain.checkpoint.tensors import local
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, SlurmtrainError, why_not_built
from slurmtrain.parallel.parallelize import DistributedModel, parallelize
from slurmtrain.planner.flops import ModelFlops
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.seeds import seed_everything
from slurmtrain.system.node_copies import with_copies
from slurmtrain.weights.pretrained import check_config, load_pretrained, weights_path


def distribute_model(
    config: Config, dims: ParallelDims, distributed: DistributedContext
) -> tuple[DistributedModel, int, int | None, ModelFlops | None]:
    """Distribute the model.

    Returns:
        The distributed model, and of the whole model the number of parameters, the vocabulary size, if it has one, and the
        operations of its training, if it can count them.
    """
    model = build_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = flops_of(model)
    distributed_model = parallelize(
        model,
        config.parallel,
        dims,
        rank=distributed.environment.rank,
        device=distributed.device,
        group=distributed.device_group,
        fill=lambda held: _filled(held, distributed.device, config),
    )
    weights = weights_path(config.model)
    if config.lora.r and weights is not None:  # which no checkpoint holds
        _read_weights(config, distributed_model.model, weights)
    return distributed_model, parameters, getattr(model, "vocab_size", None), flops


def flops_of(model: nn.Module) -> ModelFlops | None:
    """Return the operations of training a whole model, on any device; None: they cannot be counted.

    Ours say them by `training_flops()`; a model of one's own by `flops_per_token(seq_len)`: operations of one token's forward
    and backward pass with dense attention, which is a constant and a multiple of `seq_len`.
    """
    known: Any = model
    if hasattr(known, "training_flops"):
        found: ModelFlops | None = known.training_flops()
        return found
    if not hasattr(known, "flops_per_token"):
        return None
    one, two = known.flops_per_token(1), known.flops_per_token(2)
    return ModelFlops(2 * one - two, two - one)


def _filled(model: nn.Module, device: torch.device, config: Config) -> nn.Module:
    filled = fill(model, device, config.train.seed)
    if config.lora.r:
        from slurmtrain.models.lora import draw_adapters

        draw_adapters(filled, config.train.seed)
    return filled


def build_model(config: Config) -> nn.Module:
    """Build the model: on the meta device, without any memory, if it has a method `initialize(seed)`; else whole.

    Raises:
        ConfigError: it cannot be built from the config.
    """
    from hydra.utils import get_object

    try:
        late = hasattr(get_object(config.model["_target_"]), "initialize")
    except Exception:
        late = False  # `build` says what is wrong
    seed_everything(config.train.seed)
    with torch.device("meta") if late else nullcontext():
        model: nn.Module = build("model", config.model)
    if config.lora.r:
        from slurmtrain.models.lora import add_adapters

        add_adapters(model, config.lora)
    return model


def fill(model: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """Move the model to `device`; one on the meta device gets its values there, each rank its own part of them.

    One that does not draw its values itself gets zeros, and begins with the weights of a folder or a checkpoint.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(device)

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:  # a buffer that was computed when the model was built
            return tensor.to(device)
        if type(tensor) in (torch.Tensor, nn.Parameter):  # as empty_like, which first imports sympy for a meta tensor
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return torch.empty_like(tensor, device=device)

    tied = _tied(model)
    model._apply(empty)
    for (first, name), *others in tied:  # _apply makes a parameter of each
        for module, other in others:
            module._parameters[other] = first._parameters[name]
    initialize: Callable[[int], None] | None = getattr(model, "initialize", None)
    if initialize is not None:
        initialize(seed)
    else:
        for parameter in model.parameters():
            local(parameter.detach()).zero_()
    return model


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that has several."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def pretrained(config: Config) -> Callable[[nn.Module], Restored] | None:
    """Return what fills a model with the weights that the config names; None: it names none, or has them already."""
    folder = weights_path(config.model)
    if folder is None or config.lora.r:
        return None
    return partial(_read_weights, config, folder=folder)


def _read_weights(config: Config, model: nn.Module, folder: Path) -> Restored:
    check_config(config.model, folder)
    load_pretrained(model, folder)
    return Restored(folder, 0, "", as_start=True)


def build(group: str, values: dict[str, Any]) -> Any:
    """Instantiate a config group's `_target_`, which reads the copies of this node where cluster.stage has made some.

    Raises:
        ConfigError: it cannot be imported, or does not take these arguments.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(with_copies(values), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, SlurmtrainError):
            raise cause from None
        if cause is not None and not isinstance(cause, (ImportError, TypeError, AttributeError)):
            raise cause from None  # the class itself failed: its own traceback says more
        target = str(values.get("_target_"))
        raise ConfigError(
            f"{group}._target_={target}: {why_not_built(error, target)}",
            hint=f"is it importable from {sys.path[0] or 'the working directory'}, and are its arguments spelled correctly?",
        ) from None
