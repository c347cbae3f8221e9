"""The copy on the nodes: a restart in place takes it, unless it is damaged, not whole, or from before a step back.

Each rank is a node of its own, with a folder of its own. Of every promise the state that is restored is compared with the
one that was saved, to the last bit."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from slurmtrain.checkpoint import node_folder
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.training.hooks import TrainingHook
from slurmtrain.training.hooks.base import StepResult, TrainingState
from tests.distributed.test_checkpoint import Rank
from tests.distributed.test_training import alone, fit, trainer
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


def flip(file: str, *nodes: str, at: int | None = None) -> Callable[[World], None]:
    def change(world: World) -> None:
        for node in nodes:
            path = world.copies(node)[-1] / file
            content = bytearray(path.read_bytes())
            content[len(content) // 2 if at is None else at] ^= 1
            path.write_bytes(content)

    return change


def take_away_the_checkpoint(world: World) -> None:
    shutil.rmtree(committed(world.checkpoints)[-1])


CASES: dict[str, tuple[Callable[[World], None], int | None, str]] = {
    "as they are": (lambda world: None, 2, "resuming at step 2 from checkpoint_0000002, the newest, from the copies"),
    "one node is another one": (lose("b"), 1, "the nodes of this job do not all have the same one"),
    "a file is lost": (
        lambda world: (world.copies("b")[-1] / "rank00001.safetensors").unlink(),
        1,
        "no node has rank00001",
    ),
    "a file is damaged": (flip("rank00001.safetensors", "b"), 1, "its digest differs"),
    "a manifest is damaged": (flip("manifest.json", "a"), 1, "do not all have the same one"),
    "a header is damaged": (flip("rank00001.safetensors", "b", at=20), 1, "is not what was written"),
    "a mark is damaged": (flip("copy.json", "a"), 1, "not of what this run goes on from"),
    "the checkpoint under them is taken away": (take_away_the_checkpoint, None, "not of what this run goes on from"),
}


def go_through(distributed: DistributedContext, path: Path) -> dict[str, tuple[int | None, bool, list[str]]]:
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
        found[name] = (step, same, rank.said)
        dist.barrier(group=distributed.control_group)
    return found


@pytest.fixture(scope="module")
def went_through(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("copies")
    with GlooRanks(path) as ranks:
        yield ranks(len(NODES), go_through, path / "world")


@pytest.mark.parametrize("case", CASES)
def test_a_restart_in_place_restores_the_copy_that_is_whole_and_sound_else_the_checkpoint(
    went_through: list[dict[str, Any]], case: str
) -> None:
    _, expected, words = CASES[case]
    for answers in went_through:
        step, same, _ = answers[case]
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


def test_each_node_holds_its_part_of_the_newest_save_only_in_a_folder_for_nobody_else(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    answer = gloo_ranks(3, hold, tmp_path / "world")[0]
    files = [f"rank{number:05d}.safetensors" for number in range(3)]
    assert answer["held"] == {"a": [files[0]], "b": [files[1]], "c": [files[2]]}
    assert answer["steps"] == [[[3]] * 3, [[4]] * 3]
    assert answer["modes"] == {"0o700"}
    assert answer["left"] == []  # nothing stays in the memory of nodes that others get next
    assert answer["durable"] == ["checkpoint_0000001"]


def change_places(distributed: DistributedContext, path: Path) -> tuple[int | None, bool, list[list[str]]]:
    """Restore on the same nodes in another order."""
    world = World(path)
    save_both(world, distributed)
    rank = world.rank(distributed, 2, nodes="cab", seed=5)
    step = rank.restore()
    dist.barrier(group=distributed.control_group)
    return step, rank.weights() == world.noted(step or 0), [world.files(node) for node in NODES]


def test_the_nodes_may_be_in_another_order_and_keep_no_more_than_their_own_part(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    held = [[f"rank{number:05d}.safetensors"] for number in range(3)]
    assert gloo_ranks(3, change_places, tmp_path / "world") == [(2, True, held)] * 3


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


def die_in(module: str, function: str, call: int) -> None:
    """Make this process kill itself when it calls the function of a module of `checkpoint` the next `call`th time."""
    owner: Any = importlib.import_module(f"slurmtrain.checkpoint.{module}")
    *path, name = function.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(function)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(owner, name, counted)


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


FOLDER = "node_folder"
STAGES = {
    "before one rename": ((FOLDER, "NodeFolder.publish", 1, 1), 2),
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


class Dies(TrainingHook):
    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if state.step == 6:
            raise RuntimeError("out of memory, say")


def test_training_copies_its_state_in_between_and_the_next_attempt_goes_on_from_there(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    words = [f"checkpoint.local={tmp_path / 'node'}", "checkpoint.local_every_steps=4", "checkpoint.every_steps=0"]
    words += ["train.steps=8", "train.eval_every=0"]
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(alone(), tmp_path / "run", words, hooks=[Dies()]).fit()
    assert fit(alone(), tmp_path / "run", words, attempt=2).first_step == 4
    (restored,) = [event for event in RunDir(tmp_path / "run").events() if event["event"] == "restored"]
    assert restored["origin"] == "the copies on the nodes"


def test_a_copy_that_fails_is_reported_and_is_no_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(None, tmp_path / "checkpoints", local=World(tmp_path).disk("a"), node="a", max_failures=1)
    rank.steps(1)
    rank.restore()
    monkeypatch.setattr(node_folder, "SPARE_BYTES", 1 << 60)
    # Others write to the disk, too: what is left, which the error says, is never twice the same.
    left = iter(range(100 * 10**9, 200 * 10**9, 10**9))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=next(left), f_frsize=1))
    for step in (1, 2):
        assert rank.checkpointer.save_local(step, **rank.objects).wait(60)
    rank.save(3)
    assert len([line for line in rank.said if "was not copied to the nodes" in line]) == 1
    assert World(tmp_path).copies("a") == []
