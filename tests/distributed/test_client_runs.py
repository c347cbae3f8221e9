"""Scripts of Trainer and Lightning in runs of their own: what `status` and `report` know of them, over a restart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from slurmtrain.config.folders import PACKAGE
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.runs.reasons import Event
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
SCRIPTS = {"Trainer": "hf_trainer.py", "Lightning": "lightning_module.py"}


def submit(project: Project, name: str) -> LocalRun:
    (project.path / "preempted.py").write_text(PREEMPTED)
    (project.path / "script.py").write_text((PACKAGE.parent / "jobs" / SCRIPTS[name]).read_text())
    command = f"job.command='{sys.executable} -u preempted.py script.py'"
    return project.submit("+cluster=local", "job=command", command, "cluster.cpus_per_task=1", small=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LocalRun]]:
    """What has become of the run of this name, which is started when it is first asked for."""
    projects: list[Project] = []

    @cache
    def run(name: str) -> LocalRun:
        projects.append(Project(tmp_path_factory.mktemp("client") / "project"))
        return submit(projects[-1], name).finish()

    try:
        yield run
    finally:
        for project in projects:
            project.reap()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "Lightning")) for name in SCRIPTS]
)
def test_a_restart_knows_what_the_library_has_saved(finished: Callable[[str], LocalRun], name: str) -> None:
    run = finished(name)
    assert [each.first_step for each in run.attempts()] == [0, run.attempts()[0].last_step]
    assert run.events(Event.NO_CHECKPOINT_SEEN) == [] and "NO VISIBLE CHECKPOINT" not in run.logs()
    assert len(run.events(Event.CHECKPOINT_FOUND)) == 1


def test_what_a_lightning_module_logs_arrives_in_the_log_of_the_run(finished: Callable[[str], LocalRun]) -> None:
    """Those of a validation once for each, and not with each step that follows."""
    records = read_metrics(finished("Lightning").run_dir.metrics_file)
    assert any("loss" in record for record in records)
    assert [record["step"] for record in records if "error" in record] == [128, 256]
