"""A rank is frozen in its save: the others have a clear error, the job starts again, and the thawed rank commits nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.errors import CheckpointError
from slurmtrain.system.process import stat
from tests.faults.disks import LATER, attempt, calls_of_a_save, look
from tests.faults.kills import NEWEST, OLDER, RANKS
from tests.faults.layer import FileLayer
from tests.faults.outcome import Outcome, Trial
from tests.faults.processes import HANG_S, Child, Lane, UnexplainedError
from tests.faults.rows import row
from tests.faults.training import Training, checkpointer

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


def restart(rank: int, group: dist.ProcessGroup, directory: Path) -> None:
    """The next life: restore, and save LATER."""
    training = Training(rank=rank)
    writer = checkpointer(directory, group, order=3)
    restored = writer.restore(per_rank=training.per_rank, **training.objects)
    training.done = restored.step if restored else 0
    training.steps(LATER - training.done)
    writer.save(LATER, per_rank=training.per_rank, **training.objects).result()
    writer.close()


def wait_until_frozen(child: Child) -> None:
    deadline = time.monotonic() + HANG_S
    while (known := stat(child.pid)) is None or known.state != "T":
        if time.monotonic() > deadline:
            raise UnexplainedError(f"{child.log.stem} has not stopped itself")
        time.sleep(0.005)


def freeze(lane: Lane) -> Trial:
    directory = lane.directory / "checkpoints"
    calls = calls_of_a_save(lane)
    frozen = lane.random.randrange(RANKS)
    call = lane.random.randint(1, calls[frozen])
    ranks = lane.ranks(RANKS, save_and_freeze, directory, frozen, call, timeout_s=TIMEOUT_S)
    detail = f"rank {frozen} at call {call} of {calls[frozen]}"
    wait_until_frozen(ranks[frozen])
    errors = [child.result() for child in ranks if child is not ranks[frozen]]
    detail += f": {errors[0] or 'no error'}"
    before = look(lane, directory, newest=NEWEST, detail=detail, order=2)
    if before.outcome == Outcome.OLDER and errors[0] is None:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: step {NEWEST} was reported as done and is not there")
    for child in lane.ranks(RANKS, restart, directory):
        child.result()
    there = committed(directory)
    ranks[frozen].send(signal.SIGCONT)
    thawed = ranks[frozen].result()
    if committed(directory) != there:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: thawed, it changed the checkpoints: {thawed}")
    if thawed is None and before.outcome != Outcome.NEWEST:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: thawed, it says that it has committed")
    after = look(lane, directory, newest=LATER, detail=f"{detail}: after the thaw", order=4)
    if after.outcome != Outcome.NEWEST:
        return after if after.outcome == Outcome.WRONG else Trial(Outcome.LOST, after.detail)
    return Trial(Outcome.LOST, before.detail) if before.outcome == Outcome.ERROR else before


@row("a writer frozen, thawed after the restart", Outcome.NEWEST, Outcome.OLDER, full=60, short=8, lanes=8)
def frozen_writer(lane: Lane, count: int) -> Iterator[Trial]:
    for _ in range(count):
        with lane.trial():
            yield freeze(lane)
