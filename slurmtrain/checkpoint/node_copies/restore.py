"""The restore from the copies on the nodes: which one, what of it is where, and who sends what to whom.

All ranks know what every node holds, and decide the same from it. The nodes may be others than those that have saved, in
another order, and the layout another one: a file is taken from wherever it is. A node reads files that it holds; of the
others it is sent the blocks that its ranks need, into files that have holes elsewhere, and then everything goes on as for
any checkpoint (`restore.reader`), digests included.

If something is damaged, each node compares all it holds with the digests, and leaves out what is not as it was written:
the other copy of the file is taken, else an older copy, else a checkpoint of the run directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES
from slurmtrain.checkpoint.format.directory import INDEX, step_of
from slurmtrain.checkpoint.format.manifest import Manifest, parse_manifest
from slurmtrain.checkpoint.format.tensor_index import Index
from slurmtrain.checkpoint.host_memory import available_memory
from slurmtrain.checkpoint.node_copies.copies import SPARE_BYTES, NodeCopies
from slurmtrain.checkpoint.node_copies.folder import NodeCopy, restoring_path
from slurmtrain.checkpoint.node_copies.lineage import Lineage, Mark, counts, newest_durable, read_lineage
from slurmtrain.checkpoint.node_copies.transfer import Transfer, block_bytes, exchange, in_turns
from slurmtrain.checkpoint.ranks import RankGroup

log = logging.getLogger(__name__)

Need = Mapping[str, Mapping[int, int]]  # bytes that are needed of a block, by file and number


@dataclass(frozen=True)
class CopyHoldings:
    """What the nodes together hold of one copy.

    Attributes:
        mark: see `lineage`.
        holders: numbers of the nodes that hold a file, by file.
        nodes: numbers of the nodes that hold anything of it.
        with_index: the first of them whose index.bin is sound; None: no node's is.
    """

    step: int
    digest: str
    mark: Mark
    holders: Mapping[str, tuple[int, ...]]
    nodes: tuple[int, ...]
    with_index: int | None


@dataclass(frozen=True)
class ChosenCopy:
    """The copy that is restored.

    Attributes:
        holders: numbers of the nodes that hold a file, by file; at least one for each.
    """

    digest: str
    manifest: Manifest
    index_bytes: bytes
    holders: Mapping[str, tuple[int, ...]]


def copy_holdings(of_nodes: list[list[tuple[int, str, Mark, tuple[str, ...], bool]]]) -> list[CopyHoldings]:
    """Return what all nodes hold, by copy, the newest first.

    Args:
        of_nodes: by node: step, digest, mark and files of each of its copies, and whether its index is sound.
    """
    found: dict[str, CopyHoldings] = {}
    for node, copies in enumerate(of_nodes):
        for step, digest, mark, names, sound in copies:
            one = found.get(digest, CopyHoldings(step, digest, mark, {}, (), None))
            holders = {**one.holders, **{name: (*one.holders.get(name, ()), node) for name in names}}
            with_index = node if one.with_index is None and sound else one.with_index
            found[digest] = CopyHoldings(step, digest, mark, holders, (*one.nodes, node), with_index)
    return sorted(found.values(), key=lambda one: (-one.step, one.digest))


class NodeRestore:
    """One restore. All ranks make it, and call its methods, together.

    Args:
        at_most: only copies of at most this step; None: of any step.

    Attributes:
        reasons: why newer copies than the chosen one are not taken, one sentence each.
    """

    def __init__(self, copies: NodeCopies, ranks: RankGroup, at_most: int | None = None):
        self._copies, self._ranks, self._at_most = copies, ranks, at_most
        self._names = list(copies.by_node)
        self._node = self._names.index(copies.nodes[ranks.rank])
        self._here: dict[str, NodeCopy] = {}
        self._damaged: set[tuple[str, int, str]] = set()  # digest, node and file
        self._given_up: set[str] = set()  # digests
        self._newest_step: int | None = None
        self.reasons: list[str] = []
        self._holdings = self._find_holdings()

    def _find_holdings(self) -> list[CopyHoldings]:
        """Return the copies that count, as all nodes together hold them."""
        directory = self._copies.identity.directory

        def known() -> list[Any]:
            lineage = read_lineage(directory)
            return [lineage.token, lineage.base, newest_durable(directory)] if lineage is not None else []

        told = self._ranks.on_rank_0(known)
        if not told:
            return []
        token, base, newest = told
        self._newest_step = step_of(Path(newest)) if newest is not None else None

        def here() -> list[list[Any]]:
            if not self._copies.is_leader:
                return []
            self._here = {copy.digest: copy for copy in self._copies.folder.copies()}
            return [
                [copy.step, copy.digest, copy.mark.token, copy.mark.durable, list(copy.names), copy.index is not None]
                for copy in self._here.values()
            ]

        rows = self._ranks.gather(here)
        of_nodes: list[list[tuple[int, str, Mark, tuple[str, ...], bool]]] = [
            [
                (int(step), str(digest), Mark(str(mark), durable), tuple(names), bool(sound))
                for step, digest, mark, durable, names, sound in rows[ranks[0]]
            ]
            for ranks in self._copies.by_node.values()
        ]
        found = copy_holdings(of_nodes)
        lineage = Lineage(token, base)
        void = [one for one in found if not counts(one.mark, one.digest, lineage, newest)]
        self.reasons += [f"the nodes' copy of step {one.step} is not of what this run goes on from" for one in void]
        return [one for one in found if one not in void and (self._at_most is None or one.step <= self._at_most)]

    def choose(self) -> ChosenCopy | None:
        """Return the newest copy that counts and is whole, unless the run directory has a newer checkpoint."""
        for one in self._holdings:
            if self._newest_step is not None and one.step < self._newest_step:
                return None
            if one.digest in self._given_up:
                continue
            chosen = self._whole(one)
            if chosen is not None:
                return chosen
            self._given_up.add(one.digest)
        return None

    def _whole(self, one: CopyHoldings) -> ChosenCopy | None:
        """Return a copy if all of its files are somewhere."""
        if one.with_index is None:
            self.reasons.append(f"the nodes' copy of step {one.step} has no sound {INDEX}")
            return None
        leader = self._copies.by_node[self._names[one.with_index]][0]
        copy = self._here.get(one.digest)
        own: list[Any] = [copy.manifest_text, copy.index] if copy is not None else []
        text, index = self._ranks.broadcast(own, source=leader)
        manifest = parse_manifest(restoring_path(Path(), one.step), text, one.digest)
        holders = {
            name: tuple(node for node in one.holders.get(name, ()) if (one.digest, node, name) not in self._damaged)
            for name in manifest.files
            if name != INDEX
        }
        missing = sorted(name for name, nodes in holders.items() if not nodes)
        if missing:
            more = f" (and {len(missing) - 1} more files)" if len(missing) > 1 else ""
            self.reasons.append(
                f"of the nodes' copy of step {one.step}, no node has {missing[0]}{more} as it was written"
            )
            return None
        return ChosenCopy(one.digest, manifest, index, holders)

    def assemble(self, chosen: ChosenCopy) -> Path:
        """Make a folder on each node from which it can be read, and return this node's."""
        bad = {name for digest, node, name in self._damaged if digest == chosen.digest and node == self._node}
        folder = self._copies.folder
        work = self._copies.on_leader(
            lambda: folder.assemble(self._here.get(chosen.digest), chosen.manifest, chosen.index_bytes, bad)
        )
        self._ranks.all_do(work)
        return restoring_path(folder.path, chosen.manifest.step)

    def end(self) -> None:
        """Remove what `assemble` has made on this node."""
        if self._copies.is_leader:
            self._copies.folder.end_restoring()

    def origin(self, chosen: ChosenCopy) -> str:
        """Return where it comes from, as a part of a sentence."""
        holding = {node for nodes in chosen.holders.values() for node in nodes}
        without = [name for number, name in enumerate(self._names) if number not in holding]
        if len(self._names) == 1:
            return f"the copy on {self._names[0]}"
        if not without:
            return "the copies on the nodes"
        return f"the copies on the nodes ({', '.join(without[:4])} had none: the parts came from the other nodes)"

    def fetch(self, chosen: ChosenCopy, path: Path, need: Need) -> list[str]:
        """Let every node be sent the blocks that its ranks need and that it does not hold.

        Args:
            need: what this rank needs.

        Returns:
            What is wrong with what was sent, one sentence each, on every rank.
        """
        sizes = chosen.manifest.sizes
        missing = {
            file: sorted(numbers) for file, numbers in need.items() if self._node not in chosen.holders.get(file, ())
        }
        wanted = self._ranks.gather(lambda: {file: numbers for file, numbers in missing.items() if file != INDEX})
        of_nodes: list[list[tuple[str, int]]] = []
        for members in self._copies.by_node.values():
            union = {(file, number) for rank in members for file, numbers in wanted[rank].items() for number in numbers}
            of_nodes.append(sorted(union))
        if not any(of_nodes):
            return []
        room = self._ranks.gather(lambda: self._no_room_for(of_nodes[self._node], sizes))
        if any(room):
            return sorted({sentence for sentence in room if sentence})
        transfers = self._transfers(chosen, of_nodes)
        index = Index.parse(chosen.index_bytes, sizes)
        damage: list[str] = []
        copy = next((each for each in self._copies.folder.copies() if each.digest == chosen.digest), None)

        def read(file: str, block: int) -> memoryview:
            assert copy is not None
            descriptor = blocks.open_file(copy.path / file)
            try:
                data = memoryview(bytearray(block_bytes(sizes[file], block)))
                blocks.read_into(descriptor, data, block * BLOCK_BYTES)
                return data
            finally:
                os.close(descriptor)

        def write(file: str, block: int, data: memoryview) -> None:
            if not blocks.is_intact(data, index.digests[file], block):
                damage.append(f"{file} is not what was written: its digest differs")
                return
            descriptor = os.open(path / file, os.O_WRONLY)
            try:
                blocks.write_all(descriptor, data, block * BLOCK_BYTES)
            finally:
                os.close(descriptor)

        def work() -> list[str]:
            try:
                exchange(self._ranks, transfers, sizes, read=read, write=write)
            except (OSError, EOFError) as error:
                damage.append(f"blocks cannot be sent: {error}")
            return damage

        return sorted({sentence for found in self._ranks.gather(work) for sentence in found})

    def _no_room_for(self, missing: list[tuple[str, int]], sizes: Mapping[str, int]) -> str:
        """Return why this node cannot take these blocks; "" if it can."""
        folder, total = self._copies.folder, sum(block_bytes(sizes[file], block) for file, block in missing)
        left = [folder.free_bytes(), (available_memory() if folder.in_memory else None)]
        least = min(each for each in left if each is not None)
        if total + SPARE_BYTES <= least:
            return ""
        name = self._names[self._node]
        return f"{folder.root} on {name} has {least / 1e9:.2f} GB left for {total / 1e9:.2f} GB that other nodes hold"

    def _transfers(self, chosen: ChosenCopy, of_nodes: list[list[tuple[str, int]]]) -> list[Transfer]:
        """Return who sends which block to whom: work for all ranks of the nodes, from both nodes that hold a file."""
        lists: list[list[Transfer]] = []
        for node, missing in enumerate(of_nodes):
            targets = self._copies.by_node[self._names[node]]
            to: dict[int, list[Transfer]] = {rank: [] for rank in targets}
            for place, (file, block) in enumerate(missing):
                holders = chosen.holders[file]
                senders = self._copies.by_node[self._names[holders[(node + block) % len(holders)]]]
                target = targets[place % len(targets)]
                to[target].append(Transfer(senders[place % len(senders)], target, file, block))
            lists += to.values()
        return in_turns(lists)

    def leave_out_damaged(self, chosen: ChosenCopy, damage: list[str]) -> None:
        """Compare everything that all nodes hold of a copy with its digests, since something in it is damaged.

        If each file is what was written after all, this copy is not tried again.
        """
        copy = self._here.get(chosen.digest)

        def find() -> list[str]:
            bad: list[str] = []
            if copy is None or not self._copies.is_leader:
                return bad
            for name in copy.names:
                if blocks.find_damage(copy.path, [(name, chosen.manifest.files[name])], late_s=0):
                    bad.append(name)
                    (copy.path / name).unlink(missing_ok=True)
            return bad

        found = self._ranks.gather(find)
        before = len(self._damaged)
        for node, members in enumerate(self._copies.by_node.values()):
            self._damaged |= {(chosen.digest, node, name) for rank in members for name in found[rank]}
        if len(self._damaged) == before:
            self._given_up.add(chosen.digest)
        step = chosen.manifest.step
        sentence = f"the nodes' copy of step {step}: {damage[0]}"
        self.reasons.append(sentence)
        if self._ranks.rank == 0:
            bad_nodes = sorted({self._names[node] for digest, node, _ in self._damaged if digest == chosen.digest})
            where = f" (on {', '.join(bad_nodes)})" if bad_nodes else ""
            log.warning("%s%s", sentence, where)
