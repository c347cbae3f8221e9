"""How a rank leaves: what it records of the error that ends it, and its exit code, also where nothing can be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.checkpoint.errors import CheckpointMismatchError, LostPeersError, SupersededError
from slurmtrain.errors import DivergedError, EnvironmentMismatchError
from slurmtrain.rank.addresses import RendezvousError
from slurmtrain.rank.leaving import failure_of
from slurmtrain.runs.failures import Failure, Failures
from tests.support.local_runs import clean_environment
from tests.support.runs import submitted_run

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.3]:4321"


DIED_IN_A_WORKER = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback:\n  File\nKeyError: 'x'\n"
ERRORS: list[tuple[BaseException, Failure]] = [
    (ValueError("boom"), Failure(1, "ValueError: boom")),
    (RuntimeError(GLOO), Failure(1, f"RuntimeError: {GLOO}", because_of_peer=True)),
    (ValueError("Broken pipe"), Failure(1, "ValueError: Broken pipe")),  # of the user's own
    (LostPeersError("rank 3 has gone"), Failure(1, "rank 3 has gone", because_of_peer=True)),
    (RendezvousError("no rank 2", because_of_peer=True), Failure(1, "no rank 2", because_of_peer=True)),
    (RendezvousError("no port is free"), Failure(1, "no port is free")),
    (SupersededError("no"), Failure(1, "no", superseded=True)),
    (CheckpointMismatchError("another model"), Failure(78, "another model", on_any_node=True)),
    (DivergedError("nan"), Failure(78, "nan", diverged=True)),
    (EnvironmentMismatchError("no GPU", nodes=("n2",)), Failure(78, "no GPU", bad_nodes=("n2",))),
    (EnvironmentMismatchError("no GPU", told_all=True), Failure(78, "no GPU", because_of_peer=True)),
    (
        RuntimeError(DIED_IN_A_WORKER),
        Failure(1, "RuntimeError: Caught KeyError in DataLoader worker process 0. ... KeyError: 'x'"),
    ),
    (KeyboardInterrupt(), Failure(1, "KeyboardInterrupt")),
]


@pytest.mark.parametrize(("error", "failure"), ERRORS, ids=[type(row[0]).__name__ for row in ERRORS])
def test_what_a_rank_records_of_the_error_that_ends_it(error: BaseException, failure: Failure) -> None:
    assert failure_of(error, rank=2) == failure
    told_all = isinstance(error, EnvironmentMismatchError) and error.told_all
    assert failure_of(error, rank=0).because_of_peer == (failure.because_of_peer and not told_all)


# A loop of the user's own that fails when its disk does, or whose last save is lost when its checkpoints are gone.
LOOP = """
import shutil, sys
import torch
import slurmtrain
from slurmtrain.errors import DivergedError

run = slurmtrain.init(device="cpu")
if sys.argv[1] == "fails":
    shutil.rmtree(run.directory / "attempts")
    raise DivergedError("the loss is not finite")
checkpointer = slurmtrain.Checkpointer()
shutil.rmtree(run.directory / "checkpoints")
(run.directory / "checkpoints").write_text("a file where a folder should be")
checkpointer.save(1, model=torch.nn.Linear(2, 2))  # in the background
print("the last line")
"""


@pytest.mark.parametrize(("what", "code", "recorded"), [("fails", 78, 0), ("loses its last save", 1, 1)])
def test_a_loop_of_the_users_own_leaves_with_the_code_of_its_failure_whatever_can_be_recorded(
    project: Path, what: str, code: int, recorded: int
) -> None:
    run = submitted_run(project, "cluster=local", "job=command", "job.command=true")
    run.new_attempt()
    environment = {**clean_environment(), "SLURMTRAIN_RUN_DIR": str(run.path), "SLURMTRAIN_ATTEMPT": "1"}
    environment["PYTHONUNBUFFERED"] = ""  # its last line is in a buffer when it leaves
    words = [sys.executable, "-c", LOOP, what]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == code, done.stderr
    assert ("the last line" in done.stdout) == (what != "fails")
    assert len(Failures.read(run.attempt(1)).ranks) == recorded


# `slurmtrain.init` and the public Checkpointer: what loading them does, and what they say when called out of turn.


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
