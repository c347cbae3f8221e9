"""The floating-point operations of training, by arithmetic: what the model needs, however it is computed.

A product of an [m, k] and a [k, n] matrix takes 2 m k n operations. In training there are three for each matrix of
parameters: one forward, and in the backward pass one for the gradient of its input and one for that of the matrix. So each
element of a matrix takes 6 operations a token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), and 4 if it is frozen.

Attention has two products for each query, key and head, of D components each: query with key, and weight with value. In
training that is 3 x 2 x 2 D = 12 D for each pair of query and key, head and layer (Chowdhery et al. 2022, PaLM,
arXiv:2204.02311, appendix B). How many pairs there are is a convention:

    dense      every token with every token of its row, S a token. This is PaLM's, and that of most published figures.
    attended   only those that the mask lets through: in a row of one document (S + 1) / 2 a token.

What activation checkpointing computes again is no work of the model and does not count, nor do norms, the softmax and other
operations on single elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.planner.shape import DecoderShape

TRAINED, FROZEN = 6, 4  # operations of an element of a matrix for each token
OF_PAIR = 12  # operations of a component of a head for each pair of query and key


@dataclass(frozen=True)
class ModelFlops:
    """The operations that a training step of a model takes.

    Attributes:
        per_token: operations of one token in the products with matrices of parameters.
        per_pair: operations of one pair of query and key, over all layers and heads.
    """

    per_token: int
    per_pair: int

    def of(self, tokens: int, pairs: int) -> int:
        """Return the operations of forward and backward pass over so many tokens, of which so many pairs attend."""
        return self.per_token * tokens + self.per_pair * pairs


def attention_flops(n_layers: int, n_heads: int, head_dim: int) -> int:
    """Return the operations of one pair of query and key, over all layers."""
    return OF_PAIR * n_layers * n_heads * head_dim


def decoder_flops(shape: DecoderShape) -> ModelFlops:
    """Return the operations of a decoder all of whose parameters are trained.

    The matrix that predicts tokens counts; the embedding is looked up, and counts only where it is the same matrix.
    """
    return ModelFlops(
        TRAINED * multiplied_elements(shape), attention_flops(shape.n_layers, shape.n_heads, shape.head_dim)
    )


def matrix_elements(shape: DecoderShape) -> int:
    """Return the elements of the matrices of one layer."""
    return sum(each.shape[0] * each.shape[1] for each in shape.block() if len(each.shape) == 2)


def multiplied_elements(shape: DecoderShape) -> int:
    """Return the elements of all matrices that a token is multiplied with."""
    return shape.n_layers * matrix_elements(shape) + shape.vocab_size * shape.dim


def dense_pairs(rows: int, seq_len: int) -> int:
    """Return the pairs of query and key of rows in which every token attends to every token."""
    return rows * seq_len * seq_len


def attended_pairs(lengths: Sequence[int]) -> int:
    """Return the pairs of documents of these lengths in which a token attends to itself and to those before it."""
    return sum(length * (length + 1) // 2 for length in lengths)
