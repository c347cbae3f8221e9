"""Sweeps that grow while they run, and what the jobs of a Hydra program hand over; without SLURM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurmtrain.config.compose import Composer
from slurmtrain.config.folders import search_folders
from slurmtrain.launch.claims import is_claimed
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.sweep.plan import SweepPlan
from slurmtrain.sweep.search import open_sweep
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


@pytest.fixture
def sweep_plan(project: Path) -> SweepPlan:
    config = Composer(search_folders()).compose(
        ["cluster=local", "job=command", "job.command=true", "job.snapshot=none"]
    )
    return SweepPlan(with_absolute_paths(config, project), search="the same")


def test_a_point_whose_line_was_cut_short_is_asked_for_anew(sweep_plan: SweepPlan, cli: Cli) -> None:
    opened = open_sweep(sweep_plan, [], None)
    file = opened.sweep.points_file
    with opened.alone():
        assert is_claimed(opened.sweep.path)
        opened.add({"optim.lr": "1"}, sweep_plan.first)
        whole = file.read_text()
        file.write_text(f'{whole}{{"number": 1, "vari')
        assert [point["point"] for point in json.loads(cli("sweep", "status", "last", "--json").stdout)["points"]] == [
            0
        ]
        other = replace(sweep_plan.first, job=replace(sweep_plan.first.job, command="false"))
    with opened.alone():
        opened.add({"optim.lr": "2"}, other)
    assert file.read_text().startswith(whole) and [point.number for point in opened.sweep.points()] == [0, 1]
    assert not is_claimed(opened.sweep.path)
