"""`scale` on the command line, with a SLURM that only accepts: what is submitted, and what is said of what was measured."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.sweep import folder
from tests.support.commands import FakeSlurm
from tests.support.runs import add_attempt

WORDS = [
    *("+cluster=h100x8", "cluster.nodes=4", "model=llama3_1b", "parallel=fsdp", "parallel.param_dtype=bfloat16"),
    *("data.seq_len=4096", "train.global_batch_size=64", "parallel.activation_checkpointing=full"),
]


def scale(*words: str) -> int:
    return main([*WORDS, "scale", *words])


def finish(run_dir: RunDir, *, communication: float) -> None:
    """Let a run have finished, with this communication beside a second of computation in each of its steps."""
    parts = {"data": 0.01, "forward_backward": 1.0, "communication": communication, "optimizer": 0.02, "other": 0.0}
    record = {"step_time_s": sum(parts.values()), **{f"time_{name}_s": each for name, each in parts.items()}}
    run_dir.metrics_file.write_text("".join(json.dumps({"step": step, **record}) + "\n" for step in range(1, 11)))
    now = time.time()
    add_attempt(run_dir, started=now - 60, ended=now, reason="finished", verdict="done", exit_code=0, last_step=50)


def the_sweep(project: Path) -> Sweep:
    (found,) = folder.all_sweeps(project / "runs")
    return found


def test_sizes_are_submitted_once_and_what_they_measured_is_shown(
    project: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale("--no-wait") == 0
    said = capsys.readouterr().out
    sweep = the_sweep(project)
    assert f"sweep {sweep.id} of 3 sizes" in said
    assert sweep.id.startswith("train-scale.sweep-")
    assert sorted(line for text in fake_slurm.submitted for line in text.splitlines() if "--nodes=" in line) == [
        "#SBATCH --nodes=1",
        "#SBATCH --nodes=2",
        "#SBATCH --nodes=4",
    ]
    varied = {"cluster.nodes": "4", "train.global_batch_size": "64"}
    assert [point.varied for point in sweep.points()][-1] == varied

    for point, communication in zip(sweep.points(), (0.0, 0.05, 0.9), strict=True):
        finish(sweep.run_dir(point.run_id), communication=communication)
    assert scale("--plot", "-") == 0
    text = capsys.readouterr().out
    assert len(fake_slurm.submitted) == 3  # nothing again
    assert "more than 2 nodes are not worth it: 4 reach 56% of what they could" in text
    assert (
        "The first bottleneck: communication of dp_shard (parallel.dp_shard=32) that nothing hides takes longer" in text
    )
    assert "efficiency at each size against the one before; | is 80%" in text

    assert scale("--json", "--plot", "scaling.png") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (project / "scaling.png").exists()
    assert [each["nodes"] for each in found["sizes"]] == [1, 2, 4]
    assert [each["global_batch_size"] for each in found["sizes"]] == [16, 32, 64]
    assert found["doublings"][1]["bottleneck"]["axis"] == "dp_shard"
    assert found["doublings"][1]["planned"]["efficiency"] > 0.95
    assert found["sizes"][0]["planned_s"] == pytest.approx(found["sizes"][0]["step_s"], rel=0.002)


def test_a_size_that_failed_is_named_and_the_others_are_shown(
    project: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale("--no-wait", "--nodes", "1,2,4", "--strong") == 0
    sweep = the_sweep(project)
    first, second, third = (sweep.run_dir(point.run_id) for point in sweep.points())
    finish(first, communication=0.0)
    finish(third, communication=0.1)
    third.metrics_file.write_text('{"step": 1, "step_time_s": "a lot"}\n{"step"')
    add_attempt(second, started=1.0, ended=2.0, reason="crash", verdict="end", exit_code=1)
    capsys.readouterr()
    assert scale("--nodes", "1,2,4", "--strong") == 75
    text = capsys.readouterr().out
    assert f"not measured: run {second.id}, 2 nodes: failed" in text
    assert f"not measured: run {third.id}, 4 nodes" in text
    assert "one size alone says nothing of how it scales" in text
    assert f"sweep retry {sweep.id}" in text


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--steps", "3"], 2, "--steps 3: expected at least 10"),
        (["--nodes", "1"], 2, "expected at least two sizes"),
        (["train.global_batch_size=7", "--nodes", "1,x"], 2, "--nodes 1,x: expected numbers of nodes"),
        (["cluster.nodes=1"], 2, "cluster.nodes=1 leaves nothing to compare"),
        (["--strong", "--weak"], 2, "exclude each other"),
        (["--at-once", "0"], 2, "--at-once 0: expected a number of sizes"),
        (["cluster=local", "cluster.nodes=1", "--nodes", "1,2"], 78, "cluster.backend=local has"),
        (["model=llama3_405b"], 78, "needs"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_made(
    words: list[str], code: int, sentence: str, project: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale(*words) == code
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert fake_slurm.submitted == []
    assert not list((project / "runs").glob("*.sweep-*"))
