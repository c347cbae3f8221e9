"""Copies on the nodes: a restart takes them, one node may be lost, and neither damaged ones nor those from before a step back.

Each rank is a node of its own, with a folder of its own. Of every promise the state that is restored is compared with the
one that was saved, to the last bit."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.store.mirror import Mirror
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.runtime.distributed_context import DistributedContext
from tests.distributed.test_checkpoint import Rank, die_in
from tests.support.gloo import GlooRanks

NODES = "abc"


class World:
    """The directory that all ranks share, the folder of each node, and where the weights after each step are noted."""

    def __init__(self, path: Path):
        self.checkpoints, self.disks, self.notes = path / "checkpoints", path / "disks", path / "notes"
        for folder in (self.disks, self.notes):
            folder.mkdir(parents=True, exist_ok=True)

    def disk(self, node: str) -> Path:
        path = self.disks / node
        path.mkdir(exist_ok=True)
        return path

    def rank(self, distributed: DistributedContext, incarnation: int, nodes: str = NODES, **options: Any) -> Rank:
        node = nodes[distributed.environment.rank]
        return Rank(distributed, self.checkpoints, incarnation, local=self.disk(node), node=node, **options)

    def note(self, step: int, rank: Rank) -> None:
        if rank.rank == 0:
            (self.notes / str(step)).write_text(json.dumps(rank.weights()))

    def noted(self, step: int) -> list[float]:
        found: list[float] = json.loads((self.notes / str(step)).read_text())
        return found

    def copies(self, node: str) -> list[Path]:
        """What a node holds, oldest first."""
        return [path for folder in self.disk(node).glob("slurmtrain-*/*/*") for path in committed(folder)]

    def files(self, node: str) -> list[str]:
        return sorted(path.name for path in self.copies(node)[-1].glob("rank*"))


def save_both(world: World, distributed: DistributedContext) -> Rank:
    """Save step 1 in the shared directory, and step 2 on the nodes only."""
    rank = world.rank(distributed, 1)
    rank.steps(1)
    rank.save(1)
    world.note(1, rank)
    rank.steps(1)
    assert rank.checkpointer.save_local(2, **rank.objects).result().step == 2
    world.note(2, rank)
    return rank


# What happens to the nodes between the attempts, what the next attempt begins from, and in which words.


def lose(*nodes: str) -> Callable[[World], None]:
    def change(world: World) -> None:
        for node in nodes:
            shutil.rmtree(world.disk(node))

    return change


def flip(file: str, *nodes: str) -> Callable[[World], None]:
    def change(world: World) -> None:
        for node in nodes:
            path = world.copies(node)[-1] / file
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)

    return change


def take_away_the_checkpoint(world: World) -> None:
    shutil.rmtree(committed(world.checkpoints)[-1])


CASES: dict[str, tuple[Callable[[World], None], int | None, str]] = {
    "as they are": (lambda world: None, 2, "resuming at step 2 from checkpoint_0000002, the newest, from the copies"),
    "one node is another one": (lose("b"), 2, "b had none: the parts came from the other nodes"),
    "a node and the next one are lost": (lose("b", "c"), 1, "no node has rank00001.safetensors as it was written"),
    "one copy of a file is damaged": (flip("rank00001.safetensors", "b"), 2, "its digest differs"),
    "the other copy of it is damaged": (flip("rank00001.safetensors", "c"), 2, "resuming at step 2"),
    "both copies of a file are damaged": (flip("rank00001.safetensors", "b", "c"), 1, "its digest differs"),
    "a manifest is damaged": (flip("manifest.json", "a"), 2, "a had none"),
    "an index is damaged": (flip("index.bin", "a"), 2, "resuming at step 2"),
    "a mark is damaged": (flip("lineage.json", "a"), 2, "resuming at step 2"),
    "all marks are damaged": (flip("lineage.json", "a", "b", "c"), 1, "resuming at step 1"),
    "the checkpoint under them is taken away": (take_away_the_checkpoint, None, "not of what this run goes on from"),
}


def go_through(distributed: DistributedContext, path: Path) -> dict[str, tuple[int | None, bool, list[str], str]]:
    """Save once, then change the folders in every way, restore each time, and put everything back."""
    first, found = distributed.environment.rank == 0, {}
    world = World(path)
    save_both(world, distributed)
    dist.barrier(group=distributed.control_group)
    if first:
        shutil.copytree(path, path.with_name("before"))
    for number, (name, (change, _, _)) in enumerate(CASES.items()):
        if first:
            shutil.rmtree(path)
            shutil.copytree(path.with_name("before"), path)
            change(world)
        dist.barrier(group=distributed.control_group)
        rank = world.rank(distributed, 2 + number, seed=5)
        step = rank.restore()
        same = step is None or rank.weights() == world.noted(step)
        rank.checkpointer.close()
        found[name] = (step, same, rank.said, world.files("b")[0] if step == 2 and world.copies("b") else "")
        dist.barrier(group=distributed.control_group)
    return found


@pytest.fixture(scope="module")
def went_through(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("copies")
    with GlooRanks(path) as ranks:
        yield ranks(len(NODES), go_through, path / "world")


@pytest.mark.parametrize("case", CASES)
def test_the_newest_state_that_is_whole_and_sound_on_the_nodes_is_restored_else_the_checkpoint(
    went_through: list[dict[str, Any]], case: str
) -> None:
    _, expected, words = CASES[case]
    for answers in went_through:
        step, same, _, _ = answers[case]
        assert step == expected
        assert same, "restored other weights than were saved"
    assert words in "\n".join(went_through[0][case][2])


def hold(distributed: DistributedContext, path: Path) -> dict[str, Any]:
    world = World(path)
    rank = save_both(world, distributed)
    held = {node: world.files(node) for node in NODES}
    steps = []
    for step in (3, 4):
        rank.steps(1)
        rank.checkpointer.save_local(step, **rank.objects).result()
        dist.barrier(group=distributed.control_group)
        steps.append([[step_of(copy) for copy in world.copies(node)] for node in NODES])
    modes = {oct(folder.stat().st_mode & 0o777) for folder in world.disks.glob("*/slurmtrain-*/**") if folder.is_dir()}
    dist.barrier(group=distributed.control_group)
    rank.checkpointer.remove_local()
    left = sorted(path.name for path in world.disks.glob("*/*"))
    durable = [path.name for path in committed(world.checkpoints)]
    return {"held": held, "steps": steps, "modes": modes, "left": left, "durable": durable}


def test_each_node_holds_its_part_and_that_of_the_node_before_it_of_the_newest_save_only(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    answer = gloo_ranks(3, hold, tmp_path / "world")[0]
    files = [f"rank{number:05d}.safetensors" for number in range(3)]
    assert answer["held"] == {"a": [files[0], files[2]], "b": [files[0], files[1]], "c": [files[1], files[2]]}
    assert answer["steps"] == [[[3]] * 3, [[4]] * 3]
    assert answer["modes"] == {"0o700"}
    assert answer["left"] == []  # nothing stays in the memory of nodes that others get next
    assert answer["durable"] == ["checkpoint_0000001"]


def go_on_elsewhere(distributed: DistributedContext, path: Path) -> tuple[int | None, bool]:
    """As two ranks on two of the nodes, in another order."""
    world = World(path)
    rank = world.rank(distributed, 2, nodes="ca", seed=5)
    step = rank.restore()
    return step, rank.weights() == world.noted(step or 0)


def just_save_both(distributed: DistributedContext, path: Path) -> None:
    save_both(World(path), distributed)


def test_other_nodes_in_another_order_restore_what_is_whole_on_them(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    path = tmp_path / "world"
    gloo_ranks(3, just_save_both, path)
    assert gloo_ranks(2, go_on_elsewhere, path) == [(2, True)] * 2


def step_back(distributed: DistributedContext, path: Path, request: str) -> list[Any]:
    """Go back on purpose while node b is away with its copy; then it comes back."""
    world, first = World(path), distributed.environment.rank == 0
    save_both(world, distributed)
    dist.barrier(group=distributed.control_group)
    if first:
        shutil.copytree(world.disks, path / "away")
    dist.barrier(group=distributed.control_group)
    back = world.rank(distributed, 2, seed=5)
    asked: dict[str, Any] = {"path": world.checkpoints / "checkpoint_0000001"} if request == "path" else {"at_most": 1}
    restored = back.checkpointer.restore(**asked, **back.objects)
    assert restored is not None
    assert restored.step == 1
    dist.barrier(group=distributed.control_group)
    if first:
        shutil.rmtree(world.disks)
        (path / "away").rename(world.disks)
    dist.barrier(group=distributed.control_group)
    rank = world.rank(distributed, 3, seed=5)
    step = rank.restore()
    own = [step, rank.weights() == world.noted(1)]
    # From here on, copies count again.
    rank.steps(1)
    rank.checkpointer.save_local(2, **rank.objects).result()
    weights = rank.weights()
    rank = world.rank(distributed, 4, seed=6)
    return [*own, rank.restore(), rank.weights() == weights]


@pytest.mark.parametrize("request_by", ["path", "at most"])
def test_a_copy_from_before_a_step_back_never_wins(gloo_ranks: GlooRanks, tmp_path: Path, request_by: str) -> None:
    assert gloo_ranks(3, step_back, tmp_path / "world", request_by) == [[1, True, 2, True]] * 3


def roll_back(distributed: DistributedContext, path: Path) -> list[Any]:
    """In the process, to the newest of at most step 2, which is on the nodes only."""
    world = World(path)
    rank = save_both(world, distributed)
    rank.steps(1)
    restored = rank.checkpointer.restore(at_most=2, **rank.objects)
    rank.checkpointer.remove_newer(2)
    assert restored is not None
    return [restored.step, bool(restored.origin), rank.weights() == world.noted(2), rank.checkpointer.last_step]


def test_training_goes_back_to_a_copy_on_the_nodes_if_that_is_the_newest_sound_state(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    assert gloo_ranks(3, roll_back, tmp_path / "world") == [[2, True, True, 1]] * 3


def be_killed_twice(distributed: DistributedContext, path: Path) -> list[Any]:
    """Restore a copy, be ended before there is another, and restore once more."""
    world = World(path)
    save_both(world, distributed)
    steps = []
    for incarnation in (2, 3):
        rank = world.rank(distributed, incarnation, seed=5)
        steps.append(rank.restore())
    rank.steps(1)
    rank.save(3)
    late = world.rank(distributed, 4, seed=5)
    return [*steps, late.restore(), late.weights() == rank.weights()]


def test_a_restored_copy_is_there_until_there_is_a_newer_one_and_a_newer_checkpoint_wins(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    assert gloo_ranks(3, be_killed_twice, tmp_path / "world") == [[2, 2, 3, True]] * 3


# Death in the middle of a copy. The node of rank 1 dies; the other one and the disks stay.


def die_in_second_copy(
    distributed: DistributedContext, path: Path, module: str, function: str, call: int, rank_to_die: int
) -> None:
    world = World(path)
    rank = world.rank(distributed, 1, nodes="ab")
    rank.steps(1)
    rank.save(1)
    for step in (2, 3):
        rank.steps(1)
        world.note(step, rank)
        dist.barrier(group=distributed.control_group)
        if step == 3 and rank.rank == rank_to_die:
            die_in(module, function, call)
        rank.checkpointer.save_local(step, **rank.objects).result()


FOLDER = "node_copies.folder"
STAGES = {
    "before the folder": ((FOLDER, "NodeFolder.begin", 1, 1), 2),
    "while a rank writes": (("format.blocks", "write_all", 1, 1), 2),
    "before a rank hands in": (("save.job", "fsync_directory", 1, 1), 2),
    "before the index": (("format.coverage", "merged_schemas", 1, 0), 2),
    "before the exchange": (("node_copies.save", "exchange", 1, 1), 2),
    "while a neighbour writes": (("format.blocks", "write_all", 2, 1), 2),
    "before the manifest": (("format.manifest", "write_synced", 1, 1), 2),
    "before COMPLETE": (("format.manifest", "write_synced", 2, 0), 2),
    # The other node has published it by then, and holds everything.
    "before one rename": ((FOLDER, "NodeFolder.publish", 1, 1), 3),
    "before the old one goes": ((FOLDER, "NodeFolder.keep_only", 1, 0), 3),
    "while the old one goes": ((FOLDER, "remove", 1, 1), 3),
}


def restore_each(distributed: DistributedContext, path: Path) -> dict[str, Any]:
    found = {}
    for stage in STAGES:
        world = World(path / stage)
        rank = world.rank(distributed, 2, nodes="ab", seed=5)
        step = rank.restore()
        same = rank.weights() == world.noted(step or 0)
        rank.checkpointer.close()
        names = sorted({entry.name for entry in world.disks.glob("*/slurmtrain-*/*/*/checkpoint_*")})
        found[stage] = (step, same, names)
        dist.barrier(group=distributed.control_group)
    return found


def test_a_kill_at_any_stage_of_a_copy_leaves_a_state_that_is_restored(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    started = {}
    for stage, (where, _) in STAGES.items():
        (tmp_path / "stages" / stage).mkdir(parents=True)
        started[stage] = gloo_ranks.start_joined(2, die_in_second_copy, tmp_path / "stages" / stage, *where)
    for stage, ranks in started.items():
        assert -signal.SIGKILL in [ending.exit_code for ending in ranks.endings()], stage
    for answers in gloo_ranks(2, restore_each, tmp_path / "stages"):
        assert {stage: answer[:2] for stage, answer in answers.items()} == {
            stage: (step, True) for stage, (_, step) in STAGES.items()
        }
        # What the killed one has left was cleaned up.
        assert {stage: answer[2] for stage, answer in answers.items()} == {
            stage: [f"checkpoint_{step:07d}"] for stage, (_, step) in STAGES.items()
        }


def test_a_copy_that_fails_is_reported_and_is_no_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurmtrain.checkpoint.node_copies.folder import NodeFolder

    rank = Rank(None, tmp_path / "checkpoints", local=World(tmp_path).disk("a"), node="a", max_failures=1)
    rank.steps(1)
    rank.restore()
    monkeypatch.setattr(NodeFolder, "free_bytes", lambda self: 0)
    for step in (1, 2):
        assert rank.checkpointer.save_local(step, **rank.objects).wait(60)
    rank.save(3)
    assert len([line for line in rank.said if "was not copied to the nodes" in line]) == 1
    assert World(tmp_path).copies("a") == []


# Copies in an object store: they come back when the run's own directory is gone.


def mirrored(distributed: DistributedContext | None, folder: Path, incarnation: int = 1, **options: Any) -> Rank:
    options |= {"mirror": f"file://{folder}/store", "keep": Keep(last=2)}
    return Rank(distributed, folder / "checkpoints", incarnation, seed=incarnation, **options)


def save_wipe_and_restore(distributed: DistributedContext, folder: Path) -> tuple[Any, ...]:
    first = mirrored(distributed, folder)
    for step in (1, 2, 3):
        first.steps(1)
        first.save(step)
    first.checkpointer.close()
    if distributed.environment.rank == 0:
        shutil.rmtree(folder / "checkpoints")
    distributed.leave_together()
    second = mirrored(distributed, folder, 2)
    restored, there = second.restore(), [path.name for path in committed(folder / "checkpoints")]
    return restored, second.weights() == first.weights(), there, second.said


def test_two_ranks_fetch_what_was_wiped(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    answers = gloo_ranks(2, save_wipe_and_restore, tmp_path)
    assert [answer[:3] for answer in answers] == [(3, True, ["checkpoint_0000003"])] * 2
    assert "was fetched from file://" in answers[0][3][0]
    # As many copies stay as checkpoints do; the one that came while another was being copied may have been left out.
    assert 1 <= len(list((tmp_path / "store").glob("*/COMPLETE"))) <= 2


def save_two_and_wipe(folder: Path, run_id: str = "") -> None:
    for number in (1, 2):  # of two lives, since the end of each waits for its copy
        rank = mirrored(None, folder, number, run_id=run_id)
        rank.restore()
        rank.save(number)
        rank.checkpointer.close()
    shutil.rmtree(folder / "checkpoints")


def test_a_copy_that_is_damaged_is_set_aside_and_the_older_is_fetched(tmp_path: Path) -> None:
    save_two_and_wipe(tmp_path)
    (newest,) = (tmp_path / "store").glob("checkpoint_0000002*")
    content = bytearray((newest / "rank00000.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "rank00000.safetensors").write_bytes(content)
    rank = mirrored(None, tmp_path, 3)
    assert rank.restore() == 1
    assert any("checkpoint_0000002 is damaged and was set aside" in line for line in rank.said)
    assert not (newest / "COMPLETE").exists()


def test_copies_of_another_run_are_refused(tmp_path: Path) -> None:
    save_two_and_wipe(tmp_path, run_id="one")
    with pytest.raises(CheckpointMismatchError, match="belongs to run one, this is run two"):
        mirrored(None, tmp_path, 3, run_id="two").restore()


def test_a_store_that_fails_is_told_and_the_checkpoint_is_committed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise CheckpointError("the store says no")

    monkeypatch.setattr(Mirror, "upload", refuse)
    rank = mirrored(None, tmp_path)
    rank.save(1)
    rank.checkpointer.close()
    assert [path.name for path in committed(tmp_path / "checkpoints")] == ["checkpoint_0000001"]
    assert any("was not copied to" in line and "the store says no" in line for line in rank.said)
