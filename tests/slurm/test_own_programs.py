"""A program of one's own on a real SLURM: 2 nodes x 2 ranks, preempted, resumed, with the right ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.slurm.project import Project, make_project
from tests.support.slurm_cluster import Cluster

# Counts to 40 with checkpoints as transformers names them, and waits at 20 in its first attempt, until it is preempted.
# Rank 0 saves on SIGTERM, which takes a while, and leaves with 0; the others die of the signal at once.
TRAIN = r"""
import json, os, pathlib, shutil, signal, sys, time

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
run_dir, attempt = pathlib.Path(os.environ["SLURMTRAIN_RUN_DIR"]), os.environ["SLURMTRAIN_ATTEMPT"]
out = run_dir / "out"
out.mkdir(exist_ok=True)
saved = sorted(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
step = first = saved[-1] if saved else 0

def save(step):
    folder = out / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "weights").write_text(str(step))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))

def told(number, frame):
    time.sleep(1.0)
    save(step)
    (run_dir / f"told-{attempt}").write_text(signal.Signals(number).name)
    sys.exit(0)

if rank == 0:
    signal.signal(signal.SIGTERM, told)
seen = {name: os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS")}
facts = {**seen, "world": world, "first": first, "arguments": sys.argv[1:]}
while step < 40:
    if step == 20:
        (run_dir / f"up-{attempt}-{rank}").write_text(json.dumps(facts))
        while len(list(run_dir.glob(f"up-{attempt}-*"))) < world:  # a rank that is late must not see this one's last checkpoint
            time.sleep(0.01)
        if attempt == "1":
            time.sleep(600)
    step += 1
    time.sleep(0.01)
if rank == 0:
    save(step)
"""


@pytest.fixture
def project(sandbox: Cluster, tmp_path: Path) -> Project:
    made = make_project(tmp_path / "own", sandbox)
    (made.path / "train.py").write_text(TRAIN)
    return made


def test_a_program_on_two_nodes_is_preempted_and_resumes_with_the_right_ranks(project: Project) -> None:
    words = ["two words", "$HOME"]
    sizes = ["cluster.nodes=2", "cluster.tasks_per_node=2", "cluster.gpus_per_node=0", "cluster.cpus_per_task=1"]
    again = ["job.snapshot=none"]
    again += ["job.checkpoints='out/checkpoint-*'", "job.checkpoint_complete=trainer_state.json"]
    run = project.submit(*sizes, *again, small=False, words=("--", sys.executable, "train.py", *words))
    ranks = range(4)
    run.wait_until(lambda: all((run.run_dir.path / f"up-1-{rank}").exists() for rank in ranks), "up")
    torn = run.run_dir.path / "out" / "checkpoint-99"  # the program would go on from there
    torn.mkdir()
    (torn / "weights").write_text("the first half")
    os.utime(torn / "weights", (1000, 1000))
    os.utime(torn, (1000, 1000))
    run.preempt_by_high()
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"], run.logs()
    assert [attempt.world_size for attempt in run.attempts()] == [4, 4]
    assert [attempt.seen_step for attempt in run.attempts()] == [20, 40]
    aside = torn.with_name(".incomplete-checkpoint-99-attempt-2")
    assert (aside / "weights").read_text() == "the first half" and not torn.exists()
    assert "1 incomplete one moved aside (the last: checkpoint-99)" in run.status()
    # Rank 0 saved for a second after the others had died of the signal: nothing has ended it.
    assert (run.run_dir.path / "told-1").read_text() == "SIGTERM"
    for number, first in ((1, 0), (2, 20)):
        for rank in ranks:
            facts = json.loads((run.run_dir.path / f"up-{number}-{rank}").read_text())
            assert facts == {
                "LOCAL_RANK": str(rank % 2),
                "LOCAL_WORLD_SIZE": "2",
                "NODE_RANK": str(rank // 2),
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": "4",
                "world": 4,
                "first": first,
                "arguments": words,
            }
