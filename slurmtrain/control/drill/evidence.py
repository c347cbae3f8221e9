"""What the files of a drill's runs say: the evidence for `judge`, and the comparison of two runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.tensor_difference import TensorDifference
from slurmtrain.control.drill.comparison import HASH, Log, RunComparison, compare_logs, is_random
from slurmtrain.errors import CheckpointError, UnreadableRecordError
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.program_checkpoints import ProgramCheckpoint
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import read_json
from slurmtrain.system.records import finite, is_number, printable

Differences = Callable[[Path, Path], tuple[list[TensorDifference], list[str]]]


def attempts_of(run_dir: RunDir) -> list[Attempt]:
    """Return the attempts of a run; none if its files cannot be used."""
    try:
        return attempts.all_attempts(run_dir)
    except UnreadableRecordError:
        return []


def from_interruption_on(run_dir: RunDir, tries: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the attempt in which the drill has interrupted a run, and those after it.

    Before it there may be others: a job of a drill can be preempted in earnest, too.
    """
    time = (read_json(run_dir.interrupted_file) or {}).get("time")
    if not is_number(time):
        return tries
    assert isinstance(time, int | float)
    before = [index for index, each in enumerate(tries) if each.started and each.started <= time]
    return tries[before[-1] :] if before else tries


def save_seconds(run_dir: RunDir, step: int | None) -> float | None:
    """Return the seconds of the save of a step; None if it is not on record."""
    try:
        found = [
            event for event in run_dir.events() if event["event"] == Event.CHECKPOINT and event.get("step") == step
        ]
    except UnreadableRecordError:
        return None
    return finite(found[0].get("seconds")) if found else None


def log_of(run_dir: RunDir) -> Log:
    """Return the numbers that a run has logged, and the digest of its samples, by step and name; the latest of a step.

    Raises:
        UnreadableRecordError: the log cannot be read.
    """
    steps: dict[int, dict[str, float | str]] = {}
    for record in read_metrics(run_dir.metrics_file):
        values = {name: float(value) for name, value in record.items() if name != "step" and is_number_or_nan(value)}
        digest = record.get(HASH)
        steps.setdefault(record["step"], {}).update(
            values | ({HASH: printable(digest)} if isinstance(digest, str) else {})
        )
    return steps


def is_number_or_nan(value: object) -> bool:
    """Return whether a value of a log is a number; NaN and infinity, which broken training logs, are."""
    return is_number(value) or (isinstance(value, float) and not isinstance(value, bool))


def compare_runs(
    undisturbed: RunDir, resumed: RunDir, *, up_to: int | None = None, stopped_at: int | None = None
) -> RunComparison:
    """Compare what two runs have logged, and every tensor of the newest checkpoint that both have.

    Args:
        up_to: the last step to compare; None: all.
        stopped_at: the last step before the resumed one was stopped; None: not known.
    """
    try:
        logs = [log_of(run) for run in (undisturbed, resumed)]
    except UnreadableRecordError as error:
        return RunComparison(left=error.message)
    if up_to is not None:
        logs = [{step: values for step, values in log.items() if step <= up_to} for log in logs]
    found = compare_logs(*logs)
    saved = [{step_of(path): path for path in committed(run.checkpoints)} for run in (undisturbed, resumed)]
    common = sorted(saved[0].keys() & saved[1].keys())
    if not common:
        return found
    from slurmtrain.checkpoint.difference import differences  # with numpy

    return with_checkpoint(found, common[-1], saved[0], saved[1], differences, stopped_at)


def with_checkpoint(
    found: RunComparison,
    step: int,
    undisturbed: Mapping[int, Path],
    resumed: Mapping[int, Path],
    differences: Differences,
    stopped_at: int | None,
) -> RunComparison:
    """Return a comparison with that of the checkpoints of a step that both have."""
    try:
        tensors, state = differences(undisturbed[step], resumed[step])
        unseeded = _that_came_through_the_stop(state, step, resumed, differences, stopped_at)
    except CheckpointError as error:
        return dataclasses.replace(found, left=error.message)
    state = [name for name in state if name not in unseeded]
    left = f"random numbers that are not seeded and not used are left out: {', '.join(unseeded)}" if unseeded else None
    return dataclasses.replace(found, checkpoint=step, tensors=tuple(tensors), state=tuple(state), left=left)


def _that_came_through_the_stop(
    state: Sequence[str], step: int, resumed: Mapping[int, Path], differences: Differences, stopped_at: int | None
) -> list[str]:
    """Return the random states that differ only since each start of a program draws other seeds, as Python and NumPy do.

    The one of the resumed run is still what it was before the stop, so it was restored, and nothing has drawn from it.
    """
    random = [name for name in state if is_random(name)]
    before = [each for each in resumed if stopped_at is not None and each <= stopped_at < step]
    if not random or not before:
        return []
    _, changed = differences(resumed[max(before)], resumed[step])
    return [name for name in random if name not in changed]


def with_own_checkpoints(
    found: RunComparison,
    undisturbed: Sequence[ProgramCheckpoint],
    resumed: Sequence[ProgramCheckpoint],
    stopped_at: int | None = None,
) -> RunComparison:
    """Return a comparison with that of the newest complete checkpoints of the same step, of a program's own."""
    saved = [
        {each.step: each.path for each in its if each.problem is None and each.step is not None}
        for its in (undisturbed, resumed)
    ]
    common = sorted(saved[0].keys() & saved[1].keys())
    if not common:
        seen = " and ".join(str(max(each, default="none")) for each in saved)
        return dataclasses.replace(found, left=f"no checkpoint of the same step (the newest: {seen})")
    from slurmtrain.checkpoint.program_tensors import differences  # with torch

    return with_checkpoint(found, common[-1], saved[0], saved[1], differences, stopped_at)
