"""The checks before training with real ranks: what is wrong on one of them is found, on all of them, by its name."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from slurmtrain.choices import PreflightMode
from slurmtrain.config.schema import CheckpointConfig, ClusterConfig, Config, PreflightConfig
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.rank.distributed_context import init_distributed
from slurmtrain.rank.preflight import facts, measure
from slurmtrain.rank.preflight.check import run_preflight
from slurmtrain.rank.preflight.facts import MISSING
from slurmtrain.report.findings import read_preflight
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import NODES_VARIABLE, Environment
from slurmtrain.system import signals
from slurmtrain.system.files import write_json
from slurmtrain.system.process_facts import gather_facts
from tests.support.gloo import GlooRanks, cluster_config

NODES = ("n0", "n1", "n2", "n3")
# Findings that rank 0 has recorded, and the nodes that every rank's error blames.
Said = tuple[list[str], tuple[str, ...] | None]


class Ranks:
    """Four ranks, each on a node of its own as far as they know, in one run with an attempt for each check."""

    def __init__(self, directory: Path):
        rank = int(os.environ["RANK"])
        os.environ |= {
            NODES_VARIABLE: ",".join(NODES),
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        self.environment = Environment.detect()
        self.distributed = init_distributed(
            cluster_config(), "cpu", self.environment, directory, signals.install_signal_handlers()
        )
        self.rank, self.attempt = rank, 0
        self.run_dir = RunDir(directory / "run")
        if rank == 0:
            (self.run_dir.path / "code").mkdir(parents=True)
            (self.run_dir.path / "config.yaml").write_text("a: 1\n")
            write_json(self.run_dir.info_file, {"id": "run"})
        self.distributed.broadcast_text("made" if rank == 0 else None)
        self.config = Config(cluster=ClusterConfig(backend=cluster_config().backend), data={"path": str(directory)})

    def check(
        self, wrong: dict[str, Any] | None = None, *, on: int = -1, config: Config | None = None, full: bool = False
    ) -> Said:
        """Check with what a reader of facts finds on one rank, or with its own run directory, or where rank 0 cannot write."""
        self.attempt += 1
        of_all = AttemptContext(self.run_dir, self.attempt, supervised=True)
        if self.rank == 0 and not full:
            of_all.attempt_dir.path.mkdir(parents=True)
        self.distributed.broadcast_text("made" if self.rank == 0 else None)
        given = dict(wrong or {}) if self.rank == on else {}
        time.sleep(given.pop("late_s", 0))
        context, nodes = replace(of_all, run_dir=given.pop("run_dir", self.run_dir)), None
        with pytest.MonkeyPatch.context() as patch:
            for name, value in given.items():
                patch.setattr(time if name == "time" else facts, name, value)
            try:
                run_preflight(config or self.config, self.distributed, context)
            except EnvironmentMismatchError as error:
                nodes = error.nodes
        self.distributed.broadcast_text("done" if self.rank == 0 else None)
        record = read_preflight(of_all.attempt_dir)
        return [each.sentence for each in record.findings] if record is not None else [], nodes


def everything(directory: Path) -> dict[str, Said]:
    ranks = Ranks(directory)
    sound, now = gather_facts(), time.time
    asks_gpus = structs.replace(ranks.config, cluster=structs.replace(ranks.config.cluster, gpus_per_node=2))
    older = replace(sound, packages={**sound.packages, "numpy": "1.0.0"})
    no_driver = {"has_gpu_files": lambda: True, "ask_gpus": lambda _: (None, "Driver/library version mismatch")}
    strict = structs.replace(ranks.config, preflight=PreflightConfig(clock_offset_s=1.5))
    facts.FOLDER_LIMIT_S = 1.0
    found = {
        "sound": ranks.check({"late_s": 3}, on=1, config=strict),
        "clock": ranks.check({"time": lambda: now() + 300}, on=1),
        "package": ranks.check({"gather_facts": lambda: older}, on=2),
        "data": ranks.check({"look_at": lambda _: MISSING}, on=3),
        "disk": ranks.check({"disk_problem": lambda *_: "has 0 GB left"}, on=3),
        "driver": ranks.check(no_driver, on=1, config=asks_gpus),
        "own folder": ranks.check({"run_dir": RunDir(directory / "own")}, on=2),
        "no file of rank 0": ranks.check(full=True),
    }
    measure.ON_CPU = measure.Sizes(32, torch.float32, 1 << 16, 1, 0.0)
    config = structs.replace(
        ranks.config, preflight=PreflightConfig(mode=PreflightMode.FULL), checkpoint=CheckpointConfig(local="/dev/shm")
    )
    config.preflight.slow_share = 1e-9  # so little is measured here that it says nothing
    found["full"] = ranks.check(config=config)
    ranks.distributed.leave_together()
    return found


def test_what_is_wrong_on_one_node_is_found_by_all_ranks_and_blamed_on_that_node(gloo_ranks: GlooRanks) -> None:
    """Also that mode=full measures every rank, and the links of each node."""
    world = gloo_ranks.start(4, everything)
    answers = world.results()
    assert all(answer == answers[0] for answer in answers)  # the same record, and the same nodes in every rank's error
    found: dict[str, Said] = answers[0]
    assert found["sound"] == found["no file of rank 0"] == ([], None)  # what it cannot write, no other is blamed for
    (clock,), blamed = found["clock"]
    ahead = re.match(r"n1: its clock is ([\d.]+) s ahead", clock)
    assert ahead is not None and 299 < float(ahead[1]) < 310
    assert blamed is None  # a warning
    (package,), blamed = found["package"]
    assert package.startswith("n2: numpy 1.0.0; expected: numpy ") and blamed == ("n2",)
    (data,), blamed = found["data"]
    assert data.startswith("n3: /") and "is missing; expected: /" in data and blamed == ("n3",)
    assert any("/tmp has 0 GB left" in each for each in found["disk"][0])
    driver, blamed = found["driver"]
    assert "n1: the driver says: Driver/library version mismatch; expected: a driver that answers" in driver
    assert blamed == ("n1",)
    (folder, *_), blamed = found["own folder"]
    assert folder.startswith("n2: does not see in 30 s what rank 0 has written into the run directory")
    assert blamed == ("n2",)

    attempt = RunDir(world.directory / "run").attempt(len(found))
    record = read_preflight(attempt)
    assert found["full"] == ([], None) and record is not None and record.measured is not None
    rates = record.measured
    assert list(rates.tflops) == ["0", "1", "2", "3"] and rates.all_reduce is not None
    assert [link[:2] for link in rates.links] == [("n0", "n1"), ("n0", "n3"), ("n1", "n2"), ("n2", "n3")]  # a ring
    assert min(rates.all_reduce, *(link[2] for link in rates.links)) > 0
    assert [file.name for file in attempt.path.iterdir()] == ["preflight.json"]
