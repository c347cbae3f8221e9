"""Tensor parallelism: every matrix is divided among the ranks of a group, by columns and then by rows.

The method is that of Shoeybi et al. 2019, arXiv:1909.08053. With sequence parallelism, the activations between the
matrices are divided, too, along the sequence (Korthikanti et al. 2022, arXiv:2205.05198).

A plan names the style of each module. The Decoder's plan is here; a model of your own provides one by a method

    tensor_plan(sequence_parallel: bool) -> {name of a module: torch's ParallelStyle}

whose output layer leaves the logits divided along the vocabulary (`ColwiseParallel(output_layouts=Shard(-1))`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Turn the parameters of `model`, the same on all ranks, into DTensors on `mesh`, by its plan.

    Raises:
        ConfigError: the model has no plan, or its plan leaves parameters out.
    """
    parallelize_module(model, mesh, plan_of(model, sequence_parallel=sequence_parallel))
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise ConfigError(
            f"parallel.tp={mesh.size()}: the plan of {type(model).__name__} says nothing of {', '.join(left[:5])}",
            hint="every parameter must be sharded or replicated by a style of tensor_plan()",
        )


def plan_of(model: nn.Module, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Return the plan of a model: its own, or that of the Decoder.

    Raises:
        ConfigError: the model has none.
    """
    own = getattr(model, "tensor_plan", None)
    if own is not None:
        plan: dict[str, ParallelStyle] = own(sequence_parallel)
        return plan
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"parallel.tp: {type(model).__name__} has no plan for tensor parallelism",
            hint="give it a method tensor_plan(), see slurmtrain/parallel/tensor.py, or set parallel.tp=1",
        )
    stream = Shard(1) if sequence_parallel else Replicate()  # how the residual stream [B, S, W] lies
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "blocks.*.attention_norm": Replicated(stream),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.query_norm": Replicated(Shard(2)),  # [B, S, H, D], cut by heads
        "blocks.*.attention.key_norm": Replicated(Shard(2)),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=stream),
        "blocks.*.feed_forward_norm": Replicated(stream),
        "blocks.*.feed_forward": PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate()),
        "blocks.*.feed_forward.gate": ColwiseParallel(),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=stream),
        # A tied output is no module: its matrix is the embedding's, a DTensor, and wants one to be multiplied with.
        "norm": Replicated(stream, output=Replicate() if model.output is None else None),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1)),
    }
    names = [name for name, _ in model.named_modules()]
    return {pattern: style for pattern, style in plan.items() if any(fnmatchcase(name, pattern) for name in names)}


class Replicated(ParallelStyle):
    """A style in which every rank has all parameters of the module, and applies them to its own part of the activations.

    Args:
        placement: placement of the input, and of the output.
        output: placement of the output as a DTensor; None: the output is a rank's own part.
    """

    def __init__(self, placement: Placement, output: Placement | None = None):
        super().__init__()
        self._placement, self._output = placement, output

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            replicated = distribute_tensor(parameter, mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(replicated, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(
            lambda _, inputs: (DTensor.from_local(inputs[0], mesh, [self._placement], run_check=False), *inputs[1:])
        )
        module.register_forward_hook(lambda _, inputs, output: self._leave(output))
        return module

    def _leave(self, output: DTensor) -> Tensor:
        placed: DTensor = output.redistribute(placements=[self._output or self._placement])
        return placed if self._output is not None else placed.to_local()
