"""Whether an interrupted run has done the same as an undisturbed one, and why it probably has not.

It compares what both have logged, and every tensor of the newest checkpoint that both have.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.config.schema import JobConfig
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.observe.metrics import is_detail, is_measured, read_metrics
from slurmtrain.report.compare import by_step, compare_data, divergences
from slurmtrain.runs.program_checkpoints import find_checkpoints
from slurmtrain.runs.run_dir import RunDir

if TYPE_CHECKING:
    from slurmtrain.checkpoint.difference import TensorDifference  # with numpy

_RANDOM = re.compile(r"(\w+_)?(rng|random)(_states?)?(_all)?")
Log = Mapping[int, Mapping[str, float]]  # values by step and name
Differences = Callable[[Path, Path], tuple[list["TensorDifference"], list[str]]]
HASH = "data_hash"  # a digest of the samples so far
TELLING = {HASH: 0, "lr": 1, "loss": 2}  # the nearest to the cause first: samples and learning rate decide the loss
SEEDS = (
    "seed everything, and use deterministic kernels (train.deterministic=true, or torch.use_deterministic_algorithms in a "
    "program)"
)


class Divergence(NamedTuple):
    """The first step at which both logs have different values of a metric; None for values that are no numbers."""

    step: int
    name: str
    a: float | None = None
    b: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The comparison of an interrupted run, b, with an undisturbed one, a.

    Attributes:
        tolerance: relative difference up to which numbers count as equal, though not as the same bits.
        steps: steps that both have logged.
        divergence: the first difference in what they have logged, the most telling one of its step.
        apart: that difference is larger than the tolerance.
        checkpoint: step of the checkpoint that was compared; None if there is none.
        tensors: the tensors that differ in it, in the order of their names.
        state: names of what else differs in it: counters, the state of a schedule.
        left: why no checkpoint was compared; None if one was.
    """

    tolerance: float = 0.0
    steps: Sequence[int] = ()
    divergence: Divergence | None = None
    apart: bool = False
    checkpoint: int | None = None
    tensors: Sequence[TensorDifference] = ()
    state: Sequence[str] = ()
    left: str | None = None

    @property
    def reached(self) -> int | None:
        """The last step that was compared; None if nothing was."""
        return max([*self.steps, *([self.checkpoint] if self.checkpoint is not None else [])], default=None)

    @property
    def same_bits(self) -> bool:
        return self.reached is not None and not (self.divergence or self.tensors or self.state)

    @property
    def equal(self) -> bool:
        """Whether all numbers are equal up to the tolerance."""
        far = self.apart or any(each.relative > self.tolerance for each in self.tensors)
        return self.reached is not None and not self.state and not far


def compare_logs(a: Log, b: Log, tolerance: float, samples_part_at: int | None = None) -> Comparison:
    """Compare what two runs have logged. Values that measure the machine are left out.

    Args:
        samples_part_at: the first step after which they have seen different samples; None: they have seen the same.
    """
    steps = sorted(a.keys() & b.keys())
    for limit in (tolerance, 0.0):
        found = [
            Divergence(each.step, name, each.a, each.b) for name, each in divergences(a, b, tolerance=limit).items()
        ]
        found = [each for each in found if not is_measured(each.name) and not is_detail(each.name)]
        if samples_part_at is not None:
            found.append(Divergence(samples_part_at, HASH))
        if found:
            first = min(found, key=lambda each: (each.step, TELLING.get(each.name, 9), each.name))
            return Comparison(tolerance, steps, first, apart=limit == tolerance)
    return Comparison(tolerance, steps)


def with_checkpoint(
    found: Comparison, undisturbed: Mapping[int, Path], other: Mapping[int, Path], differences: Differences
) -> Comparison:
    """Return a comparison with that of the newest checkpoint of a step that both have, by their paths."""
    common = undisturbed.keys() & other.keys()
    if not common:
        newest = " and ".join(str(max(each, default="none")) for each in (undisturbed, other))
        return dataclasses.replace(found, left=f"no checkpoint of the same step (the newest: {newest})")
    step = max(common)
    try:
        tensors, state = differences(undisturbed[step], other[step])
    except CheckpointError as error:
        return dataclasses.replace(found, left=error.message)
    return dataclasses.replace(
        found,
        checkpoint=step,
        # Random states that differ are no difference as long as nothing has drawn from them: then the others differ, too.
        tensors=tuple(each for each in tensors if not _is_random(each.name)),
        state=tuple(name for name in state if not _is_random(name)),
    )


def _is_random(name: str) -> bool:
    """Return whether a part of a name says that it is a random state, as "random", "numpy_rng" or "cuda_rng_state" do."""
    return any(_RANDOM.fullmatch(part) for part in re.split(r"[^\w]+", name.lower()))


def compare_runs(undisturbed: RunDir, other: RunDir, job: JobConfig, tolerance: float) -> Comparison:
    """Compare what two runs have logged, and every tensor of the newest checkpoint that both have.

    Args:
        job: of both; its `checkpoints` name those of a program.
    """
    runs = (undisturbed, other)
    try:
        a, b = (by_step(read_metrics(run.metrics_file)) for run in runs)
        found = compare_logs(a, b, tolerance, compare_data(undisturbed, other).parts_at)
    except UnreadableRecordError as error:
        return Comparison(left=error.message)
    if job.checkpoints is not None:
        saved = []
        for run in runs:
            theirs = find_checkpoints(run.program_folders, job.checkpoints, job.checkpoint_complete)
            saved.append({each.step: each.path for each in theirs if each.problem is None and each.step is not None})
    else:
        saved = [{step_of(path): path for path in committed(run.checkpoints)} for run in runs]
        if not saved[0].keys() & saved[1].keys():
            return found
    from slurmtrain.checkpoint.difference import differences  # with numpy

    return with_checkpoint(found, saved[0], saved[1], differences)


def describe(found: Comparison) -> str:
    """Say how far the two are the same: "the same bits", "equal within 1e-06", or where they diverge."""
    if found.reached is None:
        return "nothing could be compared" + (f": {found.left}" if found.left else "")
    at = f"the checkpoint of step {found.checkpoint}"
    what = [f"{len(found.steps)} logged steps"] if found.steps else []
    what += [f"every tensor of {at}"] if found.checkpoint is not None else [found.left] if found.left else []
    if found.same_bits:
        return f"the same bits ({', '.join(what)})"
    if found.equal:
        return f"equal within {found.tolerance:g} relative ({', '.join(what)})"
    parts = []
    if found.divergence is not None:
        parts.append(f"diverges at step {found.divergence.step}: {_values(found.divergence)}")
    if found.tensors:
        first, others = found.tensors[0], len(found.tensors) - 1
        more = f" ({first.described()})" + (f", and {others} more" if others else "")
        parts.append(f"first tensor that differs in {at}: {first.name}{more}")
    if found.state:
        parts.append(f"differs in {at}: {', '.join(found.state[:5])}")
    return "; ".join(parts)


def _values(divergence: Divergence) -> str:
    a, b = divergence.a, divergence.b
    if a is None or b is None:
        return "they have seen other samples"
    digits = next((digits for digits in range(3, 17) if f"{a:.{digits}g}" != f"{b:.{digits}g}"), 17)
    return f"{divergence.name} {a:.{digits}g} and {b:.{digits}g}"


def likely_causes(found: Comparison, resumed_at: int | None) -> list[str]:
    """Return what was probably not restored in a run that differs, the likeliest first."""
    first = found.divergence
    if first is None:
        causes = ["random state is not restored, and something has drawn from it (dropout, shuffling)"]
        if any("optim" in each.name.lower() for each in found.tensors):
            causes.insert(0, "the optimiser's state is not restored, or the schedule of its learning rate")
        return causes if found.tensors else ["counters or schedules are not restored"]
    if first.name == HASH:
        return ["the order of the data is not restored: the resumed part begins with other samples"]
    if first.name == "lr":
        return ["the learning-rate schedule is not saved, or not restored: save its state_dict beside the optimiser's"]
    if resumed_at is None or first.step == resumed_at + 1:
        return [
            "the order of the data is not restored: save how many samples have been seen, or the sampler's and the "
            "loader's state, and continue there",
            "random state is not restored (dropout, augmentation): save torch.get_rng_state() and torch.cuda.get_rng_state() "
            "of every rank, and those of random and numpy",
            "the weights are not those of the checkpoint: an older one was loaded, or into a copy of the model",
        ]
    return [
        "the optimiser's state is not restored: with the weights alone the first step is right, and the next is not",
        "the learning-rate schedule is not saved, or begins anew",
        "the order of the data is restored to the wrong place: it was read ahead by the loader's workers, for instance",
    ]
