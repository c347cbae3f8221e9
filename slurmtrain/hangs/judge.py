"""Whether some rank hangs, and which one: decisions from heartbeats and from what the live ranks report, nothing else.

Rank 0 hears all ranks, and says when one hangs. The others hear rank 0, which has the store, and those of their node; they
decide when rank 0 is silent. Which rank is at fault is decided when all that live have reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.hangs import evidence
from slurmtrain.hangs.beats import Beat

SILENT_AFTER_S = 10.0  # without a beat
ALONE_MARGIN_S = 5.0  # after the time-out of a rank that is alone: its own thread comes first


class Silence:
    """For how long no newer heartbeat has come from each rank."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[int, float]] = {}

    def look(self, beats: Mapping[int, Beat], now: float) -> dict[int, float]:
        """Return the seconds, by rank.

        Args:
            now: active seconds.
        """
        for rank, beat in beats.items():
            number, _ = self._newest.get(rank, (None, 0.0))
            if number != beat.number:
                self._newest[rank] = (beat.number, now)
        return {rank: now - self._newest[rank][1] for rank in beats}


def silent_after(every_s: float) -> float:
    """Return the seconds without a beat after which a rank is silent, given those between two beats."""
    return max(SILENT_AFTER_S, 3 * every_s)


def hangs(
    own: Beat, others: Mapping[int, Beat], silent_s: Mapping[int, float], *, limit_s: float, every_s: float
) -> bool:
    """Return whether some rank hangs, as far as this rank is the one to tell.

    Either a rank is silent for `limit_s`, whatever it was doing, while this one does not get on. Until its first step is done,
    ranks load data and compile, where a call may hold the interpreter for longer. Or a rank has not got on for its time-out,
    and no other is at work. A silent rank may be at work as long as it said, and for at most `limit_s`: it may have left what
    it was doing right after its last beat.

    Args:
        others: the newest beat of each rank that this one hears.
        silent_s: for how long no newer one has come.
        limit_s: see `watchdog.silent_s`.
        every_s: seconds between two beats.
    """
    long_s, silent_after_s = limit_s + 2 * every_s, silent_after(every_s)
    if not own.unhurried and own.idle_s >= long_s and any(silence >= long_s for silence in silent_s.values()):
        return True
    if own.rank != 0 and silent_s.get(0, silent_after_s) < silent_after_s:
        return False
    silent = {rank for rank, silence in silent_s.items() if silence >= min(silent_after_s, limit_s)}
    live = [own, *(beat for rank, beat in others.items() if rank not in silent)]
    may_be_at_work = [
        rank for rank in silent if silent_s[rank] < min(limit_s, others[rank].limit_s - others[rank].idle_s)
    ]
    overdue = any(each.idle_s >= each.limit_s for each in live)
    return overdue and not may_be_at_work and not any(each.at_work for each in live)


def hangs_alone(beat: Beat, silent_s: float) -> bool:
    """Return whether the only rank of an attempt hangs so that its own thread cannot say so.

    Args:
        beat: its last one.
        silent_s: seconds since that.
    """
    return silent_s >= ALONE_MARGIN_S and beat.idle_s + silent_s >= beat.limit_s + ALONE_MARGIN_S


@dataclass(frozen=True)
class Report:
    """What a rank that lives reports when a hang has been found.

    Attributes:
        beat: its own last beat.
        where: its innermost frame, see `evidence.where`; of a rank that waits for a save, that of the thread that writes it.
        stacks: its stacks, all threads.
        workers: what is known of its child processes, if it does not wait for other ranks.
        states: the state of the process of each other rank of this node, see `evidence.state_of`.
        heard: the newest beats of other ranks that it has heard.
    """

    beat: Beat
    where: str = ""
    stacks: str = ""
    workers: list[dict[str, Any]] = field(default_factory=list)
    states: dict[int, str] = field(default_factory=dict)
    heard: dict[int, Beat] = field(default_factory=dict)


@dataclass(frozen=True)
class Culprit:
    """A rank that did not come to where the others wait.

    Attributes:
        what: what is known of it: "rank 1 on n1 was stopped (SIGSTOP) in step 17, forward/backward".
        pid: None: it was never heard.
    """

    rank: int
    node: str
    pid: int | None
    what: str
    stacks: str = ""
    workers: Sequence[Mapping[str, Any]] = ()


def find_culprits(reports: Mapping[int, Report], nodes: Sequence[str], dumps: Mapping[int, str]) -> list[Culprit]:
    """Return the ranks that did not come; none if all wait for each other.

    A rank that has not reported is stopped, gone, or in a call that holds the interpreter, so it is one of them. If all have,
    it is those that do not wait for others, or those that have done fewer steps.

    Args:
        nodes: where each rank should be.
        dumps: stacks that the timers of silent ranks have written.
    """
    silent = [rank for rank in range(len(nodes)) if rank not in reports]
    if silent:
        beats = {rank: beat for each in reports.values() for rank, beat in each.heard.items()}
        states = {rank: state for each in reports.values() for rank, state in each.states.items()}
        return [
            silent_culprit(rank, nodes[rank], beats.get(rank), states.get(rank), dumps.get(rank, "")) for rank in silent
        ]
    if len(nodes) == 1:
        return [_live_culprit(report, "did not get on") for report in reports.values()]
    at_work = [rank for rank, report in reports.items() if not report.beat.waits]
    steps = {rank: each.beat.step for rank, each in reports.items() if each.beat.step is not None}
    behind = [rank for rank, step in steps.items() if step < max(steps.values())]
    if len(at_work) < len(nodes):
        behind = [rank for rank in at_work if rank in behind] or at_work or behind
    return [_live_culprit(reports[rank], "did not come to where the others wait") for rank in behind]


def silent_culprit(rank: int, node: str, beat: Beat | None, state: str | None, dump: str) -> Culprit:
    """Return what is known of a rank that says nothing itself.

    Args:
        node: where it should be.
        beat: the last one that was heard, which is up to some seconds older than the others' reports.
        state: of its process, see `evidence.state_of`; None: nobody could look.
        dump: the stack that its timer has written.
    """
    doing, where = f"{beat.in_step}, {beat.phase}" if beat is not None else ", phase not known", ""
    if state in evidence.HELD:
        what = evidence.HELD[state]
    elif state == evidence.GONE:
        what = "ended without a word"
    elif dump or state is not None:
        what = "is in a call that holds Python's interpreter lock"
        where = f": {evidence.where(evidence.parse_dump(dump))}" if dump else ""
    else:
        what = "does not answer any more (stopped, or its node is gone)"
    if beat is not None:
        node = beat.node
    pid = beat.process.pid if beat is not None else None
    return Culprit(rank, node, pid, f"rank {rank} on {node} {what}{doing}{where}", dump)


def _live_culprit(report: Report, what: str) -> Culprit:
    beat, where = report.beat, report.where
    if beat.phase == "data":
        what = "waits for data"
        if report.workers:
            worker = min(report.workers, key=lambda each: (each["state"] not in evidence.HELD, not each["stacks"]))
            where = f"its data worker {worker['pid']} {evidence.describe(worker)}"
    elif beat.waits and what != "did not get on":
        what = "waits for others, but not in what they wait in,"
    sentence = f"rank {beat.rank} on {beat.node} {what}{beat.in_step}, {beat.phase}: {where}"
    return Culprit(beat.rank, beat.node, beat.process.pid, sentence, report.stacks, report.workers)
