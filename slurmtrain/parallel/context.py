"""Context parallelism: the ranks of a group share every sequence; each has a contiguous part of it.

Everything but attention works on single positions. Attention replaces a Decoder's `attend` by one of two exact ways to
see the rest of the sequence:

    all_gather   keys and values of all ranks are gathered (Llama 3, arXiv:2407.21783, section 3.3.2); any number of heads
    ulysses      parts of sequences with all heads are exchanged for whole sequences with some heads, and back (Jacobs et
                 al. 2023, arXiv:2309.14509); less to send, and the causal kernel can be used, but heads have to divide
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurmtrain.errors import ConfigError
from slurmtrain.models.decoder import CausalAttention, Mask
from slurmtrain.parallel.vocabulary import differentiable


def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup, method: str) -> None:
    """Replace the attention of `model` by one that reaches over all ranks of `group`.

    Raises:
        ConfigError: the model has no module with an `attend` to replace.
    """
    attentions = [module for module in model.modules() if hasattr(module, "attend")]
    if not attentions:
        raise ConfigError(
            f"parallel.cp={group.size()}: {type(model).__name__} has no attention that can be split",
            hint="call it as an attribute `attend` of a module, as in slurmtrain/models/decoder.py, or set parallel.cp=1",
        )
    attend = {"all_gather": AllGatherAttention, "ulysses": AllToAllAttention}[method](group)
    for module in attentions:
        module.attend = attend  # type: ignore[assignment]


class AllGatherAttention(CausalAttention):
    """Attention of this rank's queries over the keys and values of all ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def __call__(
        self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, dropout: float, mask: Mask | None = None
    ) -> Tensor:
        # [ranks, k and v, B, S, K, D], in the order of the sequence
        everyones = differentiable(_AllGather, torch.stack([k_BSKD, v_BSKD]), self._group)
        k_BTKD, v_BTKD = everyones.movedim(0, 2).flatten(2, 3).unbind()
        if mask is None:
            first = self._group.rank() * q_BSHD.shape[1]
            queries_S = torch.arange(first, first + q_BSHD.shape[1], device=q_BSHD.device)
            mask = torch.arange(k_BTKD.shape[1], device=q_BSHD.device) <= queries_S[:, None]
        return super().__call__(q_BSHD, k_BTKD, v_BTKD, dropout, mask)


class AllToAllAttention(CausalAttention):
    """Attention over the whole sequences of `group`, by a part of the heads."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def mask(self, documents_BT: Tensor, positions_S: Tensor) -> Mask:
        return super().mask(documents_BT, torch.arange(documents_BT.shape[1], device=documents_BT.device))

    def __call__(
        self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, dropout: float, mask: Mask | None = None
    ) -> Tensor:
        ranks = self._group.size()
        # One exchange for all three: every rank's share of query, key and value heads side by side.
        shares = [x.unflatten(2, (ranks, -1)) for x in (q_BSHD, k_BSKD, v_BSKD)]
        sizes = [share.shape[3] for share in shares]
        exchanged = differentiable(_Exchange, torch.cat(shares, dim=3).movedim(2, 0), self._group)
        q_BTHD, k_BTKD, v_BTKD = exchanged.movedim(0, 1).flatten(1, 2).split(sizes, dim=2)
        o_BTHD = super().__call__(q_BTHD, k_BTKD, v_BTKD, dropout, mask)
        exchanged = differentiable(_Exchange, o_BTHD.unflatten(1, (ranks, -1)).movedim(1, 0), self._group)
        return exchanged.movedim(0, 2).flatten(2, 3)


# torch 2.13 has other names for the two, and warns of those of before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllGather(torch.autograd.Function):
    """An autograd function that gathers x of all ranks, in their order, along a new first axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        _all_gather(result, x.contiguous(), group=ctx.group)
        return result.view(group.size(), *x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        result = gradient.new_empty(gradient.shape[1:])
        _reduce_scatter(result, gradient.flatten(0, 1).contiguous(), group=ctx.group)
        return result, None


class _Exchange(torch.autograd.Function):
    """An autograd function that gives rank i x[i] of every rank, in the order of ranks.

    It is its own inverse and so its own gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(result, x.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return differentiable(_Exchange, gradient, ctx.group), None
