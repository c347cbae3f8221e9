"""The verdict on an interrupted run: a pure function of what its records say.

It passes if it got a signal to stop, saved, came back, resumed at the step that it had saved, and ended with the bits of the
undisturbed one. Of a program of one's own, less is known: it passes if it came back, and what both show is the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.choices import RequeueMode
from slurmtrain.config.schema import JobConfig
from slurmtrain.control.drill.ways import Plan, Way
from slurmtrain.errors import EXIT_REQUEUE, UnreadableRecordError
from slurmtrain.observe.metrics import is_detail, is_measured, read_metrics
from slurmtrain.report.compare import by_step, compare_data, divergences
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.program_checkpoints import find_checkpoints
from slurmtrain.runs.reasons import Verdict as Next
from slurmtrain.runs.run_dir import RunDir

if TYPE_CHECKING:
    from slurmtrain.checkpoint.difference import TensorDifference  # with torch


MODE_HINT = "requeue=chain (or requeue=resubmit), which need no requeue by SLURM"
TOLD_HINT = (
    "look whether `scancel --signal` is restricted here, and whether a wrapper in cluster.srun_args or setup keeps it"
)
SAVES_HINT = "save when the program is told to stop (SIGTERM, or slurmtrain.should_stop()), and resume from that"
SHOW_HINT = (
    'log the loss, as lines {"step": 1, "loss": 2.5} in $SLURMTRAIN_RUN_DIR/metrics.jsonl, or name the checkpoints '
    "(job.checkpoints='out/checkpoint-*')"
)
LONGER_HINT = "give it more to do (--steps), or interrupt it earlier (--stop-at)"


class Result(StrEnum):
    """The result of one way."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_TRIED = "not tried"  # it cannot be tried here
    NOT_JUDGED = "not judged"  # what came of it is not known


@dataclass
class Evidence:
    """All that is known of an interrupted run.

    Attributes:
        way: None: it is not interrupted.
        cannot: why it could not be tried; None if it could.
        is_program: it is a program of one's own, whose attempts say nothing of its checkpoints.
        mode: requeue.mode.
        attempts: its attempts from the interrupted one on.
        over: the run has ended, in whatever way.
        finished: it has finished, or was cancelled since it had done all steps.
        explanation: what `status` says of it.
        told: the drill has sent its signal, or SLURM was told to preempt it.
        refused: what SLURM said when it refused to do that.
        time_s: seconds from the signal until SLURM kills; None if that is not known.
        resumed_at: steps done when it was resumed.
        undisturbed: what `status` says of the undisturbed run.
        comparison: the comparison with the undisturbed run; None if one of them has not finished.
        twin: the comparison of two undisturbed runs; None if there is only one.
    """

    way: Way | None
    cannot: str | None = None
    is_program: bool = False
    mode: RequeueMode = RequeueMode.REQUEUE
    attempts: Sequence[Attempt] = ()
    over: bool = False
    finished: bool = False
    explanation: str = "nothing is known of it"
    told: bool = False
    refused: str | None = None
    time_s: float | None = None
    resumed_at: int | None = None
    undisturbed: str = ""
    comparison: Comparison | None = None
    twin: Comparison | None = None

    @property
    def first(self) -> Attempt:
        return self.attempts[0] if self.attempts else Attempt(1)

    @property
    def second(self) -> Attempt | None:
        return self.attempts[1] if len(self.attempts) > 1 else None

    @property
    def stopped_at(self) -> int | None:
        """The last step that it is known to have done before it left."""
        first = self.first
        return max(first.last_step or 0, first.seen_step or 0, first.committed_step or 0) or None

    @property
    def left_after_s(self) -> float | None:
        """Seconds from when a rank got the signal until all had left.

        An attempt that is cut off has no record of its end until the next one closes it, which is no end of its own.
        """
        first = self.first
        if first.cause_time is None or first.ended is None or first.last_sign:
            return None
        return max(0.0, first.ended - first.cause_time)

    @property
    def saved_step(self) -> int | None:
        return self.first.committed_step


class Verdict(NamedTuple):
    """What is said of one way: the result, what has happened in one sentence, and hints, the most helpful first."""

    result: Result
    sentence: str
    hints: Sequence[str] = ()


def judge(evidence: Evidence, plan: Plan) -> Verdict:
    """Judge one way."""
    return _left(evidence, plan) or _came_back(evidence) or _compared(evidence)


def _failed(sentence: str, *hints: str) -> Verdict:
    return Verdict(Result.FAILED, sentence, hints)


def _not_judged(sentence: str, *hints: str) -> Verdict:
    return Verdict(Result.NOT_JUDGED, sentence, hints)


def _left(evidence: Evidence, plan: Plan) -> Verdict | None:
    """Judge how it left: it got the signal, and has saved. None: it did."""
    way, first = evidence.way, evidence.first
    assert way is not None
    if evidence.cannot is not None:
        return Verdict(Result.NOT_TRIED, f"cannot be tried here, because {evidence.cannot}")
    if evidence.refused is not None:
        said = f"SLURM refuses it, with requeue.mode={evidence.mode}: {evidence.refused}"
        if way is not Way.REQUEUE:
            return _not_judged(said)
        return _failed(said, MODE_HINT) if evidence.mode == RequeueMode.REQUEUE else Verdict(Result.NOT_TRIED, said)
    if not evidence.over and not evidence.finished:
        stage = "finish" if evidence.second else "start again" if first.cause else "stop" if evidence.told else "train"
        late = f"did not {stage} within {plan.within_min:g} min ({evidence.explanation})"
        return _not_judged(late, "--within MINUTES waits longer")
    if not first.has_trained and first.cause is None and not (way.kills and evidence.second):
        return _failed(f"its job did not come to train: {first.sentence or evidence.explanation}")
    if way.kills:
        if first.committed_step:
            return None
        return _failed("had no checkpoint when a rank was killed", "checkpoint.every_steps or every_minutes")
    if first.cause is None or not evidence.told:
        if first.verdict == Next.DONE and evidence.is_program:
            return _not_judged("it had finished before it could be interrupted", LONGER_HINT)
        if not evidence.told:
            return _not_judged(f"could not be interrupted: {evidence.explanation}")
        if first.verdict == Next.DONE and way is Way.PREEMPTION:
            return _not_judged("SLURM did not preempt it while it waited for that", f"--ways {way} tries it once more")
        if first.verdict == Next.DONE:
            return _failed("the signal did not reach its ranks, and it trained on", TOLD_HINT)
        return _failed("was killed without a signal before that", _lost_hint(evidence))

    if evidence.is_program and evidence.stopped_at is None:
        return _not_judged("it was interrupted before it had shown a step, so that nothing was lost", SHOW_HINT)
    done, saved = first.last_step, first.committed_step
    if evidence.is_program or (saved and saved >= (done or 0) and first.exit_code in (None, EXIT_REQUEUE)):
        return None
    gives = f", for which SLURM gives {evidence.time_s:.0f} s" if evidence.time_s is not None else ""
    behind = f"; it loses the steps since step {saved or 0}" if done is None or done > (saved or 0) else ""
    return _failed(f"got the signal, but ended or was killed before it had saved{gives}{behind}", _lost_hint(evidence))


def _lost_hint(evidence: Evidence) -> str:
    if evidence.way is Way.EARLY_SIGNAL:
        return "a larger cluster.signal_lead_s"
    longer = "GraceTime or KillWait" if evidence.way is Way.PREEMPTION else "KillWait"
    often = "save more often, so that less is lost: checkpoint.every_minutes=5"
    return f"ask the administrators for a longer {longer}; {often}"


def _came_back(evidence: Evidence) -> Verdict | None:
    """Judge whether it came back and resumed where it had stopped. None: it did."""
    first, second, saved = evidence.first, evidence.second, evidence.first.committed_step
    last = evidence.attempts[-1].sentence or evidence.explanation
    if second is None:
        hint = MODE_HINT
        if evidence.mode == RequeueMode.OFF:
            hint = "requeue=requeue, or requeue=chain"
        elif evidence.mode == RequeueMode.CHAIN:
            hint = "a longer requeue.chain_length"
        elif first.verdict in (Next.REQUEUE, Next.RESTARTING):
            last = f"SLURM did not start it again: {evidence.explanation}"
        return _failed(f"did not come back: {last} (requeue.mode={evidence.mode})", hint)
    if evidence.way is Way.IN_PLACE and (second.job_id, second.restart_count) != (first.job_id, first.restart_count):
        return _failed(f"came back, but not in place: {first.sentence}", "requeue.in_place=true")
    if evidence.resumed_at == 0 and evidence.stopped_at and evidence.is_program:
        return _failed(f"stopped after step {evidence.stopped_at}, and began anew", SAVES_HINT)
    if saved is not None and second.first_step not in (None, saved):
        hint = "look at the log of the second attempt: which checkpoint was taken, and why"
        return _failed(f"resumed at step {second.first_step}, though step {saved} was saved", hint)
    if not evidence.finished:
        return _failed(f"came back, and did not finish: {last}")
    # It was warned by hand, so that nothing has killed it at the limit.
    left_s, time_s = evidence.left_after_s, evidence.time_s
    if evidence.way is Way.EARLY_SIGNAL and left_s is not None and time_s is not None and left_s > time_s:
        late = f"left {left_s:.0f} s after the signal, but cluster.signal_lead_s={time_s:.0f}"
        return _failed(late, f"cluster.signal_lead_s={round(1.5 * left_s)}")
    return None


def _compared(evidence: Evidence) -> Verdict:
    """Judge whether it has done the same as the undisturbed run."""
    found = evidence.comparison
    if found is None:
        return _not_judged(f"the undisturbed run has not finished ({evidence.undisturbed})")
    if found.reached is None:
        return _not_judged(describe(found), SHOW_HINT)
    at = evidence.stopped_at if evidence.resumed_at is None else evidence.resumed_at
    resumed = f"resumed at step {at}" if evidence.resumed_at is not None else f"stopped after step {at}"
    if at is not None and found.reached <= at:
        only = f"only up to step {found.reached}"
        return _not_judged(f"{resumed}, and nothing after that could be compared, {only}", LONGER_HINT)
    said = f"{resumed}: {describe(found)}" if at is not None else describe(found)
    if found.same_bits:
        return Verdict(Result.PASSED, said)
    if evidence.twin is not None and not evidence.twin.same_bits:
        return _not_judged(f"two undisturbed runs differ, too: the second one {describe(evidence.twin)}", SEEDS)
    causes = likely_causes(found, at)
    if not evidence.is_program:
        causes.append("the hardware or libraries of the nodes differ: cluster.constraint requests nodes of one kind")
    return _failed(said, *causes)


# Whether an interrupted run has done the same as an undisturbed one, and why it probably has not: by what both have logged,
# and every tensor of the newest checkpoint that both have.

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
        steps: steps that both have logged.
        divergence: the first difference in what they have logged, the most telling one of its step.
        checkpoint: step of the checkpoint that was compared; None if there is none.
        tensors: the tensors that differ in it, in the order of their names.
        state: names of what else differs in it: counters, the state of a schedule.
        left: why no checkpoint was compared; None if one was.
    """

    steps: Sequence[int] = ()
    divergence: Divergence | None = None
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


def compare_logs(a: Log, b: Log, samples_part_at: int | None = None, resumed_at: int | None = None) -> Comparison:
    """Compare what two runs have logged. Values that measure the machine are left out.

    A program that logs every few steps may log means of these. The first ones after a resume are then means of fewer steps, so
    they are left out if they differ.

    Args:
        samples_part_at: the first step after which they have seen different samples; None: they have seen the same.
        resumed_at: steps done when b was resumed; None: not known.
    """
    found, after = _differences(a, b), None
    if resumed_at is not None:
        after = min((step for step in a.keys() & b.keys() if step > resumed_at), default=None)
    if after not in (None, (resumed_at or 0) + 1) and any(each.step == after for each in found):
        a, b = ({step: its for step, its in log.items() if step != after} for log in (a, b))
        found = _differences(a, b)
    if samples_part_at is not None:
        found.append(Divergence(samples_part_at, HASH))
    first = min(found, key=lambda each: (each.step, TELLING.get(each.name, 9), each.name), default=None)
    return Comparison(sorted(a.keys() & b.keys()), first)


def _differences(a: Log, b: Log) -> list[Divergence]:
    return [
        Divergence(each.step, name, each.a, each.b)
        for name, each in divergences(a, b).items()
        if not is_measured(name) and not is_detail(name)
    ]


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


def compare_runs(undisturbed: RunDir, other: RunDir, job: JobConfig, resumed_at: int | None = None) -> Comparison:
    """Compare what two runs have logged, and every tensor of the newest checkpoint that both have.

    Args:
        resumed_at: steps done when the other one was resumed; None: not known, or it was not.
        job: of both; its `checkpoints` name those of a program.
    """
    runs = (undisturbed, other)
    try:
        a, b = (by_step(read_metrics(run.metrics_file)) for run in runs)
        found = compare_logs(a, b, compare_data(undisturbed, other).parts_at, resumed_at)
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
    from slurmtrain.checkpoint.difference import differences  # with torch

    return with_checkpoint(found, saved[0], saved[1], differences)


def describe(found: Comparison) -> str:
    """Say that the two have the same bits, or where they diverge."""
    if found.reached is None:
        return "nothing could be compared" + (f": {found.left}" if found.left else "")
    at = f"the checkpoint of step {found.checkpoint}"
    what = [f"{len(found.steps)} logged steps"] if found.steps else []
    what += [f"every tensor of {at}"] if found.checkpoint is not None else [found.left] if found.left else []
    if found.same_bits:
        return f"the same bits ({', '.join(what)})"
    parts = []
    if found.divergence is not None:
        parts.append(f"diverges at step {found.divergence.step}: {_values(found.divergence)}")
    if found.tensors:
        first, others = found.tensors[0], len(found.tensors) - 1
        more = f" ({first.why})" + (f", and {others} more" if others else "")
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


ORDER = "the order of the data is not restored: save how many samples have been seen, and continue with the next one"
SCHEDULE = "the learning-rate schedule is not saved, or not restored: save its state_dict beside the optimiser's"
OPTIMISER = "the optimiser's state is not restored: with the weights alone the first step is right, and the next is not"
RANDOM = "random state is not restored (dropout, shuffling, augmentation): save those of torch, CUDA, random and numpy"
WEIGHTS = "the weights are not those of the checkpoint: an older one was loaded, or into a copy of the model"


def likely_causes(found: Comparison, resumed_at: int | None) -> list[str]:
    """Return what was probably not restored in a run that differs, the likeliest first."""
    first = found.divergence
    if first is None:
        optimiser = any("optim" in each.name.lower() for each in found.tensors)
        return [*[OPTIMISER] * optimiser, RANDOM] if found.tensors else ["counters or schedules are not restored"]
    if first.name in (HASH, "lr"):
        return [ORDER if first.name == HASH else SCHEDULE]
    if first.name not in TELLING and found.checkpoint is not None and not found.tensors:
        return [f"{first.name} is not restored, or counts what only one run has done; every tensor is the same"]
    if resumed_at is not None and first.step <= resumed_at:
        return [
            f"its place is not restored: it has logged step {first.step} again, after it had resumed at step {resumed_at}. "
            "Save and restore what counts the steps: a slurmtrain.DataLoader, or the number itself"
        ]
    return [ORDER, RANDOM, WEIGHTS] if resumed_at in (None, first.step - 1) else [OPTIMISER, SCHEDULE, ORDER]
