"""The shape of every parameter of a decoder, by arithmetic. `models/decoder.py` builds it.

The letters are those of that module: W width, H query heads, K key/value heads, D head_dim, F feed-forward width, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FFN_MULTIPLE = 16  # matrix units like widths that are multiples of 16


def default_ffn_width(width: int) -> int:
    """Return 8/3 of `width`, rounded up to a multiple of 16."""
    return -(-(8 * width) // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


@dataclass(frozen=True)
class Parameter:
    """The shape of one parameter.

    Attributes:
        shape: shape of the whole parameter.
        tp_dim: the dimension that tensor parallelism cuts; None: every rank has it whole.
    """

    shape: tuple[int, ...]
    tp_dim: int | None = 0

    def per_rank(self, tp: int, shard: int) -> int:
        """Return the elements on the rank that has most.

        A parameter is first cut for `tp` ranks, then by rows for the `shard` ranks of FSDP.
        """
        sizes = list(self.shape)
        if self.tp_dim is not None:
            sizes[self.tp_dim] = math.ceil(sizes[self.tp_dim] / tp)
        sizes[0] = math.ceil(sizes[0] / shard)
        return math.prod(sizes)


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a `slurmtrain.models.Decoder`."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> DecoderShape:
        """Return the sizes of the config group `model`, whose nulls have the meaning that `Decoder` gives them."""
        return cls(
            vocab_size=model["vocab_size"],
            width=model["width"],
            layers=model["layers"],
            heads=model["heads"],
            kv_heads=model.get("kv_heads") or model["heads"],
            head_dim=model.get("head_dim") or model["width"] // model["heads"],
            ffn_width=model.get("ffn_width") or default_ffn_width(model["width"]),
            tie_embeddings=model.get("tie_embeddings", True),
            qkv_bias=model.get("qkv_bias", False),
            qk_norm=model.get("qk_norm", False),
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def block(self) -> list[Parameter]:
        """Return the parameters of one layer."""
        width, ffn = self.width, self.ffn_width
        into_heads = [self.query_width, self.kv_width, self.kv_width]
        parameters = [Parameter((rows, width)) for rows in [*into_heads, ffn, ffn]]
        parameters += [Parameter((width, columns), tp_dim=1) for columns in (self.query_width, ffn)]
        parameters += [Parameter((width,), tp_dim=None)] * 2
        if self.qkv_bias:
            parameters += [Parameter((rows,)) for rows in into_heads]
        if self.qk_norm:
            parameters += [Parameter((self.head_dim,), tp_dim=None)] * 2
        return parameters

    def ends(self, *, first: bool, last: bool) -> list[Parameter]:
        """Return the parameters before and after the layers, which only the `first` and the `last` stage of a pipeline have.

        A tied matrix is needed at both ends, and counts once where one rank has both.
        """
        matrices = int(first) + int(last) - int(first and last and self.tie_embeddings)
        norm = [Parameter((self.width,), tp_dim=None)] if last else []
        return [Parameter((self.vocab_size, self.width))] * matrices + norm

    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model; a tied matrix counts once."""
        parameters = self.block() * self.layers + self.ends(first=True, last=True)
        return sum(math.prod(parameter.shape) for parameter in parameters)
