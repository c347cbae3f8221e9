"""The report of a run on a real SLURM: what each attempt left behind is enough to draw it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from slurmtrain.report.page.run_facts import read_run
from slurmtrain.report.page.run_page import run_page
from tests.slurm.project import make_project
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow


def test_a_run_that_was_preempted_twice_and_restarted_in_place_shows_each_attempt(
    sandbox: Cluster, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project", sandbox)
    words = ["+model.pause_s=0.1", "train.steps=120", "cluster.nodes=1", "cluster.tasks_per_node=2"]
    run = project.submit(*words, nodes="n0")
    run.wait_for_step(12)
    run.preempt_by_high()
    run.wait_for_attempt(2)
    run.wait_for_step(24)
    os.kill(run.rank_pids()[1], signal.SIGKILL)
    run.wait_for_attempt(3)
    run.wait_for_step(36)
    run.preempt_by_high()
    run.wait_for_attempt(4)
    run.finish()

    run.cli("report", run.run_dir.id, "--out", str(tmp_path / "report.html"))
    html = (tmp_path / "report.html").read_text()
    page = run_page(read_run(run.run_dir, now=time.time()))
    line = next(section.timeline for section in page.sections if section.timeline is not None)
    shapes = [{mark.shape for mark in row.marks} for row in line.rows]
    assert [row.name for row in line.rows] == [f"Attempt {number}" for number in (1, 2, 3, 4)]
    assert {"preempted", "told", "checkpoint"} <= shapes[0]
    assert {"failed", "in_place"} <= shapes[1]
    assert "preempted" in shapes[2]
    assert "finished" in shapes[3]
    assert [row for row, _ in line.links] == [1]
    assert all(any(bar.color == "productive" for bar in row.bars) for row in line.rows)
    assert {chart.key for chart in page.charts} >= {"loss", "tokens_per_s", "phases", "lr"}
    assert "It took 4 attempts, with 2 preemptions and 1 crash." in html
    assert "One restart was in place, in the same job." in html
