"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

It computes what Llama 2 and 3, Mistral, Qwen2.5 and Qwen3 compute; `conf/model/` has their sizes.

Tensor names end in the letters of their axes:

    B batch   S sequence   W dim (residual stream)   H query heads   K key/value heads   D head_dim
    F hidden_dim (feed-forward)   V vocabulary   T the whole sequence, where S is a rank's part of it

The rotary angles are computed where they are used, from integer positions, instead of being kept in a buffer: a buffer
would be empty after `to_empty()` and would lose its precision under `.to(bfloat16)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from slurmtrain.config.known_models import check_sizes
from slurmtrain.errors import ConfigError
from slurmtrain.models.initial import INIT_STD, Embedding, Linear, RMSNorm, initialize
from slurmtrain.planner.flops import FROZEN, TRAINED, ModelFlops, attention_flops
from slurmtrain.planner.shape import default_hidden_dim

Mask = Tensor | BlockMask  # bool [B, 1, S, T], or the like of it in blocks
BLOCK = 128  # tokens; of a row that is no longer than this, no block can be passed over


class Decoder(nn.Module):
    """The language model: tokens in, the logits of each next token out.

    A stage of a pipeline is a Decoder with some of the `blocks` only, and with None for `embedding`, `norm` or `output`
    where another stage has them. Its parameters keep the names that they have in the whole model.

    Args:
        vocab_size: number of distinct tokens, V.
        dim: size of the residual stream, W.
        n_layers: number of blocks.
        n_heads: query heads, H.
        n_kv_heads: key/value heads, K, dividing `n_heads`; None means as many as `n_heads` (plain multi-head attention).
        head_dim: components of a head, D, an even number; None means `dim / n_heads`.
        hidden_dim: inner size of the feed-forward, F; None means 8/3 of `dim`, rounded up to a multiple of 16, which
            gives SwiGLU the parameters of a classic feed-forward of 4 x width (Shazeer 2020, arXiv:2002.05202).
        max_seq_len: longest sequence accepted, in tokens.
        rope_theta: base of the rotary frequencies.
        rope_scaling: the fields of `RopeScaling`, None for none.
        norm_eps: number added to the mean square in RMSNorm.
        qkv_bias: queries, keys and values have a bias, as in Qwen2 (arXiv:2407.10671).
        qk_norm: RMSNorm over each head of queries and keys, as in Qwen3 (arXiv:2505.09388).
        tie_embeddings: use the embedding matrix as the output projection too (Press & Wolf 2017, arXiv:1608.05859).
        dropout: probability of dropping, after the embedding, in attention and before each residual sum.
        path: the folder of Hugging Face with whose weights training begins; see `weights.pretrained`, which reads it.

    Raises:
        ConfigError: the sizes do not fit together.
    """

    parallel_units = ("Block",)  # the modules that are gathered, compiled and recomputed one at a time

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        hidden_dim: int | None = None,
        max_seq_len: int,
        rope_theta: float = 10000.0,
        rope_scaling: Mapping[str, Any] | None = None,
        norm_eps: float = 1e-5,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
        path: str | None = None,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        hidden_dim = default_hidden_dim(dim) if hidden_dim is None else hidden_dim
        sizes = {
            "dim": dim,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "hidden_dim": hidden_dim,
        }
        others = {"vocab_size": vocab_size, "n_layers": n_layers, "max_seq_len": max_seq_len, "dropout": dropout}
        check_sizes({**sizes, **others})
        head_dim = dim // n_heads if head_dim is None else head_dim
        self.vocab_size, self.dim, self.n_layers, self.max_seq_len = vocab_size, dim, n_layers, max_seq_len
        self.n_heads, self.head_dim = n_heads, head_dim

        # Each residual branch adds its variance to the stream; GPT-2 shrinks the 2 x n_layers projections that feed it.
        residual_std = INIT_STD / math.sqrt(2 * n_layers)
        scaling = None if rope_scaling is None else RopeScaling(**rope_scaling)
        self.embedding = Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(dropout)
        # A dict keyed by number, since a list would number the blocks of a pipeline's stage anew.
        self.blocks = nn.ModuleDict(
            {
                str(layer): Block(
                    Attention(
                        dim,
                        n_heads,
                        n_kv_heads,
                        head_dim,
                        rope_theta,
                        scaling,
                        bias=qkv_bias,
                        norm_eps=norm_eps if qk_norm else None,
                        residual_std=residual_std,
                        dropout=dropout,
                    ),
                    FeedForward(dim, hidden_dim, residual_std),
                    RMSNorm(dim, norm_eps),
                    RMSNorm(dim, norm_eps),
                    dropout,
                )
                for layer in range(n_layers)
            }
        )
        self.norm: RMSNorm | None = RMSNorm(dim, norm_eps)
        # Tied weights are one parameter under one name, so that checkpoints, sharding and `to_empty` see it once.
        self.output = None if tie_embeddings else Linear(dim, vocab_size)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits [B, S, V] of the token that follows each of `tokens_BS` (int64 [B, S]).

        A stage of a pipeline takes the residual stream [B, S, W] of the stage before in place of tokens, and returns
        the residual stream if it has no `norm`.

        Args:
            positions_S: int64 [S], positions of these tokens in the sequence; None: 0 ... S - 1.
            documents: int [B, T], for rows packed with several documents: which one each token of the whole sequence
                belongs to, 0, 1, 2, ... along a row. Each document is then computed as if it were alone. None: a row is
                one document.

        Raises:
            ConfigError: S exceeds `max_seq_len`.
        """
        seq_len = tokens_BS.shape[1]
        if seq_len > self.max_seq_len:
            raise ConfigError(
                f"a sequence of {seq_len} tokens is longer than model.max_seq_len = {self.max_seq_len}",
                hint=f"set model.max_seq_len={seq_len}, or a shorter data.seq_len",
            )
        if positions_S is None:
            positions_S = torch.arange(seq_len, device=tokens_BS.device)
        positions, mask = positions_S, None
        if documents is not None:
            positions, mask = positions_in_documents(documents)[:, positions_S], self._mask(documents, positions_S)
        x_BSW = tokens_BS if tokens_BS.is_floating_point() else self.dropout(self.embedding(tokens_BS))
        for block in self.blocks.values():
            x_BSW = block(x_BSW, positions, mask)
        if self.norm is None:
            return x_BSW
        x_BSW = self.norm(x_BSW)
        return F.linear(x_BSW, self.embedding.weight) if self.output is None else self.output(x_BSW)

    def _mask(self, documents_BT: Tensor, positions_S: Tensor) -> Mask:
        """Return the mask in the form that the blocks' attention takes, which is the same in all blocks."""
        block: Any = next(iter(self.blocks.values()))
        mask: Mask = block.attention.attend.mask(documents_BT, positions_S)
        return mask

    def initialize(self, seed: int) -> None:
        """Draw all parameters; see `models.initial`.

        Called on a model built on the meta device, or a part of one, once it is distributed.
        """
        initialize(self, seed)

    def training_flops(self) -> ModelFlops:
        """Return the operations of a training step, 6 N + 12 L H D S for a token; matrices that are not trained count less.

        The formula is that of Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B, where D is Q. N counts the
        elements of all matrices that are multiplied: an untied input embedding is looked up and left out. As there,
        attention counts as if it were not causal and recomputed activations do not count.
        """
        looked_up = None if self.output is None else self.embedding.weight
        multiplied = [each for each in self.parameters() if each.ndim == 2 and each is not looked_up]
        per_token = sum(each.numel() * (TRAINED if each.requires_grad else FROZEN) for each in multiplied)
        return ModelFlops(per_token, attention_flops(self.n_layers, self.n_heads, self.head_dim))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        attention: Attention,
        feed_forward: FeedForward,
        attention_norm: RMSNorm,
        feed_forward_norm: RMSNorm,
        dropout: float,
    ):
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.feed_forward_norm = attention_norm, feed_forward_norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSW: Tensor, positions: Tensor, mask: Mask | None = None) -> Tensor:
        """Apply one layer: [B, S, W] -> [B, S, W]."""
        x_BSW = x_BSW + self.dropout(self.attention(self.attention_norm(x_BSW), positions, mask))
        x_BSW = x_BSW + self.dropout(self.feed_forward(self.feed_forward_norm(x_BSW)))
        return x_BSW


class Attention(nn.Module):
    """Causal self-attention in which H/K query heads share a key/value head (Ainslie et al. 2023, arXiv:2305.13245).

    Attributes:
        attend: the attention itself, which context parallelism replaces by one over a sequence that is divided among
            ranks.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rope_theta: float,
        rope_scaling: RopeScaling | None,
        *,
        bias: bool,
        norm_eps: float | None,
        residual_std: float,
        dropout: float,
    ):
        super().__init__()
        self.head_dim, self.rope_theta, self.rope_scaling = head_dim, rope_theta, rope_scaling
        self.dropout = dropout
        self.query = Linear(dim, n_heads * head_dim, bias=bias)
        self.key = Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.value = Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.query_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.key_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.out = Linear(n_heads * head_dim, dim, std=residual_std)
        self.attend = CausalAttention()

    def forward(self, x_BSW: Tensor, positions: Tensor, mask: Mask | None = None) -> Tensor:
        """Apply self-attention: [B, S, W] -> [B, S, W].

        Args:
            positions: int64 [S] or [B, S], positions for the rotary embedding.
            mask: the attention's own mask; None: plain causal attention.
        """
        # -1 heads, not a stored number: under tensor parallelism each rank holds only some of them.
        q_BSHD = self.query(x_BSW).unflatten(-1, (-1, self.head_dim))
        k_BSKD = self.key(x_BSW).unflatten(-1, (-1, self.head_dim))
        v_BSKD = self.value(x_BSW).unflatten(-1, (-1, self.head_dim))
        if self.query_norm is not None and self.key_norm is not None:
            q_BSHD, k_BSKD = self.query_norm(q_BSHD), self.key_norm(k_BSKD)
        cos, sin = rotary_angles(positions, self.head_dim, self.rope_theta, self.rope_scaling)
        q_BSHD, k_BSKD = rotate(q_BSHD, cos, sin), rotate(k_BSKD, cos, sin)
        o_BSHD = self.attend(q_BSHD, k_BSKD, v_BSKD, self.dropout if self.training else 0.0, mask)
        output_BSW: Tensor = self.out(o_BSHD.flatten(-2))
        return output_BSW


class FeedForward(nn.Module):
    """The SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden_dim: int, residual_std: float):
        super().__init__()
        self.gate = Linear(dim, hidden_dim)
        self.up = Linear(dim, hidden_dim)
        self.down = Linear(hidden_dim, dim, std=residual_std)

    def forward(self, x_BSW: Tensor) -> Tensor:
        """Apply the feed-forward: [B, S, W] -> [B, S, W]."""
        output_BSW: Tensor = self.down(F.silu(self.gate(x_BSW)) * self.up(x_BSW))
        return output_BSW


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies for longer sequences: slow rotations become slower still, fast ones stay.

    A rotation that turns more than `high_freq_factor` times within `original_seq_len` tokens keeps its frequency, one
    that turns less than `low_freq_factor` times is slowed down by `factor`; between them, both are interpolated. It is
    Meta's `apply_scaling` (github.com/meta-llama/llama-models, models/llama3/model.py) and Hugging Face's rope type
    "llama3".
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int

    def __post_init__(self) -> None:
        if self.factor < 1 or not 0 < self.low_freq_factor < self.high_freq_factor or self.original_seq_len < 1:
            raise ConfigError(
                f"model.rope_scaling = {vars(self)} does not slow down anything",
                hint="factor and original_seq_len must be at least 1, and 0 < low_freq_factor < high_freq_factor",
            )

    def __call__(self, frequencies_D: Tensor) -> Tensor:
        """Scale frequencies in radians per token, of any shape."""
        turns_D = self.original_seq_len / (2 * math.pi / frequencies_D)
        kept_D = ((turns_D - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - kept_D) * frequencies_D / self.factor + kept_D * frequencies_D


def rotary_angles(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [..., S, D], of the angles position * theta^(-2i/D), for `positions` [..., S].

    Su et al. 2021, arXiv:2104.09864, equation 15. Pair i is made of the components i and i + D/2, as in Hugging Face's
    Llama, so each angle is repeated along D.
    """
    exponent_D = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies_D = 1.0 / theta**exponent_D
    if scaling is not None:
        frequencies_D = scaling(frequencies_D)
    angles = positions.float()[..., None] * frequencies_D
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) by its angle, in float32, and return the dtype of `x_BSHD` [B, S, H, D]."""
    first, second = x_BSHD.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BSHD.float() * cos[..., None, :] + turned * sin[..., None, :]).type_as(x_BSHD)


# Attention: softmax(q k^T / sqrt(D)) v over the tokens that each token may attend to. A token attends to itself and to those
# before it, for which kernels need no mask. In a row packed with several documents it attends to those of its own document
# only, by a mask that is made once for all layers: a dense one; or on a GPU, where S x S elements are too many, one of blocks,
# which lets FlexAttention (Dong et al. 2024, arXiv:2412.05496) skip the blocks between documents.


class CausalAttention:
    """Causal attention over sequences that this rank holds in full; subclasses attend to other ranks' parts of a sequence."""

    def mask(self, documents_BT: Tensor, positions_S: Tensor) -> Mask:
        """Return the mask to pass to each call when rows are packed with several documents.

        With it, the tokens at `positions_S` attend to the tokens of their own document up to themselves.

        Args:
            documents_BT: int [B, T], the document of its row that each token of the whole sequence belongs to.
            positions_S: int64 [S], the positions of this rank's tokens in the sequence.
        """
        blocks = documents_BT.is_cuda and documents_BT.shape[1] > BLOCK
        return (block_mask if blocks else dense_mask)(documents_BT, positions_S)

    def __call__(
        self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, dropout: float, mask: Mask | None = None
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(D)) v over what `mask` lets through, [B, S, H, D]; mask None: plain causal attention.

        Args:
            q_BSHD, k_BTKD, v_BTKD: queries, keys and values.
            dropout: probability of dropping a weight.

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


def dense_mask(documents_BT: Tensor, positions_S: Tensor) -> Tensor:
    """Return the mask of documents as bool [B, 1, S, T]."""
    (rows, length), device = documents_BT.shape, documents_BT.device
    row_B111 = torch.arange(rows, device=device)[:, None, None, None]
    query_S1 = torch.arange(len(positions_S), device=device)[:, None]
    return _looks_at(documents_BT, positions_S)(row_B111, None, query_S1, torch.arange(length, device=device))


def block_mask(documents_BT: Tensor, positions_S: Tensor) -> BlockMask:
    """Return the mask of documents in blocks, compiled so that no dense mask is made on the way."""
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
