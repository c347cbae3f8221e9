"""The dry run of a layout: the real model on the real mesh, on one process, without GPUs, other ranks or memory.

torch's fake process group stands for all ranks, and tensors on the meta device have shapes but no elements. The steps
of training are done here, too, up to the first step: build, distribute, make the optimiser and let it make its state.

`python -m slurmtrain.runtime.jobs.dry_run` takes a config's values as JSON and prints the answer, for a caller that imports no
torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from slurmtrain.config.frozen import to_config
from slurmtrain.config.parallel_dims import ParallelDims, parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import EnvironmentMismatchError, SlurmtrainError
from slurmtrain.parallel.parallelize import parallelize
from slurmtrain.planner.fit import memory_of
from slurmtrain.planner.memory import StageMemory
from slurmtrain.runtime.jobs.build_model import build
from slurmtrain.training.optim import build_optimizer


def dry_run(config: Config) -> list[StageMemory]:
    """Return the memory of the first rank of each stage of the pipeline.

    Raises:
        ConfigError: the model does not support such a layout.
        EnvironmentMismatchError: the model cannot be built here.
    """
    dims = parallel_dims_of(config)
    expected = memory_of(config, dims)
    found = []
    for stage in range(dims.pp):
        rank = stage * dims.world_size // dims.pp
        model = _distributed_model(config, dims, rank)
        held = [_local(tensor) for tensor in [*model.parameters(), *model.buffers()]]
        trained = nn.ParameterList(_local(each) for each in model.parameters() if each.requires_grad)
        found.append(
            StageMemory(
                stage,
                rank,
                parameters=_bytes(held),
                gradients=_bytes(trained),
                optimizer=_bytes(_optimizer_state(trained, config)),
                gathered=expected[stage].gathered if expected else None,
                activations=expected[stage].activations if expected else None,
            )
        )
    return found


def _distributed_model(config: Config, dims: ParallelDims, rank: int) -> nn.Module:
    """Return the part of the model that `rank` holds."""
    model = _build(config)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
    try:
        return parallelize(
            model,
            replace(config.parallel, compile=False),  # compilation would change no size
            dims,
            rank=rank,
            device=torch.device("cpu"),
            group=None,  # plain replicas stay what they are: DistributedDataParallel would ask the others
            fill=lambda held: held,
        ).model
    finally:
        dist.destroy_process_group()


def _build(config: Config) -> nn.Module:
    """Build the model on the meta device, even one that is otherwise built whole."""
    try:
        with torch.device("meta"):
            model: nn.Module = build("model", config.model)
        if config.lora.r:
            from slurmtrain.models.lora import add_adapters

            add_adapters(model, config.lora)
    except Exception as error:
        raise EnvironmentMismatchError(
            f"model._target_={config.model['_target_']} cannot be built here: {error}"
        ) from None
    return model


def _optimizer_state(parameters: nn.ParameterList, config: Config) -> list[Tensor]:
    """Return what the optimiser keeps after a step, computed on pieces of parameters since DTensors are slow at it."""
    optimizer = build_optimizer(parameters, config.optim)
    for group in optimizer.param_groups:
        group["fused"] = False  # there is no such kernel for the meta device
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return [value for state in optimizer.state.values() for value in state.values()]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def main() -> int:
    """Read a config from stdin and print the answer as JSON."""
    answer: dict[str, Any]
    try:
        answer = {"stages": [dataclasses.asdict(stage) for stage in dry_run(to_config(json.load(sys.stdin)))]}
    except SlurmtrainError as error:
        answer = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
