"""Blocks of files sent from rank to rank: to the next node when a copy is made, and to a node that lacks them at a restore.

All ranks know all transfers, and do theirs in the one order in which all of them stand. Each rank sends in a thread of
its own and receives in the calling one. So the first transfer that is not done yet always has both of its ranks at it:
no order can make ranks wait for each other in a circle. Two blocks are the memory that it takes.

An error of a file does not end the exchange, since the partner would wait: what cannot be read is sent as zeros, which
no digest fits, and what cannot be written is received all the same; the error is raised at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES, block_count
from slurmtrain.checkpoint.ranks import RankGroup


class Transfer(NamedTuple):
    """A block of a file that rank `source` sends to rank `target`."""

    source: int
    target: int
    file: str
    block: int


def block_bytes(size: int, block: int) -> int:
    """Return the length of a block of a file of `size` bytes."""
    return max(0, min(BLOCK_BYTES, size - block * BLOCK_BYTES))


def ring(nodes: Sequence[str]) -> list[int | None]:
    """Return to which rank each rank sends its file: one of the next node, in the order of the first rank of each.

    Args:
        nodes: node of every rank.

    Returns:
        None for every rank if there is only one node.
    """
    on_node = ranks_of(nodes)
    names = list(on_node)
    if len(names) == 1:
        return [None] * len(nodes)
    targets: list[int | None] = [None] * len(nodes)
    for number, name in enumerate(names):
        following = on_node[names[(number + 1) % len(names)]]
        for place, rank in enumerate(on_node[name]):
            targets[rank] = following[place % len(following)]
    return targets


def ranks_of(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each node, the nodes in the order of their first rank."""
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return found


def to_neighbours(nodes: Sequence[str], files: Sequence[str], sizes: Mapping[str, int]) -> list[Transfer]:
    """Return the transfers by which the file of every rank gets to the next node.

    Args:
        files: file of every rank.
    """
    targets = ring(nodes)
    found = [
        Transfer(rank, target, files[rank], block)
        for rank, target in enumerate(targets)
        if target is not None
        for block in range(block_count(sizes[files[rank]]))
    ]
    return sorted(found, key=lambda transfer: (transfer.block, transfer.source))


def in_turns(lists: Iterable[Sequence[Transfer]]) -> list[Transfer]:
    """Return the transfers to several ranks in an order in which they receive at the same time, from different ranks."""
    kept = [list(transfers) for transfers in lists if transfers]
    turned = [
        transfers[(start := number * len(transfers) // len(kept)) :] + transfers[:start]
        for number, transfers in enumerate(kept)
    ]
    longest = max(map(len, turned), default=0)
    return [transfers[place] for place in range(longest) for transfers in turned if place < len(transfers)]


def exchange(
    ranks: RankGroup,
    transfers: Sequence[Transfer],
    sizes: Mapping[str, int],
    *,
    read: Callable[[str, int], memoryview],
    write: Callable[[str, int, memoryview], None],
) -> None:
    """Do all transfers. All ranks call it together, with the same transfers.

    Args:
        sizes: bytes of the files.
        read: returns a block of a file, on the rank that sends it.
        write: takes a block of a file, on the rank that receives it.

    Raises:
        LostPeersError: a rank is gone.
        Exception: the first of `read` and `write` that failed on this rank, when all transfers are done.
    """
    errors: list[Exception] = []
    outgoing = [transfer for transfer in transfers if transfer.source == ranks.rank]
    incoming = [transfer for transfer in transfers if transfer.target == ranks.rank]

    def send() -> None:
        try:
            for transfer in outgoing:
                length = block_bytes(sizes[transfer.file], transfer.block)
                try:
                    block = read(transfer.file, transfer.block)
                    if len(block) != length:
                        raise EOFError(f"{transfer.file} ends in block {transfer.block}")
                except Exception as error:
                    errors.append(error)
                    block = memoryview(bytearray(length))
                if length:
                    ranks.send(torch.frombuffer(block, dtype=torch.uint8), transfer.target)
        except Exception as error:  # of the network: it comes first
            errors.insert(0, error)

    sender = threading.Thread(target=send, name="checkpoint-sender", daemon=True)
    if outgoing:
        sender.start()
    buffer = torch.empty(BLOCK_BYTES if incoming else 0, dtype=torch.uint8, device="cpu")
    for transfer in incoming:
        length = block_bytes(sizes[transfer.file], transfer.block)
        if length:
            ranks.receive(buffer[:length], transfer.source)
        try:
            write(transfer.file, transfer.block, buffer[:length].numpy().data)
        except Exception as error:
            errors.append(error)
    if outgoing:
        sender.join()
    if errors:
        raise errors[0]
