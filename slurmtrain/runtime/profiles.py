"""Who answers a person that touches RUN/profile: the trainer, a program's own loop, or, where neither can, this module."""

from __future__ import annotations

import time

from slurmtrain.choices import JobKind
from slurmtrain.config.schema import Config
from slurmtrain.errors import UsageError
from slurmtrain.observe.profile_request import DEFAULT_STEPS, ProfileRequest
from slurmtrain.observe.profile_switch import ProfileSwitch
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.attempt_context import AttemptContext

BEGINS_S = 60.0  # a program of the user's own has imported what it needs, and has called `slurmtrain.init`


class ProgramSwitch(ProfileSwitch):
    """Answers for a program of the user's own that never looks for the file itself.

    Args:
        begins_s: seconds that the program has to begin to look.
    """

    def __init__(self, run_dir: RunDir, attempt_dir: AttemptDir, *, begins_s: float = BEGINS_S):
        super().__init__(run_dir, ProfileRequest())
        self._switch, self._marker = run_dir.profile_switch, attempt_dir.profiles_marker
        self._from = time.monotonic() + begins_s

    def look(self) -> None:
        if time.monotonic() >= self._from and self._switch.exists() and not self._marker.exists():
            self.refuse(
                UsageError(
                    "the program of this run cannot be profiled: it does not call slurmtrain.should_stop()",
                    hint="slurmtrain.init(), and slurmtrain.should_stop() once a step; or use torch.profiler in the program",
                )
            )


def default_request(config: Config) -> ProfileRequest:
    """Return what `touch RUN/profile` asks for."""
    return ProfileRequest(DEFAULT_STEPS, tuple(config.observe.profile_ranks) or None)


def profile_switch_of(context: AttemptContext, config: Config) -> ProfileSwitch | None:
    """Return what looks for RUN/profile on rank 0; None for a job that has no steps."""
    if config.job.kind == JobKind.TRAIN:
        return ProfileSwitch(context.run_dir, default_request(config))
    if config.job.kind == JobKind.COMMAND:
        return ProgramSwitch(context.run_dir, context.attempt_dir)
    return None
