"""Clusters as SLURM's own commands have described them: recorded answers, which `read_facts` reads as if it had asked.

A file of tests/unit/slurm/recorded has the output of each command after a line "$ COMMAND".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.read_facts import read_facts
from tests.support.fake_slurm import FakeSlurm

FOLDER = Path(__file__).parents[1] / "unit" / "slurm" / "recorded"
CLUSTERS = sorted(path.stem for path in FOLDER.glob("*.txt"))
USER = "me"


def answers_of(name: str) -> dict[str, str]:
    """The answers of one recorded cluster, by command."""
    text = (FOLDER / f"{name}.txt").read_text()
    parts = [part.partition("\n") for part in ("\n" + text).split("\n$ ")[1:]]
    return {command: output if output.endswith("\n") else f"{output}\n" for command, _, output in parts}


def facts_of(name: str, *, whole: bool = True) -> ClusterFacts:
    """The facts of a recorded cluster."""
    answers = answers_of(name)

    def ask(command: Sequence[str]) -> str | None:
        return answers.get(" ".join(command))

    return read_facts(ask, whole=whole, user=USER)


def play(fake: FakeSlurm, answers: dict[str, str]) -> None:
    """Let SLURM's commands give recorded answers to the user `me`, and fail for all else."""
    names = {command.split()[0] for command in answers}
    for command, output in answers.items():
        digest = hashlib.md5(command.encode(), usedforsecurity=False).hexdigest()
        (fake.directory / f"answer-{digest}").write_text(output)
    for name in names:
        fake.command(
            name,
            f'digest=$(printf "%s" "{name} $*" | md5sum | cut -c1-32)\n'
            'cat "$here/answer-$digest" 2>/dev/null || { echo "no answer" >&2; exit 1; }',
        )
