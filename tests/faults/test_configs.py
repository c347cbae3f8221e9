"""Hostile overrides, each to a sentence and an exit code.

Every key of the schema, group and open key gets values that a shell, a yaml file or a person could hand over, and that no
field wants. What is asked is not whether an override is taken or refused, but that nobody ever reads a traceback.
"""

from __future__ import annotations

import contextlib
import io
import random
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from slurmtrain.cli import main as command_line
from slurmtrain.config.folders import config_groups
from slurmtrain.config.overrides import all_keys
from slurmtrain.errors import EXIT_CONFIG, EXIT_USAGE

LONGEST_LINE = 1500  # characters of a line that a person is asked to read

_WORDS = """
    '' null true -1 0 1e400 nan -inf 0x10 1_000 [] {} [[]] [[1,2]] [{a:1}] {a:{b:[1]}} {a:null} [null] ~ .. / -rf % %j
    glob(*) range(3) choice(1,2) sort(3,1) interval(0,1) tag(a,1) 1,2 a=b '$(touch,x)' '`x`' '!!python/object:os.system'
    ${oc.env:HOME} ${model} ${train.steps} ${nope} ${nope:1} ${oc.env:NOPE} ${hydra:job} "${${a}}" "${" '\\${x}' ${.a} ${..}
    {_target_:os.system} {_target_:1} {_target_:no.such} [${oc.env:HOME}] '{{' ??? '???' {1:2} {true:1} 1e-5 9.99
    a/../../b //x file:///x s3:// '~nobody/x' [a,,b] [a b} ={} :1 @x
"""
VALUES = [
    *_WORDS.split(),
    *("'a b'", "'a\tb'", "'a\nb'", "'a\0b'", "\udcff", "'\udcff\udcfe'", "'\u2028'", "'é\u202e'", "'😀'", "' '"),
    *("9" * 400, "9" * 5000, "x" * 300, "x" * 100_000, "[" * 200 + "]" * 200, "'" + "${a}" * 100 + "'"),
]
OPEN_KEYS = (
    "model._target_ model.new data.new data.sources.web cluster.env.A cluster.env.A_TOKEN cluster.sbatch.comment eval.sets.a "
    "cluster.sbatch.array eval.metrics.a eval.cluster.nodes eval.parallel.tp secrets.A hydra.run.dir hydra/launcher "
    "hydra.searchpath hydra/sweeper defaults cluster@x model/tiny"
).split()
BASES = (
    ["+cluster=a100x4", "submit", "--dry-run"],
    ["+cluster=local", "job=command", "job.command=true", "render"],
    ["+cluster=sandbox", "eval=job", "render"],
    ["-m", "+cluster=a100x4", "train.seed=1,2", "submit", "--dry-run"],
)


def command_lines(count: int, seed: int) -> Iterator[list[str]]:
    """So many command lines, each with one hostile override, or now and then two."""
    draw = random.Random(seed)
    keys = [*all_keys(), *config_groups(), *OPEN_KEYS]
    for number in range(count):
        words = list(BASES[number % len(BASES)])
        for _ in range(draw.choice((1, 1, 1, 2))):
            sign = draw.choice(("", "", "", "+", "++", "~"))
            value = draw.choice(VALUES)
            key = keys[number % len(keys)] if draw.random() < 0.7 else draw.choice(keys)
            words.append(f"{sign}{key}={value}" if sign != "~" or draw.random() < 0.5 else f"~{key}")
        yield words


def what_is_wrong(words: Sequence[str]) -> str | None:
    """Type a command line. Returns what a person should not have been shown, or None."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command_line(words)
    except BaseException:
        return traceback.format_exc()
    said = err.getvalue()
    if code not in (0, EXIT_USAGE, EXIT_CONFIG):
        return f"exit code {code}: {said[-2000:]}"
    if code and "slurmtrain: error: " not in said:
        return f"exit code {code} without a sentence: {said[-2000:]}"
    long = [line for line in said.splitlines() if len(line) > LONGEST_LINE]
    return f"a line of {len(long[0])} characters: {long[0][:200]}" if long else None


def test_hostile_overrides_are_answered_by_a_sentence_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {str(words)[:300]: found for words in command_lines(100, seed=3) if (found := what_is_wrong(words))}
    assert wrong == {} and list(tmp_path.iterdir()) == []
