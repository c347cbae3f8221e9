"""Profiles of a training: touched or planned, once, on the chosen ranks, and without a change of a single bit."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.config.profile_steps import ProfileRequest
from slurmtrain.observe.profile_switch import ProfileSwitch
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.jobs.train import build_trainer
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.system.signals import StopCause, StopFlag
from slurmtrain.training.hooks import TrainingHook
from slurmtrain.training.state import StepResult, TrainingState
from slurmtrain.training.trainer import Outcome
from tests.distributed.test_training import alone, experiment, losses
from tests.support.gloo import GlooRanks
from tests.support.local_runs import clean_environment
from tests.support.runs import submitted_run

SMALL = ["train.steps=8", "train.eval_every=3", "checkpoint.every_steps=3"]


class Asks(TrainingHook):
    """Writes RUN/profile after a step, as a person would, and looks for it as rank 0's watch does."""

    def __init__(self, switch: ProfileSwitch, run: RunDir, wishes: dict[int, str], stop: StopFlag, stop_at: int | None):
        self._switch, self._run, self._wishes = switch, run, wishes
        self._stop, self._stop_at = stop, stop_at

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if state.step in self._wishes:
            self._run.profile_switch.write_text(self._wishes[state.step])
        self._switch.look()
        self._switch.look()
        if state.step == self._stop_at:
            self._stop.request(StopCause.SIGTERM)


class Fails(TrainingHook):
    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if state.step == 4:
            raise RuntimeError("out of memory, say")


def profiled(
    distributed: DistributedContext,
    path: Path,
    wishes: dict[int, str],
    overrides: list[str] | None = None,
    attempt: int = 1,
    stop_at: int | None = None,
    fails: bool = False,
) -> Outcome:
    path.mkdir(exist_ok=True)
    run, rank, stop = RunDir(path), distributed.environment.rank, StopFlag()
    where = AttemptContext(run, attempt, supervised=True)
    where.attempt_dir.path.mkdir(parents=True, exist_ok=True)
    switch = ProfileSwitch(run, ProfileRequest()) if rank == 0 else None
    hooks: list[TrainingHook] = [Asks(switch, run, wishes, stop, stop_at)] if switch is not None else []
    agreement = StopAgreement(stop, distributed.control_group)
    config = experiment(*SMALL, *(overrides or []))
    return build_trainer(
        config,
        distributed,
        where,
        agreement,
        Timeline(),
        hooks=[*hooks, *([Fails()] if fails else [])],
        profile_switch=switch,
    ).fit()


def names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path / "profiles")) for file in (path / "profiles").rglob("*"))


def recorded_steps(trace: Path) -> int:
    with gzip.open(trace) as file:
        found = json.load(file)["traceEvents"]
    return len({each["name"] for each in found if str(each.get("name", "")).startswith("ProfilerStep#")})


def events(path: Path, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == name]


def test_a_touch_profiles_the_next_steps_on_the_chosen_ranks_once_and_no_bit_changes(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    two = ["cluster.tasks_per_node=2"]
    gloo_ranks(2, profiled, tmp_path / "run", {2: "ranks=all steps=2", 3: "ranks=all steps=2"}, two)
    gloo_ranks(2, profiled, tmp_path / "plain", {}, two)
    folder = tmp_path / "run" / "profiles" / "step_0000005"
    assert names(tmp_path / "run") == [
        "step_0000005",
        *(f"step_0000005/rank-{rank}.{end}" for rank in range(2) for end in ("trace.json.gz", "txt")),
    ]
    assert [recorded_steps(folder / f"rank-{rank}.trace.json.gz") for rank in range(2)] == [2, 2]
    assert "aten::" in (folder / "rank-1.txt").read_text()
    (event,) = events(tmp_path / "run", "profiled")
    assert (event["first"], event["last"], event["ranks"], event["attempt"]) == (5, 6, [0, 1], 1)
    assert not (tmp_path / "run" / "profile").exists() and not (tmp_path / "plain" / "profiles").exists()
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_a_second_wish_during_a_profile_is_a_second_profile_and_the_end_cuts_it_short(tmp_path: Path) -> None:
    profiled(alone(), tmp_path / "run", {1: "steps=1", 3: "steps=50"})
    assert [name for name in names(tmp_path / "run") if "/" not in name] == ["step_0000004", "step_0000007"]
    assert [(each["first"], each["last"]) for each in events(tmp_path / "run", "profiled")] == [(4, 4), (7, 8)]
    assert recorded_steps(tmp_path / "run/profiles/step_0000007/rank-0.trace.json.gz") == 2


def test_a_wish_after_the_last_step_that_could_be_profiled_stays_for_a_resume(tmp_path: Path) -> None:
    profiled(alone(), tmp_path / "run", {7: ""})
    assert (tmp_path / "run" / "profile").exists() and not (tmp_path / "run" / "profiles").exists()
    profiled(alone(), tmp_path / "run", {}, ["train.steps=12", "checkpoint.allow=[config]"], attempt=2)
    assert not (tmp_path / "run" / "profile").exists() and len(events(tmp_path / "run", "profiled")) == 1


def test_a_preemption_during_a_profile_saves_first_and_the_next_attempt_takes_it(tmp_path: Path) -> None:
    stopped = profiled(alone(), tmp_path / "run", {1: "steps=4"}, stop_at=4)
    assert not stopped.finished and stopped.saved is not None
    assert (tmp_path / "run" / "profile").read_text() == "steps=4" and not (tmp_path / "run" / "profiles").exists()
    profiled(alone(), tmp_path / "run", {}, ["train.steps=20", "checkpoint.allow=[config]"], attempt=2)
    (event,) = events(tmp_path / "run", "profiled")
    assert event["attempt"] == 2 and event["last"] - event["first"] == 3


def test_an_attempt_that_fails_during_a_profile_does_not_ask_the_next_one_for_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        profiled(alone(), tmp_path / "run", {1: "steps=4"}, fails=True)
    assert not (tmp_path / "run" / "profile").exists() and names(tmp_path / "run") == ["step_0000004"]
    planned = ["observe.profile_steps=4-6"]
    profiled(alone(), tmp_path / "run", {}, planned, attempt=2)
    assert events(tmp_path / "run", "profiled") == []
    (event,) = events(tmp_path / "run", "profile refused")
    assert "'steps=4' is lost" in event["sentence"] and (tmp_path / "run/profile.refused").read_text() == "steps=4"


@pytest.mark.parametrize(("steps", "first", "recorded"), [("1", 1, 1), ("7-20", 7, 2)])
def test_the_steps_of_the_config_are_profiled_once_over_all_attempts(
    tmp_path: Path, steps: str, first: int, recorded: int
) -> None:
    planned = [f"observe.profile_steps={steps}"]
    profiled(alone(), tmp_path / "run", {}, planned)
    trace = tmp_path / "run" / "profiles" / f"step_{first:07d}" / "rank-0.trace.json.gz"
    assert recorded_steps(trace) == recorded
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)  # it has to begin anew
    profiled(alone(), tmp_path / "run", {}, planned, attempt=2)
    assert len(events(tmp_path / "run", "profiled")) == 1


LOOP = """
import slurmtrain, torch
run = slurmtrain.init(device="cpu")
from slurmtrain.observe import profile_switch
profile_switch.LOOK_EVERY_S = 0
x = torch.ones(8, 8)
for step in range(20):
    if step in (3, 10):
        (run.directory / "profile").write_text("steps=2" if step == 3 else "steps=50")
    x = x @ x.T / 8
    assert not slurmtrain.should_stop()
"""


def test_an_own_loop_is_profiled_between_its_calls_of_should_stop(tmp_path: Path) -> None:
    run = submitted_run(tmp_path, "cluster=local", f"job.runs_dir={tmp_path}/runs")
    number = run.new_attempt()
    variables = {"SLURMTRAIN_RUN_DIR": str(run.path), "SLURMTRAIN_ATTEMPT": str(number)}
    done = subprocess.run(
        [sys.executable, "-c", LOOP],
        env={**clean_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder, cut_short = sorted(run.profiles.iterdir())
    assert recorded_steps(folder / "rank-0.trace.json.gz") == 2 and not run.profile_switch.exists()
    assert "aten::mm" in (folder / "rank-0.txt").read_text()
    assert 1 < recorded_steps(cut_short / "rank-0.trace.json.gz") < 10  # the end of the program
    assert [event["event"] for event in run.events() if event["event"].startswith("profile")] == ["profiled"] * 2
    assert not run.profile_taken.exists()
