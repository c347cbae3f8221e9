"""RUN/profile: what it may say, that it is taken once, and what a person is told who asks for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest

from slurmtrain.config.fields import profiled_steps
from slurmtrain.errors import ConfigError
from slurmtrain.observe.profile_switch import ProfileRequest, ProfileSwitch, parse_request
from slurmtrain.observe.profiler import StepProfiler
from slurmtrain.observe.profiling import Profiling
from slurmtrain.runs.run_dir import RunDir

T = TypeVar("T")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    (tmp_path / "checkpoints").mkdir()
    return RunDir(tmp_path)


def events(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events_file.read_text().splitlines()]


class OneRank:
    rank, size = 0, 1

    def on_rank_0(self, work: Callable[[], T]) -> T:
        return work()


def test_the_file_says_how_many_steps_of_which_ranks() -> None:
    default = ProfileRequest(ranks=(0, 1))
    assert parse_request("", default) == ProfileRequest(3, (0, 1))
    assert parse_request("steps=5 ranks=0,4-6\nstacks=true\n", default) == ProfileRequest(5, (0, 4, 5, 6), True)
    assert parse_request("ranks=all", default).ranks is None
    for wrong in (
        "steps=0",
        "steps=101",
        "steps=x",
        "steps=000000001999999999",
        "steps",
        "ranks=",
        "ranks=5-2",
        "ranks=a",
        "stacks=1",
        "why=x",
        "²",
    ):
        with pytest.raises(ConfigError):
            parse_request(wrong, default)


def test_the_steps_of_the_config_are_a_range() -> None:
    assert (profiled_steps("100-102"), profiled_steps("7")) == ((100, 102), (7, 7))
    for wrong in ("", "0", "5-3", "1-101", "a", "1-", "-3"):
        with pytest.raises(ConfigError, match=r"not a range of 1 to 100 steps|3 is less than 5"):
            profiled_steps(wrong)


@pytest.mark.parametrize("make", ["unknown", "link", "folder", "large"])
def test_a_file_that_cannot_be_read_is_removed_and_the_run_goes_on(make: str, run: RunDir) -> None:
    path = run.profile_switch
    if make == "unknown":
        path.write_text("stepz=3\x1b[2J")
    elif make == "link":
        path.symlink_to("/etc/passwd")
    elif make == "folder":
        path.mkdir()
    else:
        path.write_bytes(bytes(1 << 20))
    switch = ProfileSwitch(run, ProfileRequest())
    for _ in range(4):
        switch.look()
    assert switch.asked() is None and not path.exists() and not path.is_symlink()
    (said,) = events(run)
    assert said["event"] == "profile refused" and said["sentence"]


def test_ranks_that_are_not_there_are_refused(run: RunDir) -> None:
    switch = ProfileSwitch(run, ProfileRequest())
    told: list[Any] = []
    profiling = Profiling(run, OneRank(), on_gpu=False, switch=switch, event=lambda event, values: told.append(values))
    run.profile_switch.write_text("ranks=5,7")
    switch.look()
    assert profiling.wanted
    profiling.begin(10)
    assert not profiling.active and not profiling.wanted and not run.profiles.exists()
    assert told[0]["sentence"] == "none of the ranks that it is asked of exists: this attempt has 1, from 0 on"
    assert not run.profile_switch.exists()


def test_a_profile_that_cannot_begin_ends_nothing(run: RunDir) -> None:
    run.profiles.write_text("a file where the folder should be")
    switch = ProfileSwitch(run, ProfileRequest())
    told: list[Any] = []
    profiling = Profiling(run, OneRank(), on_gpu=False, switch=switch, event=lambda event, values: told.append(values))
    run.profile_switch.touch()
    switch.look()
    profiling.begin(10)
    assert not profiling.active and str(run.profiles) in told[0]["sentence"]


@pytest.mark.parametrize("fails", [False, True])
def test_allocations_are_recorded_no_longer_than_the_profile_takes(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda **options: told.append(options))
    if fails:
        monkeypatch.setattr("torch.profiler.profile.step", Mock(side_effect=RuntimeError("CUPTI_ERROR_UNKNOWN")))
    profiler = StepProfiler(tmp_path, 0, ProfileRequest(2, (0,)), warmup=1, on_gpu=True)
    profiler.start()
    if fails:
        profiler.step()
    profiler.stop(write=True)  # else in its warm-up, so that no step is recorded
    assert [each.get("enabled", "all") for each in told] == ["all", None]
    assert (tmp_path / "rank-0.failed").exists() == fails
