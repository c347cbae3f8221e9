from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slurmtrain.system import process
from tests.support.children import children


def test_a_zombie_lives_no_more() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.lives(child.pid) and process.born(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected it
    assert not process.lives(child.pid) and process.born(child.pid) is None
    child.communicate()
    assert not process.lives(child.pid)


def test_processes_that_are_there_live_and_numbers_of_none_do_not() -> None:
    assert process.lives(os.getpid()) and process.lives(1) and not process.lives(2**40)


def test_children_are_told_in_the_order_of_their_start_whatever_they_call_themselves(tmp_path: Path) -> None:
    odd = tmp_path / "a ) S 1 ("
    odd.symlink_to(sys.executable)
    started = [
        subprocess.Popen([program, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        for program in (odd, sys.executable, odd)
    ]
    try:
        assert [pid for pid in children(os.getpid()) if pid in {child.pid for child in started}] == [
            child.pid for child in started
        ]
        assert {process.stats()[child.pid].parent for child in started} == {os.getpid()}
    finally:
        for child in started:
            child.communicate()
