"""`slurmtrain.init` and the public Checkpointer: what loading them does, and what they say when called out of turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.local_runs import clean_environment

SCRIPT = """
import signal, sys
import slurmtrain

def said(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)

slurmtrain.init, slurmtrain.should_stop
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "loading it has changed how TERM is handled"
assert "torch" not in sys.modules
for early in (slurmtrain.should_stop, slurmtrain.Checkpointer, slurmtrain.exit_for_requeue):
    assert said(early) == "call slurmtrain.init() first", early
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
slurmtrain.init(device="cpu")
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
assert not slurmtrain.should_stop()
assert "was already called" in said(slurmtrain.init)
assert not slurmtrain.should_stop()
signal.raise_signal(signal.SIGTERM)
while not slurmtrain.should_stop():
    pass
"""


def test_signals_are_handled_from_init_on_and_a_second_init_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_a_program_of_one_process_looks_for_a_stop_and_leaves_without_init_and_torch(tmp_path: Path) -> None:
    script = """
import os, signal, sys
import slurmtrain

assert not slurmtrain.stop_requested()
os.kill(os.getpid(), signal.SIGTERM)
while not slurmtrain.stop_requested():
    pass
assert "torch" not in sys.modules
slurmtrain.exit_for_requeue()
"""
    words = [sys.executable, "-c", script]
    assert subprocess.run(words, cwd=tmp_path, env=clean_environment(), timeout=60, check=False).returncode == 75
