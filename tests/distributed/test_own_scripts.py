"""Programs of somebody's own: loops with a few added lines, and a command that knows nothing of slurmtrain."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import slurmtrain
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import committed, step_of
from tests.support.children import children
from tests.support.gloo import wait_until
from tests.support.local_runs import Project, assert_same_tensors
from tests.support.reading import checkpoint_tensors
from tests.support.scripts import Program, Script

JOBS = Path(__file__).parents[2] / "jobs"
STEPS = 60
SLOWLY = ["--pause", "0.1"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def wait_for(program: Program | Script, text: str) -> None:
    wait_until(lambda: text in program.log.read_text() or program.has_ended(), f"saying {text!r}")
    assert text in program.log.read_text()


def folder_with_jobs(path: Path) -> Path:
    path.mkdir()
    shutil.copytree(JOBS, path / "jobs")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_with_jobs(tmp_path / "folder")


def test_the_page_shows_the_loop_over_epochs_whole() -> None:
    code = (JOBS / "own_epochs.py").read_text().split('"""', 2)[2].strip()
    page = (Path(slurmtrain.__file__).parent / "docs" / "own-scripts.md").read_text()
    assert textwrap.indent(code, "    ") in page


def test_alone_it_leaves_with_75_and_goes_on_when_it_is_started_again(folder: Path, tmp_path: Path) -> None:
    """With all that most scripts have: epochs over a shuffled DataLoader with workers, dropout, a scheduler, AMP."""
    loop, steps_of_an_epoch = "jobs/own_epochs.py", 40
    for epoch, signalled in enumerate((signal.SIGTERM, signal.SIGUSR2)):
        script = Script(folder, loop, "--pause", "0.05")
        wait_for(script, f"epoch {epoch} ")
        script.send_signal(signalled)
        assert script.wait() == 75, script.log.read_text()
        stopped_at = step_of(committed(folder / "checkpoints")[-1])
        assert steps_of_an_epoch * (epoch + 1) <= stopped_at < steps_of_an_epoch * (epoch + 2)
    last = Script(folder, loop)
    assert last.wait() == 0 and f"resuming at step {stopped_at}" in last.log.read_text()
    whole = folder_with_jobs(tmp_path / "undisturbed")
    assert Script(whole, loop).wait() == 0
    assert_same_state(folder / "checkpoints", whole / "checkpoints")


WITH_COPIES = """
import os, sys, torch
import slurmtrain

slurmtrain.init(device="cpu")
model = torch.nn.Linear(2, 2)
checkpointer = slurmtrain.Checkpointer()
restored = checkpointer.restore(model=model)
print("restored", restored.step if restored else None, restored.origin if restored else "", flush=True)
if os.environ["SLURMTRAIN_ATTEMPT"] == "1":
    checkpointer.save(3, model=model)
    checkpointer.save(5, model=model)
    checkpointer.wait()
    checkpointer._writer.join()
    os._exit(9)
slurmtrain.should_stop()
"""


def test_an_own_loop_goes_on_from_the_copies_on_its_nodes_and_leaves_none(project: Project, tmp_path: Path) -> None:
    (project.path / "copies.py").write_text(WITH_COPIES)
    (tmp_path / "node").mkdir()
    words = ("+cluster=local", "job=command", "cluster.cpus_per_task=1", f"checkpoint.local={tmp_path / 'node'}")
    run = project.submit(*words, f"job.command='{sys.executable} copies.py'", small=False).finish()
    first, second = (run.run_dir.attempt(number).rank_log(0).read_text() for number in (1, 2))
    assert "restored None" in first and "restored 5 the copies on the nodes" in second, second
    assert [(each.first_step, each.reason) for each in run.attempts()] == [(0, "crash"), (5, "finished")]
    assert list((tmp_path / "node").iterdir()) == []


def test_a_command_that_knows_nothing_of_us_is_preempted_requeued_and_finished(project: Project) -> None:
    shutil.copytree(JOBS, project.path / "jobs")
    (project.path / "pause").write_text("0.1")
    program = [sys.executable, "jobs/own_command.py", "--file", str(project.path / "sum.json"), "--count", "200"]
    paused = f'exec {shlex.join(program)} --pause "$(cat {project.path}/pause || echo 0)"'
    words = ("+cluster=local", "job=command", "cluster.tasks_per_node=2", "cluster.cpus_per_task=1")
    command = json.dumps(shlex.join(["bash", "-c", paused]))
    run = project.submit(*words, f"job.command={command}", small=False)
    log = run.run_dir.attempt(1).path / "rank-0.log"
    wait_until(lambda: log.exists() and "rank 0: 10/" in log.read_text(), "at 10")
    (project.path / "pause").unlink()  # for the attempt to come
    assert project.cli("preempt", "last").returncode == 0
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["asked", "finished"]
    assert not any("200/200" in log.read_text() for log in run.run_dir.attempt(1).rank_logs().values())
    for rank in (0, 1):
        state = json.loads((project.path / f"sum-{rank}.json").read_text())
        assert state == {"done": 200, "sum": 20100, "starts": 2}


# Two models, two optimisers and a schedule: all of them come back, under torchrun.

SAVE_EVERY = 7
TWO_MODELS = ["jobs/own_two_models.py", "--steps", str(STEPS), "--batch", "16", "--save-every", str(SAVE_EVERY)]


def plain_state(checkpoints: Path) -> dict[str, Any]:
    """What the newest checkpoint says besides tensors: the schedule, and the optimisers' settings."""
    return dict(read_manifest(committed(checkpoints)[-1]).state)


def kill_rank(program: Program, rank: int) -> None:
    """Kill one of the ranks that run by now, and wait until torchrun has started others."""
    before = children(program.process.pid)
    os.kill(before[rank], signal.SIGKILL)
    wait_until(lambda: program.has_ended() or not set(before) & set(children(program.process.pid)), "started again")


def assert_same_state(one: Path, other: Path) -> None:
    assert_same_tensors(checkpoint_tensors(one), checkpoint_tensors(other))
    assert json.dumps(plain_state(one), sort_keys=True) == json.dumps(plain_state(other), sort_keys=True)


@pytest.mark.slow
def test_killed_below_torchrun_both_models_end_with_the_bits_of_the_undisturbed_run(
    folder: Path, tmp_path: Path
) -> None:
    whole = folder_with_jobs(tmp_path / "undisturbed")
    undisturbed = Program(whole, *TORCHRUN, *TWO_MODELS)
    assert undisturbed.wait() == 0, undisturbed.said
    program = Program(folder, *TORCHRUN, "--max-restarts", "1", *TWO_MODELS, *SLOWLY)
    try:
        # The kill leaves no time to save: what comes back is written in the background while training goes on.
        wait_until(lambda: program.has_ended() or committed(folder / "checkpoints"), "saved in between")
        wait_for(program, "step 10/")
        kill_rank(program, 0)
        assert program.wait() == 0, program.log.read_text()
    finally:
        program.end()
    (resumed,) = map(int, re.findall(r"resuming at step (\d+) ", program.log.read_text()))
    assert 0 < resumed < STEPS and resumed % SAVE_EVERY == 0
    assert_same_state(folder / "checkpoints", whole / "checkpoints")
