"""The verdict on a run that `drill` has interrupted: a pure function of what its records say.

A run passes if it was told, saved, came back, resumed at the step that it had saved, and ended with the bits of the
undisturbed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from slurmtrain.choices import RequeueMode
from slurmtrain.control.drill.comparison import RunComparison, describe, likely_causes
from slurmtrain.control.drill.ways import Way
from slurmtrain.errors import EXIT_REQUEUE
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.reasons import Verdict as Next

MODE_HINT = "requeue=chain (or requeue=resubmit), which need no requeue by SLURM"


class Result(StrEnum):
    """The result of one way."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_TRIED = "not tried"  # it cannot be tried here, or could not be judged in time


@dataclass(frozen=True)
class Evidence:
    """All that is known of an interrupted run.

    Attributes:
        cannot: why it was not tried; None if it was.
        mode: requeue.mode.
        attempts: its attempts so far, oldest first.
        over: the run has ended, in whatever way.
        explanation: what `status` says of it.
        told_at: when the drill sent its signal, or told SLURM, in unix seconds; None if it did not, as when a rank is
            killed from within.
        refused: what SLURM said when it refused to do that.
        unanswered: why it is not known whether SLURM has done it; None if it has answered.
        save_s: seconds of the save before it left; None if there was none.
        time_s: seconds from the signal until SLURM kills; None if that is not known.
        time_of: what gives that time: "cluster.signal_lead_s", "partition low".
        within_min: minutes for which the drill has waited at most.
        comparison: the comparison with the undisturbed run; None if one of them has not finished.
        undisturbed: why there is no undisturbed run to compare with; None if there is one.
    """

    way: Way
    cannot: str | None = None
    mode: RequeueMode = RequeueMode.REQUEUE
    attempts: Sequence[Attempt] = ()
    over: bool = False
    explanation: str = ""
    told_at: float | None = None
    refused: str | None = None
    unanswered: str | None = None
    save_s: float | None = None
    time_s: float | None = None
    time_of: str = ""
    within_min: float = 30.0
    comparison: RunComparison | None = None
    undisturbed: str | None = None


@dataclass(frozen=True)
class Judgement:
    """What is known of one way in the end.

    Attributes:
        sentence: what has happened, in one sentence.
        advice: what to set; None if there is nothing to.
        told_after_s: seconds from the drill's signal until a rank had seen it.
        left_after_s: seconds from then until all ranks had left.
        time_s: seconds that SLURM gives for that; None if it is not known.
        saved_step, save_s: step of the last checkpoint before it left, and the seconds of its save.
        back_by: what brought it back.
        back_after_s: seconds from the end of the first attempt to the beginning of the next one.
        resumed_step: step at which that began.
        same_bits: whether it ended with the bits of the undisturbed run; None if that is not known.
        undecided: it can be tried here, and what came of it is not known.
    """

    way: Way
    result: Result
    sentence: str
    advice: str | None = None
    told_after_s: float | None = None
    left_after_s: float | None = None
    time_s: float | None = None
    saved_step: int | None = None
    save_s: float | None = None
    back_by: str | None = None
    back_after_s: float | None = None
    resumed_step: int | None = None
    same_bits: bool | None = None
    undecided: bool = False


def judge(evidence: Evidence) -> Judgement:
    """Judge one way."""
    if evidence.cannot is not None:
        return _not_here(Judgement(evidence.way, Result.NOT_TRIED, ""), evidence.cannot)
    known = _measured(evidence)
    if evidence.refused is not None:
        return _refused(evidence, known)
    steps = (_began, _was_told, _had_saved, _came_back, _resumed, _in_time, _same_in_the_end)
    return next((said for step in steps if (said := step(evidence, known)) is not None), known)


def _measured(evidence: Evidence) -> Judgement:
    """Return all that the records say, as a way that has passed."""
    first = evidence.attempts[0] if evidence.attempts else None
    second = evidence.attempts[1] if len(evidence.attempts) > 1 else None
    told = first.cause_time if first is not None else None
    ended = first.ended if first is not None else None
    # One that is cut off has no record of its end until the next attempt closes it, which is no end of its own.
    seen_end = first is not None and not first.last_sign
    known = Judgement(
        evidence.way,
        Result.PASSED,
        "",
        told_after_s=_span(evidence.told_at, told),
        left_after_s=_span(told, ended) if seen_end else None,
        time_s=evidence.time_s,
        saved_step=first.committed_step if first is not None else None,
        save_s=evidence.save_s,
        back_by=_back_by(first, second) if first is not None and second is not None else None,
        back_after_s=_span(ended, second.started) if seen_end and second is not None and second.started else None,
        resumed_step=second.first_step if second is not None else None,
        same_bits=evidence.comparison.same_bits if evidence.comparison is not None else None,
    )
    return replace(known, sentence=_story(known, evidence))


def _span(begin: float | None, end: float | None) -> float | None:
    return max(0.0, end - begin) if begin is not None and end is not None else None


def _back_by(first: Attempt, second: Attempt) -> str:
    if first.job_id is None:
        return "by the launcher"
    if second.job_id != first.job_id:
        return f"in the next job, {second.job_id}"
    if second.restart_count == first.restart_count:
        return "in place, in the same job"
    return "by SLURM's own requeue" if first.verdict == Next.RESTARTING else "by a requeue of the supervisor"


def _story(known: Judgement, evidence: Evidence) -> str:
    """Tell what has gone well, in one sentence."""
    parts = []
    if evidence.way.kills:
        parts.append("a rank was killed")
    if known.left_after_s is not None and not evidence.way.kills:
        gives = f" ({evidence.time_of} gives {known.time_s:.0f} s)" if known.time_s is not None else ""
        parts.append(f"left {known.left_after_s:.1f} s after it was told{gives}")
    if known.saved_step is not None:
        parts.append(
            f"saved step {known.saved_step}" + (f" in {known.save_s:.1f} s" if known.save_s is not None else "")
        )
    if known.back_by is not None:
        after = f" after {known.back_after_s:.0f} s" if known.back_after_s is not None else ""
        parts.append(f"came back{after} {known.back_by}")
    if known.resumed_step is not None:
        parts.append(f"resumed at step {known.resumed_step}")
    if known.same_bits:
        parts.append("ended with the same bits")
    return ", ".join(parts)


def _failed(known: Judgement, sentence: str, advice: str | None) -> Judgement:
    return replace(known, result=Result.FAILED, sentence=sentence, advice=advice)


def _not_here(known: Judgement, why: str) -> Judgement:
    return replace(known, result=Result.NOT_TRIED, sentence=f"cannot be tried here, because {why}")


def _undecided(known: Judgement, sentence: str, advice: str | None = None) -> Judgement:
    return replace(known, result=Result.NOT_TRIED, sentence=sentence, advice=advice, undecided=True)


def _too_late(evidence: Evidence, known: Judgement, what: str, why: str = "") -> Judgement:
    return _undecided(
        known,
        f"could not be judged: {what} within {evidence.within_min:g} min{why}",
        "--within MINUTES waits longer",
    )


def _refused(evidence: Evidence, known: Judgement) -> Judgement:
    if evidence.way is Way.REQUEUE and evidence.mode != RequeueMode.REQUEUE:
        return _not_here(
            known, f"with requeue.mode={evidence.mode} SLURM does not requeue the job ({evidence.refused})"
        )
    if evidence.way is Way.REQUEUE:
        return _failed(known, f"SLURM refuses to requeue the job: {evidence.refused}", MODE_HINT)
    return _undecided(known, f"could not be tried: {evidence.refused}")


def _began(evidence: Evidence, known: Judgement) -> Judgement | None:
    first = evidence.attempts[0] if evidence.attempts else None
    if first is not None and (first.has_trained or first.verdict is not None):
        if first.has_trained or first.cause is not None or (evidence.way.kills and len(evidence.attempts) > 1):
            return None
        return _failed(known, f"its job did not come to train: {first.sentence or evidence.explanation}", None)
    if evidence.over:
        return _failed(known, f"its job did not come to train: {evidence.explanation}", None)
    return _too_late(evidence, known, "its job did not begin to train", f" ({evidence.explanation})")


def _was_told(evidence: Evidence, known: Judgement) -> Judgement | None:
    first = evidence.attempts[0]
    if evidence.way.kills or first.cause is not None:
        return None
    if evidence.unanswered is not None and len(evidence.attempts) == 1:
        return _undecided(
            known,
            f"it could not be found out whether SLURM does that: {evidence.unanswered}",
            f"--ways {evidence.way} tries it once more",
        )
    if evidence.told_at is None:
        return _undecided(known, f"could not be tried: {evidence.explanation}")
    if first.verdict == Next.DONE:
        if evidence.way is Way.PREEMPTION:
            return _undecided(
                known,
                "could not be judged: SLURM did not preempt it while it waited for that",
                f"--ways {evidence.way} tries it once more",
            )
        return _failed(known, "was never told: the signal has not reached its ranks, and it trained on", _TOLD_HINT)
    if first.verdict is None and not evidence.over:
        return _too_late(evidence, known, "it was not told")
    return _failed(known, "was killed without having been told", _lost_hint(evidence))


_TOLD_HINT = (
    "look whether `scancel --signal` is restricted here, and whether a wrapper in cluster.srun_args or setup keeps it"
)


def _had_saved(evidence: Evidence, known: Judgement) -> Judgement | None:
    first = evidence.attempts[0]
    if first.verdict is None and len(evidence.attempts) == 1 and not evidence.over:
        return _too_late(evidence, known, "it has not ended")
    if evidence.way.kills:
        if first.committed_step:
            return None
        return _failed(known, "had no checkpoint when a rank was killed", "checkpoint.every_steps or every_minutes")
    done, saved = first.last_step, first.committed_step
    if saved is not None and done is not None and saved >= done and first.exit_code in (None, EXIT_REQUEUE):
        return None
    if first.job_id is None and first.reason is not None and saved is None:
        return _failed(known, f"did not save before it left: {first.sentence}", None)
    gives = f", and {evidence.time_of} gives {evidence.time_s:.0f} s" if evidence.time_s is not None else ""
    behind = f"; it loses the steps since step {saved or 0}" if done is None or done > (saved or 0) else ""
    return _failed(known, f"was told, and killed before it had saved{gives}{behind}", _lost_hint(evidence))


def _lost_hint(evidence: Evidence) -> str:
    if evidence.way is Way.EARLY_SIGNAL:
        return "a larger cluster.signal_lead_s"
    often = "save more often, so that less is lost: checkpoint.every_minutes=5, or checkpoint.local=/dev/shm"
    if evidence.way is Way.PREEMPTION:
        return f"ask the administrators for a longer GraceTime of {evidence.time_of or 'the partition'}; {often}"
    return f"ask the administrators for a longer KillWait; {often}"


def _came_back(evidence: Evidence, known: Judgement) -> Judgement | None:
    if len(evidence.attempts) > 1:
        first, second = evidence.attempts[:2]
        in_place = (second.job_id, second.restart_count) == (first.job_id, first.restart_count)
        if evidence.way is not Way.IN_PLACE or in_place:
            return None
        return _failed(known, f"came back, but not in place: {first.sentence}", "requeue.in_place=true")
    first = evidence.attempts[0]
    if not evidence.over:
        return _too_late(evidence, known, "it saved and left, and did not start again", f" ({evidence.explanation})")
    if evidence.mode == RequeueMode.OFF:
        return _failed(known, "does not come back: requeue.mode=off", "requeue=requeue, or requeue=chain")
    if first.verdict in (Next.REQUEUE, Next.RESTARTING):
        return _failed(known, f"saved, and SLURM did not start it again: {evidence.explanation}", MODE_HINT)
    if evidence.mode == RequeueMode.CHAIN:
        return _failed(
            known, f"did not come back: {first.sentence or evidence.explanation}", "a longer requeue.chain_length"
        )
    return _failed(known, f"did not come back: {first.sentence or evidence.explanation}", MODE_HINT)


def _resumed(evidence: Evidence, known: Judgement) -> Judgement | None:
    first, second = evidence.attempts[:2]
    if second.first_step is None:
        if evidence.over:
            return _failed(known, f"came back, and failed: {second.sentence or evidence.explanation}", None)
        return _too_late(evidence, known, "it came back, and has not restored")
    saved = first.committed_step
    if saved is not None and second.first_step != saved:
        return _failed(
            known,
            f"resumed at step {second.first_step}, though step {saved} was saved",
            "look at the log of the second attempt: which checkpoint was taken, and why",
        )
    return None


def _in_time(evidence: Evidence, known: Judgement) -> Judgement | None:
    """Judge whether a warned run was quick enough: it was warned by hand, so that nothing has killed it at the limit."""
    if evidence.way is not Way.EARLY_SIGNAL or known.left_after_s is None or known.time_s is None:
        return None
    if known.left_after_s <= known.time_s:
        return None
    return _failed(
        known,
        f"left {known.left_after_s:.0f} s after it was told, and {evidence.time_of}={known.time_s:.0f} comes that long before "
        "the time limit",
        f"cluster.signal_lead_s={round(1.5 * known.left_after_s)}",
    )


def _same_in_the_end(evidence: Evidence, known: Judgement) -> Judgement | None:
    if evidence.undisturbed is not None:
        return _undecided(known, f"{known.sentence}; its bits cannot be compared: {evidence.undisturbed}")
    if evidence.comparison is None:
        if evidence.over:
            last = evidence.attempts[-1]
            return _failed(known, f"came back, and did not finish: {last.sentence or evidence.explanation}", None)
        return _too_late(evidence, known, "it came back, and has not finished")
    if evidence.comparison.same_bits:
        return None
    causes = likely_causes(evidence.comparison, evidence.attempts[1].first_step if len(evidence.attempts) > 1 else None)
    return _failed(
        known,
        f"{known.sentence}, and ended with other bits: {describe(evidence.comparison)}",
        next(iter(causes), "the nodes' hardware or libraries differ: cluster.constraint"),
    )
