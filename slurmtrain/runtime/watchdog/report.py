"""Which ranks did not come, and the page that says so: from the reports of all live ranks, without asking any further.

Every live rank writes one file into the attempt's folder when a hang is found; the lowest of them writes hang.md, for
people, and hang.json, for the outcome of the attempt. The folder still works when the rank that hangs is rank 0, which has
the store.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.errors import SlurmtrainError
from slurmtrain.runs import failures
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runtime.watchdog import evidence, phases
from slurmtrain.runtime.watchdog.heartbeats import Beat
from slurmtrain.system.files import read_json, write_json, write_text

SHOWN = 8  # ranks in a sentence
WRITERS = "checkpoint-"  # how the names of threads begin that write checkpoints
IDLE = "_worker"  # the function in which a thread of concurrent.futures waits for work
STACK_LINES = 60
_OF_WORKERS = ("pt_data_worker", "multiprocessing")


@dataclass(frozen=True)
class HangReport:
    """What one live rank reports when a hang has been found.

    Attributes:
        beat: the rank's own last beat.
        stacks: its stacks, all threads.
        collectives: the newest collective of each process group, see `evidence.last_collectives`.
        workers: what is known of its child processes, if it waits for data.
        local_states: the state of the process of each other rank of this node, see `evidence.state_of`.
        seen: the newest beats of silent ranks that this rank could read.
        store_answers: whether the store in rank 0 answered.
    """

    beat: Beat
    stacks: str = ""
    collectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    workers: Sequence[Mapping[str, Any]] = ()
    local_states: Mapping[int, str] = field(default_factory=dict)
    seen: Mapping[int, Beat] = field(default_factory=dict)
    store_answers: bool = True

    def write(self, attempt_dir: AttemptDir) -> None:
        write_json(attempt_dir.hang_report(self.beat.rank), asdict(self), durable=False)

    @staticmethod
    def read(path: Path) -> HangReport | None:
        try:
            values = read_json(path) or {}
            return HangReport(
                **{
                    **values,
                    "beat": Beat(**values["beat"]),
                    "local_states": {int(rank): state for rank, state in values["local_states"].items()},
                    "seen": {int(rank): Beat(**beat) for rank, beat in values["seen"].items()},
                }
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            SlurmtrainError,
        ):  # it is being written, or is none of ours
            return None


@dataclass(frozen=True)
class NodeHangReport:
    """What a monitor reports of the ranks of its node, none of which is alive.

    Attributes:
        states: the state of each rank's process, see `evidence.state_of`.
        channels: the kernel function in which it waits, by rank; none where it is not known.
        stacks: what it has written when it was asked, by rank.
        seen: its last known beat.
    """

    states: Mapping[int, str]
    channels: Mapping[int, str]
    stacks: Mapping[int, str]
    seen: Mapping[int, Beat]

    def write(self, attempt_dir: AttemptDir) -> None:
        write_json(attempt_dir.hang_node(min(self.seen)), asdict(self), durable=False)

    @staticmethod
    def read(path: Path) -> NodeHangReport | None:
        try:
            values = {
                name: {int(rank): value for rank, value in each.items()}
                for name, each in (read_json(path) or {}).items()
            }
            return NodeHangReport(**{**values, "seen": {rank: Beat(**beat) for rank, beat in values["seen"].items()}})
        except (KeyError, TypeError, ValueError, AttributeError, SlurmtrainError):
            return None


def look_at_node(beats: Mapping[int, Beat], attempt_dir: AttemptDir | None) -> NodeHangReport:
    """Look at the processes of the ranks of this node, by their last beats, and have each that can write its stacks."""
    states = {rank: evidence.state_of(beat.pid, beat.born) for rank, beat in beats.items()}
    channels = {rank: evidence.wait_channel(beats[rank].pid) for rank, state in states.items() if state in "DS"}
    logs = {rank: attempt_dir.stacks_log(rank) for rank in beats} if attempt_dir is not None else {}
    stacks = {rank: evidence.ask_for_stacks(beats[rank].pid, states[rank], log) for rank, log in logs.items()}
    return NodeHangReport(states, {rank: each for rank, each in channels.items() if each}, stacks, dict(beats))


@dataclass(frozen=True)
class Absent:
    """A rank that did not come to where the others wait.

    Attributes:
        node: its node; "an unknown node" if it was never heard.
        step: steps done; None if nobody counts them.
        phase: its last known one.
        what: what it did instead: "was stopped (SIGSTOP)".
        where: its innermost frame; empty if it is not known.
    """

    rank: int
    node: str
    pid: int | None
    step: int | None
    phase: str
    what: str
    where: str = ""
    stacks: str = ""
    workers: Sequence[Mapping[str, Any]] = ()

    @property
    def sentence(self) -> str:
        at = f" in step {self.step + 1}" if self.step is not None else ""
        return f"rank {self.rank} on {self.node} {self.what}{at}, {self.phase}" + (
            f": {self.where}" if self.where else ""
        )


def read_reports(attempt_dir: AttemptDir) -> dict[int, HangReport]:
    """Return the reports of the live ranks, by rank."""
    found = (HangReport.read(path) for path in attempt_dir.hang_reports().values())
    return dict(sorted((each.beat.rank, each) for each in found if each is not None))


def find_absent(
    reports: Mapping[int, HangReport],
    world_size: int,
    expected_nodes: Mapping[int, str],
    dumps: Mapping[int, str],
    nodes: Sequence[NodeHangReport] = (),
) -> list[Absent]:
    """Return the ranks that did not come; none if all wait for each other.

    A rank that has written nothing is stopped, gone, or in a call that holds the interpreter, so it is one of them. If all
    have, it is those that do not wait for others, or those that have begun fewer collectives than others.

    Args:
        expected_nodes: where SLURM puts each rank.
        dumps: stacks that the timers of silent ranks have written.
        nodes: reports of monitors.
    """
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        asked = {rank: stacks for each in nodes for rank, stacks in each.stacks.items() if stacks}
        dumps = {**dumps, **asked}
        return [_silent(rank, reports, expected_nodes, dumps.get(rank, ""), nodes) for rank in silent]
    if world_size == 1:
        return [_live(report, alone=True) for report in reports.values()]
    at_work = [rank for rank, report in reports.items() if not report.beat.waits]
    behind = _behind(reports)
    if len(at_work) < world_size:
        behind = [rank for rank in at_work if rank in behind] or at_work or behind
    return [_live(reports[rank]) for rank in behind]


def _behind(reports: Mapping[int, HangReport]) -> list[int]:
    """Return the ranks that have begun fewer collectives than others, in a group in which somebody waits."""
    behind: set[int] = set()
    for group in {name for report in reports.values() for name in report.collectives}:
        last = {rank: each.collectives[group] for rank, each in reports.items() if group in each.collectives}
        most = max(int(each["number"]) for each in last.values())
        if any(each["number"] == most and each["state"] != "completed" for each in last.values()):
            behind |= {rank for rank, each in last.items() if int(each["number"]) < most}
    if not behind:
        steps = {rank: each.beat.step for rank, each in reports.items() if each.beat.step is not None}
        behind = {rank for rank, step in steps.items() if step < max(steps.values())}
    return sorted(behind)


def _silent(
    rank: int,
    reports: Mapping[int, HangReport],
    expected_nodes: Mapping[int, str],
    dump: str,
    nodes: Sequence[NodeHangReport],
) -> Absent:
    states = [each.local_states[rank] for each in reports.values() if rank in each.local_states]
    states += [each.states[rank] for each in nodes if rank in each.states]
    known = [*(each.seen for each in reports.values()), *(each.seen for each in nodes)]
    beats = [seen[rank] for seen in known if rank in seen]
    beat = max(beats, key=lambda each: each.number, default=None)
    stack = phases.parse_dump(dump)
    frame = phases.where(stack) if stack else ""
    common = _common_step(reports)
    step, phase = common, "phase not known"
    if stack:
        phase = phases.phase_of(stack, stepping=True).name
        if step is None and beat is not None:
            step = beat.step
    elif beat is not None and (common is None or (beat.step is not None and beat.step >= common)):
        step, phase = beat.step, beat.phase
    elif beat is not None:  # it has come further since
        phase = f"last seen in step {(beat.step or 0) + 1}, {beat.phase}"
    if "t" in states:
        what, frame = "was stopped by a debugger", ""
    elif "T" in states:
        what, frame = "was stopped (SIGSTOP)", ""
    elif "D" in states:
        channel = next((each.channels[rank] for each in nodes if rank in each.channels), None)
        what = f"waits in the kernel for a disk, file system or driver (state D{f', in {channel}' if channel else ''})"
    elif any(state in (evidence.GONE, "Z", "X") for state in states):
        what = "ended without a word"
    elif stack or states:
        what = "is in a call that holds Python's interpreter lock"
    else:
        what = "does not answer any more (stopped, or its node is gone)"
    node = beat.node if beat is not None else expected_nodes.get(rank, "an unknown node")
    pid = beat.pid if beat is not None else None
    return Absent(rank, node, pid, step, phase, what, frame, dump)


def _live(report: HangReport, *, alone: bool = False) -> Absent:
    beat = report.beat
    what, where = "did not get on" if alone else "did not come to where the others wait", beat.where
    stuck = [worker for worker in report.workers if any(word in worker["stacks"] for word in _OF_WORKERS)]
    stopped = [worker for worker in report.workers if worker["state"] in "TtD"]
    if beat.phase == "data":
        what = "waits for data"
        if stopped or stuck or report.workers:
            worker = (stopped or stuck or list(report.workers))[0]
            where = f"its data worker {worker['pid']} " + describe_worker(worker)
    elif beat.phase == "save" and beat.waits and (writing := _writing(report.stacks)):
        what, where = "does not get on with writing a checkpoint", phases.where(writing)
    elif beat.waits and not alone:
        what = "waits for others, but not in what they wait in,"
    return Absent(beat.rank, beat.node, beat.pid, beat.step, beat.phase, what, where, report.stacks, report.workers)


def _writing(stacks: str) -> tuple[phases.Frame, ...]:
    """Return the stack of a thread that writes a checkpoint and does not wait for other ranks; empty if there is none.

    Args:
        stacks: those of the rank whose main thread waits for it, see `evidence.own_stacks`.
    """
    for part in stacks.split("\nThread "):
        stack = phases.parse_dump(part) if part.startswith(WRITERS) else ()
        if stack and stack[-1].function != IDLE and not phases.waits_for_others(stack):
            return stack
    return ()


def describe_worker(worker: Mapping[str, Any]) -> str:
    """Return what a child process does, as "is stopped (SIGSTOP)" or "is in load (data.py:7)"."""
    state = str(worker["state"])
    if state in "TtD":
        return f"is {evidence.STATES[state]}"
    stack = phases.parse_dump(str(worker["stacks"]))
    if stack:
        return f"is in {phases.where(stack)}"
    channel = f" in {worker['wchan']}" if worker.get("wchan") else ""
    return f"is {evidence.STATES.get(state, state)}{channel}"


def _common_step(reports: Mapping[int, HangReport]) -> int | None:
    steps = [each.beat.step for each in reports.values() if each.beat.step is not None]
    return min(steps, default=None)


def sentence_of(absent: Sequence[Absent], reports: Mapping[int, HangReport], world_size: int) -> str:
    """Return the sentence of the attempt's outcome: who did not come, and where."""
    if not absent:
        step = _common_step(reports)
        at = f" in step {step + 1}" if step is not None else ""
        return f"all {world_size} ranks wait for each other{at}, and none comes"
    shown = "; ".join(each.sentence for each in absent[:SHOWN])
    more = _and_more(len(absent) - SHOWN)
    victims = world_size - len(absent)
    waited = f"; {victims} other rank{'s' * (victims != 1)} waited" if victims else ""
    return f"{shown}{more}{waited}"


def write_report(attempt_dir: AttemptDir, world_size: int, expected_nodes: Mapping[int, str]) -> str:
    """Write hang.md and hang.json from what the ranks have written, and return the sentence."""
    reports = read_reports(attempt_dir)
    silent = [rank for rank in range(world_size) if rank not in reports]
    dumps = {rank: evidence.dump_of_timer(attempt_dir.stacks_log(rank)) for rank in silent}
    nodes = [each for path in attempt_dir.hang_nodes() if (each := NodeHangReport.read(path)) is not None]
    absent = find_absent(reports, world_size, expected_nodes, dumps, nodes)
    sentence = sentence_of(absent, reports, world_size)
    failures.record_hang(
        attempt_dir,
        sentence=sentence,
        nodes=sorted({each.node for each in absent}),
        ranks=[each.rank for each in absent],
        since=_got_on(reports),
    )
    # Last: the others leave when it is there.
    write_text(attempt_dir.hang_page, page(sentence, absent, reports, world_size))
    # All that they say is on the page.
    for path in (*attempt_dir.hang_reports().values(), *attempt_dir.hang_nodes(), *attempt_dir.stacks_files()):
        with contextlib.suppress(OSError):
            path.unlink()
    return sentence


def write_program_report(attempt_dir: AttemptDir) -> str:
    """Write hang.md and hang.json on programs whose heartbeat files do not change, and return the sentence.

    Those whose processes are stopped or busy are named; if there are none, or nothing else, all of them.
    """
    reports = read_reports(attempt_dir)
    chosen = [each for each in reports.values() if not each.beat.waits] or list(reports.values())
    named = [_program(each) for each in chosen]
    others = len(reports) - len(named)
    shown = "; ".join(each.sentence for each in named[:SHOWN])
    more = _and_more(len(named) - SHOWN)
    waited = f"; {others} other rank{'s' * (others != 1)} waited" if others else ""
    sentence = f"{shown}{more}{waited}"
    nodes = sorted({each.node for each in named})
    failures.record_hang(
        attempt_dir,
        sentence=sentence,
        nodes=nodes if len(nodes) == 1 else [],  # else it is no fault of one of them
        ranks=[each.rank for each in named],
        since=_got_on(reports),
    )
    write_text(attempt_dir.hang_page, page(sentence, named, reports, len(reports)))
    for path in attempt_dir.hang_reports().values():
        with contextlib.suppress(OSError):
            path.unlink()
    return sentence


def _got_on(reports: Mapping[int, HangReport]) -> float | None:
    """Return when a rank that is alive got on for the last time, in unix seconds."""
    return max((each.beat.time - each.beat.idle_s for each in reports.values()), default=None)


def _program(report: HangReport) -> Absent:
    beat = report.beat
    stacks = "\n".join(str(each["stacks"]) for each in report.workers if each["stacks"])
    return Absent(beat.rank, beat.node, beat.pid, None, beat.phase, "hangs", beat.where, stacks, report.workers)


def page(sentence: str, absent: Sequence[Absent], reports: Mapping[int, HangReport], world_size: int) -> str:
    """Return the page as Markdown: first who did not come, then all who waited, in one table, then their stacks."""
    lines = [f"# Hung: {sentence}", ""]
    if not all(each.store_answers for each in reports.values()):
        lines += ["The store in rank 0's process did not answer.", ""]
    for missing in absent:
        lines += [f"## Rank {missing.rank} on {missing.node} (pid {missing.pid or 'unknown'})", ""]
        lines += [f"{missing.sentence}.", ""]
        for worker in missing.workers:
            lines += [f"Process {worker['pid']} {describe_worker(worker)}: `{worker['command']}`", ""]
            lines += _block(str(worker["stacks"]))
        lines += _block(missing.stacks) or ["No stack could be had.", ""]
    named = {missing.rank for missing in absent}
    others = {rank: each for rank, each in reports.items() if rank not in named}
    if others:
        lines += ["## Ranks that waited", "", "| rank | node | step | phase | for | where | last collective |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [_row(each) for each in others.values()]
        lines += ["", "## Their stacks", ""]
        for stacks, ranks in _same_stacks(others).items():
            lines += [f"### Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}", "", *_block(stacks)]
    return "\n".join(lines).rstrip() + "\n"


def _same_stacks(reports: Mapping[int, HangReport]) -> dict[str, list[int]]:
    """Return the ranks by their stacks: most of a thousand ranks wait at the same place."""
    found: dict[str, list[int]] = {}
    for rank, each in reports.items():
        found.setdefault(re.sub(r"0x[0-9a-f]+", "0x...", each.stacks), []).append(rank)
    return found


def _row(report: HangReport) -> str:
    beat = report.beat
    step = "" if beat.step is None else str(beat.step + 1)
    waiting = [each for each in report.collectives.values() if each["state"] != "completed"]
    last = min(waiting, key=lambda each: float(each["since"]), default=None)
    collective = f"{last['name']} number {last['number']}, for {beat.time - last['since']:.0f} s" if last else ""
    cells = (str(beat.rank), beat.node, step, beat.phase, f"{beat.idle_s:.0f} s", beat.where, collective)
    return "| " + " | ".join(cells) + " |"


def _block(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    return ["```", *lines[:STACK_LINES], *(["..."] if len(lines) > STACK_LINES else []), "```", ""]


def _and_more(ranks: int) -> str:
    """Say how many ranks are not shown, if any."""
    return "" if ranks <= 0 else "; and one more rank" if ranks == 1 else f"; and {ranks} more ranks"
