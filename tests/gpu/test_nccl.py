"""Two ranks that talk over NCCL: every layout computes what one GPU computes, and what happens to a rank is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from slurmtrain.config.schema import Config
from slurmtrain.rank.addresses import hold_port
from slurmtrain.rank.distributed_context import DistributedContext, init_distributed
from slurmtrain.runs.lookup import all_runs
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals
from tests.parity.matrix import ROWS, Row, compare, config_of, reference_name, train_row, train_rows
from tests.support.gloo import GlooRanks, cluster_config
from tests.support.scripts import Program

# NCCL refuses two ranks on one GPU of a host, so each of these is told that it is on a host of its own; then they talk over
# the loopback. This is slow, because the GPU runs the kernels of one process at a time, but it is all of NCCL that one GPU
# can show.


def nccl_variables(rank: int) -> dict[str, str]:
    """What a rank is told so that it is alone on its node."""
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
    }


def joined_by_nccl(directory: Path, function: Callable[..., Any], *args: Any) -> Any:
    """As `tests.support.gloo.joined`, on the GPU."""
    os.environ.update(nccl_variables(int(os.environ["RANK"])))
    stop_flag = signals.install_signal_handlers()
    world = init_distributed(cluster_config(), "cuda", Environment.detect(), directory, stop_flag)
    value = function(world, *args)
    world.leave_together()
    return value


NAMES = (
    *("DDP 2", "FSDP 2", "FSDP 2, full checkpointing", "FSDP 2, bfloat16", "FSDP 2, packed"),
    *("TP 2", "TP 2 without sequence parallel", "CP 2", "CP 2, ulysses", "PP 2, 1F1B, accumulation"),
)
LAYOUTS = [row for row in ROWS if row.name in NAMES]


def alone_on_gpu(folder: Path, config: Config) -> None:
    train_row(DistributedContext(Environment(source="single"), torch.device("cuda", 0)), folder, config)


def test_each_layout_computes_over_nccl_what_one_gpu_computes(ranks: GlooRanks, tmp_path: Path) -> None:
    assert len(LAYOUTS) == len(NAMES)
    for model in {row.model for row in LAYOUTS}:
        alone_on_gpu(tmp_path / reference_name(model), config_of(Row("alone", 1, (), model)))
    configs = {row.name: config_of(row) for row in LAYOUTS}
    ranks.start(2, joined_by_nccl, train_rows, tmp_path, configs).results(timeout_s=240)
    found = {row.name: (compare(tmp_path, row), row.bound) for row in LAYOUTS}
    for name, (differences, bound) in found.items():
        print(f"{name:<44}", {key: f"{value:.1e}" for key, value in differences.items()}, f"bound {bound:.0e}")
    assert [name for name, (differences, bound) in found.items() if max(differences.values()) > bound] == []


FAULTY = """
import os, time
from slurmtrain.models import Decoder

def dig():
    while True:
        pass

class Faulty(Decoder):
    passes = 0

    def forward(self, tokens):
        self.passes += self.training
        if self.training and self.passes == 8 and os.environ["RANK"] == "1":
            dig()
        return super().forward(tokens)
"""


def test_a_rank_that_hangs_is_named_while_nccl_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    words = ["+experiment=smoke", "train.device=cuda", "train.steps=40", "train.tensorboard=false"]
    words += ["parallel.dp_replicate=1", "parallel.dp_shard=2", "model._target_=faulty.Faulty"]
    words += ["watchdog.min_s=4", "watchdog.factor=1", "watchdog.first_step_s=60", "train"]
    with closing(hold_port(None, "here")) as held:
        told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        ranks = [
            Program(tmp_path, "-m", "slurmtrain", *words, RANK=str(rank), TORCHELASTIC_RUN_ID="pair", **told, **own)
            for rank, own in enumerate(map(nccl_variables, range(2)))
        ]
        try:
            codes = [rank.wait(120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.end()
    said = [rank.said[-2500:] for rank in ranks]
    assert not {0, 75, 78} & {*codes}, said
    page = (all_runs(tmp_path / "runs")[-1].attempt(1).path / "hang.md").read_text()
    assert "rank 1" in page and "dig" in page, (page, said)
