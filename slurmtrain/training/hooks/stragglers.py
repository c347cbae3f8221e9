"""Slow ranks: all ranks exchange how long the parts of their steps have taken, and name one that is slower than its peers.

The exchange is of a few numbers on the CPU group. It begins after a step and is looked at after the next one, so that nobody
waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmtrain.observe.phases import Phase
from slurmtrain.observe.stragglers import NUMBERS, WORDS, Straggler, StragglerDetector, summary
from slurmtrain.runs.reasons import Event
from slurmtrain.training.hooks.base import RecordingHook, StepResult, TrainingState


class StragglerWatch(RecordingHook):
    """Names slow ranks. On all ranks, of which there are several.

    Args:
        every: steps of a window.
        node: name of this rank's node.
    """

    def __init__(self, every: int, node: str):
        self._every, self._node = every, node
        self._nodes: list[str] = []
        self._detector: StragglerDetector
        self._exchange: tuple[dist.Work, Tensor, Tensor] | None = None

    def start(self, state: TrainingState) -> None:
        self._nodes = [str(node) for node in state.ranks.gather(self._node)]
        dims = state.distributed_model.dims
        # Stages of a pipeline wait for each other within their passes; rank 0 alone writes the files of the run.
        everywhere = [Phase.FORWARD_BACKWARD] if dims.pp > 1 else []
        unwatched = {rank: [*everywhere, *([Phase.OTHER] if rank == 0 else [])] for rank in range(state.ranks.size)}
        groups = [dims.coordinates(rank)["pp"] for rank in range(state.ranks.size)]
        self._detector = StragglerDetector(groups, unwatched)

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        self._look(state)
        if state.step % self._every == 0:
            own = torch.tensor(summary(state.phases.take_steps()), dtype=torch.float64)
            everyones = own.new_empty(state.ranks.size * NUMBERS)
            parts = list(everyones.split(NUMBERS))
            work = dist.all_gather(parts, own, group=state.ranks.control_group, async_op=True)
            assert work is not None
            self._exchange = work, own, everyones
            if state.stopping or state.is_last_step:
                self._look(state)

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        state.phases.take_steps()  # a restore lies between them

    def _look(self, state: TrainingState) -> None:
        """Look at what was exchanged, if something was."""
        if self._exchange is None:
            return
        work, _, everyones = self._exchange
        self._exchange = None
        with state.phases.waiting():
            work.wait()
        new, over = self._detector.look(everyones.view(-1, NUMBERS).tolist())
        for found in self._by_node(new):
            state.hooks.event(Event.STRAGGLER, self._values(state.step, found))
            state.hooks.message(self._sentence(state.step, found))
        for found in self._by_node(over):
            state.hooks.event(Event.STRAGGLER_OVER, self._values(state.step, found))

    def _by_node(self, stragglers: Sequence[Straggler]) -> list[list[Straggler]]:
        """Return the slow ranks of each node and part together: often it is the node that is slow."""
        found: dict[tuple[str, Phase], list[Straggler]] = {}
        for straggler in stragglers:
            found.setdefault((self._nodes[straggler.rank], straggler.phase), []).append(straggler)
        return list(found.values())

    def _values(self, step: int, found: Sequence[Straggler]) -> dict[str, Any]:
        worst = max(found, key=lambda each: each.ratio)
        return {
            "step": step,
            "node": self._nodes[worst.rank],
            "ranks": [each.rank for each in found],
            "phase": worst.phase.value,
            "ratio": None if worst.ratio > 1e6 else round(worst.ratio, 3),
            "excess_s": round(worst.excess_s, 6),
            "step_s": round(worst.step_s, 6),
        }

    def _sentence(self, step: int, found: Sequence[Straggler]) -> str:
        worst = max(found, key=lambda each: each.ratio)
        ranks = [each.rank for each in found]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        times = f"{worst.ratio:.2g} times as long as the others" if worst.ratio < 100 else "much longer than the others"
        return (
            f"step {step}: {who} on {self._nodes[worst.rank]} {'takes' if len(ranks) == 1 else 'take'} {times} for "
            f"{WORDS[worst.phase]}: {worst.excess_s:.3g} s more in a step of "
            f"{worst.step_s:.3g} s"
        )
