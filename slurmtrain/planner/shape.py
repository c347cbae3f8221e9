"""The shape of every parameter of a decoder, by arithmetic. `models/decoder.py` builds it.

The letters are those of that module: W dim, H query heads, K key/value heads, D head_dim, F hidden_dim, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FFN_MULTIPLE = 16  # matrix units like widths that are multiples of 16


def default_hidden_dim(dim: int) -> int:
    """Return 8/3 of `dim`, rounded up to a multiple of 16."""
    return -(-(8 * dim) // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


@dataclass(frozen=True)
class Parameter:
    """The shape of one parameter.

    Attributes:
        shape: shape of the whole parameter.
        tp_dim: the dimension that tensor parallelism cuts; None: every rank has it whole.
    """

    shape: tuple[int, ...]
    tp_dim: int | None = 0


def elements_per_rank(parameters: Iterable[Parameter], tp: int, shard: int) -> int:
    """Return the elements of some parameters on the rank that has most.

    A parameter is first cut for `tp` ranks, then by rows for the `shard` ranks of FSDP.
    """
    count = 0
    for parameter in parameters:
        sizes = list(parameter.shape)
        if parameter.tp_dim is not None:
            sizes[parameter.tp_dim] = math.ceil(sizes[parameter.tp_dim] / tp)
        sizes[0] = math.ceil(sizes[0] / shard)
        count += math.prod(sizes)
    return count


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a `slurmtrain.models.Decoder`."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> DecoderShape:
        """Return the sizes of the config group `model`, whose nulls have the meaning that `Decoder` gives them."""
        return cls(
            vocab_size=model["vocab_size"],
            dim=model["dim"],
            n_layers=model["n_layers"],
            n_heads=model["n_heads"],
            n_kv_heads=model.get("n_kv_heads") or model["n_heads"],
            head_dim=model.get("head_dim") or model["dim"] // model["n_heads"],
            hidden_dim=model.get("hidden_dim") or default_hidden_dim(model["dim"]),
            tie_embeddings=model.get("tie_embeddings", True),
            qkv_bias=model.get("qkv_bias", False),
            qk_norm=model.get("qk_norm", False),
        )

    @property
    def query_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    def block(self) -> list[Parameter]:
        """Return the parameters of one layer."""
        dim, ffn = self.dim, self.hidden_dim
        into_heads = [self.query_width, self.kv_width, self.kv_width]
        parameters = [Parameter((rows, dim)) for rows in [*into_heads, ffn, ffn]]
        parameters += [Parameter((dim, columns), tp_dim=1) for columns in (self.query_width, ffn)]
        parameters += [Parameter((dim,), tp_dim=None)] * 2
        if self.qkv_bias:
            parameters += [Parameter((rows,)) for rows in into_heads]
        if self.qk_norm:
            parameters += [Parameter((self.head_dim,), tp_dim=None)] * 2
        return parameters

    def adapter_elements(self, r: int, shard: int) -> int:
        """Return the elements of adapters (LoRA) of rank `r` beside all matrices of all layers, on one of `shard` ranks."""
        sizes = [parameter.shape for parameter in self.block() if len(parameter.shape) == 2]
        pairs = [Parameter(shape) for rows, columns in sizes for shape in ((r, columns), (rows, r))]
        return self.n_layers * elements_per_rank(pairs, 1, shard)

    def ends(self, *, first: bool, last: bool) -> list[Parameter]:
        """Return the parameters before and after the layers, which only the `first` and the `last` stage of a pipeline have.

        A tied matrix is needed at both ends, and counts once where one rank has both.
        """
        matrices = int(first) + int(last) - int(first and last and self.tie_embeddings)
        norm = [Parameter((self.dim,), tp_dim=None)] if last else []
        return [Parameter((self.vocab_size, self.dim))] * matrices + norm

    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model; a tied matrix counts once."""
        parameters = self.block() * self.n_layers + self.ends(first=True, last=True)
        return sum(math.prod(parameter.shape) for parameter in parameters)
