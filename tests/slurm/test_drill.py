"""`drill` on a real SLURM: a site that can do everything, and sites that cannot, each told with what to set."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo import wait_until
from tests.support.slurm_cluster import Cluster, reconfigured

pytestmark = pytest.mark.slow


def words_of(cluster: Cluster) -> list[str]:
    conf = cluster.sandbox.slurm_conf
    return [
        sys.executable,
        "-m",
        "slurmtrain",
        "+cluster=sandbox",
        "cluster.sandbox=null",
        f"cluster.slurm_conf={conf}",
    ]


def drill(
    cluster: Cluster, folder: Path, *words: str, path: str | None = None
) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    """Type `drill`; return its exit code, its verdicts by way, and all of its JSON."""
    env = {"PATH": path} if path is not None else None
    line = [*words_of(cluster), *words, "drill", "--json"]
    done = cluster.run(line, cwd=folder, check=False, env=env, timeout_s=1800)  # the drill's own --within
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    return done.returncode, {each["way"]: each for each in found["ways"]}, found


def jobs_of_drills(cluster: Cluster) -> list[str]:
    names = cluster.run(["squeue", "--noheader", "--format=%j"]).stdout.split()
    return [name for name in names if name.startswith("drill-")]


# A loaded machine may take long to leave: how fast it is decides nothing where a run is to pass.
PATIENCE = {"KillWait=10": "KillWait=300", "GraceTime=30": "GraceTime=300"}


@pytest.fixture
def patient(sandbox: Cluster) -> Iterator[Cluster]:
    """A cluster that gives a job minutes to leave."""
    with reconfigured(sandbox, PATIENCE) as cluster:
        yield cluster


def test_a_site_that_can_do_it_all_passes_in_every_way(patient: Cluster, tmp_path: Path) -> None:
    code, ways, found = drill(patient, tmp_path, "cluster.signal_lead_s=600")
    assert {way: each["result"] for way, each in ways.items()} == dict.fromkeys(
        ("early_signal", "requeue", "crash", "in_place", "preemption"), "passed"
    ), found
    assert code == 0 and all(each["comparison"]["same_bits"] for each in ways.values())
    assert [each["saved_step"] == each["resumed_at"] for each in ways.values()] == [True] * 5
    assert {ways[way]["saved_step"] for way in ("early_signal", "requeue", "preemption")} == {8}
    assert ways["preemption"]["time_s"] == 600  # GraceTime and KillWait
    assert found["kept"] is None and not (tmp_path / "runs" / "drills").exists()
    assert jobs_of_drills(patient) == []
    print(f"the drill took {found['took_s']:.0f} s")


def test_without_a_requeue_a_run_does_not_come_back_and_a_chain_does(sandbox: Cluster, tmp_path: Path) -> None:
    code, ways, found = drill(sandbox, tmp_path, "requeue=off", "--ways", "early_signal,requeue")
    assert code == 1, found
    assert ways["early_signal"]["result"] == "failed"
    assert (
        "requeue.mode=off" in ways["early_signal"]["sentence"] and "requeue=chain" in ways["early_signal"]["hints"][0]
    )
    assert ways["requeue"]["result"] == "not tried" and "requeue.mode=off" in ways["requeue"]["sentence"]
    assert Path(found["kept"]).is_dir()
    code, ways, found = drill(sandbox, tmp_path, "requeue=chain", "--ways", "early_signal")
    assert (code, ways["early_signal"]["result"]) == (0, "passed"), found
    assert jobs_of_drills(sandbox) == []


@pytest.fixture
def no_requeue_by_default(sandbox: Cluster) -> Iterator[Cluster]:
    """A cluster with JobRequeue=0: a job is requeued only if it was submitted with --requeue."""
    with reconfigured(sandbox, PATIENCE | {"JobRequeue=1": "JobRequeue=0"}) as cluster:
        assert "JobRequeue              = 0" in cluster.run(["scontrol", "show", "config"]).stdout
        yield cluster


def test_where_jobs_are_not_requeued_by_default_ours_are(no_requeue_by_default: Cluster, tmp_path: Path) -> None:
    code, ways, found = drill(no_requeue_by_default, tmp_path, "--ways", "requeue,preemption")
    assert (code, [each["result"] for each in ways.values()]) == (0, ["passed", "passed"]), found


@pytest.fixture
def short_grace(sandbox: Cluster) -> Iterator[Cluster]:
    """A cluster that gives a preempted job GraceTime and KillWait: 3 s and 10 s."""
    sandbox.run(["scontrol", "update", "PartitionName=low", "GraceTime=3"])
    yield sandbox
    sandbox.run(["scontrol", "update", "PartitionName=low", "GraceTime=30"])


def test_a_grace_that_is_too_short_for_a_save_is_told_with_its_seconds(short_grace: Cluster, tmp_path: Path) -> None:
    code, ways, found = drill(short_grace, tmp_path, "--ways", "preemption", "--leaving", "40")
    way = ways["preemption"]
    assert (code, way["result"], way["time_s"]) == (1, "failed", 13), found
    assert "killed before it had saved, for which SLURM gives 13 s" in way["sentence"]
    assert "GraceTime" in way["hints"][0] and "save more often" in way["hints"][0]
    assert way["resumed_at"] == way["saved_step"] == 4  # of the last save before


def test_ctrl_c_takes_all_jobs_back(sandbox: Cluster, tmp_path: Path) -> None:
    line = [*words_of(sandbox), "drill", "--ways", "early_signal,requeue"]
    process = subprocess.Popen(line, cwd=tmp_path, env=sandbox.env(), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(jobs_of_drills(sandbox)) == 3, "submitted")
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 130
    assert jobs_of_drills(sandbox) == []
