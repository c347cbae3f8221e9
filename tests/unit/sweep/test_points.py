"""A sweep's points are Hydra's own: the same overrides in the same order, and the same configs as one by one."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from slurmtrain.config.compose import compose
from slurmtrain.config.folders import Primary, search_folders
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.sweep.plan import Composer, composing, validated

LINES = [
    "optim.lr=1e-4,3e-4 model.dim=64,128",
    "model=tiny,small train.seed=range(3) optim.lr=1e-3",
    "model=glob([b*,h*,t*],exclude=[base,hf]) data=glob(stdlib*,exclude=*tiny)",
    "optim.betas=[0.9,0.95],[0.8,0.9] '+model.extra=a,b'",
    "train.seed=1,2 train.seed=3,4 job.name=one",
    "model.dim=choice(64,128) optim.lr=sort(3,1,2)",
    "cluster=sandbox requeue=off,default cluster.nodes=1,2",
    "+cluster.env.WORD='a b','c\\,d' train.steps=7",
    "experiment=smoke optim.lr=0.5,0.25 ~model.dropout",
    "job.name=one,two cluster.modules=[gcc],[gcc,cuda] cluster.account=\\'1e5\\'",
]


@pytest.fixture
def primary() -> Primary:
    return Primary("config", search_folders("config", None, None))


@pytest.fixture
def composer(primary: Primary) -> Iterator[Composer]:
    with composing(primary) as composer:
        yield composer


@pytest.mark.parametrize("line", LINES)
def test_points_are_those_of_hydras_own_sweeper_and_compose_as_they_do_alone(composer: Composer, line: str) -> None:
    words = shlex.split(line)
    parsed = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(words)
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    points = composer.expand(words).points
    assert [list(point) for point in points] == batch
    found = [composer.compose(point) for point in points]
    GlobalHydra.instance().clear()
    assert found == [compose(point) for point in points]


def test_what_varies_is_told_by_key(composer: Composer) -> None:
    grid = composer.expand(["+model.extra=a,b", "train.seed=3", "optim.lr=1e-4,1e-3"])
    assert grid.keys == ("+model.extra", "optim.lr")
    assert grid.varied(1) == {"model.extra": "a", "optim.lr": "0.001"}


def test_text_that_looks_like_a_number_stays_as_it_is_typed_in_every_point(primary: Primary) -> None:
    words = ["cluster.account=1e5,1_000", "job.name=true", "+cluster.env.A=1.0", "cluster.modules=1.10,[1e5,gcc]"]
    with composing(primary) as composer:
        grid = composer.expand(words)
        configs = [composer.compose(point) for point in grid.points]
    assert grid.varied(2) == {"cluster.account": "1_000", "cluster.modules": "1.10"}
    assert [config.cluster.account for config in configs] == ["1e5", "1e5", "1_000", "1_000"]
    assert [config.cluster.modules for config in configs] == [["1.10"], ["1e5", "gcc"]] * 2
    assert {(config.job.name, config.cluster.env["A"]) for config in configs} == {("true", "1.0")}
    assert configs == [compose(point) for point in grid.points]


def test_choices_in_the_config_are_swept_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "grid.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      optim.lr: 1e-4,1e-3\n      train.seed: range(2)\n"
    )
    folders = search_folders("config", str(tmp_path), None)
    with composing(Primary("config", folders)) as composer:
        grid = composer.expand(["experiment=grid", "optim.lr=5"])
        assert [point[0] for point in grid.points] == ["optim.lr=5", "optim.lr=5"]
        assert grid.keys == ("train.seed",)
        assert [config.train.seed for config, _ in validated(composer, grid)] == [0, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.lr=interval(1e-5,1e-2)"], "gives a range, not choices"),
        (["hydra.job.name=a,b"], "Hydra's own settings cannot vary"),
        (["optim.lr=1,,2"], "cannot read the override"),
        (["model=glob(nothing*)"], "has no choices"),
    ],
)
def test_what_cannot_be_swept_is_refused(composer: Composer, words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        composer.expand(words)


def test_a_wrong_point_is_named_before_anything_is_submitted(composer: Composer) -> None:
    grid = composer.expand(["train.seed=1,2", "optim.lr=0.1,fast"])
    with pytest.raises(ConfigError, match=r"point 1 \(train.seed=1 optim.lr=fast\): .*fast"):
        list(validated(composer, grid))
    grid = composer.expand(["train.steps=50,-1"])
    with pytest.raises(ConfigError, match=r"point 1 \(train.steps=-1\): .*train.steps"):
        list(validated(composer, grid))


def test_a_point_composes_many_times_faster_than_hydra_alone(primary: Primary) -> None:
    """Not a figure: a guard against composing everything again for each point, which takes ten times as long."""
    words = ["train.seed=range(30)"]
    began = time.process_time()
    compose(["train.seed=1"])
    one = time.process_time() - began
    with composing(primary) as composer:
        grid = composer.expand(words)
        composer.compose(grid.points[0])
        began = time.process_time()
        assert len(list(validated(composer, grid))) == 30
        assert time.process_time() - began < 30 * one / 3
