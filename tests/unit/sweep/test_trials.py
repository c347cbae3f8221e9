"""The decisions of a search, its log, and the study that is made again from it; without SLURM."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.choices import Pruner
from slurmtrain.config.folders import Primary, search_folders
from slurmtrain.config.schema import SearchConfig
from slurmtrain.errors import UsageError
from slurmtrain.sweep.optuna_study import Study
from slurmtrain.sweep.points import composing
from slurmtrain.sweep.trials import (
    LogEvent,
    Trial,
    TrialCost,
    TrialLog,
    TrialState,
    best_of,
    state_of_end,
    table,
    to_ask,
    to_report,
)
from slurmtrain.system import records

PRIMARY = Primary("config", search_folders("config", None, None))


@pytest.mark.parametrize(
    ("asked", "running", "pack", "count"),
    [
        (0, 0, 1, 3),  # all slots at the beginning
        (3, 2, 1, 1),  # one for each that has ended
        (3, 3, 1, 0),
        (9, 2, 1, 1),  # the last one
        (10, 1, 1, 0),
        (4, 2, 2, 0),  # one place in a job of two is not enough
        (4, 1, 2, 2),
        (9, 2, 2, 1),  # the last one does not wait for another
        (4, 5, 1, 0),  # fewer slots than before the shell was killed
    ],
)
def test_a_trial_is_asked_for_as_soon_as_one_has_ended(asked: int, running: int, pack: int, count: int) -> None:
    assert to_ask(asked=asked, wanted=10, running=running, slots=3, pack=pack) == count


def test_a_pruner_is_told_each_step_once_and_a_long_log_thinned() -> None:
    assert to_report([(1, 0.5), (2, 0.4), (2, 0.3), (1, 0.2), (4, 0.1)], -1) == [(1, 0.5), (2, 0.4), (4, 0.1)]
    assert to_report([(1, 0.5), (2, 0.4)], 2) == []
    every = to_report([(step, 0.0) for step in range(1, 100_001)], -1)
    assert len(every) < 1000 and every[:100] == [(step, 0.0) for step in range(1, 101)]
    in_parts, last = list[tuple[int, float]](), -1  # however often a log is looked at
    for begin in range(1, 2001, 7):
        in_parts += to_report([(step, 0.0) for step in range(begin, begin + 7)], last)
        last = in_parts[-1][0]
    assert in_parts == every[: len(in_parts)]


def test_a_run_that_had_finished_before_it_was_stopped_counts_with_its_result() -> None:
    assert state_of_end(finished=True, pruned=True, value=0.5) == TrialState.COMPLETE
    assert state_of_end(finished=False, pruned=True, value=None) == TrialState.PRUNED
    assert state_of_end(finished=False, pruned=False, value=None) == TrialState.FAIL
    assert state_of_end(finished=True, pruned=False, value=None) == TrialState.FAIL  # it has logged no result


def test_pruning_has_saved_the_steps_that_were_not_done_at_the_pace_that_there_was() -> None:
    spent = TrialCost(gpus=8, held_s=4000, trained_s=3600)
    pruned = Trial(0, (), state=TrialState.PRUNED, steps=100, steps_planned=1000, spent=spent)
    program = Trial(1, (), state=TrialState.PRUNED, steps=100, spent=TrialCost(held_s=3600, trained_s=1800))
    complete = [Trial(n, (), state=TrialState.COMPLETE, value=n, steps=n * 100, spent=spent) for n in (2, 3, 7)]
    rows = table([pruned, program, *complete])
    assert rows[0].saved_h == pytest.approx(8 * 9) and rows[0].held_h == pytest.approx(8 * 4000 / 3600)
    assert rows[1].saved_h == pytest.approx(0.5 * 2)  # to the median, 300 steps
    assert [row.saved_h for row in rows[2:]] == [None] * 3
    assert table([program])[0].saved_h is None  # nobody knows how long it would have been
    assert best_of(complete, maximize=False) is complete[0] and best_of(complete, maximize=True) is complete[2]
    assert best_of([pruned, Trial(5, (), state=TrialState.COMPLETE, value=float("nan"))], maximize=True) is None


ASKED = {"event": "asked", "trial": 0, "overrides": ["a=1"], "params": {"a": 1}}
TOLD = {"event": "told", "trial": 0, "state": "complete", "value": 0.5, "run": "r"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"event": "told", "trial": 0, "sta', "it is torn"),
        ({"event": "moved", "trial": 0}, "this version does not know the event 'moved'"),
        ({"event": "value", "trial": -1, "step": 1, "value": 1}, "it names no trial, but -1"),
        ({"event": "value", "trial": 4, "step": 1, "value": 1}, "no line before it asks for trial 4"),
        ({**ASKED, "trial": 0}, "it asks for trial 0, and the next one is 2"),  # two have written, or one line is lost
        ({**ASKED, "trial": 7}, "it asks for trial 7, and the next one is 2"),
        ({**ASKED, "trial": 2, "overrides": "a=1"}, "it has no overrides for trial 2, but 'a=1'"),
        ({**ASKED, "trial": 2, "params": [1]}, "the parameters of trial 2 are not given by name"),
        ({"event": "value", "trial": 0, "step": 9, "value": 1}, "trial 0 had ended before"),
        ({"event": "pruning", "trial": 0, "step": 9}, "trial 0 had ended before"),
        ({"event": "value", "trial": 1, "step": 3, "value": 1}, "trial 1 had come further before"),
        ({"event": "value", "trial": 1, "step": 4, "value": "1"}, "its value is no number, but '1'"),
        ({"event": "value", "trial": 1, "step": None, "value": 1}, "it names no step, but None"),
        ({"event": "started", "trial": 1, "run": "../x"}, "it names no run, but '../x'"),
        (TOLD, "trial 0 had ended before"),
        ({**TOLD, "trial": 1, "state": "vanished"}, "this version does not know the end 'vanished'"),
        ({**TOLD, "trial": 1, "value": None}, "the result of trial 1 is no number, but None"),
    ],
)
def test_a_line_that_makes_no_sense_is_left_out_with_a_sentence_and_others_come_after_it(
    tmp_path: Path, line: str | dict[str, Any], why: str
) -> None:
    path = tmp_path / "trials.jsonl"
    written = TrialLog(path)
    written.add(LogEvent.ASKED, 0, overrides=["a=1"], params={"a": 1})
    written.add(LogEvent.STARTED, 0, run="r")
    written.add(LogEvent.TOLD, 0, state="complete", value=0.5, run="r", steps=3, spent={"gpus": 1, "of a newer": 2})
    written.add(LogEvent.ASKED, 1, overrides=["a=2"], params={"a": 2})
    written.add(LogEvent.VALUE, 1, step=3, value=float("nan"))
    with path.open("a") as file:
        file.write(line if isinstance(line, str) else json.dumps(line))
    again = TrialLog(path)
    assert again.remark == f"the search ignores line 6 of {path}: {why}"
    assert (again.lines, again.trials[0]) == (written.lines, written.trials[0])
    again.add(LogEvent.TOLD, 1, state="pruned", run="r", steps=3)
    last = TrialLog(path)
    assert [trial.state for trial in last.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert last.trials[1].last_step == 3 and list(last.ignored.values()) == [why]


def test_a_line_about_another_run_is_left_out(tmp_path: Path) -> None:
    log = TrialLog(tmp_path / "trials.jsonl")
    log.add(LogEvent.ASKED, 0, overrides=["a=1"])
    log.add(LogEvent.STARTED, 0, run="mine")
    for run in ("another", "mine"):
        records.append_line(tmp_path / "trials.jsonl", json.dumps({**TOLD, "run": run}) + "\n")
    again = TrialLog(tmp_path / "trials.jsonl")
    assert again.trials[0].run_id == "mine" and again.trials[0].state == TrialState.COMPLETE
    assert again.ignored == {3: "it is about run another, and trial 0 is run mine"}
    records.append_line(tmp_path / "trials.jsonl", "{}\n")
    said = TrialLog(tmp_path / "trials.jsonl").remark
    assert said is not None and said.startswith("the search ignores 2 lines, the first of them line 3, of ")


@functools.cache
def composed_of(*words: str) -> tuple[Any, list[str]]:
    line = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=9", *words]
    with composing(PRIMARY) as composer:
        return composer.with_hydra(line), composer.of_the_program(line)


def study_of(*words: str, **search: Any) -> Study:
    return Study(*composed_of(*words), SearchConfig(**search))


def lr_of(overrides: Sequence[str]) -> float:
    return float(next(word for word in overrides if word.startswith("optim.lr=")).partition("=")[2])


def search_until(log: TrialLog, study: Study, trials: int, *, prunes: bool) -> None:
    """Trials of three values each, the loss being the learning rate plus 1 / step; one at a time, the third one fails."""
    while len(log.trials) < trials:
        chosen, number = study.ask(), len(log.trials)
        log.add(LogEvent.ASKED, number, overrides=chosen.overrides, params=chosen.params, attributes=chosen.attributes)
        end, value = TrialState.COMPLETE, lr_of(chosen.overrides)
        for step in (1, 4, 16):
            log.add(LogEvent.VALUE, number, step=step, value=value + 1 / step)
            if study.report(number, step, value + 1 / step) and prunes:
                log.add(LogEvent.PRUNING, number, step=step)
                end = TrialState.PRUNED
                break
        end = TrialState.FAIL if number == 2 else end
        result = value if end == TrialState.COMPLETE else None
        log.add(LogEvent.TOLD, number, state=end, value=result)
        study.tell(number, end, result)


@pytest.mark.parametrize("pruner", [Pruner.NONE, Pruner.MEDIAN, Pruner.ASHA])
def test_a_study_made_again_chooses_and_prunes_as_the_first_would_have(tmp_path: Path, pruner: Pruner) -> None:
    words = ["optim.lr=interval(0.001,0.9)", "optim.weight_decay=choice(0,0.1)"]
    words += ["hydra.sweeper.sampler.seed=3", "hydra.sweeper.sampler.n_startup_trials=4"]
    settings = {"pruner": pruner, "startup_trials": 2, "prune_after_steps": 1 if pruner == Pruner.ASHA else 0}
    whole = TrialLog(tmp_path / "whole.jsonl")
    search_until(whole, study_of(*words, **settings), 12, prunes=True)
    states = [trial.state for trial in whole.trials]
    assert (TrialState.PRUNED in states) == (pruner != Pruner.NONE) and states[2] == TrialState.FAIL
    for trials in (1, 3, 8):
        path = tmp_path / f"{trials}.jsonl"
        search_until(TrialLog(path), study_of(*words, **settings), trials, prunes=True)
        again, study = TrialLog(path), study_of(*words, **settings)
        study.replay(again.lines, again.trials)
        search_until(again, study, 12, prunes=True)
        assert again.lines == whole.lines


def test_a_log_with_lines_lost_doubled_or_swapped_can_still_be_gone_on_with(tmp_path: Path) -> None:
    words = ["optim.lr=interval(0.001,0.9)", "hydra.sweeper.sampler.seed=3"]
    settings = {"pruner": Pruner.MEDIAN, "startup_trials": 1}
    search_until(TrialLog(tmp_path / "whole.jsonl"), study_of(*words, **settings), 5, prunes=True)
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    changed = [[*lines[:n], *lines[n + 1 :]] for n in range(len(lines))]
    changed += [[*lines[: n + 1], *lines[n:]] for n in range(len(lines))]
    changed += [[*lines[:n], lines[n + 1], lines[n], *lines[n + 2 :]] for n in range(len(lines) - 1)]
    for number, text in enumerate(changed):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(text))
        log, study = TrialLog(path), study_of(*words, **settings)
        study.replay(log.lines, log.trials)
        for trial in log.trials:
            if trial.state == TrialState.RUNNING:
                log.add(LogEvent.TOLD, trial.number, state="fail")
                study.tell(trial.number, TrialState.FAIL, None)
        search_until(log, study, 6, prunes=True)
        again = TrialLog(path)
        assert (again.lines, again.trials) == (log.lines, log.trials) and again.ignored == log.ignored


@pytest.mark.parametrize("pruner", [Pruner.MEDIAN, Pruner.ASHA])
def test_what_was_killed_before_its_verdict_was_noted_is_pruned_all_the_same(tmp_path: Path, pruner: Pruner) -> None:
    words = ["optim.lr=interval(0.001,0.9)", "hydra.sweeper.sampler.seed=3"]
    settings = {"pruner": pruner, "startup_trials": 1, "prune_after_steps": 1}
    log, study = TrialLog(tmp_path / "trials.jsonl"), study_of(*words, **settings)
    for number, value in enumerate([0.5, float("nan")]):
        chosen = study.ask()
        log.add(LogEvent.ASKED, number, overrides=chosen.overrides, params=chosen.params, attributes=chosen.attributes)
        log.add(LogEvent.VALUE, number, step=1, value=value)
        assert study.report(number, 1, value) == (number == 1)
        if number == 0:
            log.add(LogEvent.TOLD, number, state="complete", value=value)
            study.tell(number, TrialState.COMPLETE, value)
    again, study = TrialLog(tmp_path / "trials.jsonl"), study_of(*words, **settings)
    study.replay(again.lines, again.trials)
    assert study.given_up == {1}
    study.tell(1, TrialState.PRUNED, None)  # whose last value is not a number
    assert study.ask().overrides


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_a_sampler_that_chooses_otherwise_gets_the_trials_as_they_are(
    tmp_path: Path, sampler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a seed, which a grid has not."""
    words = ["hydra/sweeper/sampler=" + sampler, "optim.lr=choice(0.1,0.2,0.3,0.4,0.5,0.6,0.7)"]
    for attempt in range(5):  # by chance it chooses the same four again, once in 840 times
        path = tmp_path / f"{attempt}.jsonl"
        log, study = TrialLog(path), study_of(*words)
        search_until(log, study, 3, prunes=False)
        chosen = study.ask()
        log.add(LogEvent.ASKED, 3, overrides=chosen.overrides, params=chosen.params, attributes=chosen.attributes)
        again, study = TrialLog(path), study_of(*words)
        study.replay(again.lines, again.trials)
        if caplog.messages:
            break
    assert "goes on from the results" in caplog.messages[-1]
    study.tell(3, TrialState.COMPLETE, 0.5)
    known = [lr_of(trial.overrides) for trial in again.trials]
    assert [trial.params["optim.lr"] for trial in study._study.trials] == pytest.approx(known)
    if sampler == "grid":
        assert study.n_trials == 7
        left = []
        for number in range(4, 7):
            left.append(lr_of(study.ask().overrides))
            study.tell(number, TrialState.COMPLETE, 0.5)
        assert sorted([*known, *left]) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


def test_a_study_that_optuna_keeps_hears_only_what_it_has_not_heard(tmp_path: Path) -> None:
    words = [f"hydra.sweeper.storage=sqlite:///{tmp_path}/kept.db", "hydra.sweeper.study_name=mine"]
    words += ["optim.lr=interval(0.1,0.9)", "hydra.sweeper.sampler.seed=3"]
    path = tmp_path / "trials.jsonl"
    log, study = TrialLog(path), study_of(*words)
    search_until(log, study, 2, prunes=False)
    for number in (2, 3):
        chosen = study.ask()
        log.add(LogEvent.ASKED, number, overrides=chosen.overrides, params=chosen.params, attributes=chosen.attributes)
    log.add(LogEvent.TOLD, 2, state="complete", value=0.25)  # and the process was killed before the study heard it
    log.add(LogEvent.VALUE, 3, step=1, value=float("nan"))  # which SQL has no place for
    again, study = TrialLog(path), study_of(*words)
    study.replay(again.lines, again.trials)
    study.report(3, 2, float("nan"))
    study.tell(3, TrialState.PRUNED, None)
    study = study_of(*words)
    study.replay(again.lines, again.trials)  # a power cut has shortened the log: the storage knows more
    assert not study.report(3, 4, 0.5)
    study.tell(3, TrialState.COMPLETE, 0.5)
    assert [trial.value for trial in study._study.trials[2:]] == [0.25, float("inf")]
    assert lr_of(study.ask().overrides) not in [lr_of(trial.overrides) for trial in again.trials]


@pytest.mark.parametrize("storage", ["sqlite:////nowhere/at/all.db", "nonsense", "of_nobody://me:secret@host/db"])
def test_a_storage_that_cannot_be_opened_is_one_sentence_without_a_password(storage: str) -> None:
    with pytest.raises(UsageError, match=r"storage=.* cannot be opened: ") as refused:
        study_of(f"hydra.sweeper.storage='{storage}'", "optim.lr=interval(0.1,0.9)")
    assert "secret" not in str(refused.value)


def test_a_trial_that_failed_and_was_tried_again_counts_with_its_result(tmp_path: Path) -> None:
    words = ["optim.lr=interval(0.1,0.9)", "hydra.sweeper.sampler.seed=3"]
    path = tmp_path / "trials.jsonl"
    log, study = TrialLog(path), study_of(*words)
    search_until(log, study, 3, prunes=False)
    log.add(LogEvent.TOLD, 2, state="complete", value=0.125)
    again, study = TrialLog(path), study_of(*words)
    study.replay(again.lines, again.trials)
    assert again.trials[2].state == TrialState.COMPLETE
    assert [trial.value for trial in study._study.trials if trial.state.name == "COMPLETE"][-1] == 0.125
    assert json.loads(path.read_text().splitlines()[-1])["trial"] == 2
