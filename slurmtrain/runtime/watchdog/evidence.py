"""What can be known of a process that hangs: its state in the kernel, its Python stacks, and the collective it waits in."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO, TypeVar

from slurmtrain.system import process

T = TypeVar("T")

# A process that has registered faulthandler for it writes its stacks. Real-time signals are used by nothing else here: USR1
# is NCCL's, USR2 and TERM are SLURM's. Forked children inherit the handler, so a data worker that hangs can be asked.
DUMP_SIGNAL = signal.SIGRTMIN + 7
WATCHING_THREADS = ("watchdog", "heartbeats", "watch", "stop-signals")
DUMP_WAIT_S = 1.0
TAIL_BYTES = 200_000
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting in the kernel for a disk, file system or driver (state D)",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}
GONE = "gone"
GOT_ON = "slurmtrain: this rank was slow, and has got on since it wrote the stacks above"


_cancels_at_fork = False


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


def own_stacks(first: int) -> str:
    """Return the stacks of the Python threads of this process, innermost frame first, as faulthandler writes them.

    Args:
        first: the thread that comes first. Those that watch it are left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    lines = []
    for ident in sorted(frames, key=lambda each: each != first):
        if names.get(ident) in WATCHING_THREADS:
            continue
        lines.append(f"Thread {names.get(ident, hex(ident))} (most recent call first):")
        frame = frames[ident]
        while frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back  # type: ignore[assignment]
    return "\n".join(lines)


def state_of(pid: int, born: str | None) -> str:
    """Return the state of a process of this machine: its letter, or `GONE`. A process that began at another time is another.

    A process that is traced by a debugger counts as stopped by it.
    """
    found = process.stat(pid)
    if found is None or (born is not None and str(found.start) != born):
        return GONE
    if found.state in "ST" and is_traced(pid):
        return "t"
    return found.state


def is_traced(pid: int | str) -> bool:
    """Return whether a debugger is attached to a process."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("TracerPid:"):
                return line.split()[1] != "0"
    return False


def wait_channel(pid: int) -> str | None:
    """Return the kernel function in which a process waits; None if it cannot be known, or it waits in none."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        return name if name not in ("", "0") else None
    return None


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def describe_processes(pids: Iterable[int], log: Path | None, *, last: bool = False) -> list[dict[str, Any]]:
    """Return what is known of each of these processes.

    Args:
        log: where they write to; None: it is not known.
        last: they are to be ended: one that has enabled faulthandler may be ended by SIGABRT, at which it writes its stacks.
    """
    found = []
    for pid in pids:
        its = process.stat(pid)
        if its is None or its.ended:
            continue
        described = {"pid": pid, "state": its.state, "wchan": wait_channel(pid), "command": process.command_line(pid)}
        found.append({**described, "stacks": ask_for_stacks(pid, its.state, log, last=last)})
    return found


def ask_for_stacks(pid: int, state: str, log: Path | None, *, last: bool = False) -> str:
    """Have a process write its stacks, and return what it has written to its log; empty if it writes none."""
    numbers = (DUMP_SIGNAL, signal.SIGABRT) if last else (DUMP_SIGNAL,)
    number = next((each for each in numbers if catches(pid, each)), None)
    if log is None or state in "TtZX" or number is None:
        return ""
    before = _size(log)
    try:
        os.kill(pid, number)
    except OSError:
        return ""
    deadline, seen = time.monotonic() + DUMP_WAIT_S, before
    while time.monotonic() < deadline:  # a file has no event to await
        time.sleep(0.1)
        if (size := _size(log)) > seen or size == before:
            seen = size
            continue
        break
    return _part(log, before)


def dump_of_timer(log: Path) -> str:
    """Return the newest stack of the main thread that faulthandler's timer has written to a rank's log.

    The timer needs no interpreter. Empty if there is none, or the rank has got on since.
    """
    text = _part(log, max(0, _size(log) - TAIL_BYTES))
    begin = text.rfind("Timeout (")
    if begin < 0 or GOT_ON in text[begin:]:
        return ""
    lines = text[begin:].splitlines()
    kept = [line for line in lines[1:] if line.startswith(("Thread 0x", "  File ", "  ..."))]
    last = max((number for number, line in enumerate(kept) if line.startswith("Thread")), default=0)
    return "\n".join(kept[last:])  # the main thread, which comes last


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _part(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def last_collectives() -> dict[str, dict[str, Any]]:
    """Return the newest collective of each process group, from torch's flight recorder; none if it cannot be read.

    The keys are names of groups; the values have "name", "number" (the same on all ranks for the same collective), "state" and
    "since" (unix seconds).
    """
    found: dict[str, dict[str, Any]] = {}
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        for entry in _recorded(dump):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                group = str(entry["process_group"][0])
                number = int(entry["collective_seq_id"])
                if number >= found.get(group, {"number": -1})["number"]:
                    found[group] = {
                        "name": str(entry["profiling_name"]),
                        "number": number,
                        "state": str(entry["state"]),
                        "since": float(entry["time_created_ns"]) / 1e9,
                    }
    return found


def _recorded(name: str) -> list[dict[str, Any]]:
    module = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(module, name, None)
    if dump is None:
        return []
    text = call_with_timeout(2.0, lambda: dump(True, False), b"{}")
    with contextlib.suppress(ValueError):
        entries = json.loads(text).get("entries", [])
        return entries if isinstance(entries, list) else []
    return []


def write_nccl_trace(path: Path) -> bool:
    """Write NCCL's flight record, which torch's `torchfrtrace` reads; return False if there is none."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace", None)
    record: bytes = call_with_timeout(5.0, dump, b"") if dump is not None else b""
    if not record:
        return False
    with contextlib.suppress(OSError):
        path.write_bytes(record)
        return True
    return False


def call_with_timeout(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """Return the result of a call that may never return, such as one that asks the driver of a device that hangs."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else otherwise


def kill_tree(pid: int, born: str | None, *, spared: int | None = None) -> bool:
    """End a process of this machine that hangs, and all below it, at once; return False if it was gone already.

    Args:
        spared: one of those below it that is not ended.
    """
    if state_of(pid, born) in (GONE, "Z", "X"):
        return False
    children = [each for each in process.living_descendants(pid) if each != spared]
    for each in (pid, *children):
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGKILL)
    return True
