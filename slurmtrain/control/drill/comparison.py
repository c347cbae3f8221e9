"""Whether a run that was stopped and resumed has done the same as an undisturbed one, and why it probably has not.

Pure functions of what both have logged and of the tensors that differ in their last common checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.checkpoint.tensor_difference import TensorDifference
from slurmtrain.observe.metrics import is_detail, is_measured

TOLERANCE = 1e-6  # relative difference up to which values count as equal, though not as the same bits
Log = Mapping[int, Mapping[str, float | str]]  # values by step and name
HASH = "data_hash"  # a digest of the samples so far


@dataclass(frozen=True)
class Divergence:
    """The first step at which both logs have a value of this name, and different ones."""

    step: int
    name: str
    a: float | str
    b: float | str


@dataclass(frozen=True)
class RunComparison:
    """The comparison of a run that was stopped and resumed, b, with an undisturbed one, a.

    Attributes:
        steps: steps that both have logged, with at least one common name.
        names: names of the values that were compared.
        divergence: the first difference in what they have logged, the most telling one of its step.
        relative: the largest relative difference between two numbers; infinite for one that only one has, such as NaN.
        checkpoint: step of the checkpoint that was compared; None if there is none.
        tensors: the tensors that differ in it, in the order of their names.
        state: names of what else differs in it: counters, the state of a schedule.
        left: what was not compared, and why; None if nothing is known of.
    """

    steps: Sequence[int] = ()
    names: Sequence[str] = ()
    divergence: Divergence | None = None
    relative: float = 0.0
    checkpoint: int | None = None
    tensors: Sequence[TensorDifference] = ()
    state: Sequence[str] = ()
    left: str | None = None

    @property
    def anything_compared(self) -> bool:
        """Whether there was something to compare."""
        return bool(self.steps) or self.checkpoint is not None

    @property
    def reached(self) -> int:
        """The last step that was compared."""
        return max([*self.steps, self.checkpoint or 0], default=0)

    @property
    def same_bits(self) -> bool:
        """Whether nothing differs in what was compared."""
        return self.anything_compared and self.divergence is None and not self.tensors and not self.state

    @property
    def largest(self) -> float:
        """The largest relative difference between two numbers of the logs or of the tensors."""
        return max([self.relative, *(each.relative for each in self.tensors)])

    def within(self, tolerance: float) -> bool:
        """Return whether all numbers are equal up to a relative difference."""
        telling = self.divergence is not None and isinstance(self.divergence.a, str)
        return self.anything_compared and not self.state and not telling and self.largest <= tolerance


def compare_logs(a: Log, b: Log) -> RunComparison:
    """Compare what two runs have logged. Values that measure the machine are left out."""
    divergence, largest, steps, names = None, 0.0, [], set()
    for step in sorted(a.keys() & b.keys()):
        common = [name for name in a[step] if name in b[step] and not is_measured(name) and not is_detail(name)]
        if not common:
            continue
        steps.append(step)
        names |= set(common)
        for name in sorted(common, key=_how_telling):
            one, other = a[step][name], b[step][name]
            if _equal(one, other):
                continue
            divergence = divergence or Divergence(step, name, one, other)
            largest = max(largest, _relative(one, other))
    return RunComparison(tuple(steps), tuple(sorted(names)), divergence, largest)


def _how_telling(name: str) -> tuple[int, str]:
    """Order the names by how near to the cause of a difference they are: samples and learning rate decide the loss."""
    first = (HASH, "lr", "loss")
    return (first.index(name) if name in first else len(first), name)


def _equal(a: float | str, b: float | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return a == b or (math.isnan(a) and math.isnan(b))


def _relative(a: float | str, b: float | str) -> float:
    if isinstance(a, str) or isinstance(b, str):  # a digest has no distance
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def describe(found: RunComparison, tolerance: float = TOLERANCE) -> str:
    """Say in words how far the two are the same: "the same bits", "equal to 3e-8 relative", or where they diverge."""
    if not found.anything_compared:
        return "nothing could be compared" + (f": {found.left}" if found.left else "")
    what = _what(found)
    if found.same_bits:
        return f"the same bits ({what})"
    if found.within(tolerance):
        return f"equal to {found.largest:.0e} relative ({what})"
    parts = []
    if found.divergence is not None:
        parts.append(f"diverges at step {found.divergence.step}: {_values(found.divergence)}")
    if found.tensors:
        first, others = found.tensors[0], len(found.tensors) - 1
        more = f" ({first.described()}), and {others} more" if others else f" ({first.described()})"
        parts.append(f"first tensor that differs in the checkpoint of step {found.checkpoint}: {first.name}{more}")
    if found.state:
        parts.append(f"differs in the checkpoint of step {found.checkpoint}: {', '.join(found.state[:5])}")
    return "; ".join(parts)


def _what(found: RunComparison) -> str:
    steps = f"{len(found.steps)} logged steps" if found.steps else ""
    saved = f"every tensor of the checkpoint of step {found.checkpoint}" if found.checkpoint is not None else ""
    return ", ".join(filter(None, (steps, saved, found.left)))


def _values(divergence: Divergence) -> str:
    if divergence.name == HASH:
        return "they have seen other samples"
    a, b = divergence.a, divergence.b
    if isinstance(a, str) or isinstance(b, str):
        return f"{divergence.name} {a} and {b}"
    digits = next((digits for digits in range(3, 17) if f"{a:.{digits}g}" != f"{b:.{digits}g}"), 17)
    return f"{divergence.name} {a:.{digits}g} and {b:.{digits}g}"


def is_random(name: str) -> bool:
    """Return whether a value of a checkpoint is the state of random numbers, by its name."""
    return any(word in name.lower() for word in ("random", "rng"))


def likely_causes(found: RunComparison, stopped_at: int | None, tolerance: float = TOLERANCE) -> list[str]:
    """Return what is likely wrong, the likeliest first; nothing if nothing is.

    Args:
        stopped_at: the last step before the stop; None if it is not known.
    """
    if not found.anything_compared or found.same_bits or found.within(tolerance):
        return []
    divergence = found.divergence
    if divergence is not None and stopped_at is not None and divergence.step <= stopped_at:
        return [
            f"they diverge before the stop (after step {stopped_at}), so two undisturbed runs differ, too: seed everything, "
            "and use deterministic kernels (train.deterministic=true, or torch.use_deterministic_algorithms in a program) to "
            "compare more than this"
        ]
    if divergence is not None and divergence.name == HASH:
        return ["the order of the data is not restored: the resumed part begins with other samples"]
    if divergence is not None and divergence.name == "lr":
        return ["the learning-rate schedule is not saved, or not restored: save its state_dict beside the optimiser's"]
    causes = []
    first = stopped_at is not None and divergence is not None and divergence.step == stopped_at + 1
    if divergence is not None and (first or stopped_at is None):
        causes += [
            "the order of the data is not restored: save how many samples have been seen, or the sampler's and the "
            "loader's state, and continue there",
            "random state is not restored (dropout, augmentation): save torch.get_rng_state() and torch.cuda.get_rng_state() "
            "of every rank, and those of random and numpy",
            "the weights are not those of the checkpoint: an older one was loaded, or into a copy of the model",
        ]
    elif divergence is not None:
        causes += [
            "the optimiser's state is not restored: with the weights alone the first step is right, and the next is not",
            "the learning-rate schedule is not saved, or begins anew",
            "the order of the data is restored to the wrong place: it was read ahead by the loader's workers, for instance",
        ]
    if divergence is None and any(is_random(name) for name in (*(each.name for each in found.tensors), *found.state)):
        causes.append("random state is not restored: it shows as soon as something draws from it (dropout, shuffling)")
    if divergence is None and any("optim" in each.name.lower() for each in found.tensors):
        causes.append("the optimiser's state is not restored, or the schedule of its learning rate")
    if divergence is None and any(not is_random(name) for name in found.state):
        causes.append("counters or schedules are not restored, though nothing that was logged shows it yet")
    return causes
