"""Ranks that hang: each is named with its node and its phase, and the attempt ends."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from slurmtrain import __main__
from slurmtrain.config.schema import Config, WatchdogConfig
from slurmtrain.rank import main
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.leaving import timed_out
from slurmtrain.rank.watchdog import Watchdog
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.failures import found_hang
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RunDir
from tests.support.gloo import GlooRanks, Ranks
from tests.support.local_runs import SMALL, Project
from tests.support.runs import submitted_run

FAULTY = """
import os, signal, time
from slurmtrain.data.sources.text import StdlibText
from slurmtrain.models import Decoder

FAULTS = {faults!r}
ATTEMPT, RANK = int(os.environ["SLURMTRAIN_ATTEMPT"]), int(os.environ["RANK"])
FAULT, AT_RANK = FAULTS[ATTEMPT - 1] if ATTEMPT <= len(FAULTS) else ("", -1)
HERE = RANK == AT_RANK

def spin():
    while True:
        pass

class Faulty(Decoder):
    passes = 0

    def forward(self, tokens):
        self.passes += self.training
        if self.training and FAULT:
            time.sleep(0.7)  # so that each step is seen
        if self.training and self.passes >= 4:
            if HERE and FAULT == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if HERE and FAULT == "loop":
                spin()
        return super().forward(tokens)

class Samples:
    reads = 0

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads += 1
        if HERE and FAULT == "worker" and self.reads > 12:
            read_for_ever()
        return self.samples[index]

def read_for_ever():
    time.sleep(1000)

class Text:
    def __init__(self, **arguments):
        source = StdlibText(**arguments)
        self.train, self.valid, self.vocab_size = Samples(source.train), source.valid, 256
"""


class Fault(NamedTuple):
    name: str
    rank: int
    said: str  # in the sentence of the attempt
    watched: list[str]


WATCHED = ["watchdog.min_s=4", "watchdog.factor=1", "watchdog.first_step_s=60"]
SILENT = ["watchdog.silent_s=5", "watchdog.min_s=600"]  # whatever a step may take
FAULTS = [
    Fault("stopped", 0, "was stopped (SIGSTOP)", SILENT),
    Fault("loop", 1, "did not come to where the others wait", WATCHED),
    Fault("worker", 1, "waits for data", WATCHED),
]
SMALL_RUN = [
    *(word for word in SMALL if "paced" not in word),
    "cluster.tasks_per_node=2",
    "model._target_=faulty.Faulty",
    "data._target_=faulty.Text",
    "train.steps=8",
]


ALONE = """
import ctypes, os, signal, time
import slurmtrain

slurmtrain.init(device="cpu", watchdog=3)
attempt = os.environ["SLURMTRAIN_ATTEMPT"]
for step in range(100):
    time.sleep(0.3)
    slurmtrain.should_stop()
    if step == 18 and attempt == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    if step == 18:
        ctypes.PyDLL(None).sleep(1000)
"""


class Hanging(NamedTuple):
    run: RunDir
    ranks: Ranks


def start_fault(ranks: GlooRanks, folder: Path, fault: Fault) -> Hanging:
    """A run of two ranks with this fault, as cluster=local would start them, but without the seconds of their imports."""
    folder.mkdir()
    (folder / "faulty.py").write_text(FAULTY.format(faults=[fault[:2]]))
    words = [word.lstrip("+") for word in (*SMALL_RUN, *fault.watched, "train.data_workers=1")]
    run = submitted_run(folder, *words, f"job.runs_dir={folder}/runs")
    run.new_attempt()
    return Hanging(run, ranks.start(2, train, folder, run.path))


def train(directory: Path, folder: Path, run_path: Path) -> None:
    """A rank: `python -m slurmtrain train RUN` in this process."""
    os.environ[ATTEMPT_VARIABLE] = "1"
    log = os.open(RunDir(run_path).attempt(1).path / f"rank-{os.environ['RANK']}.log", os.O_CREAT | os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.path.insert(0, str(folder))
    sys.argv = ["slurmtrain", "train", str(run_path)]
    __main__.run()


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Hanging]]:
    """What became of the faults, which all happen at the same time."""
    folder = tmp_path_factory.mktemp("hangs")
    with GlooRanks(folder) as ranks:
        started = {str(fault): start_fault(ranks, folder / f"{fault.name}-{fault.rank}", fault) for fault in FAULTS}
        for each in started.values():
            each.ranks.endings(300)
        yield started


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}-{fault.rank}")
def test_a_rank_that_hangs_is_named_with_its_node_and_its_phase(hung: dict[str, Hanging], fault: Fault) -> None:
    attempt = hung[str(fault)].run.attempt(1)
    assert (found := found_hang(attempt)) is not None, [log.read_text() for log in attempt.rank_logs().values()]
    assert found.sentence.startswith(f"rank {fault.rank} on {found.node} {fault.said} in step "), found.sentence
    phase = "data" if fault.name == "worker" else "forward/backward"
    if fault.name == "stopped":  # it cannot say where it is: what the others know of it is some seconds old
        phase = r"[a-z/ ]+;"
    assert re.search(rf" in step \d+, {phase}", found.sentence), found.sentence
    assert "1 other rank waited" in found.sentence
    page = attempt.hang_page.read_text()
    assert f"Rank {fault.rank} on {found.node}" in page
    frame = {"loop": "spin", "worker": "read_for_ever"}.get(fault.name)
    if frame is not None:
        assert frame in page.split("## Ranks that waited")[0], page
        assert frame in found.sentence


def test_a_rank_that_is_alone_is_named_and_ended_when_it_is_stopped_or_holds_the_interpreter(project: Project) -> None:
    """Ranks of two that are killed or stopped, and start again in their job: see tests/slurm/test_training.py."""
    (project.path / "own.py").write_text(ALONE)
    words = ("+cluster=local", "job=command", f"job.command='{sys.executable} -u own.py'", "cluster.cpus_per_task=1")
    limits = ("watchdog.min_s=3", "watchdog.factor=1", "requeue.max_attempts_without_progress=2")
    run = project.submit(*words, *limits, small=False)
    assert run.wait() == 1, run.output
    stopped, held = run.attempts()
    assert [(each.reason, each.verdict) for each in (stopped, held)] == [("hang", "requeue"), ("hang", "end")]
    node = stopped.nodes[0]
    assert stopped.sentence is not None and held.sentence is not None
    assert stopped.sentence.startswith(f"hung: rank 0 on {node} was stopped (SIGSTOP) in step "), stopped.sentence
    said = f"hung: rank 0 on {node} is in a call that holds Python's interpreter lock in step "
    assert held.sentence.startswith(said) and "(own.py:" in held.sentence, held.sentence
    assert "own.py" in run.run_dir.attempt(2).hang_page.read_text()
    assert f"hung: rank 0 on {node} was stopped" in run.output
    assert run.processes() == []


def wait_for_a_stopped_rank(world: DistributedContext, folder: Path) -> None:
    watchdog = Watchdog(WatchdogConfig(), world, AttemptDir(folder))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=4))
    dist.barrier(group=group)
    if world.environment.rank == 1:
        world.connect_to_store().wait(["watchdog/beat/1"])  # the other one knows this process
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        dist.barrier(group=group)
    except RuntimeError as error:
        if timed_out(error):
            watchdog.collective_timed_out(error)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, Ranks]]:
    """Ranks of which the second is stopped in a collective, and others where it is while the groups are made."""
    folder = tmp_path_factory.mktemp("stopped")
    with GlooRanks(folder) as ranks:
        yield (
            ranks.start_joined(2, wait_for_a_stopped_rank, folder),
            ranks.start(2, be_stopped_while_the_groups_are_made),
        )


def test_a_collective_whose_own_time_out_comes_first_names_the_rank_that_did_not_come(
    stopped: tuple[Ranks, Ranks],
) -> None:
    first, second = stopped[0].endings(90)
    assert (first.error, first.exit_code, second.exit_code) == (None, 1, -signal.SIGKILL)
    found = found_hang(AttemptDir(stopped[0].directory.parent))
    assert found is not None
    assert found.sentence.startswith(f"rank 1 on {found.node} was stopped (SIGSTOP), start")


def be_stopped_while_the_groups_are_made(directory: Path) -> None:
    """Ranks of an attempt; the second is stopped when all have met, and before it can be connected with the first."""

    def stop(*_: object, store: dist.PrefixStore, **options: object) -> None:
        store.underlying_store.wait(["restart-0/watchdog/beat/1"])  # the other one knows this process
        os.kill(os.getpid(), signal.SIGSTOP)

    if os.environ["RANK"] == "1":
        dist.init_process_group = stop  # type: ignore[assignment]
    context = AttemptContext(RunDir(directory), 1, supervised=True)
    context.attempt_dir.path.mkdir(parents=True, exist_ok=True)
    config = Config(watchdog=WatchdogConfig(first_step_s=3))
    main.Rank(context).run(lambda: (config, lambda: context.run_dir), strict=False)


def test_a_rank_that_hangs_before_the_process_groups_are_made_is_named(stopped: tuple[Ranks, Ranks]) -> None:
    """As it is with NCCL, which has no time-out for that."""
    first, second = stopped[1].endings(90)
    assert (first.exit_code, second.exit_code) == (1, -signal.SIGKILL)
    found = found_hang(RunDir(stopped[1].directory).attempt(1))
    assert found is not None
    assert found.sentence.startswith(f"rank 1 on {found.node} was stopped (SIGSTOP), start")
