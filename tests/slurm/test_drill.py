"""`drill` on a real SLURM: a site that can do everything, and sites that cannot, each told with what to set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.slurm_cluster import Cluster, reconfigured

pytestmark = pytest.mark.slow


def drill(cluster: Cluster, folder: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    """Type `drill`; return its exit code, its verdicts by way, and all of its JSON."""
    line = [*cluster.words, *words, "drill", "--json"]
    done = cluster.slurmtrain(*line, cwd=folder, check=False, timeout_s=1800)  # the drill's own --within
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
