"""Attention: softmax(q k^T / sqrt(D)) v over what each token may look at.

A token looks at itself and at those before it, for which kernels need no mask. In a row packed with several documents it
looks at those of its own document only, for which there is a mask, made once for all layers: a dense one; or on a GPU, where
S x S elements are too many, one of blocks, which lets FlexAttention (Dong et al. 2024, arXiv:2412.05496) pass over the blocks
between documents.

Letters of axes as in `decoder.py`, and T: the whole sequence, where S is a rank's stretch of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from slurmtrain.errors import ConfigError

Mask = Tensor | BlockMask  # bool [B, 1, S, T], or the like of it in blocks
BLOCK = 128  # tokens; of a row that is no longer than this, no block can be passed over


class CausalAttention:
    """Attention over sequences that this rank has whole. A subclass reaches further."""

    def mask(self, documents_BT: Tensor, positions_S: Tensor) -> Mask:
        """What to give to each call where rows are packed.

        Args:
            documents_BT: int [B, T], the document of its row that each token of the whole sequence belongs to.
            positions_S: int64 [S], where this rank's tokens stand in it.
        """
        return document_mask(documents_BT, positions_S)

    def __call__(
        self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, dropout: float, mask: Mask | None = None
    ) -> Tensor:
        """[B, S, H, D].

        Args:
            dropout: probability of dropping a weight.
            mask: from `mask`; None: each row is one document.
        """
        return attention(q_BSHD, k_BSKD, v_BSKD, dropout, mask)


def attention(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, dropout: float, mask: Mask | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over what `mask` lets through; None: the positions up to each one's own. [B, S, H, D].

    Raises:
        ConfigError: dropout, which the kernels for blocks do not have.
    """
    q_BHSD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BSHD, k_BTKD, v_BTKD))
    shared = q_BSHD.shape[2] != k_BTKD.shape[2]
    if isinstance(mask, BlockMask):
        if dropout:
            raise ConfigError(
                f"model.dropout={dropout}: on a GPU, attention within documents cannot drop weights",
                hint="set model.dropout=0, or data.document_mask=false to let documents see those before them",
            )
        o_BHSD = _compiled(flex_attention)(q_BHSD, k_BKTD, v_BKTD, block_mask=mask, enable_gqa=shared)
    else:
        o_BHSD = F.scaled_dot_product_attention(
            q_BHSD, k_BKTD, v_BKTD, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=shared
        )
    return o_BHSD.transpose(1, 2)


def positions_in_documents(documents_BT: Tensor) -> Tensor:
    """int64 [B, T]: how many tokens of its document stand before each; `documents_BT` does not decrease along a row."""
    first_BT = torch.searchsorted(documents_BT, documents_BT)
    return torch.arange(documents_BT.shape[1], device=documents_BT.device) - first_BT


def document_mask(documents_BT: Tensor, positions_S: Tensor) -> Mask:
    """What the tokens at `positions_S` look at: those of their own document up to themselves."""
    blocks = documents_BT.is_cuda and documents_BT.shape[1] > BLOCK
    return (block_mask if blocks else dense_mask)(documents_BT, positions_S)


def dense_mask(documents_BT: Tensor, positions_S: Tensor) -> Tensor:
    """bool [B, 1, S, T]."""
    (rows, length), device = documents_BT.shape, documents_BT.device
    row_B111 = torch.arange(rows, device=device)[:, None, None, None]
    query_S1 = torch.arange(len(positions_S), device=device)[:, None]
    return _looks_at(documents_BT, positions_S)(row_B111, None, query_S1, torch.arange(length, device=device))


def block_mask(documents_BT: Tensor, positions_S: Tensor) -> BlockMask:
    """The same in blocks, compiled so that it is never dense on the way."""
    (rows, length), device = documents_BT.shape, documents_BT.device
    mask: BlockMask = _compiled(create_block_mask)(
        _looks_at(documents_BT, positions_S), rows, None, len(positions_S), length, device=device, BLOCK_SIZE=BLOCK
    )
    return mask


def _looks_at(documents_BT: Tensor, positions_S: Tensor) -> Callable[[Any, Any, Any, Any], Tensor]:
    """(row, head, query, key) -> bool."""
    documents_BS = documents_BT[:, positions_S]
    return lambda row, head, query, key: (
        (documents_BT[row, key] == documents_BS[row, query]) & (key <= positions_S[query])
    )


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
