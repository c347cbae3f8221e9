"""Agreement of all ranks to stop, save, go back or profile after the same step, whichever of them was told to.

A signal reaches ranks at different moments of different steps, or one rank only, and clocks differ. A maximum over the
ranks' flags, once a step, makes it one decision. It runs on a CPU group of its own while the step goes on, so it costs
no GPU time and is not mixed with the gradients' collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from slurmtrain.system.activity import waiting
from slurmtrain.system.signals import StopCause, StopFlag


class AgreedDecision(NamedTuple):
    """The decision of all ranks after this step: stop; or else, go back to a checkpoint; or else, save.

    Besides, unless they stop, they may begin a profile.
    """

    stop: bool
    save: bool
    roll_back: bool = False
    profile: bool = False


class StopAgreement:
    """The agreement of all ranks of `group` (gloo), or of a single process; asked once a step, and once a round of evaluation.

    Attributes:
        rounds: times that this rank has passed in its flags, by which others see that it gets on.

    Args:
        take_save: returns whether this rank was asked for a checkpoint since the last step.
    """

    def __init__(
        self, stop_flag: StopFlag, group: dist.ProcessGroup | None, take_save: Callable[[], bool] = lambda: False
    ):
        self._stop_flag, self._group, self._take_save = stop_flag, group, take_save
        self._flags = torch.zeros(4, dtype=torch.int32)
        self._work: dist.Work | None = None
        self.rounds = 0

    def begin(self, *, save: bool | None = None, roll_back: bool = False, profile: bool = False) -> None:
        """Pass in this rank's flags, and return at once.

        Args:
            save: this rank wants a checkpoint; None: no checkpoint can be written now, and a request for one is kept
                for later.
            roll_back: this rank wants to go back to a checkpoint from before a trouble.
            profile: this rank knows of a wish for a profile.
        """
        self.rounds += 1
        wanted = save is not None and (self._take_save() or save)
        flags = self._stop_flag.requested, wanted, roll_back, profile
        for index, flag in enumerate(flags):
            self._flags[index] = flag
        if self._group is not None:
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> AgreedDecision:
        """Wait for the others' flags: a flag is true on all ranks when it is true on one."""
        if self._work is not None:
            with waiting():
                self._work.wait()
            self._work = None
        stop, save, roll_back, profile = self._flags.tolist()
        if stop:
            self._stop_flag.request(StopCause.OTHER_RANK)
        return AgreedDecision(bool(stop), bool(save), bool(roll_back), bool(profile))


class StopPlanner(Protocol):
    """Rank 0's plan of when to stop before the time limit, and its knowledge of the time left."""

    def plan_stop(self, step_s: float, save_s: float) -> None:
        """Plan by the longest step and the longest save so far, in seconds, whenever they were measured."""

    def seconds_left(self) -> float | None:
        """Return the seconds until this job is killed, after it was told to stop; None: not known."""
