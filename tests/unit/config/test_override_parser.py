"""Text stays as it is typed in every field of the schema that takes text: alone, in a list, a mapping or a choice."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from slurmtrain.config.override_parser import TypedOverridesParser, for_hydra
from slurmtrain.config.schema import Config
from slurmtrain.config.typed import choice_of

PARSER = TypedOverridesParser.create()


def fields_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(kind):
            yield from fields_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


FIELDS = dict(fields_of(Config))
TEXTS = [key for key, kind in FIELDS.items() if kind in (str, str | None)]
LISTS = [key for key, kind in FIELDS.items() if kind == list[str]]
MAPPINGS = [key for key, kind in FIELDS.items() if kind == dict[str, str]]
OTHERS = [key for key, kind in FIELDS.items() if kind in (int, float, bool, float | None, int | None, dict[str, Any])]
LOOKS = ["1e5", "1_000", "true", "007", "nan", "-3", "1.10", "False"]


def value(word: str) -> Any:
    return PARSER.parse_override(word).value()


def test_every_kind_of_field_is_there() -> None:
    assert {"cluster.account", "job.name", "job.command"} <= set(TEXTS)
    assert "cluster.modules" in LISTS and "cluster.env" in MAPPINGS and "optim.lr" in OTHERS
    assert any(choice_of(kind) for kind in FIELDS.values())


@pytest.mark.parametrize("text", LOOKS)
def test_text_stays_as_it_is_typed_in_every_field_of_text(text: str) -> None:
    for key in TEXTS:
        assert value(f"{key}={text}") == text, key
        assert value(f"++{key}={text} ") == text, key
    for key in LISTS:
        assert value(f"{key}={text}") == [text], key
        assert value(f"{key}=[{text},a, {text}]") == [text, "a", text], key
    for key in MAPPINGS:
        assert value(f"+{key}.NAME={text}") == text, key
        assert value(f"{key}={{NAME: {text}}}") == {"NAME": text}, key
    for key in OTHERS:
        assert repr(value(f"{key}={text}")) == repr(OverridesParser.create().parse_override(f"{key}={text}").value())


def test_fields_of_a_group_that_is_given_as_a_mapping_have_their_types_too() -> None:
    found = value("cluster={account: 1e5, nodes: 2, modules: [1.10], env: {A: true}, sandbox: null}")
    assert found == {"account": "1e5", "nodes": 2, "modules": ["1.10"], "env": {"A": "true"}, "sandbox": None}


def test_what_differs_for_evaluations_has_the_types_of_the_fields_that_it_changes() -> None:
    assert value("++eval.cluster.account=1e5") == "1e5" and value("++eval.cluster.nodes=2") == 2
    assert value("++eval.cluster.modules=1.10") == ["1.10"]
    assert value("eval.cluster={account: 1e5, nodes: 2}") == {"account": "1e5", "nodes": 2}


@pytest.mark.parametrize("words", ["1e5,true", "choice(1e5,true)", "tag(a,choice(1e5,true))"])
@pytest.mark.parametrize("key", ["cluster.account", "job.name", "cluster.modules", "+cluster.env.A"])
def test_each_choice_of_a_sweep_stays_as_it_is_typed(key: str, words: str) -> None:
    assert list(PARSER.parse_override(f"{key}={words}").sweep_string_iterator()) == ["1e5", "true"]


def test_what_a_person_casts_quotes_or_takes_from_elsewhere_is_what_it_is_for_hydra() -> None:
    assert value("cluster.account=int(3)") == 3
    assert value("job.name='1e5'") == "1e5" and value("cluster.account=null") is None
    assert value("cluster.modules=${prepare.inputs}") == "${prepare.inputs}"
    assert value("cluster.modules=null") is None
    assert list(PARSER.parse_override("job.name=range(1,3)").sweep_string_iterator()) == ["1", "2"]
    assert list(PARSER.parse_override("job.name=sort(10,9)").sweep_string_iterator()) == ["9", "10"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lr=1e-4", "optim.lr=1e-4"),
        ("cluster.account=physics", "cluster.account=physics"),
        ("cluster.account='1e5'", "cluster.account='1e5'"),
        ("cluster.account=1e5", "cluster.account='1e5'"),
        ("++cluster.account=true", "++cluster.account='true'"),
        ("cluster.modules=gcc/12", "cluster.modules=[gcc/12]"),
        ("cluster.modules=[1.10,'a b']", "cluster.modules=['1.10','a b']"),
        ("+cluster.env.A=1.0", "+cluster.env.A='1.0'"),
        ("cluster={account: 1e5,nodes: 2}", "cluster={account:'1e5',nodes:2}"),
        ("cluster.account=1e5,2e5", "cluster.account=1e5,2e5"),
        ("~cluster.account", "~cluster.account"),
        ("cluster.account=[", "cluster.account=["),
    ],
)
def test_an_override_is_passed_on_so_that_hydra_reads_it_alike(word: str, expected: str) -> None:
    assert for_hydra(word) == expected
    if "," not in word and not word.endswith("["):
        assert OverridesParser.create().parse_override(expected).value() == value(word)
