"""What can be known of a process that hangs: its state in the kernel, and its Python stacks."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import psutil

from slurmtrain.system import process
from slurmtrain.system.process import ProcessMark

# A rank, and what it forks, writes its stacks at this signal, so that a data worker that hangs can be asked. Real-time signals
# are used by nothing else here: USR1 is NCCL's, USR2 and TERM are SLURM's.
DUMP_SIGNAL = signal.SIGRTMIN + 7
WATCHING_THREADS = ("watchdog", "heartbeats", "watch", "stop-signals")
DUMP_WAIT_S = 1.0
IN_KERNEL = psutil.STATUS_DISK_SLEEP
HELD = {  # what keeps a process from going on
    IN_KERNEL: "waits in the kernel for a disk, file system or driver (state D)",
    psutil.STATUS_STOPPED: "was stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "was stopped by a debugger",
}
GONE = "gone"
_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")


def stack_of(thread: int) -> list[FrameSummary]:
    """Return the stack of a thread of this process, innermost frame first; empty if there is no such thread."""
    frame = sys._current_frames().get(thread)
    walked = traceback.walk_stack(frame) if frame is not None else ()
    # Without its lines of source: the file system may be what hangs.
    return [
        FrameSummary(each.f_code.co_filename, line, each.f_code.co_name, lookup_line=False) for each, line in walked
    ]


def own_stacks(first: int) -> str:
    """Return the stacks of the Python threads of this process, as faulthandler writes them; `first` comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident in sorted(sys._current_frames(), key=lambda each: each != first):
        if names.get(ident) not in WATCHING_THREADS:
            lines.append(f"Thread {names.get(ident, hex(ident))} (most recent call first):")
            lines += [f'  File "{each.filename}", line {each.lineno} in {each.name}' for each in stack_of(ident)]
    return "\n".join(lines)


def parse_dump(text: str) -> list[FrameSummary]:
    """Return the stack of the last thread in a dump of faulthandler, which is the main one, innermost frame first."""
    found: list[FrameSummary] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            found = []
        elif match := _DUMPED.match(line):
            found.append(FrameSummary(match[1], int(match[2]), match[3], lookup_line=False))
    return found


def where(stack: Sequence[FrameSummary]) -> str:
    """Return the innermost frame that is not of a library, and the innermost: "step (train.py:7), in recv (socket.py:3)"."""
    if not stack:
        return "an unknown place"
    own = next((each for each in stack if not any(part in each.filename for part in _LIBRARIES)), stack[0])
    mine, innermost = (f"{each.name} ({each.filename.rpartition('/')[2]}:{each.lineno})" for each in (own, stack[0]))
    return mine if own is stack[0] else f"{mine}, in {innermost}"


# What faulthandler has written, which needs no interpreter for that.


def dump_of_timer(file: Path) -> str:
    """Return the newest stack of the main thread that a rank's timer has written; empty if there is none."""
    text = _read(file).rpartition("Timeout (")[2]
    _, begin, main = text.rpartition("\nThread 0x")
    return (begin + main).strip() if begin else ""


def _read(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace")
    return ""


def describe_processes(pids: Iterable[int], file: Path) -> list[dict[str, Any]]:
    """Return pid, state, command and stacks of each of these processes that lives.

    Args:
        file: where they write their stacks when they get `DUMP_SIGNAL`.
    """
    found = []
    for pid in pids:
        state = process.state(pid)
        if state not in process.ENDED:
            stacks = "" if state in HELD and state != IN_KERNEL else _ask_for_stacks(pid, file)
            found.append({"pid": pid, "state": state, "command": process.command_line(pid), "stacks": stacks})
    return found


def _ask_for_stacks(pid: int, file: Path) -> str:
    if DUMP_SIGNAL not in process.caught_signals(pid):
        return ""
    before = seen = _read(file)
    process.send(DUMP_SIGNAL, [pid])
    until = time.monotonic() + DUMP_WAIT_S
    while time.monotonic() < until:  # a file has no event to await
        time.sleep(0.1)
        last, seen = seen, _read(file)
        if last == seen != before:
            break
    return seen[len(before) :]


def describe(worker: Mapping[str, Any]) -> str:
    """Return what such a process does, as "was stopped (SIGSTOP)" or "is in load (data.py:7)"."""
    stack = parse_dump(worker["stacks"])
    if stack and worker["state"] not in HELD:
        return f"is in {where(stack)}"
    return HELD.get(worker["state"], f"is {worker['state']}")


def state_of(mark: ProcessMark) -> str:
    """Return what a process of this machine does, as psutil calls it, or `GONE`."""
    return (process.state(mark.pid) if mark.lives() else None) or GONE
