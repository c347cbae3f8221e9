"""`submit -- PROGRAM WORD ...`: the program gets its words as they were typed, and what a rank alone can know is filled in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurmtrain.cli import main
from slurmtrain.config.compose import compose, literal_override
from slurmtrain.runtime.jobs.program_start import with_variables
from tests.support.commands import Cli

WORDS = [
    "--layers",
    "1,2",
    "--lr=1e-3",
    "two words",
    "it's",
    "~x",
    "a=b",
    "[1]",
    "{k: v}",
    "$HOME",
    "${x}",
    "",
    "--",
    "-m",
    "\\",
]


def test_a_program_gets_every_word_as_it_was_typed(cli: Cli, project: Path) -> None:
    (project / "show.py").write_text("import json, sys\njson.dump(sys.argv[1:], open('words.json', 'w'))\n")
    done = cli(
        "+cluster=local",
        "job.snapshot=none",
        "submit",
        "--",
        sys.executable,
        "show.py",
        *WORDS,
        "$RANK of ${WORLD_SIZE}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((project / "words.json").read_text()) == [*WORDS, "0 of 1"]


def test_the_points_of_a_sweep_share_the_program(cli: Cli, project: Path) -> None:
    done = cli(
        "-m", "+cluster=local", "optim.lr=1e-3,1e-4", "submit", "--dry-run", "--", "python", "x.py", "--lr", "1,2"
    )
    assert done.returncode == 0 and "2 points" in done.stdout, done.stdout + done.stderr


@settings(max_examples=15)
@given(st.text(st.sampled_from("'\"\\\\${}a =,[]\n#:()%~*"), max_size=12))
@example("\\'${x}\\\\${y}\\")
def test_any_text_can_be_an_override(text: str) -> None:
    assert compose([literal_override("job.command", text)]).job.command == text


GIVEN = {"RANK": "3", "MASTER_ADDR": "n0"}
AROUND = {"SLURM_JOB_ID": "7", "HOME": "/home/me", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["x", "$MASTER_ADDR:$MASTER_PORT", "${RANK}a", "id-$SLURM_JOB_ID"], ["x", "n0:29500", "3a", "id-7"]),
        (
            ["x", "$RANKS", "$HOME", "$", "$$", "${RANK", "cost$"],
            ["x", "$RANKS", "$HOME", "$", "$$", "${RANK", "cost$"],
        ),
        (
            ["/bin/bash", "-c", "for RANK in 1 2; do echo $RANK; done"],
            ["/bin/bash", "-c", "for RANK in 1 2; do echo $RANK; done"],
        ),
        (["env", "A=$RANK", "sh", "-c", "echo $RANK"], ["env", "A=3", "sh", "-c", "echo $RANK"]),
    ],
)
def test_what_only_a_rank_knows_is_filled_in_where_no_shell_does_it(words: list[str], meant: list[str]) -> None:
    assert with_variables(words, GIVEN, AROUND) == meant


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["submit", "--"], "there is no program after --"),
        (["--", "submit"], "works with submit and render and train and drill, not with no verb at all"),
        (["layout", "--", "python"], "not with layout"),
        (
            ["job.command=date", "submit", "--", "python"],
            "job.command=date and a program after -- contradict each other",
        ),
        (["job=prepare", "submit", "--", "python"], "job=prepare and a program after --"),
    ],
)
def test_what_cannot_be_is_one_sentence(line: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    assert sentence in capsys.readouterr().err
