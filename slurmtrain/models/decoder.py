"""A decoder-only transformer in the Llama manner: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Tensor names end in the letters of their axes:

    B batch   S sequence   W width (residual stream)   H query heads   K key/value heads   D head_dim
    F feed-forward width   V vocabulary

The rotary angles are computed where they are used, from integer positions, instead of being kept in a buffer: a buffer
would be empty after `to_empty()` and would lose its precision under `.to(bfloat16)`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slurmtrain.errors import ConfigError

INIT_STD = 0.02  # GPT-2 (Radford et al. 2019)
FFN_MULTIPLE = 16  # matrix units like widths that are multiples of 16


class Decoder(nn.Module):
    """The language model: tokens in, the logits of each next token out.

    Args:
        vocab_size: number of distinct tokens, V.
        width: size of the residual stream, W.
        layers: number of blocks.
        heads: query heads, H; `width / heads` is the head dimension and must be even.
        kv_heads: key/value heads, K, dividing `heads`; None means as many as `heads` (plain multi-head attention).
        ffn_width: inner size of the feed-forward, F; None means 8/3 of `width`, rounded up to a multiple of 16, which
            gives SwiGLU the parameters of a classic feed-forward of 4 x width (Shazeer 2020, arXiv:2002.05202).
        max_seq_len: longest sequence accepted, in tokens.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: use the embedding matrix as the output projection too (Press & Wolf 2017, arXiv:1608.05859).
        dropout: probability of dropping, after the embedding, in attention and before each residual sum.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int | None = None,
        ffn_width: int | None = None,
        max_seq_len: int,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        ffn_width = default_ffn_width(width) if ffn_width is None else ffn_width
        _check_sizes(
            vocab_size=vocab_size,
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            ffn_width=ffn_width,
            max_seq_len=max_seq_len,
        )
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"model.dropout is {dropout}, not a probability", hint="write a value in [0, 1), often 0")
        self.vocab_size, self.width, self.layers, self.heads = vocab_size, width, layers, heads
        self.max_seq_len = max_seq_len

        # Each residual branch adds its variance to the stream; GPT-2 shrinks the 2 x layers projections that feed it.
        residual_std = INIT_STD / math.sqrt(2 * layers)
        self.embedding = Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                Attention(width, heads, kv_heads, rope_theta, residual_std, dropout),
                FeedForward(width, ffn_width, residual_std),
                nn.RMSNorm(width, norm_eps),
                nn.RMSNorm(width, norm_eps),
                dropout,
            )
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, norm_eps)
        # Tied weights are one parameter under one name, so that checkpoints, sharding and `to_empty` see it once.
        self.output = None if tie_embeddings else Linear(width, vocab_size)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits [B, S, V] of the token that follows each of `tokens_BS` (int64 [B, S]).

        Raises:
            ConfigError: S exceeds `max_seq_len`.
        """
        seq_len = tokens_BS.shape[1]
        if seq_len > self.max_seq_len:
            raise ConfigError(
                f"a sequence of {seq_len} tokens is longer than model.max_seq_len = {self.max_seq_len}",
                hint=f"set model.max_seq_len={seq_len}, or a shorter data.seq_len",
            )
        positions_S = torch.arange(seq_len, device=tokens_BS.device)
        x_BSW = self.dropout(self.embedding(tokens_BS))
        for block in self.blocks:
            x_BSW = block(x_BSW, positions_S)
        x_BSW = self.norm(x_BSW)
        return F.linear(x_BSW, self.embedding.weight) if self.output is None else self.output(x_BSW)

    def reset_parameters(self) -> None:
        """Draw all parameters again from the global generator, in the order in which `__init__` drew them.

        So `torch.manual_seed(s)` before this call, after `to_empty()` of a model built on the meta device, gives the
        same values as `torch.manual_seed(s)` before building it on a real one.
        """
        for module in self.modules():
            if isinstance(module, (Embedding, Linear, nn.RMSNorm)):
                module.reset_parameters()

    def num_parameters(self) -> int:
        """Number of parameters, a tied matrix counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of one token's forward and backward pass, 6 N + 12 L W S.

        Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B, where H Q is W here. N counts the parameters that
        are multiplied: an untied input embedding is looked up and left out. As there, attention counts as if it were
        not causal and recomputed activations do not count.
        """
        multiplied = self.num_parameters() - (0 if self.output is None else self.embedding.weight.numel())
        return 6 * multiplied + 12 * self.layers * self.width * seq_len


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        attention: Attention,
        feed_forward: FeedForward,
        attention_norm: nn.RMSNorm,
        feed_forward_norm: nn.RMSNorm,
        dropout: float,
    ):
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.feed_forward_norm = attention_norm, feed_forward_norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSW: Tensor, positions_S: Tensor) -> Tensor:
        """One layer: [B, S, W] -> [B, S, W]."""
        x_BSW = x_BSW + self.dropout(self.attention(self.attention_norm(x_BSW), positions_S))
        return x_BSW + self.dropout(self.feed_forward(self.feed_forward_norm(x_BSW)))


class Attention(nn.Module):
    """Causal self-attention in which H/K query heads share a key/value head (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, width: int, heads: int, kv_heads: int, rope_theta: float, residual_std: float, dropout: float):
        super().__init__()
        self.head_dim = width // heads
        self.grouped = kv_heads != heads
        self.rope_theta, self.dropout = rope_theta, dropout
        self.query = Linear(width, heads * self.head_dim)
        self.key = Linear(width, kv_heads * self.head_dim)
        self.value = Linear(width, kv_heads * self.head_dim)
        self.out = Linear(heads * self.head_dim, width, residual_std)

    def forward(self, x_BSW: Tensor, positions_S: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        # -1 heads, not a stored number: under tensor parallelism each rank holds only some of them.
        q_BSHD = self.query(x_BSW).unflatten(-1, (-1, self.head_dim))
        k_BSKD = self.key(x_BSW).unflatten(-1, (-1, self.head_dim))
        v_BSKD = self.value(x_BSW).unflatten(-1, (-1, self.head_dim))
        cos_SD, sin_SD = rotary_angles(positions_S, self.head_dim, self.rope_theta)
        q_BSHD, k_BSKD = rotate(q_BSHD, cos_SD, sin_SD), rotate(k_BSKD, cos_SD, sin_SD)
        o_BHSD = F.scaled_dot_product_attention(
            q_BSHD.transpose(1, 2),
            k_BSKD.transpose(1, 2),
            v_BSKD.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.grouped,
        )
        return self.out(o_BHSD.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, ffn_width: int, residual_std: float):
        super().__init__()
        self.gate = Linear(width, ffn_width)
        self.up = Linear(width, ffn_width)
        self.down = Linear(ffn_width, width, residual_std)

    def forward(self, x_BSW: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        return self.down(F.silu(self.gate(x_BSW)) * self.up(x_BSW))


class Linear(nn.Linear):
    """y = W x without a bias, W ~ normal(0, std)."""

    def __init__(self, inputs: int, outputs: int, std: float = INIT_STD):
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """One vector per token, ~ normal(0, 0.02)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


def rotary_angles(positions_S: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [S, D], of position * theta^(-2i/D) (Su et al. 2021, arXiv:2104.09864, equation 15).

    Pair i is made of the components i and i + D/2, as in Hugging Face's Llama, so each angle stands twice in a row.
    """
    exponent_D = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=torch.float32) / head_dim
    angles_SD = torch.outer(positions_S.float(), theta**-exponent_D).repeat(1, 2)
    return angles_SD.cos(), angles_SD.sin()


def rotate(x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) by its angle, in float32; returns the dtype of `x_BSHD` [B, S, H, D]."""
    first, second = x_BSHD.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BSHD.float() * cos_SD[:, None] + turned * sin_SD[:, None]).type_as(x_BSHD)


def default_ffn_width(width: int) -> int:
    """8/3 of `width`, rounded up to a multiple of 16."""
    return -(-(8 * width) // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"model.{name} is {size}, it must be at least 1", hint=f"set model.{name} to 1 or more")
    width, heads, kv_heads = sizes["width"], sizes["heads"], sizes["kv_heads"]
    if width % heads:
        fitting = [n for n in range(1, width + 1) if width % n == 0 and (width // n) % 2 == 0] or [1]
        near = min(fitting, key=lambda n: abs(n - heads))
        raise ConfigError(
            f"model.width = {width} cannot be divided among model.heads = {heads}",
            hint=f"set model.heads={near}, or model.width={-(-width // (2 * heads)) * 2 * heads}",
        )
    if (width // heads) % 2:
        raise ConfigError(
            f"model.width / model.heads = {width // heads} is odd; rotary positions turn pairs of components",
            hint=f"set model.width={heads * (width // heads + 1)}, or another number of heads",
        )
    if heads % kv_heads:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"model.heads = {heads} cannot share model.kv_heads = {kv_heads} evenly",
            hint=f"set model.kv_heads to one of {', '.join(map(str, fitting))}",
        )
