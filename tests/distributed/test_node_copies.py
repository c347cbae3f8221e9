"""The copies on the nodes: a restart in place reads them, and where they are damaged or gone, the checkpoint itself.

Each rank is a node of its own, with a folder of its own. Of every promise the state that is restored is compared with the
one that was saved, to the last bit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from slurmtrain.checkpoint import node_folder
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.rank.distributed_context import DistributedContext
from tests.distributed.test_checkpoint import Rank
from tests.support.gloo import GlooRanks

NODES = "abc"


class World:
    """The directory that all ranks share, and the folder of each node."""

    def __init__(self, path: Path):
        self.checkpoints, self.disks = path / "checkpoints", path / "disks"
        for node in NODES:
            (self.disks / node).mkdir(parents=True, exist_ok=True)

    def rank(self, distributed: DistributedContext | None, incarnation: int, **options: Any) -> Rank:
        node = NODES[distributed.environment.rank if distributed else 0]
        return Rank(distributed, self.checkpoints, incarnation, local=self.disks / node, **options)

    def copies(self, node: str) -> list[str]:
        """The names of what a node holds, without links."""
        files = self.disks.glob(f"{node}/slurmtrain-*/*/*/*")
        return [file.name for file in files if not file.is_symlink()]


def save_two(world: World, distributed: DistributedContext | None) -> dict[int, list[float]]:
    """Save two steps, with the copies that follow, and return the weights of each."""
    rank, weights = world.rank(distributed, 1), {}
    for step in (1, 2):
        rank.steps(1)
        rank.save(step)
        weights[step] = rank.weights()
    rank.checkpointer.close()
    return weights


# What happens between two attempts, what the next attempt begins from, and in which words.


def lose(*nodes: str) -> Callable[[World], None]:
    def change(world: World) -> None:
        for node in nodes:
            shutil.rmtree(world.disks / node)

    return change


def flip(pattern: str, at: int | None = None) -> Callable[[World], None]:
    def change(world: World) -> None:
        for path in world.disks.parent.glob(pattern):
            content = bytearray(path.read_bytes())
            content[len(content) // 2 if at is None else at] ^= 1
            path.write_bytes(content)

    return change


def cut_short(world: World) -> None:
    for path in world.disks.glob("b/*/*/*/rank00001.safetensors"):
        path.rename(f"{path}.tmp")


COPY, NEWEST = "disks/b/*/*/*/rank00001.safetensors", "checkpoints/checkpoint_0000002"
FROM = "from checkpoint_0000002, the newest complete checkpoint, from the copies on the nodes"
CASES: dict[str, tuple[Callable[[World], None], int, str]] = {
    "as they are": (lambda world: None, 2, FROM),
    "one node is another one": (lose("b"), 2, FROM),
    "a copy was cut short": (cut_short, 2, FROM),
    "all nodes are other ones": (lose(*NODES), 2, "from checkpoint_0000002, the newest complete checkpoint"),
    "a copy is damaged": (flip(COPY), 2, "its digest differs"),
    "a copy's header is damaged": (flip(COPY, at=20), 2, "is not what was written"),
    "the checkpoint is damaged, too": (flip(f"{NEWEST}/rank*"), 1, "checkpoint_0000002 is damaged and was set aside"),
    "the checkpoint is gone": (lambda world: shutil.rmtree(world.disks.parent / NEWEST), 1, "resuming at step 1"),
}


def go_through(distributed: DistributedContext, path: Path) -> dict[str, Any]:
    """Save, then change the folders in every way, restore each time, and put everything back."""
    first, found = distributed.environment.rank == 0, dict[str, Any]()
    world = World(path)
    weights = save_two(world, distributed)
    dist.barrier(group=distributed.control_group)
    if first:
        shutil.copytree(path, path.with_name("before"), symlinks=True)
        found["held"] = {node: sorted(world.copies(node)) for node in NODES}
        folders = [folder for folder in world.disks.glob("*/slurmtrain-*/**") if folder.is_dir()]
        found["modes"] = {oct(folder.stat().st_mode & 0o777) for folder in folders}
    for number, (name, (change, _, _)) in enumerate(CASES.items()):
        if first:
            shutil.rmtree(path)
            shutil.copytree(path.with_name("before"), path, symlinks=True)
            change(world)
        dist.barrier(group=distributed.control_group)
        World(path)
        rank = world.rank(distributed, 2 + number, seed=5)
        step = rank.restore()
        found[name] = (step, rank.weights() == weights.get(step or 0), rank.said)
        rank.checkpointer.close()
        dist.barrier(group=distributed.control_group)
    rank.checkpointer.remove_local()
    dist.barrier(group=distributed.control_group)
    found["left"] = sorted(path.name for path in world.disks.glob("*/*"))
    return found


@pytest.fixture(scope="module")
def went_through(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("copies")
    with GlooRanks(path) as ranks:
        yield ranks(len(NODES), go_through, path / "world")


@pytest.mark.parametrize("case", CASES)
def test_a_restart_reads_the_copies_that_are_sound_and_else_the_checkpoint(
    went_through: list[dict[str, Any]], case: str
) -> None:
    _, expected, words = CASES[case]
    for answers in went_through:
        step, same, _ = answers[case]
        assert step == expected
        assert same, "restored other weights than were saved"
    said = "\n".join(went_through[0][case][2])
    assert words in said
    if case.startswith("all"):
        assert "copies" not in said


def test_each_node_holds_its_part_of_the_newest_checkpoint_only_in_a_folder_for_nobody_else(
    went_through: list[dict[str, Any]],
) -> None:
    answer = went_through[0]
    assert answer["held"] == {node: [f"rank{number:05d}.safetensors"] for number, node in enumerate(NODES)}
    assert answer["modes"] == {"0o700"}
    assert answer["left"] == []  # nothing stays in the memory of nodes that others get next


def test_the_copy_is_what_is_read(tmp_path: Path) -> None:
    world = World(tmp_path)
    weights = save_two(world, None)
    for file in committed(world.checkpoints)[-1].glob("rank*"):
        file.write_bytes(bytes(file.stat().st_size))
    rank = world.rank(None, 2, seed=5)
    assert rank.restore() == 2
    assert rank.weights() == weights[2]


def test_a_copy_that_fails_is_reported_once_and_is_no_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    rank = world.rank(None, 1, max_failures=1)
    rank.steps(1)
    rank.restore()
    monkeypatch.setattr(node_folder, "SPARE_BYTES", 1 << 60)
    # Others write to the disk, too: what is left, which the error says, is never twice the same.
    left = iter(range(100 * 10**9, 200 * 10**9, 10**9))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=next(left), f_frsize=1))
    for step in (1, 2):
        rank.save(step)
    rank.checkpointer.close()
    assert len([line for line in rank.said if "was not copied to the node" in line]) == 1
    assert world.copies("a") == []
