"""Processes of a trial: forks of a process that has torch and a single thread, so that one costs milliseconds.

A lane does one trial after another. It is the reaper of all that its trials start, however deep: what is still running
when a trial is over is found, ended and held against it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pickle
import random
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.children import children

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, CLONE_NEWNS, MS_REC_PRIVATE = 1, 36, 0x20000, 0x4000 | 1 << 18
LIBC = ctypes.CDLL(None, use_errno=True)
LEFTOVER_S = 60.0  # a data worker looks for its parent every 5 s
HANG_S = 180.0  # nothing here takes a tenth of it, even on a loaded machine


class UnexplainedError(Exception):
    """The trial cannot be one of the outcomes that are allowed: a hang, a traceback, something left over."""


class Child:
    """A forked process. What it tells is read from a pipe, and what it prints lies in `log`."""

    def __init__(self, log: Path, function: Callable[..., Any], *args: Any):
        self.log = log
        log.touch()
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _be_child(writer, log, function, args)
        os.close(writer)
        self._pipe = os.fdopen(reader, "rb")
        self.status: int | None = None

    def next(self, timeout_s: float = HANG_S) -> Any:
        """The next thing that it tells; None when it has ended without another word."""
        return (self._next(timeout_s) or (None,))[0]

    def _next(self, timeout_s: float) -> tuple[Any] | None:
        ready, _, _ = select.select([self._pipe], [], [], timeout_s)
        if not ready:
            raise UnexplainedError(f"{self.log.stem} says nothing for {timeout_s} s\n{self.output()}")
        try:
            message: tuple[Any] = pickle.load(self._pipe)
            return message
        except (EOFError, pickle.UnpicklingError):  # killed, maybe in the middle of a word
            return None

    def rest(self, timeout_s: float = HANG_S) -> list[Any]:
        """All that it tells until it ends."""
        deadline = time.monotonic() + timeout_s
        messages = []
        while (message := self._next(max(0.0, deadline - time.monotonic()))) is not None:
            messages.append(message[0])
        self.wait(timeout_s)
        return messages

    def result(self, timeout_s: float = HANG_S) -> Any:
        """What its function returned."""
        messages = self.rest(timeout_s)
        if self.status != 0 or not messages:
            raise UnexplainedError(f"{self.log.stem} ended with {self.status}\n{self.output()}")
        return messages[-1]

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.status is None:
                os.kill(self.pid, number)

    def wait(self, timeout_s: float = HANG_S) -> int:
        """Its exit status, negative for a signal."""
        deadline = time.monotonic() + timeout_s
        while not self.ended():
            if time.monotonic() > deadline:
                raise UnexplainedError(f"{self.log.stem} does not end in {timeout_s} s\n{self.output()}")
            time.sleep(0.002)
        assert self.status is not None
        return self.status

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()
        self._pipe.close()


_teller: int | None = None


def tell(message: Any) -> None:
    """In a child: say something to the lane at once."""
    assert _teller is not None
    os.write(_teller, pickle.dumps((message,)))


def _be_child(writer: int, log: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _teller
    code = 1
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _teller = writer
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        tell(function(*args))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


class Lane:
    """Does trials, one after another.

    Attributes:
        shared: for what the trials of all rows share.
        directory: the current trial's own, empty at its start.
        random: seeded; the only source of chance.
        memory: what the row was told, and what the lane remembers (references, measured durations).
    """

    def __init__(self, base: Path, seed: int):
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.shared, self._base, self._number = base.parent.parent, base, 0
        self.random = random.Random(seed)
        self.memory: dict[Any, Any] = {}
        self.children: list[Child] = []
        self._groups = 0
        self._private = False

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """An empty directory; at the end everything that was started is ended."""
        self._number += 1
        self.directory = self._base / f"trial-{self._number}"
        self.directory.mkdir(parents=True)
        try:
            yield
            self._expect_no_leftovers()
        finally:
            self._reap()
            shutil.rmtree(self.directory, ignore_errors=True)

    def fork(self, function: Callable[..., Any], *args: Any, name: str = "process") -> Child:
        self.children.append(Child(self.directory / f"{name}-{len(self.children)}.log", function, *args))
        return self.children[-1]

    def ranks(self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Child]:
        """`size` processes that meet in a gloo group with this timeout; each calls function(rank, group, *args)."""
        self._groups += 1
        store = self.directory / f"store-{self._groups}"
        return [
            self.fork(_be_rank, store, rank, size, timeout_s, function, args, name=f"rank{rank}")
            for rank in range(size)
        ]

    def remember(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` has returned, which is called once for all lanes of all rows."""
        if key not in self.memory:
            kept = self.shared / f"{key}.pickle"
            with open(self.shared / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not kept.exists():
                    kept.write_bytes(pickle.dumps(make()))
                self.memory[key] = pickle.loads(kept.read_bytes())
        return self.memory[key]

    def private_mounts(self) -> bool:
        """From now on, mounts of this lane are seen by nobody else, and gone with it. False without the right to mount."""
        if not self._private and os.geteuid() == 0 and LIBC.unshare(CLONE_NEWNS) == 0:
            self._private = LIBC.mount(b"none", b"/", None, MS_REC_PRIVATE, None) == 0
        return self._private

    def _expect_no_leftovers(self) -> None:
        """All children were waited for by the trial; what is left are processes that a rank left behind."""
        for child in self.children:
            child.wait()
            if "Traceback" in child.output():
                raise UnexplainedError(f"{child.log.stem} shows a traceback\n{child.output()}")
        deadline = time.monotonic() + LEFTOVER_S
        while _any_child():
            if time.monotonic() > deadline:
                raise UnexplainedError("a process is left over")
            time.sleep(0.005)

    def _reap(self) -> None:
        for child in self.children:
            child.close()
        self.children.clear()
        while _any_child():
            for pid in children(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


def _any_child() -> bool:
    """Is one still running? Collects those that are not."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _be_rank(
    store: Path, rank: int, size: int, timeout_s: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    if size == 1:
        return function(rank, None, *args)
    at_start = timedelta(seconds=HANG_S)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=at_start
    )
    return function(rank, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)), *args)
