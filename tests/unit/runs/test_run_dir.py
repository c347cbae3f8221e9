"""The run directory: made once, never shared by accident, found again."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.launch.submit import note
from slurmtrain.runs import create, lookup, run_dir
from slurmtrain.runs.create import create_run_dir, new_run_id
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import files
from slurmtrain.system.files import write_json
from tests.support.run_info import run_info


def make(root: Path, run_id: str, name: str = "train") -> RunDir:
    path = root / name / run_id
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return RunDir(path)


def in_threads(count: int, work: object) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_only_the_owner_may_look_inside(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path / "runs", "train")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert {path.name for path in run.path.iterdir()} == {"attempts", "checkpoints"}


def test_an_id_that_is_taken_is_never_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["same", "same", "other"])
    monkeypatch.setattr(create, "new_run_id", lambda: next(ids))
    assert [create_run_dir(tmp_path, "train").id for _ in range(2)] == ["same", "other"]


def test_ids_sort_by_time_to_the_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [1_800_000_000.001, 1_800_000_000.002, 1_800_000_000.999, 1_800_000_001.0]
    clock = iter(moments)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    ids = [new_run_id() for _ in moments]
    assert ids == sorted(ids)
    assert all(run_id[8] == run_id[15] == "-" for run_id in ids)


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create a run directory under"):
        create_run_dir(tmp_path / "file", "train")


def test_two_claimants_never_get_the_same_attempt(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "train")
    claimed: list[int] = []
    in_threads(8, lambda: claimed.extend(run.new_attempt() for _ in range(20)))
    assert sorted(claimed) == list(range(1, 161)) == run.attempt_numbers()


def test_the_next_attempt_follows_the_highest_one_and_other_files_do_not_count(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "train")
    for name in ("0001", "0004", "notes", ".nfs01"):
        (run.attempts / name).mkdir()
    assert run.new_attempt() == 5


def test_events_of_several_writers_stay_whole(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def write_50() -> None:
        for _ in range(50):
            run.event(Event.RESTORED, text="y" * 500)

    in_threads(8, write_50)
    events = run.events()
    assert len(events) == 400
    assert all(event["event"] == "restored" and len(event["text"]) == 500 for event in events)


def test_a_torn_last_event_is_skipped(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.events() == []
    run.event(Event.RENDERED)
    with run.events_file.open("a") as file:
        file.write('{"time": 1, "ev')
    assert [event["event"] for event in run.events()] == ["rendered"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"n": 0})
    stop = threading.Event()

    def write_100() -> None:
        for n in range(100):
            files.write_json(path, {"n": n, "pad": "x" * 5000})
        stop.set()

    writer = threading.Thread(target=write_100)
    writer.start()
    while not stop.is_set():
        assert files.read_json(path) is not None
    writer.join()
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "null"])
def test_a_missing_or_torn_json_file_reads_as_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    assert files.read_json(tmp_path / "x.json") is None


def test_a_folder_without_run_json_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        RunDir(tmp_path).info()


def test_info_is_updated_field_by_field(tmp_path: Path) -> None:
    run = make(tmp_path, "r")
    files.write_json(run.info_file, run_info())
    run.update_info(job_ids=["1"], a=1)
    run.update_info(job_ids=["1", "2"])
    assert json.loads(run.info_file.read_text()) == run_info(job_ids=["1", "2"], a=1)


# Finding.


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path, "20260101-100000-aaaa", "zebra")
    make(tmp_path, "20260101-110000-bbbb", "train")
    make(tmp_path, "20260102-100000-cccc", "apple")
    (tmp_path / "train" / "20260109-000000-dddd").mkdir()  # has no run.json: not ours, or not yet
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "run_id"),
    [
        ("20260101-110000-bbbb", "20260101-110000-bbbb"),
        ("20260101-10", "20260101-100000-aaaa"),
        ("20260102", "20260102-100000-cccc"),
        ("last", "20260102-100000-cccc"),
    ],
)
def test_a_run_is_found_by_id_beginning_or_last(reference: str, run_id: str, root: Path) -> None:
    assert lookup.find(reference, root).id == run_id


def test_a_run_is_found_by_path_whatever_the_root(root: Path, tmp_path: Path) -> None:
    path = root / "zebra" / "20260101-100000-aaaa"
    relative = os.path.relpath(path)
    for reference in (str(path), relative, relative + "/"):
        assert lookup.find(reference, tmp_path / "elsewhere").path == path.resolve()


def test_runs_are_listed_oldest_first_whatever_their_names(root: Path) -> None:
    assert [run.id[-4:] for run in lookup.all_runs(root)] == ["aaaa", "bbbb", "cccc"]


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("2027", "no run's id begins"),
        ("2026", "3 runs begin with"),
        ("train", "which is the name of 1 of them"),
    ],
)
def test_none_or_several_are_refused(reference: str, sentence: str, root: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        lookup.find(reference, root)


def test_a_sweep_that_is_named_where_a_run_is_meant_is_said_to_be_one(root: Path) -> None:
    (root / "train" / "sweep.json").write_text("{}")
    with pytest.raises(UsageError, match="train is a sweep, and not a run") as refused:
        lookup.find("train", root)
    assert "sweep status train" in str(refused.value.hint) and "20260101-110000-bbbb" in str(refused.value.hint)


def test_a_run_is_called_by_its_id_where_the_verbs_look_and_by_its_path_elsewhere(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lookup.find("last", root)
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(root))
    assert lookup.reference(run) == run.id
    monkeypatch.setenv("SLURMTRAIN_RUNS", "")  # as if it were not set
    assert lookup.runs_root() == Path("runs")
    assert lookup.reference(run) == str(run.path)
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("SLURMTRAIN_RUNS", root.name)
    assert lookup.reference(run) == run.id


# What several change at the same moment, and what a kill has torn.


def test_no_job_is_lost_while_the_running_job_says_how_far_it_is_to_get(tmp_path: Path) -> None:
    run = make(tmp_path, "a")
    write_json(run.info_file, run_info(job_ids=["1"]))
    jobs = iter(range(2, 100))

    def submitter() -> None:
        for _ in range(12):
            note(run, str(next(jobs)))

    def program() -> None:
        for step in range(12):
            run.update_info(steps=step)

    threads = [threading.Thread(target=work) for work in (submitter, submitter, program, program)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, run.info()["job_ids"])) == list(range(1, 26)) and run.info()["steps"] == 11


def test_run_json_is_changed_although_somebody_who_was_suspended_has_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "INFO_LOCK_S", 0.05)
    run = make(tmp_path, "a")
    write_json(run.info_file, run_info())
    with run.events_file.open("a") as suspended:
        fcntl.flock(suspended, fcntl.LOCK_EX)
        run.update_info(steps=5)
    assert run.info()["steps"] == 5


def test_an_event_after_a_torn_line_is_told(tmp_path: Path) -> None:
    run = make(tmp_path, "a")
    run.event(Event.RENDERED)
    with run.events_file.open("a") as file:
        file.write('{"time": 1, "eve')  # whoever wrote it was killed, or the disk was full
    run.event(Event.SUBMITTING, token="T")
    run.event(Event.SUBMITTED)
    assert [event["event"] for event in run.events()] == ["rendered", "submitting", "submitted"]


def test_a_line_that_the_system_takes_in_parts_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write = make(tmp_path, "a"), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    run.event(Event.RENDERED)
    monkeypatch.undo()
    assert [event["event"] for event in run.events()] == ["rendered"]
