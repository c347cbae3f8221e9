"""Work in several processes gives what one process gives, whatever becomes of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from slurmtrain.system.chunks import work_in_chunks
from tests.support.children import children

ME = os.getpid()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(children(ME))
    yield
    assert set(children(ME)) <= before


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))


def doubled(items: Sequence[int]) -> tuple[int, list[int]]:
    return os.getpid(), [2 * item for item in items]


def together(folder: Path, items: Sequence[int]) -> tuple[int, list[int]]:
    """Go on when four processes have begun, so that each of them gets some."""
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(os.listdir(folder)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return doubled(items)


def killed(items: Sequence[int]) -> tuple[int, list[int]]:
    if os.getpid() != ME:
        os.kill(os.getpid(), signal.SIGKILL)
    return doubled(items)


def refused(items: Sequence[int]) -> tuple[int, list[int]]:
    raise ValueError(f"no {items[0]}")


def everything(parts: Sequence[tuple[int, list[int]]]) -> list[int]:
    return [item for _, part in parts for item in part]


def test_the_results_are_in_the_order_of_the_items(tmp_path: Path) -> None:
    parts = work_in_chunks(partial(together, tmp_path), range(1000), at_least=10)
    assert everything(parts) == list(range(0, 2000, 2))
    assert len(parts) == 16 and ME in (pids := {pid for pid, _ in parts}) and len(pids) == 4


@pytest.mark.parametrize("count", [0, 1, 19])
def test_of_few_items_no_process_is_started(count: int) -> None:
    assert work_in_chunks(doubled, range(count), at_least=10) == [doubled(range(count))]


def test_what_killed_processes_leave_this_one_does() -> None:
    parts = work_in_chunks(killed, range(40), at_least=10)
    assert everything(parts) == list(range(0, 80, 2)) and {pid for pid, _ in parts} == {ME}


def unsendable(items: Sequence[int]) -> tuple[int, list[int], Callable[[], None]]:
    return (*doubled(items), lambda: None)


def test_a_result_that_cannot_be_sent_is_made_here() -> None:
    parts = [(pid, part) for pid, part, _ in work_in_chunks(unsendable, range(40), at_least=10)]
    assert everything(parts) == list(range(0, 80, 2)) and {pid for pid, _ in parts} == {ME}


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_no_further_process_can_be_started_the_others_do_all(
    monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    fork, started = os.fork, list[int]()

    def limited() -> int:
        if len(started) == allowed:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(0)
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    assert everything(work_in_chunks(doubled, range(40), at_least=10)) == list(range(0, 80, 2))


def test_an_error_of_the_work_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no "):
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
