"""Ranks that wait for the next start in a job: what they load meanwhile, and what ends them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import freeze
from slurmtrain.runs.run_dir import RunDir

# As `train RUN_DIR --standby` begins, with another module in the place of PyTorch.
WAITING = """
import os, sys
from pathlib import Path
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import standby
from slurmtrain.system import signals
standby._modules = lambda config: [sys.argv[2]]
standby.await_attempt(RunDir(Path(sys.argv[1])), signals.install_signal_handlers())
print("attempt", os.environ["SLURMTRAIN_ATTEMPT"], flush=True)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "attempts" / "0002").mkdir(parents=True)
    run_dir = RunDir(tmp_path)
    run_dir.config_file.write_text(freeze(compose(["cluster=sandbox", "requeue.standby_ranks=true"])))
    return run_dir


@pytest.fixture
def waiting(run_dir: RunDir) -> Iterator[subprocess.Popen[str]]:
    """A rank that has loaded all, and waits."""
    with start(run_dir, "colorsys") as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process


def start(run_dir: RunDir, module: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAITING, str(run_dir.path), module]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_rank_that_waits_is_one_of_the_attempt_that_it_is_told_and_writes_to_its_log(
    run_dir: RunDir, waiting: subprocess.Popen[str]
) -> None:
    assert waiting.communicate("2\n", timeout=60) == ("", "")
    assert waiting.returncode == 0
    assert run_dir.attempt(2).rank_log(0).read_text() == "attempt 2\n"


def test_a_rank_that_waits_leaves_at_a_signal_to_stop(waiting: subprocess.Popen[str]) -> None:
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(timeout=60) == 75


def test_a_rank_that_waits_leaves_at_the_end_of_its_input(waiting: subprocess.Popen[str]) -> None:
    waiting.communicate(timeout=60)
    assert waiting.returncode == 75


def test_a_rank_that_cannot_load_what_it_needs_says_so_and_is_not_ready(run_dir: RunDir) -> None:
    with start(run_dir, "no_such_module") as process:
        assert process.wait(timeout=60) == 1
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read() == "" and "no_such_module" in process.stderr.read()
