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
        ({"event": "value", "trial": 4, "step": 1, "value": 1}, "no line before it asks for trial 4"),
        ({**ASKED, "trial": 0}, "it asks for trial 0, and the next one is 2"),  # two have written, or one line is lost
        ({"event": "value", "trial": 1, "step": 3, "value": 1}, "trial 1 had come further before"),
        ({"event": "value", "trial": 1, "step": 4, "value": "1"}, "its value is no number, but '1'"),
        ({"event": "started", "trial": 1, "run": "../x"}, "it names no run, but '../x'"),
        (TOLD, "trial 0 had ended before"),
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


@pytest.mark.parametrize("storage", ["sqlite:////nowhere/at/all.db", "nonsense", "of_nobody://me:secret@host/db"])
def test_a_storage_that_cannot_be_opened_is_one_sentence_without_a_password(storage: str) -> None:
    with pytest.raises(UsageError, match=r"storage=.* cannot be opened: ") as refused:
        study_of(f"hydra.sweeper.storage='{storage}'", "optim.lr=interval(0.1,0.9)")
    assert "secret" not in str(refused.value)
