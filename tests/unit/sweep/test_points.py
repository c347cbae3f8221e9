"""A sweep's points are Hydra's own: the same overrides in the same order, and the same configs as one by one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.config.compose import Composer, compose, register_schema
from slurmtrain.config.folders import search_folders, shipped
from slurmtrain.errors import UsageError
from slurmtrain.runs.sweep_dir import tasks_of
from slurmtrain.sweep.plan import choices_of, plan_arrays, tasks_at_once, validated
from slurmtrain.sweep.study import GRID, TARGET

LINES = [
    "optim.lr=1e-4,3e-4 model.dim=64,128",
    "model=tiny,small train.seed=range(3) optim.lr=1e-3",
    "model=glob([b*,h*,t*],exclude=[base,hf]) data=glob(stdlib*,exclude=*tiny)",
    "optim.betas=[0.9,0.95],[0.8,0.9] '+model.extra=a,b'",
    "cluster=sandbox requeue=off,default cluster.nodes=1,2",
    "+cluster.env.WORD='a b','c\\,d' train.steps=7",
    "job.name=one,two cluster.modules=[gcc],[gcc,cuda] cluster.account=\\'1e5\\'",
]


@pytest.fixture
def composer() -> Composer:
    return Composer(search_folders())


@pytest.mark.parametrize("line", LINES)
def test_points_are_those_of_hydras_own_sweeper_and_compose_as_they_do_alone(composer: Composer, line: str) -> None:
    words = shlex.split(line)
    register_schema()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        parsed = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(words)
        (batch,) = BasicSweeper.split_arguments(parsed, None)
    points = choices_of(composer, words).grid().points
    assert [list(point) for point in points] == batch
    assert [composer.compose(point) for point in points] == [compose(point) for point in points]


def test_what_varies_is_told_by_key(composer: Composer) -> None:
    grid = choices_of(composer, ["+model.extra=a,b", "train.seed=3", "optim.lr=1e-4,1e-3"]).grid()
    assert grid.keys == ("+model.extra", "optim.lr")
    assert grid.varied(1) == {"model.extra": "a", "optim.lr": "0.001"}


def test_choices_in_the_config_are_swept_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "grid.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      optim.lr: 1e-4,1e-3\n      train.seed: range(2)\n"
    )
    composer = Composer(search_folders(config_dir=str(tmp_path)))
    grid = choices_of(composer, ["experiment=grid", "optim.lr=5"]).grid()
    assert [point[0] for point in grid.points] == ["optim.lr=5", "optim.lr=5"]
    assert grid.keys == ("train.seed",)
    assert [config.train.seed for config, _ in validated(composer, grid)] == [0, 1]


def test_a_config_chooses_the_sweeper_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_, override hydra/sweeper: optuna, override hydra/job_logging: disabled]\n"
        "hydra: {sweeper: {n_trials: 7, params: {optim.lr: 'interval(1e-4,1e-2)'}}}\n"
    )
    composer = Composer(search_folders("mine", str(tmp_path)), "mine")
    choices = choices_of(composer, ["hydra.sweeper.n_jobs=3", "hydra/sweeper/sampler=grid"])
    assert choices.sweeper["_target_"] == TARGET and choices.sweeper["sampler"]["_target_"] == GRID
    assert (choices.sweeper["n_trials"], choices.sweeper["n_jobs"], list(choices.space)) == (7, 3, ["optim.lr"])
    with pytest.raises(UsageError, match="gives a range, not choices"):
        choices_of(composer, ["hydra/sweeper=basic"]).grid()
    with pytest.raises(UsageError, match="sweeper has no key 'n_trails'"):
        choices_of(composer, ["hydra.sweeper.n_trails=3"])


# Points into arrays.


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.none() | st.integers(1, 20), st.integers(1, 5))
def test_every_point_is_in_one_array_of_its_shape_and_no_limit_is_passed(
    shapes: list[int], max_size: int | None, pack: int
) -> None:
    arrays = plan_arrays(shapes, max_size=max_size, pack=pack)
    assert sorted(number for members in arrays for number in members) == list(range(len(shapes)))
    for members in arrays:
        assert len({shapes[number] for number in members}) == 1
        assert max_size is None or tasks_of(len(members), pack) <= max_size
        assert members == sorted(members)


def test_the_index_begins_at_0_in_every_array_and_a_pack_is_one_task() -> None:
    assert [len(members) for members in plan_arrays(["a"] * 2500, max_size=1001)] == [1001, 1001, 498]
    assert plan_arrays(["a"] * 10 + ["b"], pack=4) == [list(range(10)), [10]]
    assert [tasks_at_once(limit, 4) for limit in (None, 3, 8, 11)] == [None, 1, 2, 2]
