"""Attention: softmax(q k^T / sqrt(D)) v over the tokens that each token may attend to.

A token attends to itself and to those before it, for which kernels need no mask. In a row packed with several documents
it attends to those of its own document only, by a mask that is made once for all layers: a dense one; or on a GPU,
where S x S elements are too many, one of blocks, which lets FlexAttention (Dong et al. 2024, arXiv:2412.05496) skip the
blocks between documents.

Letters of axes are those of `decoder.py`, and T: the whole sequence, where S is a rank's part of it.
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
    """Causal attention over sequences that this rank holds in full; subclasses attend to other ranks' parts of a sequence."""

    def mask(self, documents_BT: Tensor, positions_S: Tensor) -> Mask:
        """Return the mask to pass to each call when rows are packed with several documents.

        Args:
            documents_BT: int [B, T], the document of its row that each token of the whole sequence belongs to.
            positions_S: int64 [S], the positions of this rank's tokens in the sequence.
        """
        return document_mask(documents_BT, positions_S)

    def __call__(
        self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, dropout: float, mask: Mask | None = None
    ) -> Tensor:
        """Return the attention's output [B, S, H, D].

        Args:
            q_BSHD, k_BSKD, v_BSKD: queries, keys and values.
            dropout: probability of dropping a weight.
            mask: the result of `mask`; None: each row is one document.
        """
        return attention(q_BSHD, k_BSKD, v_BSKD, dropout, mask)


def attention(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, dropout: float, mask: Mask | None) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v over what `mask` lets through, [B, S, H, D]; mask None: plain causal attention.

    Raises:
        ConfigError: dropout is wanted with a mask of blocks, whose kernels do not have it.
    """
    q_BHSD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BSHD, k_BTKD, v_BTKD))
    shared = q_BSHD.shape[2] != k_BTKD.shape[2]
    if isinstance(mask, BlockMask):
        if dropout:
            raise ConfigError(
                f"model.dropout={dropout}: on a GPU, attention within documents cannot drop weights",
                hint="set model.dropout=0, or data.document_mask=false to let documents see those before them",
            )
        o_BHSD: Tensor = _compiled(flex_attention)(q_BHSD, k_BKTD, v_BKTD, block_mask=mask, enable_gqa=shared)
    else:
        o_BHSD = F.scaled_dot_product_attention(
            q_BHSD, k_BKTD, v_BKTD, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=shared
        )
    return o_BHSD.transpose(1, 2)


def positions_in_documents(documents_BT: Tensor) -> Tensor:
    """Return the number of tokens of its document before each token, int64 [B, T].

    `documents_BT` must not decrease along a row.
    """
    first_BT = torch.searchsorted(documents_BT, documents_BT)
    return torch.arange(documents_BT.shape[1], device=documents_BT.device) - first_BT


def document_mask(documents_BT: Tensor, positions_S: Tensor) -> Mask:
    """Return the mask with which the tokens at `positions_S` attend to the tokens of their own document up to themselves."""
    blocks = documents_BT.is_cuda and documents_BT.shape[1] > BLOCK
    return (block_mask if blocks else dense_mask)(documents_BT, positions_S)


def dense_mask(documents_BT: Tensor, positions_S: Tensor) -> Tensor:
    """Return `document_mask` as bool [B, 1, S, T]."""
    (rows, length), device = documents_BT.shape, documents_BT.device
    row_B111 = torch.arange(rows, device=device)[:, None, None, None]
    query_S1 = torch.arange(len(positions_S), device=device)[:, None]
    return _looks_at(documents_BT, positions_S)(row_B111, None, query_S1, torch.arange(length, device=device))


def block_mask(documents_BT: Tensor, positions_S: Tensor) -> BlockMask:
    """Return `document_mask` in blocks, compiled so that no dense mask is made on the way."""
    (rows, length), device = documents_BT.shape, documents_BT.device
    mask: BlockMask = _compiled(create_block_mask)(
        _looks_at(documents_BT, positions_S), rows, None, len(positions_S), length, device=device, BLOCK_SIZE=BLOCK
    )
    return mask


def _looks_at(documents_BT: Tensor, positions_S: Tensor) -> Callable[[Any, Any, Any, Any], Tensor]:
    """Return the mask as a function (row, head, query, key) -> bool, as FlexAttention takes it."""
    documents_BS = documents_BT[:, positions_S]
    return lambda row, head, query, key: (
        (documents_BT[row, key] == documents_BS[row, query]) & (key <= positions_S[query])
    )


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
