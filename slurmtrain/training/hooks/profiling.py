"""Profiles of some steps: at those that the config names, and when somebody touches RUN/profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.observe.profiling import ProfileSwitch, Profiling
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.state import StepResult, TrainingState


class StepProfiles(TrainingHook):
    """Profiles steps. On all ranks, and the first hook, so that what other hooks do after the last step is not in it.

    Args:
        run_dir: the run.
        switch: rank 0's look at RUN/profile; None on other ranks, and where nobody can ask.
        planned: first and last step that the config names; None: none.
        writers: observe.profile_ranks.
    """

    def __init__(
        self,
        run_dir: RunDir,
        switch: ProfileSwitch | None,
        planned: tuple[int, int] | None,
        writers: Sequence[int],
    ):
        self._run_dir, self._switch, self._planned, self._writers = run_dir, switch, planned, writers
        self._due = False
        self._profiling: Profiling

    def start(self, state: TrainingState) -> None:
        ranks, hooks = RankGroup(state.ranks.control_group), state.hooks

        def event(event: Event, values: dict[str, Any]) -> None:
            hooks.event(event, values)

        on_gpu = state.distributed_model.device.type == "cuda"
        self._profiling = Profiling(
            self._run_dir, ranks, self._writers, on_gpu=on_gpu, switch=self._switch, event=event
        )
        if self._planned is not None:
            folder = self._run_dir.profile(max(self._planned[0], 1))
            if ranks.on_rank_0(lambda: bool(list(self._run_dir.profiles.glob(f"{folder.name}*")))):
                self._planned = None  # an earlier attempt has taken it

    def wants_profile(self, state: TrainingState) -> bool:
        """Return whether this rank knows of a wish to profile the next steps."""
        return self._profiling.wanted and state.step + 1 < state.total_steps

    def before_step(self, state: TrainingState) -> None:
        step, most = state.step + 1, state.total_steps - state.step
        if self._due:
            self._due = False
            self._profiling.begin(step, most=most)
        elif self._planned is not None and not self._profiling.active and step >= self._planned[0] - 1:
            (first, last), self._planned = self._planned, None
            if step <= last:
                steps = last - max(step, first) + 1
                self._profiling.begin(step, most=most, steps=steps, warmup=int(step < first))

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if state.stopping:  # first of all training has to be saved
            return
        if self._profiling.active:
            said = self._profiling.step(last=state.is_last_step)
            if said is not None:
                state.hooks.message(f"step {state.step}: {said}")
            if not self._profiling.active:  # what writing took is not a part of any step
                state.throughput.start()
                state.phases.take_steps()
        elif result.decision.profile and not state.is_last_step:
            self._due = True

    def close(self, state: TrainingState) -> None:
        self.abandon()

    def abandon(self, *, failed: bool = False) -> None:
        """Drop the profile that is under way, if there is one."""
        if hasattr(self, "_profiling"):
            self._profiling.abandon(failed=failed)
