"""Context parallelism: the ranks of a group share every sequence; each has a stretch of it.

All but attention works on single positions. Attention here replaces a Decoder's `attend` by one of two exact ways to see the
rest of the sequence:

    all_gather   keys and values of all ranks are gathered (Llama 3, arXiv:2407.21783, section 3.3.2); any number of heads
    ulysses      stretches with all heads are exchanged for whole sequences with some heads, and back (Jacobs et al. 2023,
                 arXiv:2309.14509); less to send, and the causal kernel can be used, but heads have to divide
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from slurmtrain.errors import ConfigError
from slurmtrain.models.decoder import causal_attention


def share_sequences(model: nn.Module, group: dist.ProcessGroup, method: str) -> None:
    """Let the attention of `model` reach over all ranks of `group`.

    Raises:
        ConfigError: it has no module with an `attend` to replace.
    """
    attentions = [module for module in model.modules() if hasattr(module, "attend")]
    if not attentions:
        raise ConfigError(
            f"parallel.cp={group.size()}: {type(model).__name__} has no attention that could be shared",
            hint="call it as an attribute `attend` of a module, as in slurmtrain/models/decoder.py, or set parallel.cp=1",
        )
    attend = {"all_gather": gathered_attention, "ulysses": exchanged_attention}[method]
    for attention in attentions:
        attention.attend = functools.partial(attend, group)  # type: ignore[assignment]


def gathered_attention(
    group: dist.ProcessGroup, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, dropout: float
) -> Tensor:
    """Causal attention of this rank's queries over the keys and values of all; [B, S, H, D]."""
    # [ranks, k and v, B, S, K, D], in the order of the sequence
    everyones = _AllGather.apply(torch.stack([k_BSKD, v_BSKD]), group)
    k_BTKD, v_BTKD = everyones.movedim(0, 2).flatten(2, 3).unbind()
    first = group.rank() * q_BSHD.shape[1]
    queries_S = torch.arange(first, first + q_BSHD.shape[1], device=q_BSHD.device)
    keys_T = torch.arange(k_BTKD.shape[1], device=q_BSHD.device)
    o_BHSD = F.scaled_dot_product_attention(
        q_BSHD.transpose(1, 2),
        k_BTKD.transpose(1, 2),
        v_BTKD.transpose(1, 2),
        attn_mask=keys_T <= queries_S[:, None],
        dropout_p=dropout,
        enable_gqa=q_BSHD.shape[2] != k_BTKD.shape[2],
    )
    return o_BHSD.transpose(1, 2)


def exchanged_attention(
    group: dist.ProcessGroup, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, dropout: float
) -> Tensor:
    """Causal attention over whole sequences by a part of the heads; [B, S, H, D]."""
    ranks = group.size()
    # One exchange for all three: every rank's share of query, key and value heads side by side.
    shares = [x.unflatten(2, (ranks, -1)) for x in (q_BSHD, k_BSKD, v_BSKD)]
    sizes = [share.shape[3] for share in shares]
    all_BTHD = _Exchange.apply(torch.cat(shares, dim=3).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)
    q_BTHD, k_BTKD, v_BTKD = all_BTHD.split(sizes, dim=2)
    o_BTHD = causal_attention(q_BTHD, k_BTKD, v_BTKD, dropout)
    return _Exchange.apply(o_BTHD.unflatten(1, (ranks, -1)).movedim(1, 0), group).movedim(0, 2).flatten(2, 3)


class _AllGather(torch.autograd.Function):
    """x of all ranks, in their order, along another first axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(result, x.contiguous(), group)
        return result.unflatten(0, (group.size(), x.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        result = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_tensor(result, gradient.flatten(0, 1).contiguous(), group=ctx.group)
        return result, None


class _Exchange(torch.autograd.Function):
    """Rank i gets x[i] of every rank, in the order of ranks. Its own inverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(result, x.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None
