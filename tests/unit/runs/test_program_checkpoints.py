"""The checkpoints of a program of the user's own: their steps, which are whole, and what is moved aside before a restart."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmtrain.choices import JobKind
from slurmtrain.config.schema import Config, JobConfig
from slurmtrain.report.progress import read_progress
from slurmtrain.report.trouble import trouble_of_checkpoints
from slurmtrain.runs import attempts, program_checkpoints
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.program_checkpoints import (
    ProgramCheckpoint,
    cut,
    find_checkpoints,
    newest_complete,
    required_files,
    step_in,
)
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.attempt_context import AttemptContext, open_attempt
from slurmtrain.runtime.finish_attempt import finish_attempt
from slurmtrain.runtime.jobs import own_checkpoints
from slurmtrain.runtime.jobs.own_checkpoints import look_before_start, to_move
from slurmtrain.slurm.environment import Environment

PATTERN, RULE = "out/checkpoint-*", "trainer_state.json"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("checkpoint_0001000.pt", 1000),
        ("epoch=3-step=1200.ckpt", 1200),
        ("global_step80", 80),
        ("v2-step-7", 7),
        ("step_12.safetensors", 12),
        ("last.ckpt", None),
        ("checkpoint-1.5", 5),
    ],
)
def test_the_step_is_the_last_number_in_the_name(name: str, step: int | None) -> None:
    assert step_in(name) == step


def test_several_files_may_have_to_be_inside() -> None:
    assert required_files("a.json, b*.pt  c") == ("a.json", "b*.pt", "c")
    assert required_files(None) == required_files(" ") == ()


@pytest.fixture
def run(project: Path) -> RunDir:
    run_dir = create_run_dir(project / "runs", "command")
    info = {
        "id": run_dir.id,
        "name": "command",
        "steps": None,
        "own_checkpoints": {"pattern": PATTERN, "complete": RULE},
    }
    run_dir.info_file.write_text(json.dumps(info))
    return run_dir


def save(run: RunDir, step: int, state: str | None = '{"max_steps": 100}', at: float | None = None) -> Path:
    folder = run.path / "out" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("w")
    if state is not None:
        (folder / RULE).write_text(state)
    if at is not None:
        os.utime(folder, (at, at))
    return folder


def found(run: RunDir, rule: str | None = RULE) -> list[ProgramCheckpoint]:
    return find_checkpoints(run.program_folders, PATTERN, rule)


def test_the_newest_complete_one_is_that_of_the_highest_step(run: RunDir) -> None:
    for step in (9, 10, 100):
        save(run, step)
    save(run, 200, state=None)
    save(run, 300, state="")
    save(run, 400, state='{"max_st')
    assert [(each.step, each.problem) for each in found(run)[-3:]] == [
        (200, "it has no trainer_state.json"),
        (300, "trainer_state.json: it is empty"),
        (400, "trainer_state.json: it is no whole JSON"),
    ]
    newest = newest_complete(found(run))
    assert newest is not None and newest.step == 100
    assert all(each.problem is None for each in found(run, rule=None))


def write_safetensors(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", "x" * 100)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.safetensors", write_safetensors),
        ("a.pt", write_zip),
        ("a.ckpt", write_zip),
        ("a.json", lambda path: path.write_text('{"a": [1, 2]}')),
    ],
)
def test_a_file_that_a_kill_has_cut_is_told_by_its_format(
    tmp_path: Path, name: str, write: Callable[[Path], object]
) -> None:
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    assert cut(path) is None
    for size in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        if not (size == 4 and name.endswith(("pt", "ckpt"))):  # the mere letters PK.. are no torn zip either
            assert cut(path) is not None, size


def config_of(pattern: str | None = PATTERN, rule: str | None = RULE) -> Config:
    return Config(job=JobConfig(kind=JobKind.COMMAND, command="x", checkpoints=pattern, checkpoint_complete=rule))


def begin(run: RunDir, config: Config) -> AttemptContext:
    """An attempt up to the moment at which its program would start."""
    context = AttemptContext(run, run.new_attempt(), supervised=True)
    open_attempt(context, Environment(source="single"), config)
    look_before_start(config, context, lambda: False)
    return context


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_checkpoints, "QUIET_S", 0.05)


def test_what_is_incomplete_is_moved_aside_before_a_restart_and_not_before_the_first_start(run: RunDir) -> None:
    save(run, 10)
    torn = save(run, 20, state=None)
    begin(run, config_of())
    assert torn.exists()
    finish_attempt(run, 1, 1, config_of(), None)
    second = begin(run, config_of())
    assert sorted(path.name for path in (run.path / "out").iterdir()) == [
        ".incomplete-checkpoint-20-attempt-2",
        "checkpoint-10",
    ]
    assert (run.path / "out" / ".incomplete-checkpoint-20-attempt-2" / "weights").read_text() == "w"
    assert attempts.read_attempt(run, second.number).first_step == 10
    assert "1 incomplete one moved aside (the last: checkpoint-20)" in trouble_of_checkpoints(run.events())
    # Once more, and under the same name: nothing is ever overwritten.
    finish_attempt(run, 2, 1, config_of(), None)
    save(run, 20, state="")
    begin(run, config_of())
    assert len(list((run.path / "out").glob(".incomplete-checkpoint-20-*"))) == 2


def test_empty_files_that_mark_something_are_no_checkpoints_and_stay(run: RunDir) -> None:
    pattern = "out/*"
    save(run, 10)
    marks = ["checkpoint-10.done", "checkpoint-10_complete", "DONE", "latest", "seen-1", "seen-2"]
    for name in [*marks, "state-20", "state-21.pt", "state-22", "state-20-ema"]:
        (run.path / "out" / name).touch()
    for name in ("state-19", "state-19-ema"):
        (run.path / "out" / name).write_text("whole")
    begin(run, config_of(pattern, None))
    assert [each.path.name for each in find_checkpoints([run.path], pattern, None) if each.problem is None] == [
        "checkpoint-10",
        "state-19",
        "state-19-ema",
    ]
    finish_attempt(run, 1, 1, config_of(pattern, None), None)
    begin(run, config_of(pattern, None))
    left = {path.name for path in (run.path / "out").iterdir() if not path.name.startswith(".incomplete-")}
    assert left == {"checkpoint-10", "state-19", "state-19-ema", *marks}, "what a kill has left empty is moved aside"


def test_without_a_rule_folders_stay_and_cut_files_do_not(run: RunDir) -> None:
    pattern = "out/*"
    torn = save(run, 20, state=None)
    (run.path / "out" / "step=30.ckpt").write_bytes(b"PK\x03\x04 and no end")
    begin(run, config_of(pattern, None))
    finish_attempt(run, 1, 1, config_of(pattern, None), None)
    begin(run, config_of(pattern, None))
    assert torn.exists() and not (run.path / "out" / "step=30.ckpt").exists()


def test_a_checkpoint_that_a_surviving_process_completes_is_kept(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(run, config_of())
    finish_attempt(run, 1, 1, config_of(), None)
    torn, looks = save(run, 20, state=None), iter(range(10))

    def goes_on(seconds: float) -> None:
        """The other process writes another part at each look, and the last one at the third."""
        look = next(looks)
        (torn / (RULE if look == 2 else f"part-{look}")).write_text("{}")

    monkeypatch.setattr(time, "sleep", goes_on)
    assert attempts.read_attempt(run, begin(run, config_of()).number).first_step == 20


def test_a_checkpoint_that_cannot_be_read_now_may_be_whole_and_stays(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a file server hiccups: nothing is known of it, and it may be the newest one."""
    begin(run, config_of())
    finish_attempt(run, 1, 1, config_of(), None)
    whole, unlisted = save(run, 20), save(run, 30, state=None)
    listdir = os.listdir

    def fails(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(program_checkpoints, "cut", fails)
    monkeypatch.setattr(os, "listdir", lambda path=".": fails(path) if path == unlisted else listdir(path))
    begin(run, config_of())
    assert [each.problem for each in found(run)] == ["it cannot be read: Stale file handle"] * 2
    assert whole.exists() and unlisted.exists()


def test_nothing_is_moved_by_a_start_that_was_told_to_stop(run: RunDir) -> None:
    begin(run, config_of())
    finish_attempt(run, 1, 1, config_of(), None)
    torn = save(run, 20, state=None)
    context = AttemptContext(run, run.new_attempt(), supervised=True)
    look_before_start(config_of(), context, lambda: True)
    assert torn.exists()


def test_links_are_moved_and_what_they_name_is_not(run: RunDir, tmp_path: Path) -> None:
    elsewhere = tmp_path / "scratch"
    elsewhere.mkdir()
    (run.path / "out").mkdir()
    (run.path / "out" / "checkpoint-20").symlink_to(elsewhere)
    (run.path / "out" / "checkpoint-30").symlink_to(tmp_path / "gone")
    begin(run, config_of())
    finish_attempt(run, 1, 1, config_of(), None)
    begin(run, config_of())
    assert elsewhere.is_dir() and not os.path.lexists(run.path / "out" / "checkpoint-20")
    assert not os.path.lexists(run.path / "out" / "checkpoint-30")


def test_what_another_run_left_in_the_same_folder_is_not_touched(tmp_path: Path) -> None:
    torn = tmp_path / "shared" / "checkpoint-5"
    torn.mkdir(parents=True)
    old = ProgramCheckpoint(torn, 5, changed=1000.0, problem="it has no a")
    new = ProgramCheckpoint(torn, 5, changed=5000.0, problem="it has no a")
    assert to_move([old, new], RULE, since=4000.0, own_folder=tmp_path / "run") == [new]
    assert to_move([old], RULE, since=4000.0, own_folder=tmp_path / "shared") == [old]


def test_a_restart_with_no_checkpoint_to_be_seen_is_reported(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    for config in (config_of(), config_of(None, None)):
        begin(run, config)
        finish_attempt(run, run.attempt_numbers()[-1], 1, config, None)
    assert "NO VISIBLE CHECKPOINT" in caplog.text  # not at the first start
    assert trouble_of_checkpoints(run.events()) == "none visible at the start of attempt 2"
    save(run, 5)
    begin(run, config_of())
    assert trouble_of_checkpoints(run.events()) == "none visible at the start of attempt 2"


def test_a_newer_complete_checkpoint_is_progress_and_reported_steps_are_not(run: RunDir) -> None:
    verdicts = []
    for step in (10, 20, None, None, None):
        context = begin(run, config_of())
        if step is not None:
            save(run, step)
        else:
            save(run, 1000 + context.number, state=None)
        with run.metrics_file.open("a") as file:
            file.write(json.dumps({"step": 10 * context.number}) + "\n")
        verdicts.append(finish_attempt(run, context.number, 1, config_of(), None).verdict)
    assert verdicts == ["requeue", "requeue", "requeue", "requeue", "end"]


def test_checkpoints_without_a_number_count_by_the_time_of_their_change(run: RunDir) -> None:
    config, verdicts = config_of("out/last.ckpt", None), []
    (run.path / "out").mkdir()
    for moment in (1000, 2000, 3000, 4000):
        context = begin(run, config)
        (run.path / "out" / "last.ckpt").write_text("x")
        os.utime(run.path / "out" / "last.ckpt", (moment, moment))
        verdicts.append(finish_attempt(run, context.number, 1, config, None).verdict)
    assert verdicts == ["requeue"] * 4


def test_status_has_step_and_time_left_from_checkpoints_alone(run: RunDir) -> None:
    save(run, 10, at=1000.0)
    save(run, 30, at=1040.0)
    own = run.info()["own_checkpoints"]
    seen = read_progress(run, None, own, running_since=900.0)
    assert (seen.step, seen.steps, seen.step_time_s, seen.eta_s, seen.logged) == (30, 100, 2.0, 140.0, 1040.0)
    assert read_progress(run, None, own, running_since=1020.0).eta_s is None
