"""What can be known of a process that hangs: its state in the kernel, its Python stacks, and the collectives it has begun."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec
import psutil

from slurmtrain.system import process
from slurmtrain.system.patience import begin

# A process that has registered faulthandler for it writes its stacks. Real-time signals are used by nothing else here: USR1
# is NCCL's, USR2 and TERM are SLURM's. Forked children inherit the handler, so a data worker that hangs can be asked.
DUMP_SIGNAL = signal.SIGRTMIN + 7
WATCHING_THREADS = ("watchdog", "heartbeats", "watch", "stop-signals")
DUMP_WAIT_S = 1.0
DUMP_LIMIT_S = 2.0  # for torch to tell its last collectives
DUMP_BYTES = 200_000
IN_KERNEL = psutil.STATUS_DISK_SLEEP
HELD = {  # what keeps a process from going on
    IN_KERNEL: "waits in the kernel for a disk, file system or driver (state D)",
    psutil.STATUS_STOPPED: "was stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "was stopped by a debugger",
}
GONE = "gone"
_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")

_cancels_at_fork = False


class Frame(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


def stack_of(thread: int) -> list[Frame]:
    """Return the stack of a thread of this process, innermost frame first; empty if there is no such thread."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found


def frames_of(error: BaseException) -> list[Frame]:
    """Return where an error was raised, innermost frame first."""
    trace = traceback.extract_tb(error.__traceback__)
    return [Frame(each.filename, each.lineno or 0, each.name) for each in reversed(trace)]


def own_stacks(first: int) -> str:
    """Return the stacks of the Python threads of this process, as faulthandler writes them; `first` comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident in sorted(sys._current_frames(), key=lambda each: each != first):
        if names.get(ident) not in WATCHING_THREADS:
            lines.append(f"Thread {names.get(ident, hex(ident))} (most recent call first):")
            lines += [f'  File "{file}", line {line} in {function}' for file, line, function in stack_of(ident)]
    return "\n".join(lines)


def parse_dump(text: str) -> list[Frame]:
    """Return the stack of the last thread in a dump of faulthandler, which is the main one, innermost frame first."""
    found: list[Frame] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            found = []
        elif match := _DUMPED.match(line):
            found.append(Frame(match[1], int(match[2]), match[3]))
    return found


def where(stack: Sequence[Frame]) -> str:
    """Return the innermost frame that is not of a library, and the innermost: "step (train.py:7), in recv (socket.py:3)"."""
    if not stack:
        return "an unknown place"
    own = next((frame for frame in stack if not any(part in frame.file for part in _LIBRARIES)), stack[0])
    return str(own) if own == stack[0] else f"{own}, in {stack[0]}"


# Stacks that need no interpreter: faulthandler writes them.


def register_dumps(file: TextIO | None = None) -> None:
    """Let this process, and what it forks, write its stacks to a file, or to stderr, at `DUMP_SIGNAL`."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # stderr is no file
        faulthandler.register(DUMP_SIGNAL, file=file or sys.__stderr__ or 2, all_threads=True, chain=False)


def set_timer(seconds: float | None, file: TextIO | None = None) -> None:
    """Have faulthandler write all stacks to a file, or to stderr, after so many seconds.

    It does so also while a call holds the interpreter. Set anew, it begins anew; None: never.
    """
    global _cancels_at_fork
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # stderr is no file
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
            return
        if not _cancels_at_fork:
            _cancels_at_fork = True
            # The timer is a thread, which a forked child does not have, but waits for when it ends.
            os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)
        faulthandler.dump_traceback_later(seconds, file=file or sys.__stderr__ or 2)


def dump_of_timer(file: Path) -> str:
    """Return the newest stack of the main thread that a rank's timer has written; empty if there is none."""
    text = _read_from(file, 0).rpartition("Timeout (")[2]
    _, begin, main = text.rpartition("\nThread 0x")
    return (begin + main).strip() if begin else ""


def ask_for_stacks(pid: int, file: Path | None, number: int = DUMP_SIGNAL) -> str:
    """Have a process write its stacks to a file that it has open, and return them; empty if it writes none."""
    if file is None or number not in process.caught_signals(pid):
        return ""
    before = seen = _size(file)
    process.send(number, [pid])
    until = time.monotonic() + DUMP_WAIT_S
    while time.monotonic() < until:  # a file has no event to await
        time.sleep(0.1)
        if (size := _size(file)) == seen > before:
            break
        seen = size
    return _read_from(file, before)


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def _read_from(file: Path, begin: int) -> str:
    with contextlib.suppress(OSError), file.open("rb") as opened:
        opened.seek(begin)
        return opened.read(DUMP_BYTES).decode(errors="replace")
    return ""


# What the kernel says.


def state_of(pid: int, born: str | None) -> str:
    """Return what a process of this machine does, or `GONE`. A process that began at another time is another."""
    state = process.state(pid)
    return GONE if state is None or state in process.ENDED or born not in (None, process.born(pid)) else state


def describe_processes(pids: Iterable[int], file: Path | None, number: int = DUMP_SIGNAL) -> list[dict[str, Any]]:
    """Return pid, state, command and stacks of each of these processes that lives.

    Args:
        file: where they write their stacks at signal `number`; None: it is not known.
    """
    found = []
    for pid in pids:
        state = process.state(pid)
        if state not in process.ENDED:
            stacks = "" if state in HELD and state != IN_KERNEL else ask_for_stacks(pid, file, number)
            found.append({"pid": pid, "state": state, "command": process.command_line(pid), "stacks": stacks})
    return found


def describe(worker: Mapping[str, Any]) -> str:
    """Return what such a process does, as "was stopped (SIGSTOP)" or "is in load (data.py:7)"."""
    stack = parse_dump(worker["stacks"])
    if stack and worker["state"] not in HELD:
        return f"is in {where(stack)}"
    return HELD.get(worker["state"], f"is {worker['state']}")


def kill_tree(pid: int, born: str | None) -> bool:
    """End a process of this machine that hangs, and all below it, at once; return False if it was gone already."""
    if state_of(pid, born) == GONE:
        return False
    process.send(signal.SIGKILL, (pid, *process.living_descendants(pid)))
    return True


# What torch says.


@dataclass(frozen=True)
class Collective:
    """A collective of a process group.

    Attributes:
        number: the same on all ranks for the same collective.
        since: when it was begun, in unix seconds.
    """

    name: str
    number: int
    since: float


def last_collectives() -> dict[str, Collective]:
    """Return the newest collective of each process group, by its name, from torch's flight recorder, if that can be read."""
    found: dict[str, Collective] = {}
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):  # torch has no such function, or it asks a driver that never answers
            text = begin(partial(getattr(module, name), True, False)).result(DUMP_LIMIT_S)
            for entry in msgspec.json.decode(text).get("entries", []):
                number, group = int(entry["collective_seq_id"]), str(entry["process_group"][0])
                if group not in found or number >= found[group].number:
                    found[group] = Collective(entry["profiling_name"], number, entry["time_created_ns"] / 1e9)
    return found
