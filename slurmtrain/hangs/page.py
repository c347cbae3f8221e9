"""hang.md, for people, and hang.json, for the outcome of the attempt: written once, from what all live ranks report.

Every live rank writes one file into the attempt's folder when a hang is found, and the lowest of them writes the page. The
folder still works when the rank that hangs is rank 0, which has the store.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence

import msgspec

from slurmtrain.hangs import evidence
from slurmtrain.hangs.judge import Culprit, Report, find_culprits
from slurmtrain.runs import failures
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.system import records
from slurmtrain.system.files import replace_file, write_text

SHOWN = 8  # ranks in a sentence
STACK_LINES = 60
LOOKS_PER_S = 200  # looks at the folder a second of all ranks together
QUIET_S = 3.0  # without a further report: ranks that have not written one by then do not live
PAGE_S = 10.0  # for the page of the lowest live rank, before the next one writes it


def write_together(attempt_dir: AttemptDir, own: Report, nodes: Sequence[str], every_s: float) -> set[int]:
    """Write this rank's report, and the page if it is the lowest rank that has reported; return those ranks.

    The others wait for the page, and write it if it does not come.

    Args:
        nodes: where each rank should be.
        every_s: seconds between two heartbeats, which ranks may be late.

    Raises:
        OSError: the page cannot be written.
    """
    rank, pause_s = own.beat.rank, max(0.1, len(nodes) / LOOKS_PER_S)
    with contextlib.suppress(OSError):  # a full disk
        replace_file(attempt_dir.hang_report(rank), msgspec.json.encode(own), durable=False)
    live, changed = {rank}, time.monotonic()
    while time.monotonic() - changed < QUIET_S + 2 * every_s and len(live) < len(nodes):
        if not live >= (found := set(attempt_dir.hang_reports())):
            live, changed = live | found, time.monotonic()
        time.sleep(pause_s)
    until = time.monotonic() + sorted(live).index(rank) * PAGE_S
    while not attempt_dir.hang_page.exists():
        if time.monotonic() >= until:
            say(f"slurmtrain: hung: {write_page(attempt_dir, nodes)}; see {attempt_dir.hang_page}")
            break
        time.sleep(pause_s)
    return live


def say(text: str) -> None:
    """Write to stderr without any lock of Python's, which the thread that hangs may hold."""
    with contextlib.suppress(OSError):
        os.write(2, (text.rstrip() + "\n").encode(errors="replace"))


def write_page(attempt_dir: AttemptDir, nodes: Sequence[str]) -> str:
    """Write hang.md and hang.json from the reports, and return the sentence.

    Args:
        nodes: where each rank should be.
    """
    reports: dict[int, Report] = {}
    for rank, path in sorted(attempt_dir.hang_reports().items()):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            reports[rank] = msgspec.json.decode(records.read_bytes(path), type=Report)
    silent = [rank for rank in range(len(nodes)) if rank not in reports]
    dumps = {rank: evidence.dump_of_timer(attempt_dir.stacks_file(rank)) for rank in silent}
    return record(attempt_dir, find_culprits(reports, nodes, dumps), reports, len(nodes))


def record(attempt_dir: AttemptDir, culprits: Sequence[Culprit], reports: Mapping[int, Report], world_size: int) -> str:
    """Write hang.json and hang.md on these ranks, and return the sentence."""
    sentence = sentence_of(culprits, reports, world_size)
    failures.record_hang(
        attempt_dir,
        sentence=sentence,
        nodes=sorted({each.node for each in culprits}),
        ranks=[each.rank for each in culprits],
        since=max((each.beat.time - each.beat.idle_s for each in reports.values()), default=None),
    )
    write_text(attempt_dir.hang_page, page(sentence, culprits, reports))  # last: the others leave when it is there
    for path in (*attempt_dir.hang_reports().values(), *attempt_dir.stacks_files()):  # all is on the page
        with contextlib.suppress(OSError):
            path.unlink()
    return sentence


def sentence_of(culprits: Sequence[Culprit], reports: Mapping[int, Report], world_size: int) -> str:
    """Return the sentence of the attempt's outcome: who did not come, and where."""
    if not culprits:
        in_step = next(iter(reports.values())).beat.in_step if reports else ""
        return f"all {world_size} ranks wait for each other{in_step}, and none comes"
    said = [each.what for each in culprits[:SHOWN]]
    if (more := len(culprits) - SHOWN) > 0:
        said.append(f"and {more} more rank{'s' * (more != 1)}")
    if victims := world_size - len(culprits):
        said.append(f"{victims} other rank{'s' * (victims != 1)} waited")
    return "; ".join(said)


def page(sentence: str, culprits: Sequence[Culprit], reports: Mapping[int, Report]) -> str:
    """Return the page as Markdown: first who did not come, then all who waited, in one table, then their stacks."""
    lines = [f"# Hung: {sentence}", ""]
    for each in culprits:
        lines += [f"## Rank {each.rank} on {each.node} (pid {each.pid or 'unknown'})", ""]
        lines += [f"{each.what}.", ""]
        for worker in each.workers:
            lines += [f"Process {worker['pid']} {evidence.describe(worker)}: `{worker['command']}`", ""]
            lines += _block(worker["stacks"])
        lines += _block(each.stacks)
        if not any((each.stacks, *(worker["stacks"] for worker in each.workers))):
            lines += ["No stack could be had.", ""]
    named = {each.rank for each in culprits}
    others = {rank: each for rank, each in reports.items() if rank not in named}
    if others:
        lines += ["## Ranks that waited", "", "| rank | node | step | phase | for | where |"]
        lines += ["|---|---|---|---|---|---|", *map(_row, others.values()), "", "## Their stacks", ""]
    same: dict[str, list[int]] = {}  # most of a thousand ranks wait at the same place
    for rank, report in others.items():
        same.setdefault(re.sub(r"0x[0-9a-f]+", "0x...", report.stacks), []).append(rank)
    for stacks, ranks in same.items():
        lines += [f"### Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}", "", *_block(stacks)]
    return "\n".join(lines).rstrip() + "\n"


def _row(report: Report) -> str:
    beat = report.beat
    step = "" if beat.step is None else str(beat.step + 1)
    cells = (str(beat.rank), beat.node, step, beat.phase, f"{beat.idle_s:.0f} s", report.where)
    return "| " + " | ".join(cells) + " |"


def _block(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip()]
    return ["```", *lines[:STACK_LINES], *(["..."] if len(lines) > STACK_LINES else []), "```", ""] if lines else []
