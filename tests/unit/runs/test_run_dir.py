"""The run directory: made once, never shared by accident, and changed by several at the same moment."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmtrain.runs import create
from slurmtrain.runs.create import create_run_dir, new_run_id
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import files, records


def in_threads(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_an_id_that_is_taken_is_never_reused_and_ids_sort_by_time_to_the_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = [1_800_000_000.001, 1_800_000_000.002, 1_800_000_000.999, 1_800_000_001.0]
    with monkeypatch.context() as patch:
        clock = iter(moments)
        patch.setattr(time, "time", lambda: next(clock))
        ids = [new_run_id() for _ in moments]
    assert ids == sorted(ids) and all(run_id[8] == run_id[15] == "-" for run_id in ids)
    given = iter(["same", "same", "other"])
    monkeypatch.setattr(create, "new_run_id", lambda: next(given))
    assert [create_run_dir(tmp_path, "train").id for _ in range(2)] == ["same", "other"]


def test_two_claimants_never_get_the_same_attempt_and_other_files_do_not_count(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "train")
    for name in ("0001", "0004", "notes", ".nfs01"):
        (run.attempts / name).mkdir()
    claimed: list[int] = []
    in_threads(*[lambda: claimed.extend(run.new_attempt() for _ in range(20))] * 8)
    assert sorted(claimed) == list(range(5, 165))


def test_events_of_several_writers_stay_whole_and_torn_ones_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    assert run.events() == []
    run.event(Event.RENDERED)
    with run.events_file.open("a") as file:
        file.write('{"time": 1, "eve')  # whoever wrote it was killed, or the disk was full
    run.event(Event.SUBMITTING, token="T")
    write = os.write
    with monkeypatch.context() as patch:  # a line that the system takes in parts
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
        run.event(Event.SUBMITTED)
    assert [event["event"] for event in run.events()] == ["rendered", "submitting", "submitted"]

    def write_50() -> None:
        for _ in range(50):
            run.event(Event.RESTORED, text="y" * 500)

    in_threads(*[write_50] * 8)
    with run.events_file.open("a") as file:
        file.write('{"time": 1, "ev')
    events = run.events()[3:]
    assert len(events) == 400 and all(len(event["text"]) == 500 for event in events)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"n": 0})
    stop = threading.Event()

    def write() -> None:
        for n in range(100):
            files.write_json(path, {"n": n, "pad": "x" * 5000})
        stop.set()

    def read() -> None:
        while not stop.is_set():
            seen.append(records.read_json(path))

    seen: list[object] = []
    in_threads(write, read)
    assert seen and None not in seen and list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
