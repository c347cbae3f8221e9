from __future__ import annotations

import os
import subprocess
import sys

from slurmtrain import process


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
