"""The verb probe, and what submit says of a job that does not suit the cluster, with recorded answers of SLURM."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from tests.support.fake_slurm import FakeSlurm
from tests.support.recorded_slurm import answers_of, play


@pytest.fixture
def alpha(project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A cluster with accounting, as it was recorded, for the user `me`; the current folder is an empty project."""
    monkeypatch.setattr("slurmtrain.slurm.read_facts.own_user", lambda: "me")
    play(slurm, answers_of("alpha_22_05"))
    return slurm


def test_probe_writes_a_file_that_cluster_finds_in_this_folder(
    alpha: FakeSlurm, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe"]) == 0
    said = capsys.readouterr().out
    assert "wrote conf/cluster/alpha.yaml for partition gpu" in said
    assert "SLURM would accept a job of it" in said
    assert "python -m slurmtrain +cluster=alpha submit --dry-run" in said
    assert "with the partitions gpu (default), " in said
    assert "storage_gb_per_s: What do all nodes" in said
    assert os.listdir(project) == ["conf"]
    config = compose(["cluster=alpha"])
    assert (config.cluster.partition, config.cluster.gpus_per_node) == ("gpu", 4)
    assert main(["+cluster=alpha", "submit", "--dry-run"]) == 0
    assert "#SBATCH --gpus-per-node=a100:4" in capsys.readouterr().out
    assert main(["+cluster=alpha", "+experiment=smoke", "submit"]) == 0
    assert len(alpha.submitted) == 1


def test_probe_never_replaces_a_file_unasked(alpha: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf/cluster").mkdir(parents=True)
    Path("conf/cluster/alpha.yaml").write_text("nodes: 7\n")
    assert main(["probe"]) == 2
    assert "conf/cluster/alpha.yaml already exists" in capsys.readouterr().err
    assert Path("conf/cluster/alpha.yaml").read_text() == "nodes: 7\n"
    assert main(["probe", "--force"]) == 0
    assert "gpus_per_node: 4" in Path("conf/cluster/alpha.yaml").read_text()


def test_probe_of_another_partition_prints_or_writes_where_it_is_told(
    alpha: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "--partition", "debug", "--out", "-"]) == 0
    assert "\npartition: debug " in capsys.readouterr().out
    assert not Path("conf").exists()
    assert main(["probe", "--partition", "cpu", "--account", "physics", "--out", "mine/cluster/c.yaml", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["file"], answer["partition"], answer["refused"]) == ("mine/cluster/c.yaml", "cpu", None)
    assert answer["values"]["account"] == "physics"
    assert main(["--config-dir", "mine", "+cluster=c", "submit", "--dry-run"]) == 0
    assert main(["probe", "--partition", "gpus"]) == 78
    assert "there is no partition 'gpus'" in capsys.readouterr().err


def test_a_file_whose_jobs_slurm_refuses_is_written_and_said(
    alpha: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    alpha.fail("sbatch --test-only", "Batch job submission failed: Invalid account or account/partition combination")
    assert main(["probe"]) == 78
    assert "SLURM would not accept a job of it" in capsys.readouterr().out
    assert Path("conf/cluster/alpha.yaml").exists()


def test_without_an_answer_of_slurm_nothing_is_written(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words, hint = "scontrol: error: Unable to contact slurm controller (connect failure)", "`scontrol ping` says more"
    slurm.command("scontrol", f"echo 'scontrol: error: DNS SRV lookup failed' >&2; echo '{words}' >&2; exit 1")
    assert main(["probe"]) == 1
    said = capsys.readouterr().err
    assert f"`scontrol show config` failed: {words}" in said and hint in said and not Path("conf").exists()
