"""Work in several processes gives what one process gives, whatever becomes of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import active_children
from pathlib import Path

import pytest

from slurmtrain.system.chunks import work_in_chunks

ME = os.getpid()


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))


def doubled(items: Sequence[int]) -> tuple[int, list[int]]:
    return os.getpid(), [2 * item for item in items]


def killed(items: Sequence[int]) -> tuple[int, list[int]]:
    if os.getpid() != ME:
        os.kill(os.getpid(), signal.SIGKILL)
    return doubled(items)


def refused(items: Sequence[int]) -> tuple[int, list[int]]:
    raise ValueError(f"no {items[0]}")


def test_the_results_are_in_the_order_of_the_items() -> None:
    parts = work_in_chunks(doubled, range(1000), at_least=10)
    assert [item for _, part in parts for item in part] == list(range(0, 2000, 2))
    assert ME not in {pid for pid, _ in parts} and len(parts) == 16


@pytest.mark.parametrize("count", [0, 1, 19])
def test_of_few_items_no_process_is_started(count: int) -> None:
    assert work_in_chunks(doubled, range(count), at_least=10) == [doubled(range(count))]


def test_a_killed_process_leaves_the_work_to_this_one() -> None:
    assert work_in_chunks(killed, range(40), at_least=10) == [doubled(range(40))]
    assert not active_children()


def test_where_no_second_process_can_be_started_none_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, started = os.fork, list[int]()

    def limited() -> int:
        if started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(0)
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    assert work_in_chunks(doubled, range(40), at_least=10) == [doubled(range(40))]
    for child in active_children():  # they were killed
        child.join(20)
    assert not active_children()


def test_an_error_of_the_work_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no 0"):
        work_in_chunks(refused, range(40), at_least=10)


WAITING = """
import os, sys, time
from slurmtrain.system.chunks import work_in_chunks
os.sched_getaffinity = lambda pid: set(range(4))
def wait(items):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    time.sleep(600)
work_in_chunks(wait, range(40), at_least=10)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_processes_end_with_the_one_that_started_them(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(os.listdir(tmp_path)) < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        # A terminal tells all of its processes of Ctrl-C; a kill is for one.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=60)  # which waits until no child has the pipe any more
    assert process.returncode == -number
    assert said.count("Traceback") == (number == signal.SIGINT)
