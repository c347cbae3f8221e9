"""Stop signals: noticed within milliseconds, acted on only by the step loop.

A Python signal handler runs only between bytecodes of the main thread: while that waits in a collective for a slow
peer, a handler is seconds late. `signal.set_wakeup_fd` writes the signal's number from the C handler at once, and a
thread reads it. Nothing else happens here: no exception is raised, nothing is saved, no process exits.

Call `install_signal_handlers` before torch is imported: threads that exist already would not inherit the blocked mask.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from enum import StrEnum
from typing import NamedTuple  # dataclasses would load twice as long, before Ctrl-C ends a command silently

# USR2 is the early warning (USR1 is taken by NCCL). TERM is what a preemption sends where the site did not set
# send_user_signal, and what scancel and requeue send.
SLURM_STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
STOP_SIGNALS = (*SLURM_STOP_SIGNALS, signal.SIGINT)  # INT is Ctrl-C of a person


class StopCause(StrEnum):
    """The reason why a rank was told to stop, as attempt.json records it."""

    SIGUSR2 = "SIGUSR2"
    SIGTERM = "SIGTERM"
    SIGINT = "SIGINT"
    DEADLINE = "deadline"  # the time limit is near
    OTHER_RANK = "another rank"  # which was told to
    STOP_FILE = "the file stop"
    PROGRAM = "the program"  # of the user's own, which an engine has told in its own way
    PREEMPTED = "a preemption"  # before the ranks could hear its signal
    ENDED = "the end of the job"  # which SLURM has ended before

    @property
    def is_signal(self) -> bool:
        return self in (StopCause.SIGUSR2, StopCause.SIGTERM, StopCause.SIGINT)


class StopRequest(NamedTuple):
    """The reason why this rank wants to stop, as far as it can know itself."""

    cause: StopCause
    time: float  # unix time, seconds
    moment: float  # of time.monotonic


class StopDuringStartError(Exception):
    """A stop was requested while a rank waited for others, before its work has begun."""


class StopFlag:
    """The flags of what was requested of this rank. Get the process's only instance from `install_signal_handlers`.

    Attributes:
        requested: a stop was requested.
        first: the first reason for it.
        save_asked, profile_asked: somebody wants a checkpoint, or a profile of the next steps.
    """

    def __init__(self) -> None:
        self.requested = False
        self.first: StopRequest | None = None
        self.save_asked, self.profile_asked = threading.Event(), threading.Event()
        self._event = threading.Event()
        self._interrupts = 0

    def request(self, cause: StopCause) -> None:
        """Request a stop for another reason than a signal. The first cause is kept."""
        if self.first is None:
            self.first, self.requested = StopRequest(cause, time.time(), time.monotonic()), True
            self._event.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a stop is requested; return False if none was after `timeout_s` seconds."""
        return self._event.wait(timeout_s)

    def _install(self) -> None:
        import multiprocessing  # here: a verb of the command line needs none of these
        import socket
        from multiprocessing import forkserver

        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # A new process group or daemon must not be told of signals through our pipe.
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._pipe = (reader, writer)
        for number in STOP_SIGNALS:
            signal.signal(number, _seen_elsewhere)
        # Children that are exec'ed (spawned data workers, subprocesses) inherit the mask, and so survive USR2. The
        # thread below is the one place where it is not blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        threading.Thread(target=self._read, name="stop-signals", daemon=True).start()
        # A launcher may have blocked these until somebody listens (cluster=local does): they arrive now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        os.register_at_fork(after_in_child=_disarm_child)
        preloaded = getattr(forkserver._forkserver, "_preload_modules", ["__main__"])
        multiprocessing.set_forkserver_preload(["slurmtrain.rank.forkserver", *preloaded])

    def _read(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        reader = self._pipe[0]
        while True:
            for number in reader.recv(64):
                if number in STOP_SIGNALS:
                    self.request(StopCause(signal.Signals(number).name))
                if number == signal.SIGINT:
                    self._interrupts += 1
                    if self._interrupts > 1:  # a person who asks twice does not want to wait for a checkpoint
                        os._exit(128 + signal.SIGINT)


_armed: StopFlag | None = None


def install_signal_handlers() -> StopFlag:
    """Install the handlers, once per process; later calls return the same flag.

    Only the main thread can. Elsewhere (Ray Train calls its loop in a thread) signals stay with whoever has the main one.
    """
    global _armed
    if _armed is None:
        _armed = StopFlag()
        if threading.current_thread() is threading.main_thread():
            _armed._install()
    return _armed


def ignore_further_stop_signals() -> None:
    """Ignore stop signals from now on.

    So a second one during interpreter shutdown does not turn a clean exit into a kill.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _seen_elsewhere(number: int, frame: object) -> None:
    """Do nothing, since the reader thread gets the signal."""


def _disarm_child() -> None:
    # A forked child shares the pipe: its own signals (a pool that is terminated, say) would look like ours.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Ctrl-C where no code of a verb could handle it: while Python loads the verb, and after its end.

INTERRUPTED = 130  # what shells show for it


def leave_silently() -> None:
    """Let Ctrl-C end this process at once, unless it is ignored or has another handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, for the verb to handle."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
