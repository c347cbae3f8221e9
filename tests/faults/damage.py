"""Files of the newest checkpoint are damaged, swapped or missing: the older one is restored, and it is said why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from unittest import mock

import torch.distributed as dist

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.directory import checkpoint_name
from slurmtrain.checkpoint.restore import reader
from tests.faults.kills import NEWEST, OLDER, RANKS, check, facts
from tests.faults.processes import Lane
from tests.faults.rows import Outcome, Trial, row, row_of_many
from tests.faults.training import Report, Training, checkpointer, classify, restore

FLIPS_A_PROCESS = 250
SHARDS = "rank*.safetensors"


def save_both(rank: int, group: dist.ProcessGroup | None, directory: Path, run: int = 0) -> None:
    training = Training(run=run, rank=rank)
    writer = checkpointer(directory, group)
    for step in (OLDER, NEWEST):
        training.steps(step - training.done)
        writer.save(step, per_rank=training.per_rank, **training.objects).result()
    writer.close()


def prepared(lane: Lane, run: int = 0) -> Path:
    """Both checkpoints of a run, made once."""

    def make() -> Path:
        directory = lane.shared / f"prepared-{run}"
        for child in lane.ranks(RANKS, save_both, directory, run):
            child.result()
        return directory

    directory: Path = lane.remember(f"prepared {run}", make)
    return directory


def copied(lane: Lane) -> Path:
    """A copy to be damaged; the newest checkpoint in it."""
    shutil.copytree(prepared(lane), lane.directory / "checkpoints")
    return lane.directory / "checkpoints" / checkpoint_name(NEWEST)


def shards(path: Path) -> list[Path]:
    return sorted(path.glob(SHARDS))


# Each takes a source of chance, the newest checkpoint of run 0, and run 1, which has the same shapes.
Damage = Callable[[Random, Path, Path], object]


def truncate(random: Random, path: Path, other: Path) -> None:
    file = random.choice(shards(path))
    os.truncate(file, random.randrange(file.stat().st_size))


def zero_a_part(random: Random, path: Path, other: Path) -> None:
    file = random.choice(shards(path))
    content = bytearray(file.read_bytes())
    while content == file.read_bytes():  # until the part was not of zeros already
        begin = random.randrange(len(content))
        end = min(len(content), begin + random.randint(1, 4096))
        content[begin:end] = bytes(end - begin)
    file.write_bytes(content)


def swap_ranks(random: Random, path: Path, other: Path) -> None:
    first, second = shards(path)
    first.rename(path / "aside")
    second.rename(first)
    (path / "aside").rename(second)


def from_another_step(random: Random, path: Path, other: Path) -> None:
    name = random.choice(shards(path)).name
    shutil.copy(path.parent / checkpoint_name(OLDER) / name, path / name)


def all_shards_from_another_run(random: Random, path: Path, other: Path) -> None:
    for file in shards(path):
        shutil.copy(other / path.name / file.name, file)


def replace_from(name: str) -> Damage:
    def replace(random: Random, path: Path, other: Path) -> None:
        shutil.copy(other / path.name / name, path / name)

    return replace


def change_a_header(random: Random, path: Path, other: Path) -> None:
    file = random.choice(shards(path))
    content = bytearray(file.read_bytes())
    content[random.randrange(8 + int.from_bytes(content[:8], "little"))] ^= 1
    file.write_bytes(content)


def cut_the_manifest(random: Random, path: Path, other: Path) -> None:
    file = path / "manifest.json"
    os.truncate(file, random.randrange(file.stat().st_size))


def edit_the_manifest(random: Random, path: Path, other: Path) -> None:
    """Stays valid JSON: another step, a file less, another digest, another shape."""
    file = path / "manifest.json"
    values = json.loads(file.read_text())
    kind = random.randrange(4)
    if kind == 0:
        values["step"] += 1
    elif kind == 1:
        values["files"].pop(random.choice(sorted(values["files"])))
    elif kind == 2:
        values["files"][random.choice(sorted(values["files"]))]["digests"] = "0" * 64
    else:
        values["tensors"][random.choice(sorted(values["tensors"]))]["shape"] = [1]
    file.write_text(json.dumps(values, indent=1))


def named_like_another_step(random: Random, path: Path, other: Path) -> None:
    """Somebody renamed the older one over the newest."""
    shutil.rmtree(path)
    shutil.copytree(path.parent / checkpoint_name(OLDER), path)


KINDS: dict[str, Damage] = {
    "a shard truncated": truncate,
    "a shard emptied": lambda random, path, other: os.truncate(random.choice(shards(path)), 0),
    "a shard deleted": lambda random, path, other: random.choice(shards(path)).unlink(),
    "a shard zeroed in part": zero_a_part,
    "shards of two ranks swapped": swap_ranks,
    "a shard of another step": from_another_step,
    "all shards of another run": all_shards_from_another_run,
    "a shard's header changed": change_a_header,
    "manifest cut": cut_the_manifest,
    "manifest edited": edit_the_manifest,
    "manifest of another run": replace_from("manifest.json"),
    "COMPLETE without manifest": lambda random, path, other: (path / "manifest.json").unlink(),
    "COMPLETE of another run": replace_from("COMPLETE"),
    "COMPLETE missing": lambda random, path, other: (path / "COMPLETE").unlink(),
    "a checkpoint under another step's name": named_like_another_step,
}


def enter(kind: str, damage: Damage) -> None:
    @row(kind, Outcome.OLDER, full=100, short=3)
    def work(lane: Lane) -> Trial:
        newest = copied(lane)
        damage(lane.random, newest, prepared(lane, 1))
        ranks = RANKS if lane.random.random() < 0.3 else 1
        trial = check(lane, newest.parent, f"{ranks} ranks restore", ranks=ranks)
        silent = kind != "COMPLETE missing" and not list(newest.parent.glob(f"{newest.name}.damaged-*"))
        if trial.outcome == Outcome.OLDER and silent:
            trial = Trial(Outcome.UNEXPLAINED, "the damaged one was not set aside")
        return trial


for _kind, _damage in KINDS.items():
    enter(_kind, _damage)


@row("an explicit path that is damaged", Outcome.ERROR, full=50, short=4)
def explicit_path(lane: Lane) -> Trial:
    newest = copied(lane)
    kind = lane.random.choice(sorted(KINDS))
    KINDS[kind](lane.random, newest, prepared(lane, 1))
    reports = [
        child.result()
        for child in lane.ranks(RANKS, lambda rank, group, at: restore(at.parent, rank, group, path=at), newest)
    ]
    return classify(reports, facts(lane), newest=NEWEST, older=OLDER, detail=kind)


@row("all checkpoints damaged", Outcome.ERROR, full=50, short=4)
def all_damaged(lane: Lane) -> Trial:
    newest = copied(lane)
    for path in newest.parent.glob("checkpoint_*"):
        flip(path, *random_bit(lane.random, path))
    trial = check(lane, newest.parent, "", ranks=RANKS)
    again = check(lane, newest.parent, "the next attempt", order=3)
    return trial if again.outcome == Outcome.ERROR else again


def random_bit(random: Random, path: Path) -> tuple[str, int]:
    """File and number of a bit: half of them fall on the files alike, half on the bytes alike."""
    sizes = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    names = list(sizes)
    name = random.choice(names) if random.random() < 0.5 else random.choices(names, [sizes[n] for n in names])[0]
    return name, random.randrange(8 * sizes[name])


def flip(path: Path, name: str, bit: int) -> None:
    with (path / name).open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def flip_and_restore(newest: Path, bits: list[tuple[str, int]], mutant: str) -> list[Report]:
    """Flip, restore, flip back, each in turn; in one process, since a flip has to cost no more than a restore."""
    reports = []
    if mutant == "any digest":  # a restore that must be found out
        compare = blocks.check_block
        mock.patch.object(
            reader, "check_block", lambda *words, **options: (compare(*words, **options), None)[1]
        ).start()
    for name, bit in bits:
        flip(newest, name, bit)
        reports.append(restore(newest.parent))
        for aside in newest.parent.glob(f"{newest.name}.damaged-*"):
            aside.rename(newest)
        flip(newest, name, bit)
    reports.append(restore(newest.parent))  # all is as it was, or the flips above have shown nothing
    return reports


@row_of_many("a flipped bit", Outcome.OLDER, kind="flips", full=10_000, short=150)
def flips(lane: Lane, count: int) -> Iterator[Trial]:
    mutant = lane.memory.get("mutant", "")
    while count > 0:
        with lane.trial():
            newest = copied(lane)
            bits = [random_bit(lane.random, newest) for _ in range(min(count, FLIPS_A_PROCESS))]
            count -= len(bits)
            *reports, last = lane.fork(flip_and_restore, newest, bits, mutant).result(timeout_s=300)
            for report, (name, bit) in zip(reports, bits, strict=True):
                yield classify([report], facts(lane), newest=NEWEST, older=OLDER, detail=f"bit {bit} of {name}")
            undone = classify([last], facts(lane), newest=NEWEST, older=OLDER)
            if undone.outcome != Outcome.NEWEST:
                yield Trial(Outcome.UNEXPLAINED, f"after all flips were undone: {undone.outcome.value} {undone.detail}")
