"""The table of the page `clients`, row by row: each script is preempted, killed and compared with an undisturbed run.

A script is an example of `jobs/`, as it stands, or without the lines that slurmtrain needs: as it was before.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from slurmtrain.config.folders import PACKAGE
from tests.slurm.project import Project, Run, make_project
from tests.support.slurm_cluster import Cluster

ROOT = PACKAGE.parent
METERED = Path(__file__).with_name("metered.py")
MARK = re.compile(r"\s*# \+(?:  (?:was: (?P<before>.*)|.*))?$")
RANKS = range(4)
SAVE_STEPS = 10  # steps between the saves of a script
DISTURBED = ["preempted", "preempted", "crash", "finished"]


@dataclass(frozen=True)
class Client:
    """A row of the table, and how its script is submitted.

    Args:
        name: as in the table.
        script: file of `jobs/`.
        options: of the script.
        overrides: of the submission.
        plain: without slurmtrain's lines.
        steps: that are done before it is disturbed, each time.
        save_steps: between its saves; None: it saves at a stop and at its end.
        tolerance: of a final weight, absolute; 0: the same bits.
    """

    name: str
    script: str
    options: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    plain: bool = False
    steps: int = 7
    save_steps: int | None = SAVE_STEPS
    tolerance: float = 0.0

    @property
    def text(self) -> str:
        text = (ROOT / "jobs" / self.script).read_text()
        return before(text) if self.plain else text


def before(script: str) -> str:
    """The script without slurmtrain: lines that end in `# +` are left out, or are again what they were."""
    lines = []
    for line in script.splitlines():
        match = MARK.search(line)
        if match is None or line.startswith('"""'):
            lines.append(line)
        elif match["before"]:
            lines.append(line[: len(line) - len(line.lstrip())] + match["before"])
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class ClientRun:
    """A submitted script whose optimiser steps are counted (`metered.py`)."""

    run: Run

    def steps_done(self, rank: int = 0, attempt: int | None = None) -> int:
        """Optimiser steps of an attempt, or of all: those that were done twice are counted twice."""
        path = self.run.run_dir.path / f"steps-{rank}"
        done = path.read_text() if path.exists() else ""
        return len(done) if attempt is None else done.count(str(attempt))

    def wait_for_steps(self, more: int) -> None:
        """Until so many more steps are done."""
        goal = self.steps_done() + more
        self.run.wait_until(lambda: self.steps_done() >= goal, f"{more} steps further", timeout_s=300)

    def kill_a_rank(self, rank: int) -> None:
        """As the kernel does to a process when memory is short. It has done a step in the attempt that runs."""
        pid = int((self.run.run_dir.path / f"rank-{rank}").read_text().split()[0])
        assert b"metered.py" in Path(f"/proc/{pid}/cmdline").read_bytes(), f"rank {rank} does not run"
        os.kill(pid, signal.SIGKILL)

    def world_sizes(self) -> set[int]:
        """Numbers of ranks that each rank has trained together with."""
        return {int((self.run.run_dir.path / f"rank-{rank}").read_text().split()[1]) for rank in RANKS}

    def reasons(self) -> list[str | None]:
        return [attempt.reason for attempt in self.run.attempts()]

    def weights(self) -> dict[str, torch.Tensor]:
        """The final weights that the script has written; of one that leaves a checkpoint at its end, all of that."""
        folder = self.run.run_dir.path
        if (folder / "weights.pt").exists():
            found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
            return found
        if (file := folder / "trainer" / "final" / "model.safetensors").exists():
            from safetensors.torch import load_file

            return load_file(file)
        return self.run.tensors()


def submit(project: Project, client: Client, *, nodes: str) -> ClientRun:
    """Submit its script on two nodes with two ranks each."""
    shutil.copy(METERED, project.path / "metered.py")
    (project.path / "script.py").write_text(client.text)
    run = project.submit(
        *("cluster.nodes=2", "cluster.tasks_per_node=2", "cluster.cpus_per_task=1", "requeue.restart_delay_s=3"),
        *client.overrides,
        small=False,
        nodes=nodes,
        words=("--", sys.executable, "metered.py", "script.py", *client.options),
    )
    return ClientRun(run)


def seen_row(client: Client, project: Project) -> dict[str, str]:
    """Run its script undisturbed, and preempted twice and killed once: its row of the table, as it was seen."""
    undisturbed = submit(project, client, nodes="n[2-3]")
    undisturbed.run.go_on()
    disturbed = submit(project, client, nodes="n[0-1]")
    for _ in range(2):
        disturbed.wait_for_steps(client.steps)
        disturbed.run.preempt_by_high()
    disturbed.wait_for_steps(client.steps)
    disturbed.kill_a_rank(2)
    disturbed.run.finish(600)
    undisturbed.run.finish(600)
    assert undisturbed.reasons() == ["finished"], undisturbed.run.status() + undisturbed.run.logs()
    assert disturbed.reasons() == DISTURBED, disturbed.run.status() + disturbed.run.logs()
    becomes, twice = _steps_done_twice(undisturbed, disturbed, client.save_steps)
    return {
        "client": client.name,
        "lines": str(sum(bool(MARK.search(line)) and not line.startswith('"""') for line in client.text.splitlines())),
        "2 x 2": "starts" if undisturbed.world_sizes() == disturbed.world_sizes() == {len(RANKS)} else "does not start",
        "preempted twice": becomes,
        "kill -9": becomes,
        "final weights": _difference(undisturbed.weights(), disturbed.weights(), client.tolerance),
        "steps done twice": twice,
    }


def _steps_done_twice(undisturbed: ClientRun, disturbed: ClientRun, save_steps: int | None) -> tuple[str, str]:
    """What the script does when it is started again, and which steps it does twice.

    Where preemptions cost steps, too, there are more of them than between two saves, or than the killed attempt has done.
    """
    total = [undisturbed.steps_done(rank) for rank in RANKS]
    twice = [disturbed.steps_done(rank) - total[rank] for rank in RANKS]
    killed = [disturbed.steps_done(rank, attempt=3) for rank in RANKS]
    if all(disturbed.steps_done(rank, attempt=4) == total[rank] for rank in RANKS):
        return "starts over", "all"
    if all(0 < twice[rank] <= min(killed[rank], save_steps or killed[rank]) for rank in RANKS):
        return "resumes", "since the last save"
    if save_steps and all(0 < twice[rank] <= 3 * save_steps for rank in RANKS):
        return "resumes", "since the last save, each time"
    return "resumes", f"{twice} on the ranks"


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> str:
    assert one.keys() == other.keys()
    if not tolerance and all(torch.equal(one[name], other[name]) for name in one):
        return "same bits"
    largest = max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
    return f"within {tolerance:.0e}".replace("e-0", "e-") if largest <= tolerance else f"{largest:.1e} apart"


SAVES = ("--save-steps", str(SAVE_STEPS))
STEPS = ("--steps", "40")
DEVICES = ("--nodes", "2", "--devices", "2")
CLIENTS = [
    Client("Trainer, SlurmtrainCallback", "hf_trainer.py", (*SAVES, *STEPS)),
    Client("Accelerate, plain", "accelerate_loop.py", SAVES, plain=True),
    Client("Accelerate, Checkpointer", "accelerate_loop.py", SAVES),
    Client("Lightning, SlurmtrainCallback", "lightning_module.py", (*DEVICES, *SAVES)),
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
    Client("own epochs, DataLoader and Checkpointer", "own_epochs.py", ("--epochs", "4"), save_steps=20),
]


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_what_the_page_says_of_a_client_is_what_happens(client: Client, sandbox: Cluster, tmp_path: Path) -> None:
    lines = (PACKAGE / "docs" / "clients.md").read_text().splitlines()
    heads, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    said = next(dict(zip(heads, row, strict=True)) for row in rows if row[0] == client.name)
    assert seen_row(client, make_project(tmp_path / "project", sandbox)) == said
