"""Scripts of Trainer and Lightning in runs of their own: what `status` and `report` know of them, over a restart."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from slurmtrain.config.folders import PACKAGE
from slurmtrain.observe import read_metrics
from slurmtrain.runs.events import Event
from tests.support.local_runs import LocalRun, Project

# Runs a script, which is told to stop after six steps of the first attempt, as by a preemption.
PREEMPTED = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = 0

def count(*_):
    global steps
    steps += 1
    if steps == 6 and os.environ["SLURMTRAIN_ATTEMPT"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)

register_optimizer_step_post_hook(count)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# By Trainer.save_checkpoint instead of a Checkpointer.
SAVED_BY_LIGHTNING = {
    "checkpointer=True, ": "",
    "import SlurmtrainCallback": "import resume_from, SlurmtrainCallback",
    "batch_size=64))": "batch_size=64), ckpt_path=resume_from())",
}
SCRIPTS: dict[str, tuple[str, dict[str, str]]] = {
    "Trainer": ("hf_trainer_callback.py", {}),
    "Lightning": ("lightning_module.py", SAVED_BY_LIGHTNING),
    "a Checkpointer in a folder of its own": (
        "lightning_module.py",
        {
            "checkpointer=True": "checkpointer=slurmtrain.Checkpointer('mine')",
            "parser = ": "import slurmtrain; slurmtrain.init(device='cpu')\nparser = ",
        },
    ),
}


def submit(project: Project, script: str, changes: dict[str, str]) -> LocalRun:
    text = (PACKAGE.parent / "jobs" / script).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    (project.path / "script.py").write_text(text)
    (project.path / "preempted.py").write_text(PREEMPTED)
    command = f"job.command='{sys.executable} -u preempted.py script.py'"
    return project.submit("+cluster=local", "job=command", command, "cluster.cpus_per_task=1", small=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalRun]]:
    """All of them at the same time, since most of it is imports."""
    projects = {name: Project(tmp_path_factory.mktemp("client") / "project") for name in SCRIPTS}
    try:
        yield {name: submit(projects[name], *SCRIPTS[name]) for name in SCRIPTS}
    finally:
        for project in projects.values():
            project.reap()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_restart_knows_what_the_library_has_saved(runs: dict[str, LocalRun], name: str) -> None:
    run = runs[name].finish()
    assert [each.first_step for each in run.attempts()] == [0, run.attempts()[0].last_step]
    assert run.events(Event.NO_CHECKPOINT_SEEN) == [] and "NO VISIBLE CHECKPOINT" not in run.logs()
    assert len(run.events(Event.CHECKPOINT_FOUND)) == 1


def test_what_a_lightning_module_logs_arrives_in_the_log_of_the_run(runs: dict[str, LocalRun]) -> None:
    """Those of a validation once for each, and not with each step that follows."""
    records = read_metrics(runs["Lightning"].finish().run_dir.metrics_file)
    assert any("loss" in record for record in records)
    assert [record["step"] for record in records if "error" in record] == [128, 256]
