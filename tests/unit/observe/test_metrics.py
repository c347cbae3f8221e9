from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.observe.logger import Ending, Held, LoggedRun
from slurmtrain.observe.metrics import MetricsLog, read_metrics
from slurmtrain.observe.phases import Throughput
from slurmtrain.observe.tensorboard import TensorBoardLogger


def write_steps(path: Path, first: int, last: int, resume_step: int) -> None:
    log = MetricsLog(path, resume_step)
    for step in range(first, last + 1):
        log.write(step, loss=1 / step)
    log.close()


def test_an_interrupted_run_leaves_the_log_of_an_uninterrupted_one(tmp_path: Path) -> None:
    write_steps(tmp_path / "whole.jsonl", 1, 10, resume_step=0)
    write_steps(tmp_path / "parts.jsonl", 1, 7, resume_step=0)  # checkpoint at step 5, died after step 7
    write_steps(tmp_path / "parts.jsonl", 6, 10, resume_step=5)
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [record["step"] for record in read_metrics(tmp_path / "parts.jsonl")] == list(range(1, 11))


def test_a_kill_while_dropping_records_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 5, resume_step=0)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsLog(path, 5, keep=lambda record: record["step"] != 2)
    assert len(read_metrics(path)) == 5


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for held, last, loss in ((-1, 7, 9.0), (5, 8, 1.0)):  # of the first attempt, steps 6 and 7 were not noted
        log = TensorBoardLogger(None)
        log.open(LoggedRun("id", "name", "user", tmp_path, 1, held=Held(held)))
        for step in range(max(held, 0) + 1, last + 1):
            log.log(step, {"loss": loss})
        log.close(Ending.FINISHED)
    # An evaluation may be of a later step than the last that was logged.
    for given, step in ((Held(8), 10), (Held(8, 10), 11)):
        log.open(LoggedRun("id", "name", "user", tmp_path, 1, held=given))
        log.evaluated(step, {"valid_loss": 2.0})
        log.close(Ending.FINISHED)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(step, 9.0) for step in range(1, 6)] + [(step, 1.0) for step in range(6, 9)]
    assert [event.step for event in events.Scalars("valid_loss")] == [10, 11]


def test_throughput_is_taken_over_the_last_steps_and_leaves_pauses_out() -> None:
    now = 0.0
    meter = Throughput(window=2, clock=lambda: now)
    for seconds in (100.0, 1.0, 3.0):
        now += seconds
        assert meter.step(1000) == seconds
    assert (meter.read().tokens_per_s, meter.read().step_time_s) == (500.0, 2.0)
    now += 60.0  # an evaluation
    meter.start()
    now += 1.0
    meter.step(1000)
    assert meter.read().step_time_s == 2.0


class Disk:
    """A disk that is full when it is told to be, after it has taken some more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.full, self.room = False, 0
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, data: bytes) -> int:
        if not self.full:
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room, self.room = self.room, 0
        return self._write(descriptor, data[:room])


def test_what_a_full_disk_refuses_is_written_later_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_steps(tmp_path / "whole.jsonl", 1, 10, resume_step=0)
    disk, log = Disk(monkeypatch), MetricsLog(tmp_path / "m.jsonl", 0)
    for step in range(1, 11):
        disk.full, disk.room = 4 <= step <= 7, 5 if step == 4 else 0
        log.write(step, loss=1 / step)
        if step == 6:
            assert [record["step"] for record in read_metrics(tmp_path / "m.jsonl")] == [1, 2, 3]
    log.close()
    assert (tmp_path / "m.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert caplog.text.count("No space left on device") == 1 and "can be written again" in caplog.text
