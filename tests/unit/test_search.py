"""What a sweeper that chooses by results is told, and what a Hydra job hands over; without SLURM."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus

from slurmtrain import rundir
from slurmtrain.config.compose import Primary, search_folders
from slurmtrain.config.points import composing
from slurmtrain.errors import ConfigError
from slurmtrain.launch.open_sweep import Wanted
from slurmtrain.launch.search import Search, identity_text, seeds
from slurmtrain.launch.state import RunState
from slurmtrain.rundir import RunDir, write_json
from slurmtrain.runtime.hydra_task import _pickled

PRIMARY = Primary("config", search_folders("config", None, None))


def test_only_what_has_no_seed_is_given_one_and_always_the_same() -> None:
    sweeper = {"seed": 3, "sampler": {"seed": None, "name": "tpe"}, "deep": {"er": {"seed": None}}}
    found = list(seeds(sweeper, "this search"))
    keys, values = zip(*(word.split("=") for word in found), strict=True)
    assert keys == ("hydra.sweeper.sampler.seed", "hydra.sweeper.deep.er.seed")
    assert found == list(seeds(sweeper, "this search")) != list(seeds(sweeper, "another"))
    assert all(0 <= int(value) < 2**31 for value in values)


def test_a_search_is_the_same_by_what_is_fixed_who_chooses_and_from_what() -> None:
    line = ["optim.lr=interval(0.1,1)", "train.steps=5"]
    with composing(PRIMARY) as composer:
        assert composer.fixed(line) == ["train.steps=5"] and composer.choices(line) == {"optim.lr": "interval(0.1,1)"}
        base, sweeper = composer.compose(composer.fixed(line)), composer.sweeper(line)
        other = composer.compose(["train.steps=6"])
    text = identity_text(base, sweeper, composer.choices(line))
    assert text == identity_text(base, dict(reversed(sweeper.items())), {"optim.lr": "interval(0.1,1)"})
    assert (
        len({text, identity_text(other, sweeper, {}), identity_text(base, sweeper, {}), identity_text(base, {}, {})})
        == 4
    )


class Finished:
    """An open sweep whose runs finish with the learning rate as their loss; lr=2 logs nothing, lr=3 fails."""

    def __init__(self, path: Path):
        self.path = path

    def run(
        self, wanted: Sequence[Wanted], on_end: Callable[[RunDir, RunState], None]
    ) -> list[tuple[RunDir, RunState]]:
        ended = []
        for each in wanted:
            run_dir = rundir.create(self.path, "train")
            write_json(run_dir.info_file, {"varied": [f"{key}={value}" for key, value in each.varied.items()]})
            run_dir.metrics_file.write_text(
                f'{{"step": 1, "valid_loss": {each.config.optim.lr}}}\n' if each.config.optim.lr != 2 else ""
            )
            word, sentence = ("failed", "rank 0: no luck") if each.config.optim.lr == 3 else ("finished", "finished")
            state = RunState(word, sentence, False, [], None)
            on_end(run_dir, state)
            ended.append((run_dir, state))
        return ended


def test_a_point_gives_back_its_best_metric_or_the_words_of_its_failure(tmp_path: Path) -> None:
    said: list[str] = []
    points = [[f"optim.lr={lr}"] for lr in (1, 0.5, 2, 3)] + [["optim.lr=-1"]]
    with composing(PRIMARY) as composer:
        loader = GlobalHydra.instance().config_loader()
        from hydra.types import RunMode

        jobs = [(point, loader.load_configuration("config", point, RunMode.RUN)) for point in points]
        opened: Any = Finished(tmp_path)
        returned = Search(composer, opened, ["optim.lr"], said.append).launch(jobs)
    assert [each.status for each in returned] == [JobStatus.COMPLETED] * 2 + [JobStatus.FAILED] * 3
    assert [each.return_value for each in returned[:2]] == [1, 0.5]
    assert returned[0].overrides == ["optim.lr=1"] and returned[0].cfg is not None and "hydra" not in returned[0].cfg
    for each, words in zip(returned[2:], ("logged no metric", "no luck", "optim.lr"), strict=True):
        with pytest.raises(Exception, match=words):
            _ = each.return_value
    assert isinstance(returned[4]._return_value, ConfigError) and len(said) == 4
    assert "the best so far" in said[1] and "no luck" in said[3]


class Stubborn(Exception):
    """Cannot be read again: its constructor wants more than it was made of."""

    def __init__(self, a: int, b: int):
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    ("status", "value", "words"),
    [
        (JobStatus.FAILED, Stubborn(1, 2), "Stubborn: 1 and 2"),
        (JobStatus.COMPLETED, (each for each in ()), "cannot be handed over"),
        (JobStatus.FAILED, ValueError("no luck"), "no luck"),
    ],
)
def test_what_cannot_be_handed_over_says_so(status: JobStatus, value: object, words: str) -> None:
    returned = JobReturn(overrides=[], status=status)
    returned.return_value = value
    with pytest.raises(Exception, match=words):
        _ = pickle.loads(_pickled(returned)).return_value


def test_the_same_search_asks_for_the_same_points(tmp_path: Path) -> None:
    """Without a seed of its own, and on this machine."""
    result = """'{"step": 1, "valid_loss": 1}'"""
    program = f"cd $SLURMTRAIN_RUN_DIR; echo once >>started; echo {result} >metrics.jsonl"
    (tmp_path / "point.sh").write_text(program)
    words = ["-m", "+cluster=local", "job=command", "job.command='bash point.sh'", "job.snapshot=none"]
    words += ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "optim.lr=interval(0.1,1)", "submit"]
    for _ in range(2):
        command = [sys.executable, "-m", "slurmtrain", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "is there already" in done.stderr
    assert [path.read_text() for path in tmp_path.glob("runs/*/*/started")] == ["once\n"] * 3
