"""An own script with two models, two optimisers and a schedule: all of them come back, to the last bit."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.format.manifest import read_manifest
from tests.distributed.test_own_scripts import TORCHRUN, Program, folder_with_jobs
from tests.support.children import children
from tests.support.gloo import wait_until
from tests.support.local_runs import assert_same_tensors
from tests.support.reading import checkpoint_tensors

STEPS, SAVE_EVERY = 60, 7
SCRIPT = ["jobs/own_two_models.py", "--steps", str(STEPS), "--batch", "16", "--save-every", str(SAVE_EVERY)]
SLOWLY = ["--pause", "0.1"]
NAMES = ("generator", "discriminator", "generator_optimizer", "discriminator_optimizer", "scheduler")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_with_jobs(tmp_path / "folder")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks that nobody interrupted."""
    folder = folder_with_jobs(tmp_path_factory.mktemp("undisturbed") / "folder")
    Program(folder, *TORCHRUN, *SCRIPT).finish()
    return folder / "checkpoints"


def plain_state(checkpoints: Path) -> dict[str, Any]:
    """What the newest checkpoint says besides tensors: the schedule, and the optimisers' settings."""
    return dict(read_manifest(committed(checkpoints)[-1]).state)


def rank_pids(program: Program) -> list[int]:
    return children(program.process.pid)


def signal_rank(program: Program, rank: int, number: int) -> None:
    """Stop the ranks that run by now, and wait until torchrun has started others."""
    before = rank_pids(program)
    os.kill(before[rank], number)
    wait_until(lambda: program.process.poll() is not None or not set(before) & set(rank_pids(program)), "started again")


def resumed_at(program: Program) -> list[int]:
    return [int(step) for step in re.findall(r"resuming at step (\d+) ", program.log.read_text())]


def assert_same_state(one: Path, other: Path) -> None:
    assert_same_tensors(checkpoint_tensors(one), checkpoint_tensors(other))
    assert json.dumps(plain_state(one), sort_keys=True) == json.dumps(plain_state(other), sort_keys=True)


def test_both_models_both_optimisers_and_the_schedule_are_in_the_checkpoint(undisturbed: Path) -> None:
    tensors, plain = checkpoint_tensors(undisturbed), plain_state(undisturbed)
    for name in NAMES:
        assert [key for key in (*tensors, *plain) if key == name or key.startswith(f"{name}.")], name
    # Adam keeps two moments and a count for every parameter: nothing of either optimiser is missing.
    for model in ("generator", "discriminator"):
        parameters = [key for key in tensors if key.startswith(f"{model}.")]
        moments = [key for key in tensors if key.startswith(f"{model}_optimizer.state.")]
        assert (len(parameters), len(moments)) == (4, 12)
    assert plain["scheduler"]["last_epoch"] == STEPS
    steps = {int(path.name.rpartition("_")[2]) for path in committed(undisturbed)}
    assert steps == {STEPS, STEPS - STEPS % SAVE_EVERY}  # the last, and the last of those in between


def test_stopped_and_killed_both_models_end_with_the_bits_of_the_undisturbed_run(
    folder: Path, undisturbed: Path
) -> None:
    program = Program(folder, *TORCHRUN, "--max-restarts", "2", *SCRIPT, *SLOWLY)
    program.wait_for("step 10/")
    signal_rank(program, 1, signal.SIGTERM)
    program.wait_for(" from checkpoint")
    (stopped,) = resumed_at(program)
    assert 10 <= stopped < STEPS
    # The kill leaves no time to save: what comes back is written in the background while training goes on.
    wait_until(lambda: step_of(committed(folder / "checkpoints")[-1]) > stopped, "saved in between")
    signal_rank(program, 0, signal.SIGKILL)
    program.finish()
    _, killed = resumed_at(program)
    assert stopped < killed < STEPS
    assert killed % SAVE_EVERY == 0
    assert_same_state(folder / "checkpoints", undisturbed)
