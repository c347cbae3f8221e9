"""The table of the page `clients`, row by row: scripts of Hugging Face's users, preempted, killed and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.project import make_project
from tests.support.clients import SAVE_STEPS, Client, seen_row, table_row
from tests.support.slurm_cluster import Cluster

SAVES = ("--save-steps", str(SAVE_STEPS))
STEPS = ("--steps", "40")
CLIENTS = [
    Client("Trainer, plain", "hf_trainer.py", (*SAVES, *STEPS), plain=True),
    Client("Trainer, SlurmtrainCallback", "hf_trainer_callback.py", (*SAVES, *STEPS)),
    Client("Trainer, CheckpointedTrainer", "hf_trainer.py", (*SAVES, *STEPS)),
    Client("Accelerate, plain", "accelerate_loop.py", SAVES, plain=True),
    Client("Accelerate, AcceleratorCheckpointer", "accelerate_loop.py", SAVES),
]


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_what_the_page_says_of_a_client_is_what_happens(client: Client, sandbox: Cluster, tmp_path: Path) -> None:
    assert seen_row(client, make_project(tmp_path / "project", sandbox)) == table_row(client.name)
