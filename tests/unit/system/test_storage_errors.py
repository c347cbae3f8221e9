"""Small files on a storage that fails: what it says is an OSError everywhere, and a lock is waited for, but not for ever."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.errors import UnavailableRecordError
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import patience, records
from slurmtrain.system.files import write_json
from slurmtrain.system.patience import patiently
from slurmtrain.system.records import read_json


def failing(number: int) -> Any:
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("function", ["open", "pread"])
def test_a_failure_of_the_storage_is_an_os_error_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(os, function, failing(errno.ESTALE))
    with pytest.raises(UnavailableRecordError, match=r"run.json cannot be read: Stale file handle") as caught:
        read_json(tmp_path / "run.json")
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.ESTALE
    assert caught.value.exit_code == 2 and str(caught.value) == caught.value.message


def test_a_record_that_is_replaced_while_it_is_read_over_nfs_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pread = tmp_path / "run.json", os.pread
    path.write_text('{"old": 1}')
    stale = [True, True]

    def replaced(descriptor: int, size: int, begin: int) -> bytes:
        if stale:
            stale.pop()
            write_json(path, {"new": 2})
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return pread(descriptor, size, begin)

    monkeypatch.setattr(os, "pread", replaced)
    assert read_json(path) == {"new": 2}
    stale.append(True)
    assert b"new" in records.read_tail(path, 100)
    before = len(os.listdir("/proc/self/fd"))
    stale.append(True)
    read_json(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_event_waits_for_the_lines_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    run.event(Event.SUBMITTED)
    other, waited = os.open(run.events_file, os.O_RDWR), []

    def sleep(seconds: float) -> None:
        waited.append(len(run.events()))
        fcntl.flock(other, fcntl.LOCK_UN)

    monkeypatch.setattr(time, "sleep", sleep)
    fcntl.flock(other, fcntl.LOCK_EX)
    run.event(Event.SUBMITTED)
    os.close(other)
    assert waited == [1] and len(run.events()) == 2


def test_a_switch_works_once_and_without_its_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    assert not run.take_switch(run.stop_switch, Event.STOP_FILE_FOUND)
    run.stop_switch.touch()
    with monkeypatch.context() as full:
        full.setattr(os, "write", failing(errno.ENOSPC))
        assert run.take_switch(run.stop_switch, Event.STOP_FILE_FOUND)
    assert not run.take_switch(run.stop_switch, Event.STOP_FILE_FOUND)
    run.save_switch.touch()
    recorded_when_done = []
    assert run.take_switch(run.save_switch, Event.SAVE_FILE_FOUND, lambda: recorded_when_done.extend(run.events()))
    assert recorded_when_done == []  # it is done before the record, which may wait for a lock
    assert [(event["event"], event["uid"]) for event in run.events()] == [(Event.SAVE_FILE_FOUND, os.getuid())]


class Storage:
    """Fails with these numbers, one after the other, and on a clock that only sleeps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int):
        self.numbers, self.asked, self.now = list(numbers), 0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> str:
        self.asked += 1
        if self.numbers:
            number = self.numbers.pop(0)
            raise OSError(number, os.strerror(number))
        return "content"


def test_only_errors_that_may_pass_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int | None] = []
    storage = Storage(monkeypatch, errno.EIO, errno.ESTALE)
    assert patiently(storage.read, patience.STEP, told=lambda error: told.append(error.errno)) == "content"
    assert told == [errno.EIO, errno.ESTALE]
    for number in (errno.ENOENT, errno.EACCES, errno.EMFILE, errno.EISDIR):
        storage = Storage(monkeypatch, number)
        with pytest.raises(OSError):
            patiently(storage.read, patience.RESTORE)
        assert storage.asked == 1
