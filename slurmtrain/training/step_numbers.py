"""Loss and gradient norm of each step, the same on all ranks, and what is done when they are not finite.

They are read without waiting for the device: they are copied to host memory while it works on, and this rank's part of the
loss is added up over all ranks together with the counts of a later step, which costs no collective of its own. So they are
known `LAG` steps later. That number is fixed, so that what is decided by them is decided after the same step in every run,
however often it was interrupted.

An update that is not finite is left out on the device itself; `NonfiniteGuard` says when to go back to a checkpoint, or to
end. Everything that it remembers (`Health`) is saved in checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from slurmtrain.choices import OnNonfinite
from slurmtrain.config.schema import TrainConfig
from slurmtrain.errors import DivergedError
from slurmtrain.runs.reasons import Event
from slurmtrain.training.agreement import TrainingRanks

if TYPE_CHECKING:
    from slurmtrain.training.hooks.base import TrainingState

HINT = (
    "the same steps would do the same again, so nothing is tried again: a smaller optim.lr, more optim.warmup_steps or "
    "optim.grad_clip=1 may help, or other data; `resume RUN optim.lr=...` goes on from the newest checkpoint, if there is one"
)
ALL_TOLD = 10  # of more skipped steps in a row, each hundredth is told
SAMPLES_NAMED = 8  # of a step's samples, at most

LAG = 2  # the numbers of a step are known in the second step after it
PARTS = 3  # integers that a rank adds to the counts of a step; see `NumbersReader.own_part`
_FRACTION = 2**16  # losses are added up as integers, whose sum does not depend on the order of ranks
_MOST = 2**62


class StepNumbers(NamedTuple):
    """The numbers of a step, over all ranks.

    Attributes:
        step: number of the step, from 1.
        samples: numbers of the first of its samples in the order of the run, and of the one after the last.
        loss: mean over all its tokens, in nats; NaN if that of any rank is not finite.
        grad_norm: norm of all gradients before they were clipped.
        failed_ranks: number of ranks whose loss is not finite.
        failed_rank: that rank, if it is the only one.
    """

    step: int
    samples: tuple[int, int]
    loss: float
    grad_norm: float
    failed_ranks: int = 0
    failed_rank: int | None = None

    def to_json(self) -> list[Any]:
        """Return it as it is saved; as text, since JSON has no numbers that are not finite."""
        return [self.step, *self.samples, repr(self.loss), repr(self.grad_norm), self.failed_ranks, self.failed_rank]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> StepNumbers:
        """Return what `to_json` has saved."""
        step, first, end, loss, norm, failed_ranks, failed_rank = values
        return cls(step, (first, end), float(loss), float(norm), failed_ranks, failed_rank)


@dataclass(frozen=True)
class _Noted:
    """The numbers of a step on this rank while they are copied from the device.

    Attributes:
        values: sum of this rank's losses, and the norm of all gradients, float32 [2] in host memory.
        tokens: number of tokens of the step over all ranks.
        copied: on a GPU, the event that marks the end of the copy.
    """

    step: int
    samples: tuple[int, int]
    values: Tensor
    tokens: int
    copied: torch.cuda.Event | None

    def known(self, norm: float, sums: Sequence[int]) -> StepNumbers:
        """Return the numbers over all ranks, given the sums of what `NumbersReader.own_part` returns on each."""
        loss_sum, failed, names = sums
        loss = math.nan if failed else loss_sum / _FRACTION / self.tokens
        only = names - 1 if failed == 1 else None
        return StepNumbers(self.step, self.samples, loss, norm, failed, only)


class NumbersReader:
    """Reads the numbers of each step `LAG` steps later. All ranks note, read and restore in the same steps.

    Args:
        ranks: this rank, and the group that adds up.
    """

    def __init__(self, ranks: TrainingRanks):
        self._ranks, self._most = ranks, _MOST // ranks.size
        self._waiting: deque[_Noted | StepNumbers] = deque()  # of the last `LAG` steps, oldest first
        self._due: tuple[_Noted, float] | StepNumbers | None = None

    def note(self, step: int, samples: tuple[int, int], loss_sum: Tensor, norm: Tensor, tokens: int) -> None:
        """Copy the numbers of a step (scalars) from its device, without waiting for the copy."""
        values, copied = torch.stack([loss_sum.detach().float(), norm.detach().float()]), None
        if norm.is_cuda:
            values = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._waiting.append(_Noted(step, samples, values, tokens, copied))

    def own_part(self) -> list[int]:
        """Return this rank's part of the numbers that are due: integers to be added up over all ranks, for `finish`.

        While the device works on the step before, so that it has something to do while this function waits.
        """
        self._due, part = None, [0] * PARTS
        if len(self._waiting) >= LAG:
            noted = self._waiting.popleft()
            if isinstance(noted, StepNumbers):  # known already, and due no earlier for that
                self._due = noted
            else:
                norm, part = self._read(noted)
                self._due = noted, norm
        return part

    def finish(self, sums: Sequence[int]) -> StepNumbers | None:
        """Return the numbers that are due, given the sums over all ranks; None: none are."""
        due, self._due = self._due, None
        if isinstance(due, StepNumbers) or due is None:
            return due
        noted, norm = due
        return noted.known(norm, sums)

    def read_all(self) -> list[StepNumbers]:
        """Read what is not due yet, too, and wait for the device. All ranks call it together.

        What is returned stays due when it would have been.
        """
        read = [self._read(each) for each in self._waiting if isinstance(each, _Noted)]
        if read:
            norms = iter(norm for norm, _ in read)
            sums = iter(self._ranks.sum_integers(torch.tensor([part for _, part in read])).tolist())
            self._waiting = deque(
                each.known(next(norms), next(sums)) if isinstance(each, _Noted) else each for each in self._waiting
            )
        return [each for each in self._waiting if isinstance(each, StepNumbers)]

    def take_all(self) -> list[StepNumbers]:
        """As `read_all`, and nothing is due any more."""
        numbers = self.read_all()
        self._waiting.clear()
        return numbers

    def restore(self, numbers: Sequence[StepNumbers]) -> None:
        """Continue where `read_all` has returned `numbers`."""
        self._waiting, self._due = deque(numbers), None

    def _read(self, noted: _Noted) -> tuple[float, list[int]]:
        """Return the norm of all gradients, and this rank's part of the numbers, once they are copied."""
        if noted.copied is not None:
            noted.copied.synchronize()
        loss_sum, norm = noted.values.tolist()
        if not math.isfinite(loss_sum):
            return norm, [0, 1, self._ranks.rank + 1]
        return norm, [max(-self._most, min(round(loss_sum * _FRACTION), self._most)), 0, 0]


@dataclass
class Health:
    """What is remembered of the steps so far.

    Attributes:
        skipped: number of steps of the run whose update was skipped.
        in_a_row: number of these that came directly one after another, up to the last step that was looked at.
        first: first step of these.
        sound_step: the newest step whose parameters gave finite numbers in the step after it; None: not known.
        checked_step: the last step that was looked at.
        rollbacks: number of times that training has gone back since it last got any further.
        furthest: the step from which it went back last.
        due: why it is to go back before the next step; None: it is not.
    """

    skipped: int = 0
    in_a_row: int = 0
    first: int = 0
    sound_step: int | None = None
    checked_step: int = 0
    rollbacks: int = 0
    furthest: int = 0
    due: str | None = None

    def look(self, numbers: StepNumbers, train: TrainConfig) -> OnNonfinite | None:
        """Note the numbers of the next step, and return what is done about it; None: they are finite."""
        self.checked_step = numbers.step
        if math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm):
            self.in_a_row = 0
            if numbers.step > self.furthest:
                self.rollbacks = 0
            self.sound_step = max(self.sound_step or 0, numbers.step - 1)  # not that of a step before a rollback
            return None
        self.skipped += 1
        self.in_a_row += 1
        self.first = numbers.step - self.in_a_row + 1
        too_many = train.on_nonfinite == OnNonfinite.SKIP and 0 < train.max_skipped <= self.in_a_row
        return OnNonfinite.ROLLBACK if too_many else train.on_nonfinite

    def went_back(self, before: Health, *, from_step: int, to_step: int) -> None:
        """Go on from what was remembered at step `to_step`, which this is, after a trouble.

        Args:
            before: what was remembered when it went back, from step `from_step`.
        """
        self.sound_step = to_step  # which the steps after it have shown, before they are done anew with other samples
        self.checked_step = to_step
        self.skipped, self.rollbacks = before.skipped, before.rollbacks + 1
        self.furthest, self.due = max(from_step, before.furthest), None


class NonfiniteGuard:
    """Skips updates that are not finite, and asks to go back, or ends the run.

    It judges by numbers that are the same on all ranks, after the same step on all of them.

    Attributes:
        error: with which training is to end after this step; None: it goes on.
    """

    def __init__(self, train: TrainConfig):
        self._train = train
        self.error: DivergedError | None = None

    def look(self, state: TrainingState, numbers: StepNumbers) -> None:
        """Look at the loss and the gradient norm of an earlier step; `health.due` then says why to go back, if it is to.

        Called once for each step, in their order: in the second step after it, or after the last one. Of a step that was
        still unread when a checkpoint was written, in the attempt that goes on from there.
        """
        health = state.health
        action = health.look(numbers, self._train)
        if action is None:
            return
        if health.in_a_row <= ALL_TOLD or health.in_a_row % 100 == 0:
            self._tell_skip(state, numbers)
        if action == OnNonfinite.ROLLBACK:
            health.due = _sentence(state, numbers, self._train)
        elif action == OnNonfinite.STOP:
            why = _sentence(state, numbers, self._train)
            self.error = DivergedError(f"{why}; train.on_nonfinite=stop", hint=HINT)

    def check_parameters(self, state: TrainingState) -> None:
        """Raise DivergedError if training is done and the parameters are not finite."""
        if not state.stopping and not state.is_finite():
            raise DivergedError(f"the parameters are not finite after step {state.step}", hint=HINT)

    def _tell_skip(self, state: TrainingState, numbers: StepNumbers) -> None:
        health = state.health
        state.hooks.event(
            Event.UPDATE_SKIPPED,
            {
                "step": numbers.step,
                "samples": list(numbers.samples),
                "rank": numbers.failed_rank,
                "in_a_row": health.in_a_row,
                "skipped": health.skipped,
            },
        )
        if health.in_a_row == 1:
            state.hooks.message(skip_sentence(numbers, self._train))


class RunningBuffers:
    """The buffers that forward passes change, which are brought back when a step's update is skipped.

    Running statistics (BatchNorm) have taken in the step's activations before its loss is known, and would stay NaN for
    good. Those that stay as they are, such as tables of positions, cost nothing.

    Which they are is seen in the first step of an attempt, among all that are saved in checkpoints. Their versions do not
    tell: a batch norm changes its statistics without counting theirs up.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        modules = list(modules)
        unsaved = {
            id(module._buffers[name])
            for root in modules
            for module in root.modules()
            for name in module._non_persistent_buffers_set
        }
        self._buffers = list(
            {id(buffer): buffer for root in modules for buffer in root.buffers() if id(buffer) not in unsaved}.values()
        )
        self._seen = False  # which of them change
        self._before: list[Tensor] = []

    def begin_step(self) -> None:
        """Keep what is there before the step."""
        self._before = [buffer.clone() for buffer in self._buffers]

    def end_step(self, skips: Tensor | None) -> None:
        """Bring back what was there where `skips`, a bool scalar on the device, is true, without waiting for it.

        None: it is known already that the step is not skipped.
        """
        pairs = list(zip(self._buffers, self._before, strict=True))
        if not self._seen:
            pairs = [(buffer, before) for buffer, before in pairs if not torch.equal(buffer, before)]
            self._buffers, self._seen = [buffer for buffer, _ in pairs], True
        if skips is not None:
            for buffer, before in pairs:
                buffer.copy_(torch.where(skips, before, buffer))
        self._before = []


def skip_sentence(numbers: StepNumbers, train: TrainConfig) -> str:
    """Return what is said of the first step in a row whose update was left out, and what will be done about more of them."""
    waits = train.on_nonfinite == OnNonfinite.SKIP and train.max_skipped > 1
    more = f"; after {train.max_skipped} such steps in a row it goes back to a checkpoint" if waits else ""
    return (
        f"step {numbers.step}: loss or gradient norm are not finite{_where(numbers)}, so its update was left out{more}"
    )


def _sentence(state: TrainingState, numbers: StepNumbers, train: TrainConfig) -> str:
    """Return what went wrong, where, and with which samples."""
    health = state.health
    if health.in_a_row > 1:
        many = f" (train.max_skipped={train.max_skipped})" if health.in_a_row == train.max_skipped else ""
        what = (
            f"loss or gradient norm are not finite for {health.in_a_row} steps in a row{many}: from step {health.first} on; "
            f"step {numbers.step} has loss {numbers.loss:.4g} and gradient norm {numbers.grad_norm:.4g}{_where(numbers)}"
        )
    else:
        what = f"step {numbers.step} has loss {numbers.loss:.4g} and gradient norm {numbers.grad_norm:.4g}{_where(numbers)}"
    return f"{what}; its samples are {_samples(state, numbers)}"


def _where(numbers: StepNumbers) -> str:
    if numbers.failed_rank is not None:
        return f", by the loss of rank {numbers.failed_rank}"
    return f", by the losses of {numbers.failed_ranks} ranks" if numbers.failed_ranks else ""


def _samples(state: TrainingState, numbers: StepNumbers) -> str:
    """Name the samples of a step: their numbers in the order of the run, and a few of their indices in the data set."""
    first, end = numbers.samples
    indices = state.loader.indices(first, min(end, first + SAMPLES_NAMED))
    more = ", ..." if end - first > SAMPLES_NAMED else ""
    return f"{first} to {end - 1} of the run's order (in the data set: {', '.join(map(str, indices))}{more})"
