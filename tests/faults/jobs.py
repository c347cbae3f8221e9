"""More than one job, life or directory where there should be one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.store import commit
from tests.faults.kills import NEWEST, RANKS, check
from tests.faults.processes import CLONE_NEWNS, LIBC, Lane
from tests.faults.rows import Outcome, Trial, row
from tests.faults.saves import attempt, mounted
from tests.faults.training import Facts, Report, Training, checkpointer, classify, restore


@dataclass(frozen=True)
class Job:
    """What a rank of a job tells of itself: the facts of every state that was reported as committed, and its last error."""

    saved: dict[int, Facts]
    error: str | None


def job(
    rank: int, group: dist.ProcessGroup, directory: Path, run: int, order: int | None, wait_s: float, saves: int
) -> Job:
    """Restore what is there, then save every few steps. Each run has its own data, so no two have the same states."""
    time.sleep(wait_s)
    training = Training(run=run, rank=rank)
    saved: dict[int, Facts] = {}
    try:
        writer = checkpointer(directory, group, order)
        restored = writer.restore(per_rank=training.per_rank, **training.objects)
        training.done = restored.step if restored else 1
        for _ in range(saves):
            training.steps(2)
            saving = writer.save(training.done, per_rank=training.per_rank, **training.objects)
            saving.result()
            now = training.facts()
            saved[now.step] = now
        writer.close()
    except CheckpointError as error:
        return Job(saved, str(error))
    return Job(saved, None)


def compete(lane: Lane, orders: tuple[int | None, int | None]) -> Trial:
    """Two jobs at once. What is restored is a state that one of them committed, and the newer one was not disturbed."""
    directory = lane.directory / "checkpoints"
    wait_s = lane.random.uniform(0.0, 0.3)
    started = [
        lane.ranks(RANKS, job, directory, run, order, run * wait_s, 3 + 5 * (run == 0))
        for run, order in enumerate(orders)
    ]
    told = [[child.result() for child in ranks] for ranks in started]
    detail = f"the second after {wait_s:.2f} s: " + " | ".join(
        f"{[*ranks[0].saved]} {ranks[0].error}" for ranks in told
    )
    if any((ranks[0].error is None) != (rank.error is None) for ranks in told for rank in ranks):
        return Trial(Outcome.UNEXPLAINED, f"{detail}: ranks of a job differ: {told}")
    undisturbed = [run for run, ranks in enumerate(told) if ranks[0].error is None]
    if not undisturbed:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: neither job went on")
    newest = max(max(told[run][0].saved) for run in undisturbed)
    trials = []
    for run in undisturbed:
        expected = {(step, 0): facts for step, facts in told[run][0].saved.items() if step == newest}
        report = lane.ranks(1, restore_of, directory, run)[0].result()
        trials.append(classify([report], expected, newest=newest, older=None, detail=detail))
    return next((trial for trial in trials if trial.outcome == Outcome.NEWEST), trials[0])


def restore_of(rank: int, group: dist.ProcessGroup | None, directory: Path, run: int) -> Report:
    return restore(directory, order=None, run=run)


row("two incarnations in one directory", Outcome.NEWEST, full=40, short=3)(lambda lane: compete(lane, (1, 2)))


row("two jobs in one directory", Outcome.NEWEST, full=40, short=3)(lambda lane: compete(lane, (None, None)))


def save_where_told(
    rank: int, group: dist.ProcessGroup | None, directories: list[Path], ranks_apart: bool
) -> str | None:
    """One save; its error, if there was one. `ranks_apart`: the same name is another disk on rank 1."""
    directory = directories[rank]
    if ranks_apart and rank == 1:
        commit.VISIBILITY_S = 2.0  # no network file system is late here
        os.makedirs(directory, exist_ok=True)
        LIBC.unshare(CLONE_NEWNS)
        LIBC.mount(b"none", bytes(directory), b"tmpfs", 0, None)
    training = Training(rank=rank)
    training.steps(NEWEST)
    try:
        writer = checkpointer(directory, group, order=None)
    except CheckpointError as error:
        return str(error)
    told = attempt(writer, training)
    writer.close()
    return told


def apart(lane: Lane, directories: list[Path], *, ranks_apart: bool = False) -> Trial:
    """Everybody has an error, or the checkpoint is whole in the first directory."""
    errors = [child.result() for child in lane.ranks(RANKS, save_where_told, directories, ranks_apart)]
    if all(errors):
        return Trial(Outcome.ERROR, str(errors[0]))
    if any(errors):
        return Trial(Outcome.UNEXPLAINED, f"ranks differ: {errors}")
    return check(lane, directories[0], "reported as saved", ranks=RANKS)


row("ranks told different directories", Outcome.NEWEST, Outcome.ERROR, full=10, short=2)(
    lambda lane: apart(lane, [lane.directory / name for name in ("a", "b")])
)


@row("a directory that ranks do not share", Outcome.ERROR, full=10, short=2)
def not_shared(lane: Lane) -> Trial:
    with mounted(lane, "size=4m"):  # skips where nothing can be mounted
        return apart(lane, [lane.directory / "a"] * RANKS, ranks_apart=True)


def save_alone(rank: int, group: dist.ProcessGroup | None, directory: Path) -> str | None:
    """As a script does that forgot to make the process group."""
    return save_where_told(rank, None, [directory] * RANKS, False)


@row("ranks of a job that are each alone", Outcome.ERROR, full=10, short=2)
def each_alone(lane: Lane) -> Trial:
    errors = [child.result() for child in lane.ranks(RANKS, save_alone, lane.directory / "checkpoints")]
    return Trial(Outcome.ERROR if all(errors) else Outcome.UNEXPLAINED, f"{errors}")
