"""kill -9 of one rank and of all ranks at random moments of an asynchronous save, while ranks write at different times."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slurmtrain.checkpoint.errors import CheckpointError
from tests.faults.layer import FileLayer
from tests.faults.processes import Child, Lane, UnexplainedError, tell
from tests.faults.rows import Outcome, Trial, row
from tests.faults.training import Training, checkpointer, classify, reference, restore

RANKS = 2
OLDER, NEWEST, LATER = 3, 5, 7  # the last is saved when a disk is well again


@dataclass(frozen=True)
class Plan:
    """When a rank dies in its save of NEWEST: at its own call number `call` of the file layer, or not by itself.

    Attributes:
        delays_s: what each rank waits before it opens its file.
        all_ranks: whether it takes the others with it.
    """

    delays_s: tuple[float, ...]
    dying: int = -1
    call: int = 0
    all_ranks: bool = False


def save_two(rank: int, group: dist.ProcessGroup, directory: Path, plan: Plan) -> dict[str, Any]:
    """Save OLDER, then NEWEST in the background of further steps. Tells when NEWEST begins."""
    training = Training(rank=rank)
    writer = checkpointer(directory, group)
    training.steps(OLDER)
    writer.save(OLDER, per_rank=training.per_rank, **training.objects)
    writer.wait()
    training.steps(NEWEST - OLDER)
    pids: list[Any] = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())

    def before(number: int, name: str, path: str) -> None:
        if name == "open" and path.endswith(f"rank{rank:05d}.safetensors"):
            time.sleep(plan.delays_s[rank])
        if rank == plan.dying and number == plan.call:
            others = [pid for pid in pids if pid != os.getpid()]
            for pid in [*(others if plan.all_ranks else []), os.getpid()]:
                os.kill(pid, signal.SIGKILL)

    layer = FileLayer(directory, before).install()
    tell("saving")
    started = time.monotonic()
    try:
        saving = writer.save(NEWEST, per_rank=training.per_rank, **training.objects)
        while not saving.done():
            training.steps(1)
            time.sleep(0.002)
        writer.wait()
        tell("committed")
        error = None
    except CheckpointError as failure:
        error = str(failure)
    writer.close()
    return {"error": error, "calls": len(layer.calls), "seconds": time.monotonic() - started}


def measured(lane: Lane) -> dict[str, Any]:
    """Calls of the file layer by rank, and the seconds of a save that nothing disturbs."""

    def make() -> dict[str, Any]:
        ranks = lane.ranks(RANKS, save_two, lane.directory / "measured", Plan((0.0,) * RANKS))
        results = [child.result() for child in ranks]
        if any(result["error"] or not result["calls"] for result in results):
            raise UnexplainedError(f"an undisturbed save: {results}")
        seconds = max(result["seconds"] for result in results)
        return {"calls": [result["calls"] for result in results], "seconds": seconds}

    measured: dict[str, Any] = lane.remember("save that is killed", make)
    return measured


def facts(lane: Lane) -> Any:
    return lane.remember("facts", lambda: lane.fork(reference, [OLDER, NEWEST, LATER]).result())


def check(
    lane: Lane, directory: Path, detail: str, *, ranks: int = 1, order: int | None = 2, newest: int = NEWEST
) -> Trial:
    """Restore on fresh ranks and classify what they report."""
    found = [
        child.result() for child in lane.ranks(ranks, lambda rank, group: restore(directory, rank, group, order=order))
    ]
    return classify(found, facts(lane), newest=newest, older=OLDER, detail=detail)


def kill(lane: Lane, *, all_ranks: bool) -> Trial:
    """Half of the trials die at a moment of the clock, half at a call: the short commit gets as many as the long write."""
    usual = measured(lane)
    delays = tuple(lane.random.uniform(0, lane.memory["skew_s"]) for _ in range(RANKS))
    dying = lane.random.randrange(RANKS)
    plan = Plan(delays, all_ranks=all_ranks)
    moment = lane.random.uniform(0, 1.3 * (max(delays) + usual["seconds"]) + 0.2)
    # Whatever the machine is busy with, some die after the commit.
    after_commit = lane.random.random() < 0.1
    if after_commit:
        detail = f"rank {dying} after the commit"
    elif lane.random.random() < 0.5:
        plan = replace(plan, dying=dying, call=lane.random.randint(1, usual["calls"][dying]))
        detail = f"rank {dying} at call {plan.call} of {usual['calls'][dying]}"
    else:
        detail = f"rank {dying} after {moment:.3f} s"
    detail += f", all={all_ranks}, delays {delays[0]:.2f} {delays[1]:.2f}"
    directory = lane.directory / "checkpoints"
    ranks = lane.ranks(RANKS, save_two, directory, plan)
    for child in ranks:
        # None: another rank's call has killed this one before it could tell.
        if (message := child.next()) not in ("saving", None):
            return Trial(Outcome.UNEXPLAINED, f"{detail}: {message}")
    told: list[list[Any]] = [[child.next()] if after_commit else [] for child in ranks]
    if plan.dying < 0:
        if not after_commit:
            time.sleep(moment)
        for child in ranks if all_ranks else [ranks[dying]]:
            child.send(signal.SIGKILL)
    told = [[*messages, *child.rest()] for messages, child in zip(told, ranks, strict=True)]
    if (why := wrong_survivor(ranks, told)) is not None:
        return Trial(Outcome.UNEXPLAINED, f"{detail}: {why}")
    world = RANKS if lane.random.random() < 0.3 else 1
    trial = check(lane, directory, f"{detail}, {world} ranks restore", ranks=world)
    if trial.outcome == Outcome.ERROR:  # OLDER was committed and has not been touched
        return replace(trial, outcome=Outcome.LOST)
    if trial.outcome == Outcome.OLDER and any("committed" in messages for messages in told):
        return Trial(Outcome.UNEXPLAINED, f"{detail}: step {NEWEST} was reported as committed and is not there")
    return trial


def wrong_survivor(ranks: list[Child], told: list[list[Any]]) -> str | None:
    """A rank that was not killed has committed, or has one clear error; it never hangs and shows no traceback."""
    for child, messages in zip(ranks, told, strict=True):
        if child.status == -signal.SIGKILL:
            continue
        if child.status != 0 or not messages or "error" not in messages[-1]:
            return f"a surviving rank ended with {child.status}\n{child.output()}"
        if messages[-1]["error"] is None and "committed" not in messages:
            return "a surviving rank has neither committed nor an error"
    return None


for _name, _all in (("kill -9 of one rank", False), ("kill -9 of all ranks", True)):
    row(_name, Outcome.NEWEST, Outcome.OLDER, kind="trials", full=500, short=40)(partial(kill, all_ranks=_all))
