"""The records of a run, each read when it is first asked for. What cannot be read is left out, and `troubles` says why."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.goodput import Goodput
from slurmtrain.report.gpu_hours import goodput_of
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import Reason
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.records import Count, Number, printable

if TYPE_CHECKING:
    from slurmtrain.runs.gpu_use import GpuUse
    from slurmtrain.slurm.node_ledger import Blamed

MOST_EVENTS = 20_000  # of the newest ones
RANKS_NAMED = 8  # of one node, at most
_NUMBERS = (Event.UPDATE_SKIPPED, Event.ROLLED_BACK)
SLOW_SHOWN = 3  # findings of slow ranks that are told in a phrase
T = TypeVar("T")


@dataclass(frozen=True)
class RunFacts:
    """A run as `status RUN` and its page show it.

    Attributes:
        state: what it does, as SLURM and its files say.
        now: unix seconds at which it is read.
        troubles: why parts could not be read, each in a sentence.
    """

    run_dir: RunDir
    state: RunState
    now: float
    troubles: list[str] = field(default_factory=list)

    def tried(self, read: Callable[[], T], otherwise: T) -> T:
        """Return what is read; if it cannot be, note why, and return the other."""
        try:
            return read()
        except UnreadableRecordError as error:
            self.troubles.append(error.message)
            return otherwise

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts, oldest first."""
        return self.state.attempts

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """The contents of run.json."""
        return self.run_dir.info()

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The contents of config.yaml as plain values; None if it cannot be read."""
        found = self.tried(self.run_dir.config_values, None)
        return found if isinstance(found, Mapping) else None

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of the config; None if there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The newest events, oldest first."""
        found: list[dict[str, Any]] = self.tried(self.run_dir.events, [])
        return found[-MOST_EVENTS:]

    @cached_property
    def slow_ranks(self) -> list[SlowRanks]:
        """The slow ranks that it has named, oldest first."""
        return slow_ranks(self.events)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """What it has logged, by step, each value once, as it counts."""
        from slurmtrain.report.collect import metrics_of

        return self.tried(lambda: metrics_of(self.run_dir), [])

    @cached_property
    def goodput(self) -> Goodput | None:
        """Its time by cause; None if that cannot be read. A run of which SLURM cannot be asked counts as alive."""
        alive = None if self.state.status == RunStatus.UNKNOWN else self.state.alive
        return self.tried(lambda: goodput_of(self.run_dir, alive=alive, now=self.now), None)

    @cached_property
    def gpus(self) -> GpuUse | None:
        """How busy its GPUs were, as its attempts have sampled them; None if none has."""
        folders = [self.run_dir.attempt(each.number) for each in self.attempts]
        if not (sampled := [folder for folder in folders if folder.gpu_files()]):
            return None
        from slurmtrain.runs.gpu_use import read_gpu_use, total_of

        found: list[GpuUse] = []
        for folder in sampled:
            found += self.tried(partial(read_gpu_use, folder), [])
        return total_of(found)

    @cached_property
    def findings(self) -> str:
        """What the checks of its newest attempt have found, in one line."""
        if not self.attempts or not os.path.lexists(self.run_dir.attempt(self.attempts[-1].number).preflight_file):
            return ""
        found = self.tried(partial(read_preflight, self.run_dir.attempt(self.attempts[-1].number)), None)
        return in_words(found.findings) if found is not None else ""

    @cached_property
    def left_out(self) -> list[Blamed]:
        """The nodes that its latest job leaves out."""
        if not any(event["event"] == Event.NODES_LEFT_OUT for event in self.events):
            return []
        from slurmtrain.runs.node_blame import left_out_of

        return self.tried(lambda: left_out_of(self.run_dir, self.state.job_id), [])

    @property
    def hang_pages(self) -> dict[int, Path]:
        """The pages with the stacks of the ranks of attempts that hung, by their numbers."""
        hung = (each.number for each in self.attempts if each.reason == Reason.HANG)
        return {number: page for number in hung if (page := self.run_dir.attempt(number).hang_page).exists()}

    @property
    def has_gpus(self) -> bool:
        """Whether it has held GPUs, or may have."""
        return self.goodput is None or self.goodput.gpu_hours > 0 or not self.attempts


# What has happened to its numbers, its ranks, and the checkpoints of a program, in a phrase each, from its events.


def trouble(events: Sequence[Mapping[str, Any]]) -> str:
    """Return a phrase such as "3 updates skipped (the last in step 12)"; an empty one if nothing happened."""
    found = {name: [each for each in events if each.get("event") == name] for name in _NUMBERS}
    skipped, backs = found.values()
    parts = []
    if skipped:
        total = skipped[-1].get("skipped")
        number = total if isinstance(total, int) and records.is_count(total) else len(skipped)
        parts.append(f"{_times(number, 'update')} skipped (the last in step {skipped[-1].get('step')})")
    if backs:
        last, many = backs[-1], "once" if len(backs) == 1 else f"{len(backs)} times"
        parts.append(f"went back {many} (the last time from step {last.get('from_step')} to {last.get('step')})")
    return ", ".join(parts)


@dataclass(frozen=True)
class SlowRanks:
    """Ranks of a node that a run has found slower than the others.

    Attributes:
        phase: the part of a step in which they are.
        ratio: how many times as long it takes the slowest of them; None: not known.
        share: by how much of a whole step it takes longer; None: not known.
        since, until: steps after which this was found, and was over; None: it was not.
    """

    node: str
    ranks: tuple[int, ...]
    phase: str
    ratio: float | None
    share: float | None
    since: int
    until: int | None = None
    attempt: int | None = None

    def __str__(self) -> str:
        """Say it: "rank 3 on n2 (1.6 times as long for forward_backward, in attempt 1 from step 120 to 360)"."""
        many = ", ".join(map(str, self.ranks[:RANKS_NAMED])) + (", ..." if len(self.ranks) > RANKS_NAMED else "")
        times = "much longer" if self.ratio is None else f"{self.ratio:.2g} times as long"
        when = f"since step {self.since}" if self.until is None else f"from step {self.since} to {self.until}"
        where = "" if self.attempt is None else f"in attempt {self.attempt} "
        return (
            f"rank{'s' if len(self.ranks) > 1 else ''} {many} on {self.node} ({times} for {self.phase}, {where}{when})"
        )


def slow_ranks(events: Iterable[Mapping[str, Any]]) -> list[SlowRanks]:
    """Return the slow ranks that a run has named, oldest first; what no run has written is left out."""
    found: list[SlowRanks] = []
    for event in events:
        name, step, ranks = event.get("event"), event.get("step"), event.get("ranks")
        if name not in (Event.STRAGGLER, Event.STRAGGLER_OVER) or not records.is_count(step):
            continue
        node, phase, attempt = event.get("node"), event.get("phase"), event.get("attempt")
        if not (isinstance(node, str) and isinstance(phase, str) and isinstance(ranks, list) and ranks):
            continue
        if not all(records.is_count(rank) for rank in ranks):
            continue
        assert isinstance(step, int)
        if name == Event.STRAGGLER:
            excess, step_s = records.finite(event.get("excess_s")), records.finite(event.get("step_s"))
            share = excess / step_s if excess is not None and step_s else None
            ratio = records.finite(event.get("ratio"))
            number = attempt if isinstance(attempt, int) else None
            found.append(SlowRanks(node, tuple(ranks), phase, ratio, share, step, attempt=number))
            continue
        for place, each in enumerate(found):
            same = (each.node, each.phase, each.attempt) == (node, phase, attempt) and each.until is None
            if same and set(each.ranks) & set(ranks):
                found[place] = replace(each, until=step)
    return found


def trouble_of_ranks(found: Sequence[SlowRanks]) -> str:
    """Return a phrase on the slow ranks that were found last; an empty one if there were none."""
    earlier = [f"{len(found) - SLOW_SHOWN} more before"] if len(found) > SLOW_SHOWN else []
    return "; ".join([*map(str, found[-SLOW_SHOWN:]), *earlier])


def trouble_of_checkpoints(events: Sequence[Mapping[str, Any]]) -> str:
    """Return a phrase on the checkpoints of a program of the user's own; an empty one if nothing is wrong with them."""
    unseen = [each.get("attempt") for each in events if each.get("event") == Event.NO_CHECKPOINT_SEEN]
    incomplete = [each for each in events if each.get("event") == Event.INCOMPLETE_CHECKPOINT]
    parts = []
    if unseen:
        numbers = ", ".join(str(number) for number in unseen[-5:])
        parts.append(f"none visible at the start of attempt{'s' if len(unseen) > 1 else ''} {numbers}")
    if incomplete:
        last = os.path.basename(str(incomplete[-1].get("path")))
        parts.append(f"{_times(len(incomplete), 'incomplete one')} moved aside (the last: {last})")
    return ", ".join(parts)


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


# What the checks of an attempt have found, read from its preflight.json, which anybody may have written.


@dataclass(frozen=True)
class FoundFinding:
    """A finding as it is shown: its kind, one sentence, what to do, and whether it has ended the attempt."""

    kind: str
    sentence: str
    advice: str = ""
    fatal: bool = False


@dataclass(frozen=True)
class Rates:
    """What was measured: GB/s of an all-reduce, TFLOP/s by rank, and (node, node, GB/s) of pairs of nodes."""

    all_reduce: Number | None = None
    tflops: dict[str, Number] = field(default_factory=dict)
    links: list[tuple[str, str, Number]] = field(default_factory=list)


@dataclass(frozen=True)
class PreflightRecord:
    """The checks of an attempt, as `runtime.preflight.check.record_of` writes them.

    Attributes:
        seconds: of the quick checks, on rank 0.
        nodes: for each node, what it is.
        measured: None: nothing was measured.
    """

    mode: str
    seconds: Number
    ranks: Count
    findings: list[FoundFinding]
    nodes: list[dict[str, Any]]
    measured: Rates | None = None

    @property
    def fatal(self) -> bool:
        """Whether training must not begin."""
        return any(each.fatal for each in self.findings)


def read_preflight(attempt_dir: AttemptDir) -> PreflightRecord | None:
    """Return what the checks of an attempt have found; None: they have not come to an end, or the record is none of ours.

    Raises:
        UnreadableRecordError: the record is no regular file, or too large.
    """
    try:
        values = records.parse(records.read_bytes(attempt_dir.preflight_file, at_most=records.EVENTS_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return records.typed_or_none(PreflightRecord, values)


def in_words(found: Sequence[FoundFinding]) -> str:
    """Say findings in one line: the first one, and how many more there are."""
    if not found:
        return ""
    more = f", and {len(found) - 1} more in preflight.json" if len(found) > 1 else ""
    return printable(f"{found[0].kind}: {found[0].sentence}{more}")


# How long the steps and the saves of a run take. What is not a finite number counts as missing.

RECORDS = 50  # newest records that count
SHORTEST_S, LONGEST_S = 1e-7, 1e7  # of a step; a time beyond is none
PARTS = ("data", "forward_backward", "communication", "optimizer", "other")


@dataclass(frozen=True)
class StepTimes:
    """The median seconds of a step, over the newest records of a run.

    Attributes:
        step_s: seconds of a step, without pauses for evaluations and saves.
        parts: seconds by the part of the step that they are spent on, as far as the run has measured them.
        tokens_per_s: tokens of all ranks per second; None: not logged.
        mfu: as logged; None: it is not.
    """

    step_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None
    mfu: float | None = None

    def share(self, part: str) -> float:
        """Return the share of a step that a part takes; 0 where it was not measured."""
        return min(1.0, self.parts.get(part, 0.0) / self.step_s)


def step_times(logged: Sequence[Mapping[str, Any]]) -> StepTimes | None:
    """Return the medians over the newest half of these records of metrics.jsonl, at most `RECORDS`; None: there are none.

    The older half is left out, since the first steps take longer: memory is allocated, kernels are chosen or compiled.
    """
    steps = [each for each in logged if SHORTEST_S <= (records.finite(each.get("step_time_s")) or 0.0) <= LONGEST_S]
    if not steps:
        return None
    newest = steps[-min(RECORDS, max(1, len(steps) // 2)) :]
    measured = {name: _median(newest, f"time_{name}_s") for name in PARTS}
    if measured["data"] is None:
        measured["data"] = _median(newest, "data_wait_s")
    parts = {name: seconds for name, seconds in measured.items() if seconds is not None}
    whole = sum(parts.values()) if "forward_backward" in parts else 0.0
    step_s = whole if SHORTEST_S <= whole <= LONGEST_S else float(newest[-1]["step_time_s"])
    return StepTimes(step_s, parts, _median(newest, "tokens_per_s"), _median(newest, "mfu"))


def save_times(events: Iterable[Mapping[str, Any]]) -> tuple[float, float, float] | None:
    """Return the median bytes of a save, seconds until it is complete, and seconds for which it holds training up."""
    saves = [each for each in events if each.get("event") == Event.CHECKPOINT]
    size, write_s, stall_s = (_median(saves, name) for name in ("size", "seconds", "stall_s"))
    return (size, write_s, stall_s) if size and write_s is not None and stall_s is not None else None


def _median(found: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [value for each in found if (value := records.finite(each.get(name))) is not None and value >= 0]
    return statistics.median(values) if values else None
