"""The table of the page `clients`, row by row: each script is preempted, killed and compared with an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.project import make_project
from tests.support.clients import SAVE_STEPS, Client, seen_row, table_row
from tests.support.slurm_cluster import Cluster

SAVES = ("--save-steps", str(SAVE_STEPS))
STEPS = ("--steps", "40")
RANKS = ("--nodes", "2", "--devices", "2")
CLIENTS = [
    Client("Trainer, SlurmtrainCallback", "hf_trainer.py", (*SAVES, *STEPS)),
    Client("Accelerate, plain", "accelerate_loop.py", SAVES, plain=True),
    Client("Accelerate, AcceleratorCheckpointer", "accelerate_loop.py", SAVES),
    Client("Lightning, SlurmtrainCallback", "lightning_module.py", (*RANKS, *SAVES)),
    Client("DeepSpeed ZeRO-2, EngineCheckpoints", "deepspeed_zero.py", SAVES),
    # After a restart DDP adds up in another order, once. Its steps contract (learning rate times largest curvature: below 1),
    # so that roundings do not grow: in each of 60 steps 6 roundings of 2**-24 in each of 21 numbers below 2, as a norm: 1e-4.
    Client(
        "own snapshots",
        "own_snapshots.py",
        ("--folder", "$SLURMTRAIN_RUN_DIR"),
        ("job.checkpoints=snapshots/epoch-*.pt",),
        steps=15,
        tolerance=1e-4,
    ),
    Client("own loop, Checkpointer", "own_loop.py", STEPS, save_steps=None),
]


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_what_the_page_says_of_a_client_is_what_happens(client: Client, sandbox: Cluster, tmp_path: Path) -> None:
    if client.script == "deepspeed_zero.py":
        pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
    assert seen_row(client, make_project(tmp_path / "project", sandbox)) == table_row(client.name)
