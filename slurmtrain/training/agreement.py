"""Sums and agreements of training over all ranks: on a stop, on a save, on a step that is bad for one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slurmtrain.system.activity import waiting
from slurmtrain.system.signals import StopCause, StopFlag


@dataclass(frozen=True)
class TrainingRanks:
    """This rank and its process groups, as far as training needs to know them.

    Attributes:
        device_group: all ranks, for tensors on the model's device; None for a single rank.
        control_group: a gloo group of all ranks for small sums on the CPU; None for a single rank.
    """

    rank: int = 0
    device_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.control_group is None else self.control_group.size()

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks, in float64 on the CPU."""
        return self._reduced(value.detach().double().cpu().clone())

    def sum_integers(self, values: Tensor) -> Tensor:
        """Return the sum of integers (int64, on the CPU) over all ranks."""
        return self._reduced(values.clone())

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the greatest of each of these numbers over all ranks."""
        found: list[float] = self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX).tolist()
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order; each is JSON."""
        from slurmtrain.checkpoint.ranks import RankGroup  # a script that only asks whether to stop does without

        return RankGroup(self.control_group).all_do(lambda: value, list)

    def all_true(self, value: bool) -> bool:
        """Return whether `value` is true on all ranks."""
        return bool(self._reduced(torch.tensor(int(value)), dist.ReduceOp.MIN))

    def of_rank_0(self, value: int) -> int:
        """Return rank 0's value on all ranks."""
        return int(self._reduced(torch.tensor(value if self.rank == 0 else 0)))

    def _reduced(self, value: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.control_group is not None:
            with waiting():
                dist.all_reduce(value, operation, self.control_group)
        return value


class AgreedDecision(NamedTuple):
    """The decision of all ranks after this step: stop; or else, go back to a checkpoint; or else, save.

    Besides, unless they stop, they may begin a profile.
    """

    stop: bool
    save: bool
    roll_back: bool = False
    profile: bool = False


class StopAgreement:
    """The agreement of all ranks to stop, save, go back or profile after the same step, whichever of them was told to.

    A signal reaches ranks at different moments of different steps, or one rank only, and clocks differ. A maximum over the
    ranks' flags, once a step and once a round of evaluation, makes it one decision. It runs on a CPU group of its own
    (`group`; None: a single process) while the step goes on, so it costs no GPU time and is not mixed with the gradients'
    collectives.

    Attributes:
        rounds: times that this rank has passed in its flags, by which others see that it gets on.

    Args:
        stop_flag: what was asked of this rank.
    """

    def __init__(self, stop_flag: StopFlag, group: dist.ProcessGroup | None):
        self._stop_flag, self._group = stop_flag, group
        self._flags = torch.zeros(4, dtype=torch.int32)
        self._work: dist.Work | None = None
        self.rounds = 0

    def begin(self, *, save: bool | None = None, roll_back: bool = False, profile: bool = False) -> None:
        """Pass in this rank's flags, and return at once.

        Args:
            save: this rank wants a checkpoint; None: no checkpoint can be written now, and a request for one is kept
                for later.
            roll_back: this rank wants to go back to a checkpoint from before a trouble.
            profile: a profile can begin after this step, if somebody has asked for one.
        """
        self.rounds += 1
        flag = self._stop_flag
        if save is not None and flag.save_asked.is_set():
            flag.save_asked.clear()  # only what was seen: another thread may ask at any moment
            save = True
        profile = profile and flag.profile_asked.is_set()
        if profile:
            flag.profile_asked.clear()
        for index, wanted in enumerate((flag.requested, bool(save), roll_back, profile)):
            self._flags[index] = wanted
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
