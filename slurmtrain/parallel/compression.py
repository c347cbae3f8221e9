"""Gradient compression: replicas (DDP) exchange gradients in fewer bytes. FSDP2 has its own `reduce_dtype`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from slurmtrain.choices import GradientCompression
from slurmtrain.config.schema import ParallelConfig

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compress(
    model: nn.parallel.DistributedDataParallel, parallel: ParallelConfig, group: dist.ProcessGroup
) -> PowerSGD | None:
    """Make `model` exchange its gradients as `parallel.gradient_compression` says.

    Returns:
        The compression if it has a state to save, else None.
    """
    how = parallel.gradient_compression
    if how == GradientCompression.POWERSGD:
        return PowerSGD(model, group, rank=parallel.powersgd_rank, start_step=parallel.powersgd_start_step)
    if how != GradientCompression.NONE:
        model.register_comm_hook(group, _in_dtype(_DTYPES[how]))
    return None


def _in_dtype(dtype: torch.dtype) -> Any:
    """Return a communication hook of DDP that adds up a bucket's gradients in `dtype`.

    torch's own `bf16_compress_hook` does the same, but DDP refuses it without CUDA.
    """

    # DDP compares annotations with types, and the postponed ones of this module are strings.
    def hook(group, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        small = buffer.to(dtype).div_(group.size())
        sent = dist.all_reduce(small, group=group, async_op=True).get_future()
        return sent.then(lambda done: buffer.copy_(done.value()[0]))

    return hook


class PowerSGD:
    """Compression of gradients to products of two thin matrices, by torch's hook, with a state to save.

    The method is that of Vogels et al. 2019, arXiv:1905.13727.

    What a step leaves out is added to the gradients of the next one, so each rank has a state of its own, which belongs
    in the checkpoint. After a change of the number of ranks, or of what is compressed, the state starts empty on all
    ranks.
    """

    def __init__(
        self, model: nn.parallel.DistributedDataParallel, group: dist.ProcessGroup, *, rank: int, start_step: int
    ):
        self._hook = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=start_step)
        self._device = next(model.parameters()).device
        self._of = [group.size(), rank, sum(parameter.numel() for parameter in model.parameters())]
        self._before: tuple[dict[int, Tensor], dict[int, Tensor]] = {}, {}  # errors and Qs, by bucket
        model.register_comm_hook(self._hook, powerSGD_hook)

    def begin(self, step: int) -> None:
        """Count steps from `step` on, so that all ranks agree, including those that have restored no state."""
        self._hook.iter = step

    def begin_step(self) -> None:
        """Keep the state before a step. The errors are made anew in each step, so that it takes no copy of them."""
        hook = self._hook
        self._before = dict(hook.error_dict), {bucket: q.clone() for bucket, q in hook.q_memory_dict.items()}

    def end_step(self, skips: Tensor | None) -> None:
        """Bring that state back where `skips`, a bool scalar on the device, is true; None: the step is not skipped."""
        hook, (errors, qs) = self._hook, self._before
        if skips is not None:
            for bucket, error in hook.error_dict.items():
                hook.error_dict[bucket] = torch.where(skips, errors.get(bucket, 0.0), error)
            for bucket, q in hook.q_memory_dict.items():
                hook.q_memory_dict[bucket] = torch.where(skips, qs[bucket] if bucket in qs else _random_like(q), q)
        self._before = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state: the next backward pass writes into it while a checkpoint may still be being written."""
        hook = self._hook
        memory = {"error": hook.error_dict, "p": hook.p_memory_dict, "q": hook.q_memory_dict}
        return {
            "of": self._of,
            **{name: {bucket: tensor.clone() for bucket, tensor in held.items()} for name, held in memory.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["of"] != self._of:
            return
        self._hook.error_dict, self._hook.p_memory_dict, self._hook.q_memory_dict = (
            self._on_device(state[name]) for name in ("error", "p", "q")
        )

    def _on_device(self, held: dict[int, Tensor]) -> dict[int, Tensor]:
        return {bucket: tensor.to(self._device) for bucket, tensor in held.items()}


def _random_like(matrix: Tensor) -> Tensor:
    """Return random numbers that are the same on all ranks, as torch's hook begins with in a bucket's first step."""
    return torch.randn(matrix.shape, dtype=matrix.dtype, generator=torch.Generator().manual_seed(0)).to(matrix.device)
