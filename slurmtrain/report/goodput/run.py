"""The time and the GPU hours of a run by cause: productive, start-up, checkpoints, steps done again, hung, queue.

Everything is read from the run directory: the records of the attempts, the events, and when the log of metrics was last
written. SLURM is not asked, and metrics.jsonl is not read, however long it is.

Each second of a run has one cause, so the seconds add up to the time from its submission to its end. Clocks of several
hosts have written the records, and some may be set back meanwhile: a time that would go backwards counts as the one before
it, one in the future as now.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmtrain.report.goodput.attempt import Stretch, inside_of
from slurmtrain.report.goodput.causes import Cause, Goodput, Segment, sums_of
from slurmtrain.report.goodput.history import AttemptTimes, History, read_history
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.ownership import check_parts
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.runs.run_dir import RunDir

NOT_RECORDED = "not recorded"  # why an attempt ended that nobody could judge
STAGES_KEPT = 32
_REASONS = frozenset(str(reason) for reason in Reason)
_RESUMED = frozenset({Event.RESUME_ASKED, Event.SUBMITTING, Event.SUBMITTED})
_TURNS = _RESUMED | {Event.CANCEL_ASKED}  # from when on a run waits, or waits no more

Turn = tuple[float, str]  # when, and the name of the event


def goodput_of(run_dir: RunDir, *, alive: bool | None = None, now: float | None = None) -> Goodput:
    """Return the time of a run by cause, over all its attempts.

    Args:
        alive: whether the run's job is in the queue or runs, if somebody has asked SLURM. None: an attempt without a
            recorded end counts as running, and a run that is to start again as waiting.
        now: unix seconds; None: those of this machine's clock.

    Raises:
        UnreadableRecordError: the run's files cannot be used.
    """
    check_parts(run_dir)
    return of_history(read_history(run_dir), alive=alive, now=time.time() if now is None else now)


def of_history(history: History, *, alive: bool | None, now: float) -> Goodput:
    """Return the time by cause of a run with this history: a pure function."""
    spans = _spans(history, alive, now)
    first = [moment for moment in (history.submitted, *(span[0] for span in spans[:1])) if moment is not None]
    if not first:
        return Goodput()
    cursor = begin = min(min(first), now)
    events_of = _by_attempt(history.events)
    turns = [(event["time"], event["event"]) for event in history.events if event["event"] in _TURNS]
    segments, startup, interruptions = list[Segment](), dict[str, float](), dict[str, int]()
    furthest, before, why = 0, None, ""  # `why` the attempt before ended early
    for each, (start, end) in zip(history.tries, spans, strict=True):
        record, number = each.record, each.record.number
        is_last = each is history.tries[-1]
        start, end = max(start, begin), max(end, begin)
        waits = _waits(history, turns, before, each, cursor, start, why)
        over = is_last and alive is not True and record.verdict == Verdict.END
        inside = inside_of(each, history.kind, events_of.get(number, {}), start, end, furthest, over=over)
        # What a person's command launches here does not wait: this is start-up of the attempt.
        launched = waits.pop().start if waits and waits[-1].cause is Cause.STARTUP else start
        if launched < start:
            inside = [(launched, start, Cause.STARTUP, ""), *inside]
        own = _why_ended(record, gone=not is_last or alive is False)
        if own:
            interruptions[own] = interruptions.get(own, 0) + 1
        # Why seconds were lost: because of the end of the attempt before, or of this one.
        blame = dict.fromkeys((Cause.STARTUP, Cause.REDONE), why)
        blame |= dict.fromkeys((Cause.HUNG, Cause.IDLE_END, Cause.LOST), own)
        segments += waits
        segments += [
            Segment(number, a, b, cause, each.gpus, because or blame.get(cause, "")) for a, b, cause, because in inside
        ]
        _add_stages(startup, each, inside, launched, "launch" if history.local else "batch script")
        furthest = max(furthest, record.last_step or 0, record.first_step or 0)
        before, why, cursor = each, own, end
    is_waiting = _waits_at_the_end(history, before, alive)
    if is_waiting and cursor < now:
        segments += _waits(history, turns, before, None, cursor, now, why)
    last = before.record if before is not None else None
    runs = last is not None and last.ended is None and last.verdict is None and alive is not False
    kept = _joined(segments)
    return Goodput(
        **sums_of(kept),
        segments=kept,
        gpu_count=before.gpus if before is not None else 0.0,
        startup_s=startup,
        interruptions=interruptions,
        nodes={each.record.number: tuple(each.record.nodes) for each in history.tries},
        running=is_waiting or runs,
    )


def _by_attempt(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, list[Mapping[str, Any]]]]:
    """Return the events of each attempt by its number and their name."""
    found: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
    for event in events:
        number = event.get("attempt")
        if isinstance(number, int):
            found.setdefault(number, {}).setdefault(event["event"], []).append(event)
    return found


def _joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return the segments without empty ones, and neighbours that differ in nothing as one."""
    found: list[Segment] = []
    for each in segments:
        if each.end <= each.start:
            continue
        last = found[-1] if found else None
        if last is not None and last.cause is each.cause and last == each._replace(start=last.start, end=last.end):
            found[-1] = last._replace(end=each.end)
        else:
            found.append(each)
    return tuple(found)


def _spans(history: History, alive: bool | None, now: float) -> list[tuple[float, float]]:
    """Return begin and end of each attempt: in order, without overlaps, not after `now`.

    An attempt that was still at work when the next one began, which can happen after a node was lost, ends there.
    """
    begins: list[float] = []
    for each in history.tries:
        begins.append(min(now, max(each.begun, begins[-1] if begins else 0.0)))
    ends = []
    for index, (each, begin) in enumerate(zip(history.tries, begins, strict=True)):
        is_last = index == len(begins) - 1
        latest = now if is_last else begins[index + 1]
        end = each.record.ended
        if each.last_sign is not None and end is not None:  # nobody saw its end, and its record was closed later
            end = min(end, each.last_sign)
        elif end is None:
            end = latest if is_last and alive is not False else each.last_sign
        ends.append(min(latest, max(begin, latest if end is None else end)))
    return list(zip(begins, ends, strict=True))


def _why_ended(record: Attempt, *, gone: bool) -> str:
    """Return why an attempt ended before the run had finished; "" if it has finished, or has not ended.

    Args:
        gone: it is over, whether or not somebody has recorded its end.
    """
    if record.verdict == Verdict.DONE or record.reason == Reason.FINISHED:
        return ""
    if record.verdict is None and record.ended is None and not gone:
        return ""
    return record.reason if record.reason in _REASONS else NOT_RECORDED


def _waits(
    history: History,
    turns: Iterable[Turn],
    before: AttemptTimes | None,
    after: AttemptTimes | None,
    start: float,
    end: float,
    why: str,
) -> list[Segment]:
    """Return the wait between two attempts, before the first or after the last one: for SLURM, a person, or both in turn."""
    if end <= start:
        return []
    inside = sorted(turn for turn in turns if start <= turn[0] <= end)
    # Resuming is refused while the run has a job: what it had before is gone then.
    resumed = max((moment for moment, name in inside if name == Event.RESUME_ASKED), default=start)
    again = Cause.STARTUP if history.local else Cause.QUEUE
    # Of an attempt whose end nobody saw, nothing may have been left that would have started the next one.
    lost = resumed > start and before is not None and (history.local or before.last_sign is not None)
    if before is None:
        found = [Segment(0, start, end, again)]
    elif lost or before.record.verdict in (Verdict.END, Verdict.DONE):
        found = [Segment(before.record.number, start, end, Cause.STOPPED)]
    elif after is not None and (history.local or (before.job[0] is not None and before.job == after.job)):
        found = [Segment(before.record.number, start, end, Cause.BETWEEN, after.gpus, why)]
    else:
        found = [Segment(before.record.number, start, end, Cause.QUEUE, 0.0, why)]
    for moment, name in inside:
        last = found[-1]
        if last.cause is Cause.STOPPED and name in _RESUMED:
            cause = again
        elif last.cause is not Cause.STOPPED and name == Event.CANCEL_ASKED and moment < resumed:
            cause = Cause.STOPPED
        else:
            continue
        found[-1:] = [last._replace(end=moment), Segment(last.attempt, moment, end, cause)]
    return found


def _waits_at_the_end(history: History, before: AttemptTimes | None, alive: bool | None) -> bool:
    """Return whether the run waits to be started, for the first time or once more."""
    if alive is False:
        return False
    if before is None:
        return alive is True or history.submitted is not None
    record = before.record
    if record.ended is None and record.verdict is None:
        return False
    return record.verdict not in (Verdict.DONE, Verdict.END) or bool(alive)


def _add_stages(
    startup: dict[str, float], each: AttemptTimes, inside: Sequence[Stretch], begin: float, launcher: str
) -> None:
    """Add the start-up of an attempt, by stage: as rank 0 has timed them, and what was before and after them.

    They add up to the start-up's part of the attempt. `launcher` names the stage before those of rank 0.
    """
    total = math.fsum(end - start for start, end, cause, _ in inside if cause is Cause.STARTUP)
    if total <= 0:
        return
    record = each.record
    stages = {name: value for name, value in record.start_up_s.items() if value > 0} if record.stepping else {}
    until_steps = min(total, max(0.0, (record.stepping or 0.0) - begin)) if record.stepping else total
    timed = math.fsum(stages.values())
    scale = min(1.0, until_steps / timed) if timed > 0 else 0.0
    found = {launcher if record.stepping else "unfinished": until_steps - timed * scale}
    found |= {name: value * scale for name, value in stages.items()}
    found |= {"first step": total - until_steps}
    for name, seconds in found.items():
        if seconds > 0 and (name in startup or len(startup) < STAGES_KEPT):
            startup[name] = startup.get(name, 0.0) + seconds
