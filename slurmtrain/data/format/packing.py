"""Packing: which stretches of the token stream make up each sample, as pure functions without a seed.

A document of L tokens has L - 1 pairs of an input and its target. A piece is a stretch of such pairs: with `start` p
and `pairs` n, its inputs are the tokens p ... p + n - 1 of the split and its targets p + 1 ... p + n. A sample is one
piece or several. Every pair of every document is in exactly one piece, unless long documents are cut on request.

Best-fit decreasing: documents are taken from long to short, and each goes into the sample with the least room that
still holds it (D. Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974).
Only documents that are longer than a sample are cut, so far fewer tokens are separated from the context that they refer
to than if the stream were cut at regular places (H. Ding et al., "Fewer Truncations Improve Language Modeling", 2024,
arXiv:2404.10830).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PIECE = np.dtype([("start", "<u8"), ("pairs", "<u4")])  # 12 bytes, the form in which they are stored

Pieces = NDArray[np.void]  # an array of PIECE


def best_fit_rows(ends: NDArray[np.uint64], first_token: int, seq_len: int) -> tuple[Pieces, NDArray[np.int64]]:
    """Pack consecutive documents into samples of up to `seq_len` pairs.

    Args:
        ends: where each document ends, in tokens after `first_token`; uint64 [documents], not decreasing.
        first_token: position in the split at which the first document begins.
        seq_len: S.

    Returns:
        Pieces [P], sample after sample and in each sample by position; and the number of pieces of each sample, int64
            [samples]. Samples are in the order of their first tokens.
    """
    starts, pairs = _split_at(seq_len, *_whole_documents(ends, first_token))
    bins = best_fit(pairs, seq_len)
    # The first piece of a bin has its smallest position, since pieces come by position.
    _, firsts = np.unique(bins, return_index=True)
    place = np.empty(len(firsts), dtype=np.int64)
    place[np.argsort(firsts)] = np.arange(len(firsts))
    sample = place[bins]
    order = np.argsort(sample, kind="stable")
    return _pieces(starts[order], pairs[order]), np.bincount(sample, minlength=len(firsts))


def document_rows(ends: NDArray[np.uint64], first_token: int, seq_len: int) -> tuple[Pieces, NDArray[np.int64]]:
    """Make one sample of each document, of its first `seq_len` pairs; documents without a pair are left out.

    Arguments and result are as for `best_fit_rows`.
    """
    starts, pairs = _whole_documents(ends, first_token)
    return _pieces(starts, np.minimum(pairs, seq_len)), np.ones(len(starts), dtype=np.int64)


def best_fit(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the bin of each item by best-fit decreasing, int64 [items]; bins are numbered from 0.

    Items of one size are placed together: the bins with the least room that holds one of them take as many as fit. The
    result is the same as placing one item after another, since a bin that still holds a second item is then the
    tightest of all.

    Args:
        sizes: size of each item, from 1 to `capacity`; int64 [items].
        capacity: size of a bin.
    """
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    bin_of = np.empty(len(sizes), dtype=np.int64)
    open_bins: dict[int, list[NDArray[np.int64]]] = {}  # bins by the room that they have left, more than 0
    rooms = 0  # the same rooms as a set of bits: the least of at least s is the lowest bit of rooms >> s
    bins = begin = 0
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = begin + count
        while begin < end:
            if fitting := rooms >> size:
                room = size + (fitting & -fitting).bit_length() - 1
                each = min(room // size, end - begin)
                held = open_bins[room]
                chosen, left = np.split(held.pop(), [(end - begin) // each])
                if len(left):
                    held.append(left)
                elif not held:
                    rooms ^= 1 << room
            else:
                room, each = capacity, min(capacity // size, end - begin)
                chosen = np.arange(bins, bins + (end - begin) // each)
                bins += len(chosen)
            placed = each * len(chosen)
            bin_of[order[begin : begin + placed]] = np.repeat(chosen, each)
            begin += placed
            if room := room - each * size:
                open_bins.setdefault(room, []).append(chosen)
                rooms |= 1 << room
    return bin_of


def _whole_documents(ends: NDArray[np.uint64], first_token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return start and number of pairs of each document that has a pair, however long."""
    begins = np.zeros(len(ends), dtype=np.int64)
    begins[1:] = ends[:-1]
    pairs = ends.astype(np.int64) - begins - 1
    kept = pairs > 0
    return begins[kept] + first_token, pairs[kept]


def _split_at(
    seq_len: int, starts: NDArray[np.int64], pairs: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return start and number of pairs of pieces of at most `seq_len` pairs that together hold the same pairs."""
    parts = -(-pairs // seq_len)
    skipped = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * seq_len  # within the document
    return np.repeat(starts, parts) + skipped, np.minimum(np.repeat(pairs, parts) - skipped, seq_len)


def _pieces(starts: NDArray[np.int64], pairs: NDArray[np.int64]) -> Pieces:
    pieces = np.empty(len(starts), dtype=PIECE)
    pieces["start"], pieces["pairs"] = starts, pairs
    return pieces
