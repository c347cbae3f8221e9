"""Which run a command means: `last` is the one that was submitted last, and a copy of a run has no jobs of the original."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmtrain.cli import main
from tests.support.commands import refusal
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import printed, shown

SUBMIT = ["+cluster=a100x4", "submit"]
Out = pytest.CaptureFixture[str]


@pytest.fixture
def zones(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The time zone of this process can be changed by the variable TZ and `time.tzset`."""
    with monkeypatch.context() as patch:
        yield patch
    time.tzset()


def submit() -> Path:
    """A run that was submitted by a command line."""
    before = {*Path("runs").glob("*/2*")}
    assert main(SUBMIT) == 0
    (run,) = {*Path("runs").glob("*/2*")} - before
    return run.absolute()


@pytest.mark.parametrize("verb", ["cancel", "status"])
def test_last_is_the_run_that_was_submitted_last_in_whatever_time_zone(
    verb: str, project: Path, slurm: FakeSlurm, zones: pytest.MonkeyPatch, capsys: Out
) -> None:
    runs = []
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):  # 25 hours apart
        zones.setenv("TZ", zone)
        time.tzset()
        runs.append(submit())
    runs[0].rename(runs[0].with_name("zz-my-first"))  # names do not count either
    assert [each["path"] for each in shown("status")] == [str(runs[0].with_name("zz-my-first")), str(runs[1])]
    capsys.readouterr()
    assert main([verb, "last"]) == 0
    if verb == "cancel":
        assert slurm.calls("scancel") == ["scancel 102"]
        assert f"last is run {runs[1].name} (train), submitted " in capsys.readouterr().err
    else:
        assert f"run {runs[1].name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [(["preempt"], "last"), (["requeue"], "2"), (["resume"], "last"), (["checkpoints", "prune"], "2")],
)
def test_what_changes_a_run_says_first_which_one_it_means(
    words: list[str], named: str, project: Path, slurm: FakeSlurm, capsys: Out
) -> None:
    run = submit()
    main([words[0], named, *words[1:]])
    assert f"slurmtrain: {named} is run {run.name} (train)" in capsys.readouterr().err.splitlines()[0]
    main([words[0], run.name, *words[1:]])
    assert "is run" not in capsys.readouterr().err


@pytest.fixture
def copies(project: Path, slurm: FakeSlurm) -> tuple[Path, Path]:
    """A run whose job is running, and a copy of its directory with the same name."""
    run = submit()
    slurm.change("101", state="RUNNING", nodes="n1")
    copy = project / "kept" / run.name
    shutil.copytree(run, copy, symlinks=True)
    return run, copy


def test_a_copy_of_a_run_has_no_job_and_does_not_touch_that_of_the_original(
    copies: tuple[Path, Path], slurm: FakeSlurm
) -> None:
    run, copy = copies
    now = shown("status", str(copy))
    assert (now["state"], now["alive"], now["job_ids"]) == ("stopped", False, [])
    assert now["sentence"] == (f"this is a copy of {run}, and has no job of its own. `resume {copy.name}` continues it")
    for verb in ("cancel", "preempt", "requeue"):
        said = refusal(verb, str(copy))
        assert f"run {copy} is a copy of {run}, and has no job of its own" in said and f"name {run}" in said
    assert slurm.calls("scancel") == [] and slurm.job("101")["state"] == "RUNNING"
    assert shown("status", run.name)["alive"]


def test_a_copy_is_resumed_as_a_run_of_its_own(copies: tuple[Path, Path], slurm: FakeSlurm) -> None:
    run, copy = copies
    assert "is submitted again as job 102" in printed("resume", str(copy))
    script = slurm.job("102")["script"]
    assert f"run_dir={copy}\n" in script and f"{run}\n" not in script
    assert [shown("status", str(path))["job_ids"] for path in (run, copy)] == [["101"], ["102"]]
    assert shown("status", str(copy))["state"] == "waiting"
    printed("cancel", str(copy))
    assert slurm.calls("scancel") == ["scancel 102"]
    printed("cancel", str(run))
    assert slurm.calls("scancel") == ["scancel 102", "scancel 101"]


def test_a_run_that_was_moved_is_the_same_run_and_starts_where_it_is_now(project: Path, slurm: FakeSlurm) -> None:
    run = submit()
    moved = project / "moved" / run.name
    moved.parent.mkdir()
    run.rename(moved)
    assert shown("status", str(moved))["job_id"] == "101"
    printed("cancel", str(moved))
    assert slurm.calls("scancel") == ["scancel 101"]
    printed("resume", str(moved))
    assert f"run_dir={moved}\n" in slurm.job("102")["script"]
    assert shown("status", str(moved))["job_ids"] == ["101", "102"]
