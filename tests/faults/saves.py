"""A save meets a disk that is full or broken, writes that are cut short, and a frozen rank."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.system.process import state
from tests.faults.kills import LATER, NEWEST, OLDER, RANKS, check
from tests.faults.layer import FileLayer
from tests.faults.processes import HANG_S, Lane, UnexplainedError
from tests.faults.rows import Outcome, SkippedError, Trial, row
from tests.faults.training import Training, checkpointer


@dataclass(frozen=True)
class Fault:
    """What happens from a rank's call number `call` in the save of NEWEST on: `act` is done, then `number` is raised.

    Attributes:
        once: only at that call.
    """

    rank: int = -1
    call: int = 0
    number: int = 0
    act: Callable[[], object] | None = None
    once: bool = False
    short: bool = False


def save_three(rank: int, group: dist.ProcessGroup, directory: Path, fault: Fault, last: int = LATER) -> dict[str, Any]:
    """Save OLDER, NEWEST with the fault, and LATER without; which of them were reported as committed."""
    training = Training(rank=rank)
    writer = checkpointer(directory, group)
    errors: dict[int, str | None] = {}

    def before(number: int, name: str, path: str) -> None:
        if rank != fault.rank or number < fault.call or (number > fault.call and fault.once):
            return
        if fault.act is not None:
            fault.act()
        if fault.number:
            raise OSError(fault.number, os.strerror(fault.number), path)

    layer = FileLayer(directory, before, short=fault.short)
    for step in (OLDER, NEWEST, LATER):
        if step > last:
            break
        training.steps(step - training.done)
        if step == NEWEST:
            layer.install()
        errors[step] = attempt(writer, training)
        layer.remove()
        dist.barrier(group)
    with contextlib.suppress(CheckpointError):  # the same failure, if it was not told yet
        writer.close()
    return {"errors": errors, "calls": layer.calls}


def attempt(writer: Checkpointer, training: Training) -> str | None:
    """The error of a save of this step, if there is one."""
    try:
        writer.save(training.done, per_rank=training.per_rank, **training.objects).result()
    except CheckpointError as error:
        with contextlib.suppress(CheckpointError):  # the same failure, if it was not told yet
            writer.wait()
        return str(error)
    return None


def after(lane: Lane, directory: Path, results: list[dict[str, Any]], detail: str) -> Trial:
    """All ranks say the same of NEWEST, LATER is there, and NEWEST is there if it was said to be."""
    errors = [result["errors"] for result in results]
    detail += f": {errors[0][NEWEST] or 'no error'}"
    if any(len({bool(error[step]) for error in errors}) > 1 for step in (OLDER, NEWEST, LATER)):
        return Trial(Outcome.UNEXPLAINED, f"{detail}: ranks differ: {errors}")
    if errors[0][OLDER] or errors[0][LATER]:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: the disk is well again, but {errors[0]}")
    trial = check(lane, directory, detail, newest=LATER)
    if trial.outcome != Outcome.NEWEST:
        return trial if trial.outcome == Outcome.WRONG else Trial(Outcome.LOST, trial.detail)
    # The newest one is set aside by hand: what is below it?
    newest, *_ = directory.glob(f"checkpoint_*{LATER}")
    newest.rename(directory / "looked-at")
    below = check(lane, directory, detail, newest=NEWEST, order=3)
    if below.outcome == Outcome.ERROR:
        return Trial(Outcome.LOST, below.detail)
    if below.outcome == Outcome.OLDER and errors[0][NEWEST] is None:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: the save of step {NEWEST} was reported as done and is not there")
    return below


def calls_of_a_save(lane: Lane) -> list[int]:
    def make() -> list[int]:
        ranks = lane.ranks(RANKS, save_three, lane.directory / "measured", Fault())
        return [len(child.result()["calls"]) for child in ranks]

    calls: list[int] = lane.remember("calls", make)
    assert min(calls) > 0, "the layer sees nothing"
    return calls


def enter_errno(name: str, number: int) -> None:
    @row(f"{name} in any call of any thread", Outcome.NEWEST, Outcome.OLDER, full=100, short=8)
    def work(lane: Lane) -> Trial:
        calls = calls_of_a_save(lane)
        rank = lane.random.randrange(RANKS)
        call = lane.random.randint(1, calls[rank])
        fault = Fault(rank, call, number, once=lane.random.random() < 0.5)
        directory = lane.directory / "checkpoints"
        results = [child.result() for child in lane.ranks(RANKS, save_three, directory, fault)]
        where = results[rank]["calls"][call - 1 :][:1]
        return after(lane, directory, results, f"{name} at call {call} of rank {rank} {where}")


for _name, _number in {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}.items():
    enter_errno(_name, _number)


@row("writes cut short", Outcome.NEWEST, full=10, short=2)
def short_writes(lane: Lane) -> Trial:
    directory = lane.directory / "checkpoints"
    results = [child.result() for child in lane.ranks(RANKS, save_three, directory, Fault(short=True))]
    return after(lane, directory, results, "every write takes half")


@contextlib.contextmanager
def mounted(lane: Lane, options: str) -> Iterator[Path]:
    """A tmpfs that only this lane sees."""
    if not lane.private_mounts():
        raise SkippedError("mounting a tmpfs needs root")
    path = lane.directory / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> None:
    """Somebody else's file takes all that is left."""
    with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def free(disk: Path) -> None:
    for file in disk.glob("filler*"):
        file.unlink()


def next_life(rank: int, group: dist.ProcessGroup, directory: Path, order: int) -> str | None:
    """Restore what is there and save LATER; the error of that, if there was one."""
    training = Training(rank=rank)
    writer = checkpointer(directory, group, order)
    restored = writer.restore(per_rank=training.per_rank, **training.objects)
    training.done = restored.step if restored else 0
    training.steps(LATER - training.done)
    error = attempt(writer, training)
    with contextlib.suppress(CheckpointError):  # the same failure
        writer.close()
    return error


@row("a full disk", Outcome.NEWEST, Outcome.OLDER, full=50, short=4)
def full_disk(lane: Lane) -> Trial:
    """The disk fills up at a random call of NEWEST; a restore is tried on it; with room again, the next life goes on."""
    calls = calls_of_a_save(lane)
    with mounted(lane, "size=4m") as disk:
        directory = disk / "checkpoints"
        rank = lane.random.randrange(RANKS)
        fault = Fault(rank, lane.random.randint(1, calls[rank]), act=lambda: fill(disk))
        results = [child.result() for child in lane.ranks(RANKS, save_three, directory, fault, NEWEST)]
        failed = {bool(result["errors"][NEWEST]) for result in results}
        detail = f"call {fault.call} of rank {rank}: {results[0]['errors'][NEWEST] or 'no error'}"
        sick = check(lane, directory, f"{detail}: while it is full", newest=NEWEST)
        free(disk)
        if sick.outcome in (Outcome.WRONG, Outcome.LOST):
            return sick
        trial = check(lane, directory, detail, newest=NEWEST, order=3)
        went_on = [child.result() for child in lane.ranks(RANKS, next_life, directory, 4)]
        if trial.outcome == Outcome.ERROR:
            return Trial(Outcome.LOST, trial.detail)
        if len(failed) > 1:
            return Trial(Outcome.UNEXPLAINED, f"{detail}: ranks differ: {results}")
        if trial.outcome == Outcome.OLDER and failed == {False}:
            return Trial(Outcome.UNEXPLAINED, f"{detail}: step {NEWEST} was reported as done and is not there")
        if went_on != [None] * RANKS or check(lane, directory, "", newest=LATER, order=5).outcome != Outcome.NEWEST:
            return Trial(Outcome.UNEXPLAINED, f"{detail}: the next life does not go on: {went_on}")
        return trial


TIMEOUT_S = 10.0  # of the gloo group: so long the others wait for the frozen one, and for one that the machine holds up


def save_and_freeze(rank: int, group: dist.ProcessGroup, directory: Path, frozen: int, call: int) -> str | None:
    """Save OLDER and NEWEST; in the latter, this rank stops itself at a call. The error of NEWEST, if there was one."""
    training = Training(rank=rank)
    writer = checkpointer(directory, group)
    training.steps(OLDER)
    writer.save(OLDER, per_rank=training.per_rank, **training.objects).result()

    def before(number: int, name: str, path: str) -> None:
        if rank == frozen and number == call:
            os.kill(os.getpid(), signal.SIGSTOP)

    FileLayer(directory, before).install()
    training.steps(NEWEST - OLDER)
    error = attempt(writer, training)
    with contextlib.suppress(CheckpointError):
        writer.close()
    return error


@row("a writer frozen, thawed after the restart", Outcome.NEWEST, Outcome.OLDER, full=60, short=4, lanes=4)
def freeze(lane: Lane) -> Trial:
    """The others have a clear error, the job starts again, and the thawed rank commits nothing."""
    directory = lane.directory / "checkpoints"
    calls = calls_of_a_save(lane)
    frozen = lane.random.randrange(RANKS)
    call = lane.random.randint(1, calls[frozen])
    ranks = lane.ranks(RANKS, save_and_freeze, directory, frozen, call, timeout_s=TIMEOUT_S)
    detail = f"rank {frozen} at call {call} of {calls[frozen]}"
    deadline = time.monotonic() + HANG_S
    while state(ranks[frozen].pid) != psutil.STATUS_STOPPED:
        if time.monotonic() > deadline:
            raise UnexplainedError(f"{ranks[frozen].log.stem} has not stopped itself")
        time.sleep(0.005)
    errors = [child.result() for child in ranks if child is not ranks[frozen]]
    detail += f": {errors[0] or 'no error'}"
    before = check(lane, directory, detail, newest=NEWEST, order=2)
    if before.outcome == Outcome.OLDER and errors[0] is None:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: step {NEWEST} was reported as done and is not there")
    went_on = [child.result() for child in lane.ranks(RANKS, next_life, directory, 3)]
    if went_on != [None] * RANKS:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: the next life does not go on: {went_on}")
    there = committed(directory)
    ranks[frozen].send(signal.SIGCONT)
    thawed = ranks[frozen].result()
    if committed(directory) != there:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: thawed, it changed the checkpoints: {thawed}")
    if thawed is None and before.outcome != Outcome.NEWEST:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: thawed, it says that it has committed")
    after = check(lane, directory, f"{detail}: after the thaw", newest=LATER, order=4)
    if after.outcome != Outcome.NEWEST:
        return after if after.outcome == Outcome.WRONG else Trial(Outcome.LOST, after.detail)
    return Trial(Outcome.LOST, before.detail) if before.outcome == Outcome.ERROR else before
