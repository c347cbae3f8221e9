"""Work on many items by several processes of this machine, such as reading the files of thousands of runs."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from slurmtrain.system.parent_death import be_killed_with

T = TypeVar("T")
Result = TypeVar("Result")

log = logging.getLogger(__name__)

PROCESSES = 4  # at most, with this one: the login nodes of a cluster are shared
CHUNKS_EACH = 4  # so that one who gets large items does not keep the others waiting for long


@dataclass(frozen=True)
class _Helper:
    """A process that this one has forked.

    Attributes:
        pid: its id.
        pipe: the reading end of the pipe to which it writes its results.
    """

    pid: int
    pipe: int


def work_in_chunks(work: Callable[[Sequence[T]], Result], items: Sequence[T], *, at_least: int) -> list[Result]:
    """Return what `work` returns of each chunk of the items, in their order.

    This process works, too, and does what the others leave: where no other one can be started, as with a limit on a login
    node, or where they fail, it does all. The processes are forked: for a verb, which has no threads. They are no pool
    of concurrent.futures, since that needs threads, for which such a limit may leave no room, and waits forever then.

    Args:
        work: a function that returns what can be pickled.
        at_least: items in a chunk. Of fewer than two chunks there is one, which this process works on.
    """
    processes = min(PROCESSES, len(os.sched_getaffinity(0)), len(items) // max(1, at_least))
    if processes < 2:
        return [work(items)]
    size = max(at_least, -(-len(items) // (processes * CHUNKS_EACH)))
    chunks = [items[begin : begin + size] for begin in range(0, len(items), size)]
    found: dict[int, Result] = {}
    helpers: list[_Helper] = []
    with contextlib.ExitStack() as stack:
        try:
            # Each process takes the number of its next chunk from a pipe, a byte, until that is empty.
            numbers, writing = os.pipe()
            stack.callback(os.close, numbers)
            try:
                os.write(writing, bytes(range(len(chunks))))
            finally:
                os.close(writing)
            for _ in range(processes - 1):
                helper = _fork(work, chunks, numbers)
                stack.callback(_end, helper)
                helpers.append(helper)
        except OSError as error:
            log.debug("%d processes work instead of %d: %s", len(helpers) + 1, processes, error)
        if helpers:
            for number in _taken(numbers):
                found[number] = work(chunks[number])
        for helper in helpers:
            found |= _results(helper)
    return [found[number] if number in found else work(chunk) for number, chunk in enumerate(chunks)]


def _taken(numbers: int) -> Iterator[int]:
    while taken := os.read(numbers, 1):
        yield taken[0]


def _fork(work: Callable[[Sequence[T]], Result], chunks: Sequence[Sequence[T]], numbers: int) -> _Helper:
    """Start a process that works on chunks until all are taken, and writes what it has found to its pipe then."""
    parent = os.getpid()
    reading, writing = os.pipe()
    try:
        pid = os.fork()
    except BaseException:
        os.close(reading)
        os.close(writing)
        raise
    if pid == 0:
        _help(work, chunks, numbers, writing, parent)
    os.close(writing)
    return _Helper(pid, reading)


def _help(
    work: Callable[[Sequence[T]], Result], chunks: Sequence[Sequence[T]], numbers: int, writing: int, parent: int
) -> NoReturn:
    """Be a helper. It ends with its parent, whatever ends that, leaves Ctrl-C to it, and errors of the work, too."""
    code = 1
    try:
        be_killed_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        found = {number: work(chunks[number]) for number in _taken(numbers)}
        with open(writing, "wb") as pipe:
            pipe.write(pickle.dumps(found))
        code = 0
    finally:
        os._exit(code)


def _results(helper: _Helper) -> dict[int, Result]:
    """Wait for the results of a helper; it has none if it failed."""
    with open(helper.pipe, "rb", closefd=False) as pipe:
        written = pipe.read()
    try:
        failed = os.waitpid(helper.pid, 0)[1] != 0
    except ChildProcessError:  # who started this process ignores SIGCHLD, so that nobody is told how children end
        failed = True
    if failed:
        log.debug("process %d, which helped, has failed", helper.pid)
        return {}
    found: dict[int, Result] = pickle.loads(written)
    return found


def _end(helper: _Helper) -> None:
    """End a helper, unless it has ended."""
    os.close(helper.pipe)
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        if os.waitpid(helper.pid, os.WNOHANG)[0] == 0:
            os.kill(helper.pid, signal.SIGKILL)
            os.waitpid(helper.pid, 0)
