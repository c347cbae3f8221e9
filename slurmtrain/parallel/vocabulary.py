"""Loss and most probable token when the vocabulary is divided among ranks: no rank ever has all logits of a token."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def vocabulary_loss_sum(logits_BSV: Tensor, targets_BS: Tensor, group: dist.ProcessGroup, ignored: int) -> Tensor:
    """Return the sum of the cross-entropies, in nats, of logits whose vocabulary is divided among ranks.

    Args:
        logits_BSV: this rank's part, [B, S, V / ranks], in the order of ranks.
        ignored: value of targets that do not count.
    """
    logits_NV = _local(logits_BSV).flatten(0, -2).float()
    return differentiable(_VocabularyLossSum, logits_NV, targets_BS.flatten(), group, ignored)


def vocabulary_argmax(logits_BSV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the token with the highest logit, int64 [B, S]; of equal ones the first, as torch.argmax of all logits would."""
    own_BSV = _local(logits_BSV)
    highest_BS, guess_BS = own_BSV.max(dim=-1)
    whole_BS = highest_BS.clone()
    dist.all_reduce(whole_BS, dist.ReduceOp.MAX, group)
    size = own_BSV.shape[-1]
    guess_BS = torch.where(highest_BS == whole_BS, guess_BS + group.rank() * size, group.size() * size)
    dist.all_reduce(guess_BS, dist.ReduceOp.MIN, group)
    return guess_BS


def whole_vocabulary(logits_BSV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all logits [B, S, V], on every rank of `group`."""
    own_BSV = _local(logits_BSV).contiguous()
    parts = [torch.empty_like(own_BSV) for _ in range(group.size())]
    dist.all_gather(parts, own_BSV, group)
    return torch.cat(parts, dim=-1)


def _local(logits_BSV: Tensor) -> Tensor:
    if hasattr(logits_BSV, "to_local"):  # a DTensor, of a tied output
        own: Tensor = logits_BSV.to_local()
        return own
    return logits_BSV


class _VocabularyLossSum(torch.autograd.Function):
    """An autograd function of log(sum(exp(logits))) - logits[target], of which every rank has some terms."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup, ignored: int) -> Tensor:
        own = targets_N - group.rank() * logits_NV.shape[1]  # position of the target in this rank's part
        here_N = (own >= 0) & (own < logits_NV.shape[1]) & (targets_N != ignored)
        place_N1 = torch.where(here_N, own, 0)[:, None]
        highest_N = logits_NV.amax(dim=1)
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, group)
        exp_NV = (logits_NV - highest_N[:, None]).exp()
        target_N = torch.where(here_N, logits_NV.gather(1, place_N1)[:, 0] - highest_N, 0.0)
        sums = torch.stack([exp_NV.sum(dim=1), target_N])
        dist.all_reduce(sums, group=group)
        counts_N = targets_N != ignored
        ctx.save_for_backward(exp_NV.div_(sums[0][:, None]), place_N1, here_N, counts_N)
        return torch.where(counts_N, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return softmax - 1 at the target, for this rank's part."""
        softmax_NV, place_N1, here_N, counts_N = ctx.saved_tensors
        result = softmax_NV.scatter_add(1, place_N1, -here_N[:, None].to(softmax_NV.dtype))
        return result * (counts_N[:, None] * gradient), None, None, None


def differentiable(function: type[Function], *arguments: Any) -> Tensor:
    """Return what `function`'s forward makes of `arguments`; its backward gives the gradient.

    `Function.apply` has no types, and a subclass of ours does not count as torch's.
    """
    result: Tensor = function.apply(*arguments)
    return result
