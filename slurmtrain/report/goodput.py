"""The time and the GPU hours of a run by cause: productive, start-up, checkpoints, steps done again, hung, queue.

Everything is read from the run directory: the records of the attempts, the events, and when the log of metrics was last
written. SLURM is not asked, and metrics.jsonl is not read, however long it is.

Each second of a run has one cause, so the seconds add up to the time from its submission to its end. Clocks of several
hosts have written the records, and some may be set back meanwhile: a time that would go backwards counts as the one before
it, one in the future as now.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from slurmtrain.choices import Backend, JobKind
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs import attempts, reached_step
from slurmtrain.runs.attempt_dir import is_gpu_file
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.outcome import Reason, Verdict
from slurmtrain.runs.ownership import check_parts
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import read_json

ROLLED_BACK = "rolled back"  # why steps are done again in the same attempt
NOT_RECORDED = "not recorded"  # why an attempt ended that nobody could judge
FAILURES_READ = 32  # records of failed ranks that are looked at: of a thousand ranks the first ones tell enough
STAGES_KEPT = 32


class Cause(StrEnum):
    """What a second of a run went into. Each second has one cause."""

    QUEUE = "queue"  # SLURM had not started its job yet
    STOPPED = "stopped"  # it had ended, until a person resumed it
    STARTUP = (
        "startup"  # batch script, interpreter, rendezvous, restore, and what the first step takes longer (compile)
    )
    PRODUCTIVE = "productive"  # steps that were done for the first time
    REDONE = "redone"  # steps that an earlier attempt had done already, and that no checkpoint had
    CHECKPOINT = "checkpoint"  # training waited for a save
    EVALUATION = "evaluation"  # training waited for an evaluation
    HUNG = "hung"  # no rank got on, until the watchdog ended the attempt
    LOST = "lost"  # steps after the last checkpoint of a run that has ended: nobody has them
    IDLE_END = "idle_end"  # after the last step: ranks that leave, and what a failure left standing
    BETWEEN = "between"  # between two attempts in the same job, which keeps its GPUs
    UNKNOWN = "unknown"  # a program of the user's own that reports no progress


HOLDS_NO_GPUS = frozenset({Cause.QUEUE, Cause.STOPPED})


class Piece(NamedTuple):
    """What an attempt, or a wait after it, adds to the sums of its run: its time with one cause, for one reason.

    Attributes:
        attempt, cause, gpus, because: as of a `Segment`.
        seconds: sum over the segments.
    """

    attempt: int
    cause: Cause
    seconds: float
    gpus: float = 0.0
    because: str = ""


class Segment(NamedTuple):
    """A stretch of a run's time with one cause.

    Attributes:
        attempt: number of the attempt; of a wait, that of the attempt before it, 0 before the first one.
        start, end: unix seconds.
        gpus: GPUs that the run held then; a share of them where several runs shared the job, so that it may be a fraction.
        because: why this time was lost: the reason for which an attempt ended, or "rolled back". "" if it was not.
    """

    attempt: int
    start: float
    end: float
    cause: Cause
    gpus: float = 0.0
    because: str = ""

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Goodput:
    """The time of a run by cause.

    Attributes:
        seconds: wall-clock seconds by cause; causes without any time are left out. They add up to `wall_s`.
        gpu_count: GPUs of its newest attempt; 0 on CPUs. A share of them where several runs shared the job.
        gpu_seconds: GPUs x seconds by cause. No GPU is held in the queue, so waits are not in it.
        segments: the same in the order of time, without gaps and overlaps.
        pieces: the same by attempt, without the order: a few of them where there are thousands of segments.
        startup_s: wall-clock seconds of the start-ups by stage, over all attempts: "batch script", "interpreter", ...
        lost_gpu_seconds: GPUs x seconds lost, by why an attempt ended ("crash", "hang", "preempted", "node failure",
            "requeued", ...) or "rolled back": what stood still until it had ended, and all until the run was where it had been.
        lost_s: wall-clock seconds of the same, the queue included.
        interruptions: number of attempts that ended before the run had finished, by why.
        nodes: the nodes of each attempt, by its number.
        running: it has not ended, and its last segment ends now.
        begin, end: of its first and of its last segment, in unix seconds; 0 if there is none.
    """

    seconds: Mapping[Cause, float] = field(default_factory=dict)
    gpu_count: float = 0.0
    gpu_seconds: Mapping[Cause, float] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    pieces: tuple[Piece, ...] = ()
    startup_s: Mapping[str, float] = field(default_factory=dict)
    lost_gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    lost_s: Mapping[str, float] = field(default_factory=dict)
    interruptions: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    running: bool = False
    begin: float = 0.0
    end: float = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds from the submission to the end of the last attempt, or until now."""
        return math.fsum(self.seconds.values())

    @property
    def held_s(self) -> float:
        """Seconds in which the run held its nodes."""
        return math.fsum(seconds for cause, seconds in self.seconds.items() if cause not in HOLDS_NO_GPUS)

    @property
    def gpu_hours(self) -> float:
        """GPU hours over all attempts."""
        return math.fsum(self.gpu_seconds.values()) / 3600

    @property
    def lost_gpu_hours(self) -> float:
        """GPU hours that interruptions have cost."""
        return math.fsum(self.lost_gpu_seconds.values()) / 3600

    @property
    def share(self) -> float | None:
        """The goodput: productive seconds / seconds in which nodes were held.

        Time of which nobody knows what it went into is left out of both. None if nothing is known but the start-up.
        """
        return self._productive_of(self.held_s)

    @property
    def effective_share(self) -> float | None:
        """The effective training time ratio: productive seconds / seconds held or queued.

        The time in which the run had ended, until a person resumed it, is left out, and so is what nobody knows.
        """
        return self._productive_of(self.wall_s - self.seconds.get(Cause.STOPPED, 0.0))

    def _productive_of(self, seconds: float) -> float | None:
        productive, unknown = self.seconds.get(Cause.PRODUCTIVE, 0.0), self.seconds.get(Cause.UNKNOWN, 0.0)
        known = seconds - unknown
        return productive / known if known > 0 and self.held_s > 0 and (productive or not unknown) else None

    def since(self, moment: float) -> Goodput:
        """Return the part from `moment`, in unix seconds, on.

        Interruptions and stages of start-ups stay those of the whole run.
        """
        if self.begin >= moment:
            return self
        cut = tuple(each._replace(start=max(each.start, moment)) for each in self.segments if each.end > moment)
        pieces = tuple(Piece(each.attempt, each.cause, each.seconds, each.gpus, each.because) for each in cut)
        sums = Sums()
        for piece in pieces:
            sums.add(piece)
        begin, end = (cut[0].start, cut[-1].end) if cut else (0.0, 0.0)
        return replace(self, **sums.fields(), segments=cut, pieces=pieces, begin=begin, end=end)


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


def over_all(found: Iterable[Goodput]) -> Goodput:
    """Return the sum over several runs: of a sweep, or of a person. It has no segments."""
    total = _Sum()
    for each in found:
        total.add(each)
    return total.result()


class _Sum:
    def __init__(self) -> None:
        self._values: dict[str, dict[Any, float]] = {name: {} for name in _SUMMED}
        self._gpus, self._running = 0.0, False

    def add(self, goodput: Goodput) -> None:
        for name, total in self._values.items():
            for key, value in getattr(goodput, name).items():
                total[key] = total.get(key, 0) + value
        self._gpus, self._running = self._gpus + goodput.gpu_count, self._running or goodput.running

    def result(self) -> Goodput:
        return Goodput(**self._values, gpu_count=self._gpus, running=self._running)  # type: ignore[arg-type]


_SUMMED = ("seconds", "gpu_seconds", "startup_s", "lost_gpu_seconds", "lost_s", "interruptions")


# What the run's files say.


class AttemptTimes(NamedTuple):
    """What the files say of one attempt. Times are unix seconds, None where nobody has recorded them.

    Attributes:
        begun: when its batch script claimed it.
        record: attempt.json.
        job: the start of a job that it belongs to.
        hung_since: when ranks got on for the last time before a hang.
        failed: when the first rank failed.
        last_sign: when it last wrote something; asked for only where `ended` does not say it.
        gpus: GPUs that it held.
        sampled: its folder holds records of how busy they were.
    """

    begun: float
    record: Attempt
    job: tuple[str | None, int]
    hung_since: float | None = None
    failed: float | None = None
    last_sign: float | None = None
    gpus: float = 0.0
    sampled: bool = False


@dataclass(frozen=True)
class History:
    """What the files of a run say of its time.

    Attributes:
        submitted: when it was submitted first; None if it never was.
        kind: job.kind; None if it is not known.
        local: it was started here, without SLURM.
        jobs: ids of the jobs that it was submitted as.
        slurm_conf: the slurm.conf that it names, of which nobody has checked who has written it.
        tries: its attempts, in order.
        events: its events, oldest first.
    """

    submitted: float | None
    kind: str | None
    local: bool
    tries: Sequence[AttemptTimes]
    events: Sequence[Mapping[str, Any]]
    jobs: tuple[str, ...] = ()
    slurm_conf: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether only SLURM, or the host of a local run, can say if it still runs or waits."""
        last = self.tries[-1].record if self.tries else None
        return last is None or last.verdict not in (Verdict.DONE, Verdict.END)


def read_history(run_dir: RunDir) -> History:
    """Read what the files of a run say of its time.

    Raises:
        UnreadableRecordError: they cannot be used.
    """
    info, events = run_dir.info(), run_dir.events()
    local = info.get("backend") == Backend.LOCAL
    by_hand = _GpusByScript(run_dir, packed=bool(info.get("packed")))
    found: list[AttemptTimes] = []
    numbers = run_dir.attempt_numbers()
    for number in numbers:
        each = _read_times(run_dir, number, by_hand, is_last=number == numbers[-1])
        if each is not None:
            found.append(each)
    for index, (each, after) in enumerate(pairwise(found)):
        # Closed by the next attempt, since nobody saw its end: it was over when it last wrote something.
        if each.last_sign is None and each.record.ended is not None and each.record.ended >= after.begun:
            found[index] = each._replace(last_sign=_last_sign(run_dir, each.record.number, with_log=False))
    kind = next((each.record.kind for each in reversed(found) if each.record.kind), None)
    if kind is None and any(each.record.stepping is None for each in found):
        kind = _kind_in_config(run_dir)
    jobs, conf = tuple(info.get("job_ids") or ()), info.get("slurm_conf")
    return History(_submitted(events, info), kind, local, found, events, jobs, conf)


def _submitted(events: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> float | None:
    first = next((event for event in events if event["event"] == Event.SUBMITTED), None)
    if first is not None:
        asked = first.get("submitted")
        return float(asked) if records.is_time(asked) and asked > 0 else float(first["time"])  # type: ignore[operator,arg-type]
    created = info.get("created")
    return float(created) if records.is_time(created) and info.get("job_ids") else None  # type: ignore[arg-type]


def _read_times(run_dir: RunDir, number: int, by_hand: _GpusByScript, *, is_last: bool) -> AttemptTimes | None:
    folder = run_dir.attempt(number)
    names = folder.names()
    record = attempts.read_attempt_in(folder, number, names)
    job, claimed = (record.job_id, record.restart_count), None
    with contextlib.suppress(OSError, UnreadableRecordError, ValueError):
        words = records.read_bytes(folder.claim_file).split()
        if len(words) >= 3 and records.is_time(at := float(words[2])):
            claimed = at
        if record.job_id is None and len(words) >= 2 and records.is_job_id(name := words[0].decode("ascii", "replace")):
            job = name, int(words[1])
    begun = claimed if claimed is not None else record.started
    if begun <= 0:  # neither its batch script nor rank 0 has left a word
        return None
    hung_since = failed = sign = None
    if record.reason == Reason.HANG:
        hung_since = _hung_since(run_dir, record)
    if record.reason in (Reason.CRASH, Reason.DIVERGED, Reason.BAD_NODE):
        failed = _first_failure(folder.path)
    if record.last_sign is not None:
        sign = record.last_sign
    elif record.ended is None:
        sign = _last_sign(run_dir, number, with_log=is_last)
    if record.ended is None and is_last:
        record = _with_present_steps(run_dir, record)
    gpus = record.gpus if record.gpus is not None else by_hand.of(max(1, len(record.nodes)))
    sampled = any(map(is_gpu_file, names or ()))
    return AttemptTimes(begun, record, job, hung_since, failed, sign, max(0.0, gpus), sampled)


def _with_present_steps(run_dir: RunDir, record: Attempt) -> Attempt:
    """Return the record of an attempt that has not ended with what the log of metrics says of its steps until now."""
    last_step, last_logged = record.last_step, record.last_logged
    with contextlib.suppress(OSError, UnreadableRecordError):
        logged = os.lstat(run_dir.metrics_file).st_mtime
        if record.started and logged >= record.started:
            last_logged = logged if last_logged is None else last_logged
            last_step = reached_step.last_logged_step(run_dir) if last_step is None else last_step
    return replace(record, last_step=last_step, last_logged=last_logged)


def _hung_since(run_dir: RunDir, record: Attempt) -> float | None:
    """Return when the ranks got on for the last time, or the next best that is known: when the hang was found."""
    found = read_json(run_dir.attempt(record.number).hang_file) or {}
    for moment in (found.get("since"), record.last_logged, found.get("time")):
        if records.is_time(moment):
            return float(moment)  # type: ignore[arg-type]
    return None


def _first_failure(folder: Path) -> float | None:
    """Return when the first rank of an attempt failed, by the records of the first ranks in the folder."""
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if re.fullmatch(r"failed-[0-9]{1,9}\.json", entry.name):
                names.append(entry.name)
            if len(names) >= FAILURES_READ:
                break
    times = []
    for name in names:
        with contextlib.suppress(UnreadableRecordError):
            moment = (read_json(folder / name) or {}).get("time")
            if records.is_time(moment):
                times.append(float(moment))  # type: ignore[arg-type]
    return min(times, default=None)


def _last_sign(run_dir: RunDir, number: int, *, with_log: bool) -> float | None:
    """Return when an attempt last wrote something: to the log of rank 0 or, the last one, to the metrics of the run."""
    paths = [run_dir.attempt(number).rank_log(0), run_dir.attempt(number).record_file]
    times = []
    for path in [*paths, run_dir.metrics_file] if with_log else paths:
        with contextlib.suppress(OSError):
            times.append(os.lstat(path).st_mtime)
    return max(times, default=None)


class _GpusByScript:
    """The GPUs of attempts that do not say it themselves, by the job's script, which is read at most once."""

    def __init__(self, run_dir: RunDir, *, packed: bool):
        self._run_dir, self._packed = run_dir, packed
        self._each: float | None = None

    def of(self, nodes: int) -> float:
        if self._each is None:
            self._each = self._read()
        return self._each * nodes

    def _read(self) -> float:
        try:
            text = records.read_text(self._run_dir.script)
        except (OSError, UnreadableRecordError):
            return 0.0
        match = re.search(r"^#SBATCH --gpus-per-node=(?:[\w.-]{1,64}:)?([0-9]{1,4})\s*$", text, re.MULTILINE)
        return int(match[1]) / self._sharing() if match else 0.0

    def _sharing(self) -> int:
        pack: object = None
        if self._packed:
            with contextlib.suppress(UnreadableRecordError):
                pack = (read_json(self._run_dir.path.parent / "sweep.json") or {}).get("pack")
        return pack if isinstance(pack, int) and records.is_count(pack) and pack > 0 else 1


def _kind_in_config(run_dir: RunDir) -> str | None:
    """Return job.kind of the frozen config, as the text that `submit` writes: to parse all of it takes much longer."""
    try:
        text = records.read_text(run_dir.config_file)
    except (OSError, UnreadableRecordError):
        return None
    inside = False
    for line in text.splitlines():
        if not line.startswith(" "):
            inside = line == "job:"
        elif inside and (match := re.fullmatch(r" {1,8}kind: (\w{1,20})", line)):
            return match[1]
    return None


# From what the files say to segments.

Stretch = tuple[float, float, Cause, str]  # start, end, cause, because


def of_history(history: History, *, alive: bool | None, now: float, with_segments: bool = True) -> Goodput:
    """Return the time by cause of a run with this history: a pure function.

    Args:
        with_segments: return the segments, too, which takes a third of the time; the pieces are there without.
    """
    spans = _spans(history, alive, now)
    first = [moment for moment in (history.submitted, *(span[0] for span in spans[:1])) if moment is not None]
    if not first:
        return Goodput()
    cursor = begin = min(min(first), now)
    by_attempt = _by_attempt(history.events)
    pieces, segments = list[Piece](), list[Segment]()
    startup: dict[str, float] = {}
    furthest = 0
    before: AttemptTimes | None = None
    why = ""  # the reason for which the attempt before ended early
    for each, (start, end) in zip(history.tries, spans, strict=True):
        start, end = max(start, begin), max(end, begin)
        between = _waits(history, before, each, cursor, start, why)
        events = by_attempt.get(each.record.number, {})
        over = each is history.tries[-1] and alive is not True and each.record.verdict == Verdict.END
        inside = _inside(each, history.kind, events, start, end, furthest, over=over)
        own = _why_ended(each.record, gone=each is not history.tries[-1] or alive is False)
        blame, gpus = _blame(why, own), each.gpus
        number = each.record.number
        pieces += [Piece(wait.attempt, wait.cause, wait.seconds, wait.gpus, wait.because) for wait in between]
        for (cause, because), seconds in _lengths(inside).items():
            pieces.append(Piece(number, cause, seconds, gpus, because or blame.get(cause, "")))
        if with_segments:
            segments += between
            segments += [
                Segment(number, a, b, cause, gpus, because or blame.get(cause, "")) for a, b, cause, because in inside
            ]
        _add_stages(startup, each, inside, start)
        furthest = max(furthest, each.record.last_step or 0, each.record.first_step or 0)
        before, why, cursor = each, own, end
    waits = _waits_at_the_end(history, before, alive)
    if waits and cursor < now:
        number = before.record.number if before else 0
        segments.append(Segment(number, cursor, now, Cause.QUEUE, 0.0, why))
        pieces.append(Piece(number, Cause.QUEUE, now - cursor, 0.0, why))
        cursor = now
    last = history.tries[-1] if history.tries else None
    runs = last is not None and last.record.ended is None and last.record.verdict is None and alive is not False
    sums = Sums()
    for piece in pieces:
        sums.add(piece)
    interruptions: dict[str, int] = {}
    for each in history.tries:
        if own := _why_ended(each.record, gone=each is not last or alive is False):
            interruptions[own] = interruptions.get(own, 0) + 1
    return Goodput(
        **sums.fields(),
        segments=_joined(segments) if with_segments else (),
        pieces=tuple(pieces),
        gpu_count=last.gpus if last is not None else 0.0,
        startup_s=startup,
        interruptions=interruptions,
        nodes={each.record.number: tuple(each.record.nodes) for each in history.tries},
        running=waits or runs,
        begin=begin if cursor > begin else 0.0,
        end=cursor if cursor > begin else 0.0,
    )


class Sums:
    """Adds up pieces to those fields of a `Goodput` that are sums."""

    def __init__(self) -> None:
        self._seconds: dict[Cause, float] = {}
        self._gpu_seconds: dict[Cause, float] = {}
        self._lost: dict[str, float] = {}
        self._lost_gpus: dict[str, float] = {}

    def add(self, piece: Piece, shared_by: int = 1) -> None:
        """Add a piece; of its GPUs only a part, if nodes share them.

        Args:
            shared_by: number of those nodes.
        """
        _, cause, seconds, gpus, because = piece
        if seconds <= 0:
            return
        gpus /= shared_by
        self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds
        if because:
            self._lost[because] = self._lost.get(because, 0.0) + seconds
        if gpus:
            self._gpu_seconds[cause] = self._gpu_seconds.get(cause, 0.0) + seconds * gpus
            if because:
                self._lost_gpus[because] = self._lost_gpus.get(because, 0.0) + seconds * gpus

    def fields(self) -> dict[str, Any]:
        """Return the fields."""
        return {
            "seconds": self._seconds,
            "gpu_seconds": self._gpu_seconds,
            "lost_s": self._lost,
            "lost_gpu_seconds": self._lost_gpus,
        }


def _lengths(inside: Iterable[Stretch]) -> dict[tuple[Cause, str], float]:
    """Return the seconds of each cause, and why they were lost."""
    found: dict[tuple[Cause, str], float] = {}
    for start, end, cause, because in inside:
        key = cause, because
        found[key] = found.get(key, 0.0) + (end - start)
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


Events = Mapping[str, Sequence[Mapping[str, Any]]]  # the events of an attempt, by name, oldest first


def _by_attempt(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, list[Mapping[str, Any]]]]:
    found: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
    for event in events:
        number, name = event.get("attempt"), event["event"]
        if isinstance(number, int):
            try:
                found[number][name].append(event)
            except KeyError:
                found.setdefault(number, {})[name] = [event]
    return found


def _times(events: Events, name: Event) -> list[float]:
    return [float(event["time"]) for event in events.get(name, ())]


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


_REASONS = frozenset(str(reason) for reason in Reason)


def _blame(before: str, own: str) -> dict[Cause, str]:
    """Return why the seconds of a cause were lost: because of the end of the attempt before, or of this one."""
    of_before = dict.fromkeys((Cause.STARTUP, Cause.REDONE), before)
    return of_before | dict.fromkeys((Cause.HUNG, Cause.IDLE_END, Cause.LOST), own)


def _waits(
    history: History, before: AttemptTimes | None, after: AttemptTimes, start: float, end: float, why: str
) -> Sequence[Segment]:
    """Return the wait between two attempts, or before the first one."""
    if end <= start:
        return ()
    if before is None:
        return (Segment(0, start, end, Cause.STARTUP if history.local else Cause.QUEUE, 0.0),)
    number, record = before.record.number, before.record
    if record.verdict in (Verdict.END, Verdict.DONE):
        resumed = [event["time"] for event in history.events if event["event"] in _RESUMED]
        moment = next((at for at in resumed if start <= at <= end), end)
        return (
            Segment(number, start, moment, Cause.STOPPED),
            Segment(number, moment, end, Cause.STARTUP if history.local else Cause.QUEUE),
        )
    if history.local or (before.job[0] is not None and before.job == after.job):
        return (Segment(number, start, end, Cause.BETWEEN, after.gpus, why),)
    return (Segment(number, start, end, Cause.QUEUE, 0.0, why),)


_RESUMED = (Event.RESUME_ASKED, Event.SUBMITTING, Event.SUBMITTED)


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


# Inside of an attempt.


def _inside(
    each: AttemptTimes,
    kind: str | None,
    events: Events,
    begin: float,
    end: float,
    furthest: int,
    *,
    over: bool,
) -> list[Stretch]:
    """Return what the time of an attempt went into, from `begin` to `end`.

    Args:
        furthest: steps that earlier attempts have done.
        over: the run has ended with it.
    """
    record = each.record

    def within(moment: float | None, default: float) -> float:
        return default if moment is None else min(end, max(begin, moment))

    stepping = record.stepping if record.stepping is not None and record.stepping > 0 else None
    if stepping is None:
        found = _inside_of_program(record, kind, events, begin, end, within)
    else:
        found = _inside_of_training(each, kind, events, within(stepping, end), begin, end, furthest, over=over)
    standing: list[Stretch] = []
    if each.failed is not None:
        standing.append((within(each.failed, end), end, Cause.IDLE_END, ""))
    found = _overlay(found, standing)
    if each.hung_since is not None:
        found = _overlay(found, [(within(each.hung_since, end), end, Cause.HUNG, "")])
    return found


def _inside_of_program(
    record: Attempt,
    kind: str | None,
    events: Events,
    begin: float,
    end: float,
    within: Any,
) -> list[Stretch]:
    """Return the time of an attempt that never said that it trains: it was starting, or is a program of the user's own.

    Of such a program only the time between its first and its last report of progress is known to be productive.
    """
    if kind is not None and kind != JobKind.COMMAND:
        return [(begin, end, Cause.STARTUP, "")]
    started = within(record.started or None, end)
    reports = _times(events, Event.FIRST_REPORT)
    marks = [moment for moment in (record.last_logged, record.marked) if moment is not None]
    first = within(reports[0], end) if reports else end
    last = max([first, *(within(mark, end) for mark in marks)]) if reports else end
    found: list[Stretch] = [
        (begin, started, Cause.STARTUP, ""),
        (started, max(started, first), Cause.UNKNOWN, ""),
        (max(started, first), max(started, last), Cause.PRODUCTIVE, ""),
        (max(started, last), end, Cause.UNKNOWN, ""),
    ]
    again = _times(events, Event.CAUGHT_UP)
    step = next((_step(event) for event in events.get(Event.FIRST_REPORT, ())), None)
    if step is not None and step < (record.reported_before or 0):
        until = within(again[-1], end) if again else last
        found = _overlay(found, [(first, until, Cause.REDONE, "")], only=Cause.PRODUCTIVE)
    return [each for each in found if each[1] > each[0]]


def _inside_of_training(
    each: AttemptTimes,
    kind: str | None,
    events: Events,
    stepping: float,
    begin: float,
    end: float,
    furthest: int,
    *,
    over: bool,
) -> list[Stretch]:
    """Return the time of an attempt that has begun to train, or to evaluate, at `stepping`."""
    record = each.record

    def clamp(moment: float) -> float:
        return min(end, max(stepping, moment))

    leaving = next((event for name in _LEAVING for event in events.get(name, ())[-1:]), None)
    left = end if leaving is None else clamp(float(leaving["time"]))
    base = Cause.EVALUATION if kind == JobKind.EVALUATE else Cause.PRODUCTIVE
    found: list[Stretch] = [
        (begin, stepping, Cause.STARTUP, ""),
        (stepping, left, base, ""),
        (left, end, Cause.IDLE_END, ""),
    ]
    first, last = record.first_step, record.last_step
    found = _overlay(found, _first_step(events, stepping, left, first, last))
    found = _overlay(found, _redone(events, stepping, left, first, last, furthest))
    if over and Event.TRAINING_STARTED in events:
        found = _overlay(found, _lost(record, events, stepping, left), only=Cause.PRODUCTIVE)
    last_save = _step(leaving) if leaving is not None else None
    saves: list[Stretch] = []
    finite = records.finite
    for event in events.get(Event.CHECKPOINT, ()):
        seconds, stall = finite(event.get("seconds")), finite(event.get("stall_s"))
        if last_save is not None and event.get("step") == last_save:
            stall = seconds  # nothing else is done meanwhile
        if seconds is not None and stall is not None and stall > 0:
            start = event["time"] - seconds
            until = start + stall
            start, until = max(start, stepping), min(until, end)  # as `clamp`, for thousands of them
            if start < until:
                saves.append((start, until, Cause.CHECKPOINT, ""))
    evaluations: list[Stretch] = []
    for event in events.get(Event.EVALUATED, ()):
        seconds, at = records.finite(event.get("seconds")) or 0.0, float(event["time"])
        evaluations.append((clamp(at - seconds), clamp(at), Cause.EVALUATION, ""))
    return _overlay(_overlay(found, saves), evaluations)


_LEAVING = (Event.TRAINING_FINISHED, Event.TRAINING_STOPPED)


def _step(event: Mapping[str, Any]) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and records.is_count(step) else None


def _pace(begin: float, end: float, first: int | None, last: int | None) -> float | None:
    """Return seconds per step, pauses included; None if it is not known how many steps were done."""
    return (end - begin) / (last - first) if first is not None and last is not None and last > first else None


def _first_step(events: Events, stepping: float, left: float, first: int | None, last: int | None) -> list[Stretch]:
    """Return what the first step took longer than the others: it compiles, and tunes kernels."""
    done = next(iter(_times(events, Event.FIRST_STEP)), None)
    if done is None:
        return []
    done = min(left, max(stepping, done))
    others = _pace(done, left, None if first is None else first + 1, last)
    excess = done - stepping - (others or 0.0)
    return [(stepping, stepping + excess, Cause.STARTUP, "")] if others is not None and excess > 0 else []


def _redone(
    events: Events,
    stepping: float,
    left: float,
    first: int | None,
    last: int | None,
    furthest: int,
) -> list[Stretch]:
    """Return where steps were done again: until the attempt was where an earlier one, or it itself, had been before.

    Where no event says when that was, as in runs of earlier versions, it is estimated by the seconds per step.
    """
    found: list[Stretch] = []
    caught_up, backs = _times(events, Event.CAUGHT_UP), _times(events, Event.ROLLED_BACK)
    if first is not None and first < furthest:
        at = next((moment for moment in caught_up if not backs or moment <= backs[0]), None)
        if at is None and not backs and last is not None and last > furthest:
            pace = _pace(stepping, left, first, last)
            at = stepping + (furthest - first) * pace if pace is not None else None
        if at is None:  # it did not get there
            at = backs[0] if backs else left
        found.append((stepping, min(left, max(stepping, at)), Cause.REDONE, ""))
    for index, back in enumerate(backs):
        until = backs[index + 1] if index + 1 < len(backs) else left
        at = next((moment for moment in caught_up if back <= moment <= until), until)
        found.append((min(left, max(stepping, back)), min(left, max(stepping, at)), Cause.REDONE, ROLLED_BACK))
    return found


def _lost(record: Attempt, events: Events, stepping: float, left: float) -> list[Stretch]:
    """Return the time of the steps after the last checkpoint of a run that has ended with this attempt."""
    committed = record.committed_step or 0
    if record.last_step is None or record.last_step <= max(committed, record.seen_step or 0):
        return []
    begun = [
        float(event["time"]) - (records.finite(event.get("seconds")) or 0.0)
        for event in events.get(Event.CHECKPOINT, ())
        if _step(event) == committed
    ]
    return [(min(left, max(stepping, begun[-1])) if begun else stepping, left, Cause.LOST, "")]


def _overlay(base: list[Stretch], layer: Iterable[Stretch], *, only: Cause | None = None) -> list[Stretch]:
    """Return `base` with the stretches of `layer` painted over it, or only over one cause of it."""
    over: list[Stretch] = []
    reached = -math.inf
    for each in sorted(layer):
        start, end, cause, because = each
        if start < reached:
            start = reached
            each = (start, end, cause, because)
        if end > start:
            over.append(each)
            reached = end
    if not over:
        return base
    found: list[Stretch] = []
    place, count = 0, len(over)
    for start, end, cause, because in base:
        while place < count and over[place][1] <= start:
            place += 1
        at = start
        if only is None or cause is only:
            for index in range(place, count):  # of thousands: each step counts
                begin, until, painted, why = over[index]
                if begin >= end:
                    break
                begin, until = max(at, begin), min(end, until)
                if begin > at:
                    found.append((at, begin, cause, because))
                if until > begin:
                    found.append((begin, until, painted, why))
                    at = until
        if at < end:
            found.append((at, end, cause, because))
    return found


def _add_stages(startup: dict[str, float], each: AttemptTimes, inside: Sequence[Stretch], begin: float) -> None:
    """Add the start-up of an attempt, by stage: as rank 0 has timed them, and what was before and after them.

    They add up to the start-up's part of the attempt.
    """
    total = math.fsum(end - start for start, end, cause, _ in inside if cause is Cause.STARTUP)
    if total <= 0:
        return
    record = each.record
    stages = {name: value for name, value in record.start_up_s.items() if value > 0} if record.stepping else {}
    until_steps = min(total, max(0.0, (record.stepping or 0.0) - begin)) if record.stepping else total
    timed = math.fsum(stages.values())
    scale = min(1.0, until_steps / timed) if timed > 0 else 0.0
    found = {"batch script" if record.stepping else "unfinished": until_steps - timed * scale}
    found |= {name: value * scale for name, value in stages.items()}
    found |= {"first step": total - until_steps}
    for name, seconds in found.items():
        if seconds > 0 and (name in startup or len(startup) < STAGES_KEPT):
            startup[name] = startup.get(name, 0.0) + seconds
