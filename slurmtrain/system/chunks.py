"""Reading many small files by several processes of this machine: a shared file system answers each of them later than one."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import TypeVar

from slurmtrain.system.parent_death import end_with_parent

T = TypeVar("T")
Result = TypeVar("Result")

log = logging.getLogger(__name__)

PROCESSES = 4  # at most: the login nodes of a cluster are shared
CHUNKS_EACH = 4  # so that one who gets large items does not keep the others waiting for long


def work_in_chunks(work: Callable[[Sequence[T]], Result], items: Sequence[T], *, at_least: int) -> list[Result]:
    """Return what `work` returns of each chunk of the items, in their order.

    Where this machine cannot start another process, as with a limit on a login node, this one does the work alone. The
    processes are forked: for a verb, which has no threads.

    Args:
        work: a function that can be pickled, and so must be what it returns.
        at_least: items in a chunk. Of fewer than two chunks there is one, which this process works on.
    """
    processes = min(PROCESSES, len(os.sched_getaffinity(0)), len(items) // max(1, at_least))
    if processes < 2:
        return [work(items)]
    # They are loaded here since every verb loads this module's users, and few have so many items.
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import active_children, get_context

    size = max(at_least, -(-len(items) // (processes * CHUNKS_EACH)))
    chunks = [items[begin : begin + size] for begin in range(0, len(items), size)]
    before = active_children()
    try:
        with ProcessPoolExecutor(processes, get_context("fork"), initializer=_begin) as pool:
            try:
                futures = [pool.submit(work, chunk) for chunk in chunks]
                return [future.result() for future in futures]
            except BaseException:  # Ctrl-C waits for no chunk; and the pool forgets children, if not all can be started
                for child in active_children():
                    if child not in before:
                        child.kill()
                raise
    except (BrokenProcessPool, OSError) as error:
        log.debug("one process works alone: %s", error)
        return [work(items)]


def _begin() -> None:
    """Begin a process of the pool: it ends with its parent, whatever ends that, and leaves Ctrl-C to it."""
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
