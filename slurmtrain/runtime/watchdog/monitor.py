"""A process beside the first rank of each node, for what no thread of a rank can see: that the rank itself is stopped.

A thread does not run while its process is stopped, or a call holds the interpreter. Of several ranks the others notice; a
rank that is alone has this process, which hears its beats through a pipe. When none has come for the rank's time-out, it
writes the page and ends the rank. Of a node whose ranks are all stopped it tells the ranks of other nodes, which have found
the hang, in which state they are, and ends them.

It starts some seconds after the rank, whose start it does not delay, and imports little until there is something to say.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runtime.watchdog.heartbeats import Beat
from slurmtrain.runtime.watchdog.progress import ActiveClock
from slurmtrain.system import process

IGNORED = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)  # they are for the ranks
LOOK_EVERY_S = 1.0
MARGIN_S = 5.0  # after the rank's own time-out: its thread comes first
SILENT_S = 60.0  # without a beat: a call may hold the interpreter for so long
STOPPED_S = 3.0  # without a beat, of a process that is stopped
PAGE_S = 60.0  # for the page that they write
LINE_BYTES = 4096  # what a pipe takes as a whole or not at all (PIPE_BUF)


class Monitor:
    """The monitor process of this rank, until `close`. A monitor that has ended is not started again.

    Args:
        attempt_dir: where the page is written; None: there is no run, and what is known goes to the rank's stderr.
    """

    def __init__(self, attempt_dir: AttemptDir | None, world_size: int):
        folder = str(attempt_dir.path) if attempt_dir is not None else ""
        paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        reads, self._pipe = os.pipe()
        try:
            # subprocess would wait for the end of a pipe of its own, which a data worker that the main thread forks at this
            # moment holds open for as long as it lives: then nothing would watch this rank any more.
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", __name__, folder, str(world_size), str(os.getpid())],
                {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, reads, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsigmask={*IGNORED, *signal.pthread_sigmask(signal.SIG_BLOCK, ())},  # until it ignores them itself
                setsigdef=(signal.SIGPIPE,),
            )
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(reads)
        os.set_blocking(self._pipe, False)
        self._told: set[int] = set()

    def tell(self, beat: Beat, local_beats: Mapping[int, Beat]) -> None:
        """Send this rank's beat, and once the newest known ones of the other ranks of its node."""
        self._send(beat)
        for rank, local in list(local_beats.items()):
            if rank not in self._told:
                self._send(local)
                self._told.add(rank)

    def _send(self, beat: Beat) -> None:
        line = beat.text().encode() + b"\n"
        if len(line) <= LINE_BYTES:
            with contextlib.suppress(OSError):  # it is stopped, or was killed
                os.write(self._pipe, line)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a program may have waited for all of its children
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        os.close(self._pipe)


class _Heard:
    """What the monitor has heard of its rank.

    Args:
        pid: the rank's process.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self.beats: dict[int, Beat] = {}  # of this node's ranks, by rank
        self.own: Beat | None = None
        self.silent_s = 0.0  # in which this process could run
        self._clock = ActiveClock(time.monotonic())
        self._since = 0.0
        self._rest = b""

    def read(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for beat in filter(None, map(Beat.parse, lines)):
            self.beats[beat.rank] = beat
            if beat.pid == self.pid:
                self.own, self._since = beat, self._clock.seconds

    def look(self) -> None:
        self.silent_s = self._clock.look(time.monotonic()) - self._since

    def is_silent(self) -> bool:
        """Return whether the rank can say nothing itself."""
        if self.silent_s < STOPPED_S:
            return False
        its = process.stat(self.pid)
        return self.silent_s >= SILENT_S or (its is not None and its.state == "T")

    def begin_anew(self) -> None:
        self._since = self._clock.seconds


def is_overdue(beat: Beat, silent_s: float) -> bool:
    """Return whether a rank that is alone hangs.

    Args:
        beat: its last one.
        silent_s: seconds since that.
    """
    return silent_s >= MARGIN_S and beat.idle_s + silent_s >= beat.limit_s + MARGIN_S


def main(words: list[str]) -> None:
    """Watch the rank until it has ended.

    Args:
        words: folder of the attempt, or nothing; number of ranks; pid of the rank.
    """
    for descriptor in os.listdir("/proc/self/fd"):  # what libraries of the rank have let its children inherit
        if int(descriptor) > 2:
            with contextlib.suppress(OSError):
                os.close(int(descriptor))
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    folder, world_size, pid = words
    attempt_dir = AttemptDir(Path(folder)) if folder else None
    heard, born = _Heard(int(pid)), process.born(int(pid))
    inputs: list[int] = [0]
    # Its descriptor is readable when it has ended; from Linux 5.3 on.
    with contextlib.suppress(OSError, AttributeError):
        inputs.append(os.pidfd_open(int(pid)))
    while born is not None and process.born(int(pid)) == born:
        ready, _, _ = select.select(inputs, [], [], LOOK_EVERY_S)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            heard.read(data)
            time.sleep(0.1)  # a rank that were to send without end
        heard.look()
        if heard.own is None:
            continue
        if world_size == "1" and is_overdue(heard.own, heard.silent_s):
            _end_alone(attempt_dir, heard)
        elif world_size != "1" and attempt_dir is not None and heard.is_silent():
            _help_others(attempt_dir, heard)


def _end_alone(attempt_dir: AttemptDir | None, heard: _Heard) -> None:
    """Write the page on the rank, which is the only one, and end it, unless a debugger has stopped it."""
    from slurmtrain.runtime.watchdog import report

    beat, known = heard.own, report.look_at_node(heard.beats, attempt_dir)
    assert beat is not None
    if known.states[beat.rank] == "t":
        heard.begin_anew()
        return
    if attempt_dir is None:
        absent = report.find_absent({}, 1, {beat.rank: beat.node}, {}, [known])
        _say(heard.pid, f"slurmtrain: hung: {report.sentence_of(absent, {}, 1)}")
    else:
        try:
            known.write(attempt_dir)
            sentence = report.write_report(attempt_dir, 1, {beat.rank: beat.node})
        except OSError as error:
            sentence = f"(the page cannot be written: {error})"
        _say(heard.pid, f"slurmtrain: hung: {sentence}; see {attempt_dir.hang_page}")
    _end(heard)


def _help_others(attempt_dir: AttemptDir, heard: _Heard) -> None:
    """Tell the live ranks of other nodes, if they have found a hang, what became of those here, and end these."""
    found = attempt_dir.hang_reports()
    if not (found or attempt_dir.hang_page.exists()) or any(rank in found for rank in heard.beats):
        return  # a live rank of this node does it
    from slurmtrain.runtime.watchdog import report

    with contextlib.suppress(OSError):
        report.look_at_node(heard.beats, attempt_dir).write(attempt_dir)
    until = time.monotonic() + PAGE_S
    while not attempt_dir.hang_page.exists() and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
    _end(heard)


def _end(heard: _Heard) -> NoReturn:
    """End the ranks of this node, which cannot end themselves, and this process."""
    from slurmtrain.runtime.watchdog import evidence

    for rank, beat in heard.beats.items():
        if evidence.kill_tree(beat.pid, beat.born, spared=os.getpid()):
            _say(heard.pid, f"slurmtrain: ended rank {rank} (pid {beat.pid}), which cannot end itself")
    os._exit(0)


def _say(pid: int, text: str) -> None:
    """Write to the stderr of the rank."""
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        try:
            os.write(descriptor, (text.rstrip() + "\n").encode(errors="replace"))
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
