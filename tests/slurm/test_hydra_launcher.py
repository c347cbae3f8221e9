"""`hydra/launcher=slurmtrain`: Hydra's own suites for launchers, and what they do not ask."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra.core.singleton import Singleton
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite
from hydra.version import VersionBase

import slurmtrain.config.compose  # noqa: F401  Hydra's fixtures put back the resolvers that there were before a test
from slurmtrain.runs import attempts
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.sweep.jobs import states_of
from tests.support.slurm_cluster import Cluster

LOCAL = "hydra.launcher.cluster=local"


def settings(cluster: Cluster) -> list[str]:
    """What a person writes behind `hydra/launcher=slurmtrain` for a job in this cluster."""
    own = ["cluster.sandbox=null", f"cluster.slurm_conf={cluster.sandbox.slurm_conf}"]
    own += ["cluster.nodes=1", "cluster.tasks_per_node=1"]
    return ["hydra.launcher.cluster=sandbox", f"hydra.launcher.overrides={own}"]


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program's own process: with runs of its own, and no version of Hydra's manners that another test has set."""
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.delitem(Singleton._instances, VersionBase, raising=False)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher_name", "overrides"), [("slurmtrain", [LOCAL])])
class TestOnThisMachine(LauncherTestSuite):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("launcher_name", "overrides"), [("slurmtrain", ["hydra.sweeper.max_batch_size=2", LOCAL])])
class TestInBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=slurmtrain", LOCAL])])
class TestProgramsOnThisMachine(IntegrationTestSuite):
    pass


PROGRAM = """
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    with open(f"calls-{cfg.x}", "a") as file:
        file.write("once\\n")
    if cfg.x == 2:
        raise ValueError(f"no luck with {cfg.x}")
    return cfg.x

main()
"""


def test_a_program_hears_what_its_jobs_raised(sandbox: Cluster, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    choices = ["+x=1,2,3", "hydra.sweep.dir=sweep", "hydra/launcher=slurmtrain", *settings(sandbox)]
    env = sandbox.env(SLURMTRAIN_RUNS=str(tmp_path / "runs"))
    done = sandbox.run([sys.executable, "program.py", "-m", *choices], cwd=tmp_path, env=env, check=False)
    assert done.returncode == 1 and "ValueError: no luck with 2" in done.stderr
    assert [(tmp_path / f"calls-{number}").read_text() for number in (1, 2, 3)] == ["once\n"] * 3
    (sweep,) = map(Sweep, (tmp_path / "runs").glob("*.sweep-*"))
    states = [state.status for state in states_of(sweep).values()]
    assert states == ["finished", "failed", "finished"]
    assert sweep.points()[1].varied == {"x": "2"}
    failed = sweep.run_dir(sweep.points()[1].run_id)
    assert "ValueError: no luck with 2" in (attempts.all_attempts(failed)[-1].sentence or "")
    sandbox.wait_for(str(failed.info()["job_ids"][-1]), "FAILED")
    assert (tmp_path / "sweep" / "2" / ".hydra" / "overrides.yaml").read_text() == "- +x=3\n"
