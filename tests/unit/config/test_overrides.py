"""Overrides of the command line: text stays as it is typed where a field takes text, and all that is wrong is said at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmtrain.config.compose import compose, parse
from slurmtrain.config.fields import GROUP, plain
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, UsageError
from tests.support.runs import printed


def fields_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in schema.__annotations__.items():
        if isinstance(kind, GROUP):
            yield from fields_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, plain(kind)


FIELDS = dict(fields_of(Config))
TEXTS = [key for key, kind in FIELDS.items() if kind is str]
LISTS = [key for key, kind in FIELDS.items() if kind == list[str]]
LOOKS = ["1e5", "1_000", "true", "007", "nan", "-3", "1.10", "False"]


def value(word: str) -> Any:
    return parse(word).value()


@pytest.mark.parametrize("text", LOOKS)
def test_text_stays_as_it_is_typed_in_every_field_of_text(text: str) -> None:
    assert {"cluster.account", "job.name", "job.command"} <= set(TEXTS) and "cluster.modules" in LISTS
    for key in [*TEXTS, "+cluster.env.NAME", "++eval.cluster.account"]:
        assert value(f"{key}={text}") == text and value(f"{key}={text} ") == text, key
    for key in LISTS:
        assert value(f"{key}=[{text},a, {text}]") == [text, "a", text], key
    config = compose([f"job.command={text}", f"cluster.modules={text}", f"cluster.env={{A: {text}}}"])
    assert (config.job.command, config.cluster.modules, config.cluster.env) == (text, [text], {"A": text})
    assert value("cluster={account: 1e5, nodes: 2, env: {A: true}}") == {
        "account": "1e5",
        "nodes": 2,
        "env": {"A": "true"},
    }


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (["job.name='1e5'"], "job.name", "1e5"),
        (["cluster.account=null"], "cluster.account", None),
        (["cluster.modules=[a]", "prepare.inputs=${cluster.modules}"], "prepare.inputs", ["a"]),
        (["prepare.inputs='my texts/*.txt'"], "prepare.inputs", ["my texts/*.txt"]),
        (["job.command=run-${train.seed}", "train.seed=3"], "job.command", "run-3"),
        (["optim.lr='1e-3'"], "optim.lr", 1e-3),
        (["checkpoint.allow=config"], "checkpoint.allow", ["config"]),
        (["parallel.reshard_after_forward=2"], "parallel.reshard_after_forward", 2),
        (["cluster.nodes='4'"], "cluster.nodes", 4),
    ],
)
def test_a_value_becomes_what_its_field_takes(words: list[str], key: str, expected: object) -> None:
    found: Any = compose(words)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == expected and isinstance(found, type(expected))


def test_yaml_files_may_write_numbers_and_switches_as_yaml_1_1_reads_them(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/mine.yaml").write_text("lr: 1e-3\nwarmup_steps: '5'\n")
    (tmp_path / "requeue").mkdir()
    (tmp_path / "requeue/mine.yaml").write_text("mode: off\n")
    config = compose(["optim=mine", "requeue=mine"], config_dir=str(tmp_path))
    assert (config.optim.lr, config.optim.warmup_steps, config.requeue.mode) == (1e-3, 5, "off")


def test_no_name_in_a_yaml_file_is_run_by_bash(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for name in ("A$(touch x)", "A\nid"):
        hostile = yaml.safe_dump({"secrets": {name: "env"}})
        (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{hostile}")
        with pytest.raises(
            ConfigError, match=r"secrets has .*A.*, which is not a valid name of an environment variable"
        ):
            compose(["experiment=mine"], config_dir=str(tmp_path))


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as unknown:
        compose(["train.stepz=1", "optim.lrr=2", "train.seed=x", "cluster=nosuch"])
    assert all(word in unknown.value.message for word in ("stepz", "lrr", "nosuch")) and "seed" not in str(
        unknown.value
    )
    with pytest.raises(ConfigError) as wrong:
        compose(["train.steps=0", "optim.lr=high", "preflight.ignore=[clok]"])
    first, *others = wrong.value.message.splitlines()
    assert first == "3 things are wrong:" and [line.partition(" (")[0] for line in others] == [
        "  optim.lr=high is not a number",
        "  train.steps=0 must be at least 1",
        "  preflight.ignore[0]=clok is not known",
    ]
    with pytest.raises(ConfigError) as rules:
        validate(compose(["cluster=a100x4", "cluster.mem_per_cpu_gb=1", "cluster.venv=a", "cluster.conda_env=b"]))
    assert "mem_per_node_gb=480 and cluster.mem_per_cpu_gb=1" in rules.value.message
    assert "cluster.venv=a and cluster.conda_env=b exclude each other" in rules.value.message


@pytest.mark.parametrize(
    ("steps", "words", "expected"),
    [
        (20, [], (1, 1, 5, 4)),
        (100_000, [], (2000, 10, 500, 100)),
        (1, [], (1, 1, 1, 1)),
        (20, ["optim.warmup_steps=0", "train.eval_every=0", "checkpoint=auto"], (0, 1, 0, 0)),
    ],
)
def test_what_nobody_has_set_follows_the_length_of_the_run(
    steps: int, words: list[str], expected: tuple[int, ...]
) -> None:
    config = compose([f"train.steps={steps}", *words])
    validate(config)
    found = config.optim.warmup_steps, config.train.log_every, config.train.eval_every, config.checkpoint.every_steps
    assert found == expected
    assert f"  warmup_steps: {expected[0]}\n" in printed("--cfg", "job", f"train.steps={steps}", *words)
