"""Sweeps that grow while they run, and what the jobs of a Hydra program hand over; without SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import Cli

PROGRAM = """
import os, hydra
{beside}
@hydra.main(version_base=None, config_path=None)
def main(cfg):
    print("with", os.environ["HF_TOKEN"])
    {inside}
main()
"""
LAUNCHED = ["-m", "+x=1,2", "hydra/launcher=slurmtrain", 'hydra.launcher.overrides=["+secrets.HF_TOKEN=env"]']


@pytest.mark.parametrize(
    ("beside", "inside", "words"),
    [
        ("TOKEN = os.environ['HF_TOKEN']", "return TOKEN", "the function holds the value of the secret"),
        ("", "raise ValueError('boom', os.environ['HF_TOKEN'])", "boom"),
    ],
)
def test_no_secret_of_a_program_lies_on_disk(cli: Cli, project: Path, beside: str, inside: str, words: str) -> None:
    (project / "program.py").write_text(PROGRAM.format(beside=beside, inside=inside))
    done = cli(*LAUNCHED, program=("program.py",), HF_TOKEN="hf_123456")
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert ("waiting for 2 jobs of" in done.stdout) == ("raise" in inside)  # who waits is told for what
    assert [path for path in project.rglob("*") if path.is_file() and b"hf_123456" in path.read_bytes()] == []
