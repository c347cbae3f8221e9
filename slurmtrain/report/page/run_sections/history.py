"""Sections of what has happened: attempts, problems of nodes, and events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmtrain.report.page import sentences, units
from slurmtrain.report.page.contents import Section, grid
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.timeline import MOST_ROWS, timeline_of
from slurmtrain.report.status.state import RunStatus
from slurmtrain.report.trouble import SlowRanks, slow_ranks
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.node_blame import records_of
from slurmtrain.slurm.node_ledger import NodeEvent

MOST_EVENTS = 300  # rows of the table of events
MOST_SLOW = 50  # rows
ATTEMPTS = ("attempt", "job", "nodes", "started", "took", "steps", "reason", "details, and what came next")


def attempts_section(facts: RunFacts) -> Section:
    """Return the section of the attempts, with their timeline."""
    timeline = timeline_of(facts)
    if not facts.attempts:
        return Section("attempts", "Attempts", timeline=timeline, missing="The run has not started yet.")
    about = sentences.attempts_sentence(facts.attempts)
    if timeline is not None and timeline.left_out:
        about += f" The timeline shows the last {MOST_ROWS} of them, the table shows all."
    table = grid("Attempts", ATTEMPTS, [attempt_cells(each, facts) for each in facts.attempts])
    saved = sentences.checkpoints_sentence(facts.events)
    return Section("attempts", "Attempts", about, timeline=timeline, grids=(table,), notes=(saved,) if saved else ())


def attempt_cells(attempt: Attempt, facts: RunFacts) -> tuple[str, ...]:
    """Return the row of an attempt, as text."""
    end = attempt.ended or (
        facts.now if attempt is facts.attempts[-1] and facts.state.status == RunStatus.RUNNING else None
    )
    first, last = attempt.first_step, attempt.last_step
    if last is None and attempt is facts.attempts[-1]:
        last = facts.state.step
    steps = f"{'?' if first is None else f'{first:,}'} to {'?' if last is None else f'{last:,}'}"
    return (
        str(attempt.number),
        units.clean(attempt.job_id or "-", 40),
        units.listed((units.clean(node, 64) for node in attempt.nodes), 4) or "-",
        units.moment(attempt.started),
        units.duration(end - attempt.started) if end and attempt.started else "-",
        steps if (first, last) != (None, None) else "-",
        units.clean(attempt.reason or ("not ended" if end is None or attempt.ended is None else "not known"), 40),
        units.clean(attempt.sentence or ""),
    )


def nodes_section(facts: RunFacts) -> Section:
    """Return the section of nodes with problems, slow ranks, and nodes that the job excludes."""
    title = "Conspicuous nodes"
    rows = [
        (
            units.moment(each.time),
            units.clean(each.node, 64),
            str(each.event),
            str(each.attempt),
            units.clean(each.said),
        )
        for each in records_of(facts.run_dir.id, facts.attempts)
        if each.event is not NodeEvent.TRAINED and each.node
    ]
    grids = [grid("Problems on nodes", ("time", "node", "problem", "attempt", "details"), rows)] if rows else []
    slow = [_slow_cells(each) for each in slow_ranks(facts.events)[-MOST_SLOW:]]
    if slow:
        header = ("ranks", "node", "phase of the step", "how slow", "share of the step lost", "steps")
        grids.append(grid("Slow ranks", header, slow))
    left_out = [
        (units.clean(each.node, 64), units.clean(each.why), units.moment(each.until)) for each in facts.left_out
    ]
    if left_out:
        grids.append(grid("Nodes that the job excludes", ("node", "why", "until"), left_out))
    missing = "" if grids else "No rank was slower than the others, and no node had problems."
    return Section("nodes", title, grids=tuple(grids), missing=missing)


def _slow_cells(slow: SlowRanks) -> tuple[str, ...]:
    until = f"{slow.until:,}" if slow.until is not None else "the end, or now"
    return (
        units.listed(map(str, slow.ranks), 16),
        units.clean(slow.node, 64),
        units.clean(slow.phase.replace("_", " "), 60),
        "much longer" if slow.ratio is None else f"{units.brief(slow.ratio)} times as long as the others",
        "-" if slow.share is None else units.percent(slow.share),
        f"step {slow.since:,} to {until}",
    )


def events_section(facts: RunFacts) -> Section:
    """Return the section of the newest events."""
    rows = [_event_cells(event) for event in facts.events[-MOST_EVENTS:]]
    if not rows:
        return Section("events", "Events", missing="No event has been recorded.")
    left = len(facts.events) - len(rows)
    about = f"The last {len(rows)} of {len(facts.events):,} events; events.jsonl contains all of them." if left else ""
    return Section(
        "events", "Events", about, grids=(grid("Events", ("time", "attempt", "event", "details"), rows, folded=True),)
    )


def _event_cells(event: Mapping[str, Any]) -> tuple[str, ...]:
    more = {name: value for name, value in event.items() if name not in ("time", "event", "attempt")}
    words = ", ".join(
        f"{name}: {value if isinstance(value, str) else units.json_words(value)}" for name, value in more.items()
    )
    attempt = event.get("attempt")
    return (
        units.moment(event["time"]),
        str(attempt) if isinstance(attempt, int) else "",
        units.clean(event["event"], 60),
        units.clean(words, 240),
    )
