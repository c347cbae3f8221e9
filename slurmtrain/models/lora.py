"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685) in a model, through the package `peft` (extra `lora`).

Beside each chosen linear layer W stands B A, of rank r; the layer computes x W + alpha / r * (x A) B. Only A and B are
trained, and only they are in checkpoints: everything else comes from where the model's weights come from, each time.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slurmtrain.checkpoint.tensors import module_state
from slurmtrain.config.known_models import OUTPUTS
from slurmtrain.config.schema import LoraConfig
from slurmtrain.errors import ConfigError, nearest
from slurmtrain.models.initial import Normal, initialize_layers

BASE = "base_layer."  # what peft adds to the names of a layer's own parameters
ADAPTER = "default"  # peft's name of an adapter that has no other


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Put adapters beside linear layers of `model`, and freeze all other parameters.

    `draw_adapters` then gives the adapters their values.

    Args:
        model: on the meta device, or with its weights; changed in place.
        config: with r > 0.

    Raises:
        ConfigError: peft is not installed, or a name of `target_modules` is that of no linear layer, or of one whose
            weights another module has, too.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("lora.r needs peft, which is not installed", hint="pip install 'slurmtrain[lora]'") from None
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = _targets(layers, config.target_modules)
    _check_not_tied(model, targets)
    settings = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        init_lora_weights=False,
    )
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    with torch.device("meta" if on_meta else "cpu"):
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    for name, layer in _adapters(model):
        start: Any = functools.partial(_start, layer.in_features if "lora_A" in name.split(".") else 0)
        layer.initial = start
    model.register_state_dict_post_hook(_keep_adapters)


def draw_adapters(model: nn.Module, seed: int) -> None:
    """Give the adapters of `model`, whole or sharded, their initial values, which are the same on every layout.

    B begins with zeros, so that the model computes at first what it did without them.
    """
    initialize_layers(_adapters(model), seed)


def has_adapters(model: nn.Module) -> bool:
    """Return whether `add_adapters` was called for `model`."""
    return _keep_adapters in model._state_dict_hooks.values()


def without_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters and the saved buffers of a model with adapters, by the names that they have without.

    A tied parameter has all of its names.
    """
    not_saved = {id(each._buffers[name]) for each in model.modules() for name in each._non_persistent_buffers_set}
    return {
        name_without_adapters(name): tensor
        for name, tensor in module_state(model).held.items()
        if not _is_adapter(name) and id(tensor) not in not_saved
    }


def name_without_adapters(name: str) -> str:
    """Return the name that a frozen parameter has in a model without adapters."""
    return name.replace(BASE, "")


def _targets(layers: list[str], wanted: list[str]) -> list[str]:
    """Return the full names of the layers that get adapters."""
    if not wanted:
        return [name for name in layers if name.rpartition(".")[2] not in OUTPUTS]
    chosen: list[str] = []
    for target in wanted:
        found = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not found:
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"lora.target_modules: the model has no linear layer {target!r}", hint=nearest(target, known)
            )
        chosen += found
    return chosen


def _check_not_tied(model: nn.Module, targets: list[str]) -> None:
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in targets:
        if owners[id(model.get_submodule(name).weight)] > 1:
            raise ConfigError(
                f"lora.target_modules: {name} has the same weights as another layer (an embedding): adapters beside it "
                "could not be merged into one of the two for an export",
                hint=f"leave {name.rpartition('.')[2]} out of lora.target_modules",
            )


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and _is_adapter(name):
            yield name, module


def _is_adapter(name: str) -> bool:
    return not {"lora_A", "lora_B"}.isdisjoint(name.split("."))


def _start(fan_in: int) -> dict[str, Normal]:
    """Return the initial distribution of an adapter's layer; B, for which `fan_in` is 0, begins with zeros.

    A has the standard deviation of peft's own kaiming_uniform_(a=sqrt(5)), 1 / sqrt(3 fan_in).
    """
    return {"weight": Normal(std=1 / math.sqrt(3 * fan_in) if fan_in else 0.0)}


def _keep_adapters(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Remove from a model's state what is not trained, so that checkpoints are small."""
    for name in [name for name in state_dict if not _is_adapter(name)]:
        del state_dict[name]
