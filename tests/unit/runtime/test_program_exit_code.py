"""What the end of a program of the user's own means: every exit code, told to stop or not, with and without a rule."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.failures import Failure, Failures, record_failure
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.jobs import command
from slurmtrain.runtime.jobs.command import run_command
from slurmtrain.runtime.jobs.launchers import ProcessEnd
from slurmtrain.runtime.jobs.program_exit_code import FinishedWhen, contract_code
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import descendants
from slurmtrain.system.signals import StopCause, StopFlag

ROWS = [
    # the program's own code, told to stop, job.finished_when, its file is there -> the contract's code
    (0, False, None, False, 0),
    (0, True, None, False, 75),
    (75, False, None, False, 75),
    (78, True, None, False, 78),
    (3, False, None, False, 3),
    (3, True, None, False, 75),
    (-15, True, None, False, 75),
    (-15, False, None, False, -15),
    (0, False, "done", False, 75),
    (0, False, "done", True, 0),
    (0, True, "done", True, 0),
    (-15, True, "done", True, 0),  # it was done, and then died of the signal
    (-15, False, "done", True, -15),  # somebody else has killed it
    (-15, False, "done", False, -15),
    (3, False, "done", True, 3),  # a crash is a crash: the file may be an old one
    (75, True, "done", True, 75),
    (0, True, "0", False, 0),  # a program whose 0 can be relied on
    (9, False, "9", False, 0),
    (9, True, "9", False, 0),
    (0, False, "9", False, 75),
    (3, False, "9", False, 3),
]


@pytest.mark.parametrize(("code", "told", "rule", "there", "meaning"), ROWS)
def test_what_the_end_of_a_program_means(code: int, told: bool, rule: str | None, there: bool, meaning: int) -> None:
    assert contract_code(code, told=told, rule=FinishedWhen.of(rule), there=there) == meaning


class LateSignal(StopFlag):
    """A signal to stop that this process notices only some seconds after the program has ended of it; None: never."""

    after_s: float | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        if self.after_s is not None and (timeout_s is None or timeout_s >= self.after_s):
            self.request(StopCause.SIGTERM)
        return self.requested


@pytest.mark.parametrize(
    ("code", "signal_after_s", "records"),
    [
        (-9, None, -9),
        (137, None, 137),
        (3, None, 3),
        (-15, 0.9, None),
        (0, 0.9, None),
        (3, 0.2, None),
        (3, 0.9, 3),  # the others were told to stop because of this crash
        (-9, 0.1, -9),
    ],
)
def test_a_crash_is_on_record_before_what_is_left_of_the_program_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, signal_after_s: float | None, records: int | None
) -> None:
    """Meanwhile the other ranks fail for want of this one, and all are told to stop, which is no reason for its end."""
    run = create_run_dir(tmp_path, "train")
    context = AttemptContext(run, run.new_attempt(), supervised=True)
    nodes = Environment("slurm", rank=1, world_size=2, node_rank=1, nodes=("n0", "n1"), tasks_per_node=(1, 1))
    stop_flag = LateSignal()
    stop_flag.after_s = signal_after_s
    start = SimpleNamespace(words=["train"], variables={}, prepare=None, folder=None, name="train")
    start.end = lambda code, told: ProcessEnd(-1, code, 0.0)

    def end_the_rest(*_: object) -> None:
        record_failure(context.attempt_dir, 0, Failure(1, "I noticed"))
        if code != 0:
            stop_flag.request(StopCause.SIGTERM)

    monkeypatch.setattr(command, "start_of", lambda *_: start)
    program = SimpleNamespace(wait=lambda: code, pid=0)
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(Popen=lambda *_, **__: program))
    monkeypatch.setattr(command, "_wait_for_descendants", end_the_rest)
    monkeypatch.setattr(command, "ProgramStopper", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(descendants, "adopt_orphans", lambda: None)
    config = compose(["job=command", "job.command=train", "train.device=cpu"])
    left_with = run_command(config, nodes, context, stop_flag, None)
    first = Failures.read(context.attempt_dir).first()
    assert first is not None
    if records is None:
        assert (left_with, first.rank) == (75, 0)
    else:
        assert (left_with, first.rank) == (records if records > 0 else 128 - records, 1)
        assert first.failure.exit_code == records
