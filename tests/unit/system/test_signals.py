"""Stop signals, in processes of their own: seen at once, harmless to children, and never lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import ClassVar

import pytest


class Process:
    """A Python program that talks in lines."""

    started: ClassVar[list[Process]] = []

    def __init__(self, code: str, blocked: set[signal.Signals] | None = None):
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, blocked)) if blocked else None,
        )
        self.pid = self._process.pid
        self.started.append(self)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        return self._process.wait(timeout=60)

    def clean_up(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start() -> Iterator[type[Process]]:
    yield Process
    while Process.started:
        Process.started.pop().clean_up()


BLOCKED_IN_C = """
    import hashlib, threading, time
    from slurmtrain.system.signals import install_signal_handlers
    stop = install_signal_handlers()
    working = True
    clock = time.pthread_getcpuclockid(threading.main_thread().ident)
    def report():
        while time.clock_gettime(clock) < in_call:
            time.sleep(0.01)
        print("in the call")
        stop.wait()
        print(stop.first.cause, working)
    in_call = time.clock_gettime(clock) + 0.05
    reporter = threading.Thread(target=report)
    reporter.start()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 600_000_000)  # one C call, without the GIL, for minutes
    working = False
    reporter.join()
"""


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_seen_at_once_while_the_main_thread_is_in_a_long_c_call(
    number: signal.Signals, start: type[Process]
) -> None:
    process = start(BLOCKED_IN_C)
    assert process.line() == "in the call"
    process.kill(number)
    assert process.line() == f"{number.name} True"


def test_the_first_cause_is_kept_and_nothing_is_raised(start: type[Process]) -> None:
    process = start(
        """
        import sys
        from slurmtrain.system.signals import StopCause, install_signal_handlers
        stop = install_signal_handlers()
        assert install_signal_handlers() is stop and not stop.requested
        request = stop.request
        def tell(cause):
            request(cause)
            print(cause, stop.first.cause)
        stop.request = tell
        print("ready")
        sys.stdin.readline()
        tell(StopCause.DEADLINE)
        """
    )
    process.line()
    process.kill(signal.SIGUSR2)
    assert process.line() == "SIGUSR2 SIGUSR2"
    process.kill(signal.SIGTERM)
    assert process.line() == "SIGTERM SIGUSR2"
    process.say("go on")
    assert process.line() == "deadline SIGUSR2"
    assert process.end() == 0


@pytest.mark.parametrize("how", ["subprocess", "spawn", "forkserver"])
def test_a_spawned_worker_survives_usr2(how: str, start: type[Process]) -> None:
    process = start(
        f"""
        import multiprocessing, os, signal, subprocess, sys
        from slurmtrain.system.signals import install_signal_handlers
        stop = install_signal_handlers()
        work = "import time; print('up', flush=True); time.sleep(60)"
        if {how!r} == "subprocess":
            worker = subprocess.Popen([sys.executable, "-c", work])
        else:
            worker = multiprocessing.get_context({how!r}).Process(target=exec, args=(work,))
            worker.start()
        sys.stdin.readline()
        os.kill(worker.pid, signal.SIGUSR2)
        worker.terminate()
        ended_by = -worker.wait() if {how!r} == "subprocess" else (worker.join(), -worker.exitcode)[1]
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait()
        print(signal.Signals(ended_by).name, stop.first.cause)
        """
    )
    assert process.line() == "up"
    process.say("go on")
    assert process.line() == "SIGTERM SIGINT"
    assert process.end() == 0


def test_signals_on_the_way_out_do_not_change_the_exit_code(start: type[Process]) -> None:
    process = start(
        """
        import sys
        from slurmtrain.system.signals import install_signal_handlers, ignore_further_stop_signals
        install_signal_handlers()
        ignore_further_stop_signals()
        print("leaving")
        while (line := sys.stdin.readline()) != "go\\n":
            print(line, end="")
        sys.exit(75)
        """
    )
    process.line()
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGINT):
        process.kill(number)
        process.say(f"after {number}")
        assert process.line() == f"after {number}"
    process.say("go")
    assert process.end() == 75
