"""A training state whose every bit is a function of step, rank and run: what was restored can be compared with what was."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.store.commit import Incarnation
from tests.faults.rows import Outcome, Trial
from tests.support.logs import collect_messages
from tests.support.own_objects import Bare

GO_ON = 3  # steps after a restore whose losses have to be those of the undisturbed run


@dataclass(frozen=True)
class Facts:
    """A state in short: digests of what all ranks share and of what this rank has, and the losses of the next steps."""

    step: int
    shared: str
    own: str
    losses: tuple[float, ...]


class Training:
    """Two layers with AdamW; and what a rank keeps for itself: a count, and the sum of its random draws.

    Every rank computes the whole batch, so the bits are the same on any number of ranks.

    Args:
        run: names the initial weights and the data; another run has the same shapes and other values.
        rank: draws of its own random numbers.
    """

    def __init__(self, *, run: int = 0, rank: int = 0):
        torch.manual_seed(run)
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.own, self.done = Bare({"count": 0, "drawn": torch.zeros(3, dtype=torch.float64)}), 0
        self._run = run
        torch.manual_seed(1000 * run + rank + 1)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def per_rank(self) -> dict[str, Any]:
        return {"own": self.own}

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            data = torch.Generator().manual_seed(7919 * self._run + self.done)
            batch = torch.randn(8, 4, generator=data)
            loss = (self.model(batch) - batch.flip(1)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.own.value["count"] += 1
            self.own.value["drawn"] += torch.rand(3, dtype=torch.float64)
            self.done += 1
            losses.append(loss.item())
        return losses

    def facts(self) -> Facts:
        """Takes `GO_ON` steps; the digests are of the state before."""
        shared = hashlib.sha256(str(self.done).encode())
        for parameter in self.model.parameters():
            shared.update(parameter.detach().numpy().tobytes())
            for _, value in sorted(self.optimizer.state[parameter].items()):
                shared.update(value.numpy().tobytes())
        own = hashlib.sha256(str(self.own.value["count"]).encode() + self.own.value["drawn"].numpy().tobytes())
        own.update(torch.get_rng_state().numpy().tobytes())
        return Facts(self.done, shared.hexdigest(), own.hexdigest(), tuple(self.steps(GO_ON)))


def reference(steps: list[int], *, ranks: int = 2, **options: Any) -> dict[tuple[int, int], Facts]:
    """The facts of these steps in a run that nothing disturbs, by step and rank."""
    facts = {}
    for rank in range(ranks):
        for step in steps:
            training = Training(rank=rank, **options)
            training.steps(step)
            facts[step, rank] = training.facts()
    return facts


def checkpointer(
    directory: Path, group: dist.ProcessGroup | None, order: int | None = 1, **options: Any
) -> Checkpointer:
    said = collect_messages()
    incarnation = None if order is None else Incarnation(order, f"life {order}")
    found = Checkpointer(directory, group=group, incarnation=incarnation, **options)
    found.said = said  # type: ignore[attr-defined]  # for the checks
    return found


@dataclass(frozen=True)
class Report:
    """What a rank found when it tried to restore: facts, or an error's sentence, or neither (there was nothing)."""

    facts: Facts | None = None
    error: str | None = None
    said: tuple[str, ...] = ()


def restore(
    directory: Path, rank: int = 0, group: dist.ProcessGroup | None = None, *, order: int | None = 2, **options: Any
) -> Report:
    """Restore on a fresh rank, whose own initial state is that of no run, and go on."""
    said: tuple[str, ...] = ()
    path = options.pop("path", None)
    training = Training(run=options.pop("run", 0), rank=rank)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(0.123)
    try:
        with closing(checkpointer(directory, group, order, **options)) as reader:  # else no other may be made here
            restored = reader.restore(path=path, per_rank=training.per_rank, **training.objects)
            said = tuple(reader.said)  # type: ignore[attr-defined]
    except CheckpointError as error:
        return Report(error=str(error), said=said)
    if restored is None:
        return Report(said=said)
    training.done = restored.step
    return Report(training.facts(), said=said)


def classify(
    reports: list[Report], facts: dict[tuple[int, int], Facts], *, newest: int, older: int | None, detail: str = ""
) -> Trial:
    """The outcome of a restore, from the reports of all its ranks. Rank r of it is compared with rank r of the run."""

    def trial(outcome: Outcome, why: str = "") -> Trial:
        return Trial(outcome, f"{detail}: {why}" if why and detail else why or detail)

    errors = [report.error for report in reports if report.error is not None]
    if errors:
        if len(errors) < len(reports):
            return trial(Outcome.UNEXPLAINED, f"only some ranks have an error: {errors[0]}")
        return trial(Outcome.ERROR, errors[0])
    found = [report.facts for report in reports if report.facts is not None]
    if not found:
        return trial(Outcome.LOST, "restore found nothing")
    if len(found) < len(reports):
        return trial(Outcome.WRONG, "only some ranks restored")
    for rank, fact in enumerate(found):
        expected = facts.get((fact.step, rank))
        if fact.step not in (newest, older) or expected is None:
            return trial(Outcome.WRONG, f"rank {rank} says step {fact.step}")
        for name in ("shared", "own", "losses"):
            if getattr(fact, name) != getattr(expected, name):
                return trial(Outcome.WRONG, f"rank {rank}: {name} is not that of step {fact.step}")
    if len({fact.step for fact in found}) > 1:
        return trial(Outcome.WRONG, "ranks restored different steps")
    return trial(Outcome.NEWEST if found[0].step == newest else Outcome.OLDER)
