"""Overrides that nobody should type: a selection of `python -m tests.faults.configs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.configs import BASES, VALUES, command_lines, what_is_wrong


def test_hostile_overrides_are_answered_by_a_sentence_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {str(words)[:300]: found for words in command_lines(40, seed=3) if (found := what_is_wrong(words))}
    assert wrong == {} and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override", ["prepare=${train.steps}", "prepare=" + "x" * 100_000, "requeue.chain_length=" + "x" * 100_000]
)
def test_values_that_once_were_a_traceback_or_endless_are_not(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert what_is_wrong(["+cluster=a100x4", "submit", "--dry-run", override]) is None


@pytest.mark.parametrize("base", BASES, ids=lambda base: " ".join(base[:2]))
def test_the_command_lines_that_are_spoilt_are_fine_without_what_spoils_them(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from slurmtrain.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(base) == 0, capsys.readouterr().err


def test_each_hostile_value_is_another_one() -> None:
    assert len(set(VALUES)) == len(VALUES) > 80
