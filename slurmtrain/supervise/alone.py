"""The supervisor's look at a rank that is alone: no other notices when it is stopped, or when a call holds its interpreter.

The rank writes its heartbeats to a file of the attempt. When none has come for the rank's own time-out, hang.md is written, and
the rank is killed. It has to be on this node, where its process can be seen. Loads no torch.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator

from slurmtrain.runs.attempt_dir import AttemptDir

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


@contextlib.contextmanager
def watched(attempt_dir: AttemptDir) -> Iterator[None]:
    """Watch over the rank of an attempt, if it is alone, during the block; then remove what ranks have left for a watch."""
    closed = threading.Event()
    thread = threading.Thread(target=_watch, args=(attempt_dir, closed), name="watch-alone", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
        with contextlib.suppress(
            OSError
        ):  # a hiccup of a shared file system does not keep the attempt from being judged
            for path in (attempt_dir.heartbeat_file, *attempt_dir.stacks_files()):  # of ranks that were killed
                path.unlink(missing_ok=True)


def _watch(attempt_dir: AttemptDir, closed: threading.Event) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread, which they wake
    while not closed.wait(LOOK_EVERY_S):
        with contextlib.suppress(OSError):  # also a hiccup of a shared file system
            if attempt_dir.heartbeat_file.exists():
                _watch_rank(attempt_dir, closed)


def _watch_rank(attempt_dir: AttemptDir, closed: threading.Event) -> None:
    """Watch until the rank's file is gone, or it hangs.

    Raises:
        OSError: the file is gone, or cannot be read.
    """
    from slurmtrain.hangs import evidence, judge, page
    from slurmtrain.hangs.beats import ActiveClock, parse_beat

    file, clock = attempt_dir.heartbeat_file, ActiveClock(time.monotonic())
    beat, changed, since = None, 0, 0.0
    while not closed.wait(LOOK_EVERY_S):
        now = clock.look(time.monotonic())
        if (newest := file.stat().st_mtime_ns) != changed:  # which changes also when the disk is full
            beat, changed, since = parse_beat(file.read_bytes()) or beat, newest, now
        if beat is None or not judge.hangs_alone(beat, now - since):
            continue
        state = evidence.state_of(beat.pid, beat.born)
        if state in (evidence.GONE, "t", "Z", "X"):
            since = now
            continue
        dump = evidence.dump_of_timer(attempt_dir.stacks_file(beat.rank))
        try:
            sentence = page.record(attempt_dir, [judge.silent_culprit(beat.rank, beat, state, dump)], {}, 1)
            log.error("hung: %s; see %s", sentence, attempt_dir.hang_page)
        except OSError as error:  # a full disk does not keep a GPU
            log.error("hung: rank %d, of which nothing can be written: %s", beat.rank, error.strerror or error)
        evidence.kill_tree(beat.pid, beat.born)
        return
