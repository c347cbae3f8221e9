"""`submit -- PROGRAM WORD ...`: the program gets its words as they were typed, and what a rank alone can know is filled in."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.overrides import literal_override
from slurmtrain.rank.jobs.program_start import with_variables
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm

WORDS = "--layers|1,2|--lr=1e-3|two words|it's|~x|a=b|[1]|{k: v}|$HOME|${X}||--|-m|\\".split("|")


def test_a_program_gets_every_word_as_it_was_typed(cli: Cli, project: Path) -> None:
    (project / "show.py").write_text("import json, sys\njson.dump(sys.argv[1:], open('words.json', 'w'))\n")
    program = (sys.executable, "show.py", *WORDS, "$RANK of ${WORLD_SIZE}")
    done = cli("+cluster=local", "job.snapshot=none", "submit", "--", *program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((project / "words.json").read_text()) == [*WORDS, "0 of 1"]


@pytest.mark.parametrize(
    ("overrides", "program", "command"),
    [
        (["+lr=1e-3"], ["x.py", "--lr", "${lr}"], "x.py --lr 1e-3"),
        (["optim.lr=0.5"], ["x.py", "--lr=${optim.lr}", "${RANK}"], "x.py --lr=0.5 ${RANK}"),
        (['+name="it\'s"'], ["x.py", "a-${name}", "${job.args.name}"], "x.py a-it's it's"),
        (["+a=1"], ["bash", "-ec", "for a in *; do echo ${a}; done", "${a}"], "for a in *; do echo ${a}; done"),
        (["+lr=1"], ["bash", "run.sh", "${lr}"], "bash run.sh 1"),
    ],
)
def test_the_words_of_a_program_follow_the_config(
    overrides: list[str], program: list[str], command: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "x.py").touch(0o700)
    assert main([*overrides, "--cfg", "job", "submit", "--", *program]) == 0
    words = shlex.split(yaml.safe_load(capsys.readouterr().out)["job"]["command"])
    assert command in " ".join(words)


def test_each_point_of_a_sweep_has_its_own_arguments_in_one_array(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "x.py").touch()
    words = ["-m", "+cluster=a100x4", "+lr=1e-3,3e-3", "submit", "--", "python", "x.py", "--lr", "${lr}"]
    assert main(words) == 0
    runs = sorted(project.glob("runs/*/*/config.yaml"))
    commands = [yaml.safe_load(run.read_text())["job"]["command"] for run in runs]
    assert [shlex.split(command) for command in commands] == [["python", "x.py", "--lr", lr] for lr in ("1e-3", "3e-3")]
    assert len(slurm.jobs) == 1 and slurm.jobs[0]["options"]["array"] == "0-1"
    assert [json.loads((run.parent / "run.json").read_text())["varied"] for run in runs] == [["lr=1e-3"], ["lr=3e-3"]]
    capsys.readouterr()
    assert main(["status", runs[1].parent.name]) == 0
    shown = capsys.readouterr().out
    assert "  program: python x.py --lr '3e-3'\n" in shown and "  overrides: cluster=a100x4 +lr=1e-3,3e-3\n" in shown


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
            ["/bin/bash", "-c", "for RANK in 1 2; do echo $RANK; done"],
            ["/bin/bash", "-c", "for RANK in 1 2; do echo $RANK; done"],
        ),
        (["env", "A=$RANK", "sh", "-c", "echo $RANK"], ["env", "A=3", "sh", "-c", "echo $RANK"]),
    ],
)
def test_what_only_a_rank_knows_is_filled_in_where_no_shell_does_it(words: list[str], meant: list[str]) -> None:
    assert with_variables(words, GIVEN, AROUND) == meant
