"""RUN/profile: that it is taken once, and that nothing of it ends a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest

from slurmtrain.config.fields import profiled_steps
from slurmtrain.errors import ConfigError
from slurmtrain.observe.profiling import ProfileSwitch, Profiling, StepProfiler
from slurmtrain.runs.run_dir import RunDir

T = TypeVar("T")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    (tmp_path / "checkpoints").mkdir()
    return RunDir(tmp_path)


class OneRank:
    rank, size = 0, 1

    def on_rank_0(self, work: Callable[[], T]) -> T:
        return work()


def test_a_touch_asks_once_and_says_who_asked(run: RunDir) -> None:
    switch = ProfileSwitch(run)
    for touch, asked in ((False, False), (True, True), (False, True)):
        if touch:
            run.profile_switch.touch()
        switch.look()
        assert switch.asked is asked and not run.profile_switch.exists()
    assert [event["event"] for event in run.events()] == ["profile file found"]


def test_the_steps_of_the_config_are_a_range() -> None:
    assert (profiled_steps("100-102"), profiled_steps("7")) == ((100, 102), (7, 7))
    for wrong in ("", "0", "5-3", "1-101", "a", "1-", "-3"):
        with pytest.raises(ConfigError, match=r"not a range of 1 to 100 steps|3 is less than 5"):
            profiled_steps(wrong)


def test_ranks_that_are_not_there_write_no_profile(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    profiling = Profiling(run, OneRank(), [1, 8], on_gpu=False)
    profiling.begin(10, steps=3)
    assert not profiling.active and not run.profiles.exists()
    assert "observe.profile_ranks=[1, 8], and there are 1 ranks" in caplog.text


def test_a_profile_that_cannot_begin_ends_nothing(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    run.profiles.write_text("a file where the folder should be")
    switch = ProfileSwitch(run)
    profiling = Profiling(run, OneRank(), on_gpu=False, switch=switch)
    run.profile_switch.touch()
    switch.look()
    assert profiling.wanted
    profiling.begin(10)
    assert not profiling.active and not profiling.wanted and str(run.profiles) in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_allocations_are_recorded_no_longer_than_the_profile_takes(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda **options: told.append(options))
    if fails:
        monkeypatch.setattr("torch.profiler.profile.step", Mock(side_effect=RuntimeError("CUPTI_ERROR_UNKNOWN")))
    profiler = StepProfiler(tmp_path, 0, 2, warmup=1, on_gpu=True)
    profiler.start()
    if fails:
        profiler.step()
    profiler.stop(write=True)  # else in its warm-up, so that no step is recorded
    assert [each.get("enabled", "all") for each in told] == ["all", None]
    assert ("CUPTI_ERROR_UNKNOWN" in caplog.text) == fails
