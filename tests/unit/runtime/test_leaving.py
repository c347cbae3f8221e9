"""How a rank leaves: what it records of its failure, and its exit code, also where nothing can be written any more."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmtrain.config.compose import compose
from slurmtrain.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DivergedError,
    LostPeersError,
    PreflightError,
    RendezvousError,
    SlurmtrainError,
    SupersededError,
    UnreadableRecordError,
)
from slurmtrain.runs import attempts
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.failures import Failure, Failures
from slurmtrain.runs.reasons import LastWord
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import api, attempt_context, main
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.jobs import train
from slurmtrain.runtime.leaving import failure_of, timed_out
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.signals import StopFlag
from tests.support.local_runs import clean_environment

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.3]:4321"
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("boom"), Failure(1, "ValueError: boom")),
        (RuntimeError(GLOO), Failure(1, f"RuntimeError: {GLOO}", because_of_peer=True)),
        (ValueError("Broken pipe"), Failure(1, "ValueError: Broken pipe")),  # of the user's own
        (LostPeersError("rank 3 has gone"), Failure(1, "rank 3 has gone", because_of_peer=True)),
        (
            RendezvousError("rank 2 did not come", because_of_peer=True),
            Failure(1, "rank 2 did not come", because_of_peer=True),
        ),
        (RendezvousError("no port is free"), Failure(1, "no port is free")),
        (SupersededError("no"), Failure(1, "no", superseded=True)),
        (CheckpointMismatchError("another model"), Failure(78, "another model", on_any_node=True)),
        (DivergedError("nan"), Failure(78, "nan", diverged=True)),
        (PreflightError("no GPU", nodes=("n2",)), Failure(78, "no GPU", bad_nodes=("n2",))),
        (PreflightError("no GPU", told_all=True), Failure(78, "no GPU", because_of_peer=True)),
        (
            RuntimeError(
                "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback:\n  File\nKeyError: 'x'\n"
            ),
            Failure(1, "RuntimeError: Caught KeyError in DataLoader worker process 0. ... KeyError: 'x'"),
        ),
        (KeyboardInterrupt(), Failure(1, "KeyboardInterrupt")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_rank_records_of_the_error_that_ends_it(error: BaseException, failure: Failure) -> None:
    assert failure_of(error, rank=2) == failure
    told_all = isinstance(error, PreflightError) and error.told_all
    assert failure_of(error, rank=0).because_of_peer == (failure.because_of_peer and not told_all)


def test_an_error_that_says_that_a_rank_did_not_come_in_time_is_known_by_its_words() -> None:
    with pytest.raises(RuntimeError) as waited:
        dist.TCPStore("127.0.0.1", 0, None, True).wait(["a key that nobody sets"], timedelta(milliseconds=1))
    assert timed_out(waited.value)
    assert timed_out(RuntimeError("[/pytorch/third_party/gloo/gloo/context.cc:1] Timed out waiting 1800000ms for recv"))
    assert not timed_out(RuntimeError(GLOO)) and not timed_out(TimeoutError("Timed out waiting"))


@pytest.mark.parametrize("code", [0, 75])
def test_a_full_disk_below_a_ranks_log_does_not_change_its_exit_code(code: int) -> None:
    script = f"from slurmtrain.runtime.leaving import leave; print('the last words', end=''); leave({code})"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**clean_environment(), "PYTHONUNBUFFERED": ""},
            stdout=full,
            stderr=full,
            timeout=60,
            check=False,
        )
    assert done.returncode == code


class Left(BaseException):
    """In place of the end of the process: the exit code."""


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Left(code)

    for module in (api, main):
        monkeypatch.setattr(module, "leave", leave)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "train")


class Deaf:
    """A watchdog, whose ranks cannot be told anything, and what it was asked to tell them."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def close(self) -> None:
        pass

    def failed(self, *, lost_a_peer: bool = False) -> None:
        self.told.append(lost_a_peer)
        raise ConnectionRefusedError


class Losing:
    """A Checkpointer that has lost its last save, and cannot be closed."""

    lost = CheckpointError("the save of step 7 was lost")

    def close(self, patience_s: float) -> None:
        raise RuntimeError("the group is gone")


def session_with(monkeypatch: pytest.MonkeyPatch, attempt_dir: AttemptDir, *checkpointers: Losing) -> Deaf:
    """Let the script be rank 3 of a run, with a watchdog, which is returned."""
    distributed = DistributedContext(Environment("local", rank=3, world_size=4), torch.device("cpu"))
    context: Any = SimpleNamespace(attempt_dir=attempt_dir)
    watchdog = Deaf()
    session: Any = api.Session(context, distributed, watchdog=watchdog)  # type: ignore[arg-type]
    session.checkpointers = checkpointers
    monkeypatch.setattr(api, "session", session)
    monkeypatch.setenv("RANK", "3")
    return watchdog


@pytest.mark.usefixtures("leaves")
@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize(
    ("error", "code", "peer"),
    [(RuntimeError(GLOO), 1, True), (DivergedError("nan"), 78, False), (LostPeersError("gone"), 1, True)],
    ids=["closed by a peer", "wrong config", "lost in a save"],
)
def test_an_own_loop_records_its_failure_as_a_rank_of_ours_does_and_leaves_with_its_code_if_it_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, code: int, peer: bool, writable: bool
) -> None:
    attempt_dir = AttemptDir(tmp_path if writable else tmp_path / "gone")
    watchdog = session_with(monkeypatch, attempt_dir, Losing())
    with pytest.raises(Left) as left:
        api._record_and_show(type(error), error, None)
    assert left.value.args == (code,) and watchdog.told == [peer]
    assert [each.failure for each in Failures.read(attempt_dir).ranks] == ([failure_of(error, 3)] if writable else [])


@pytest.mark.usefixtures("leaves")
@pytest.mark.parametrize("writable", [True, False])
def test_a_script_whose_last_save_was_lost_never_ends_as_if_it_had_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writable: bool
) -> None:
    attempt_dir = AttemptDir(tmp_path if writable else tmp_path / "gone")
    session_with(monkeypatch, attempt_dir, Losing())
    with pytest.raises(Left, match="1"):
        api._let_go()
    assert [each.failure.sentence for each in Failures.read(attempt_dir).ranks] == [Losing.lost.message] * writable


@pytest.mark.usefixtures("leaves")
def test_a_rank_started_by_hand_leaves_with_its_code_although_its_attempt_cannot_be_completed(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    context = AttemptContext(run, run.new_attempt(), supervised=False)  # which has no config.yaml
    watchdog: Any = Deaf()
    with pytest.raises(Left, match="78"), caplog.at_level(logging.WARNING):
        main._fail(DivergedError("nan"), context, Environment("single"), watchdog)
    assert [each.failure.sentence for each in Failures.read(context.attempt_dir).ranks] == ["nan"]
    assert "cannot complete the record of the attempt" in caplog.text and watchdog.told == [False]


# The last word.


@pytest.mark.parametrize(
    ("said", "fails", "pauses"),
    [
        (LastWord.FINISHED, 2, attempt_context.LAST_WORD_PAUSES_S[:2]),
        (LastWord.FINISHED, 99, attempt_context.LAST_WORD_PAUSES_S),
        (LastWord.STOPPED, 1, ()),  # its exit code says so, too
    ],
)
@pytest.mark.parametrize("error", [FULL, UnreadableRecordError("attempt.json is not a regular file")])
def test_that_a_run_has_finished_is_recorded_as_soon_as_that_is_possible(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    said: LastWord,
    fails: int,
    pauses: tuple[float, ...],
    error: OSError | SlurmtrainError,
) -> None:
    context = AttemptContext(run, run.new_attempt(), supervised=True)
    real, failures = attempts.write_attempt, [error] * fails

    def write(run_dir: RunDir, attempt: Attempt) -> None:
        if failures:
            raise failures.pop()
        real(run_dir, attempt)

    monkeypatch.setattr(attempts, "write_attempt", write)
    paused: list[float] = []
    attempt_context.record_last_word(context, said, sleep=paused.append, last_step=7)
    assert tuple(paused) == pauses
    recorded = attempts.read_attempt(run, 1)
    assert (recorded.said, recorded.last_step) == ((said, 7) if fails == 2 else (None, None))


def test_a_training_that_has_committed_its_last_step_has_finished_although_nothing_more_can_be_written(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise FULL

    monkeypatch.setattr(attempts, "write_attempt", full)
    monkeypatch.setattr(RunDir, "event", full)
    monkeypatch.setattr(attempt_context, "LAST_WORD_PAUSES_S", ())
    done = SimpleNamespace(finished=True, step=3, saved=None)
    monkeypatch.setattr(train, "build_trainer", lambda *_, **__: SimpleNamespace(fit=lambda: done))
    context = AttemptContext(run, run.new_attempt(), supervised=True)
    distributed = DistributedContext(Environment("single"), torch.device("cpu"))
    code = main._train(compose([]), distributed, context, StopFlag(), Timeline(None), None, None)
    assert code == 0
