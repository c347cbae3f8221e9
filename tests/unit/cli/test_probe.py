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
    assert main(["probe", "--check", "alpha"]) == 0
    assert capsys.readouterr().out == f"{project}/conf/cluster/alpha.yaml fits cluster alpha\n"
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


@pytest.mark.parametrize(
    "words", [["--out", "/dev/null/cluster/x.yaml"], ["--out", "x.yaml"], ["--out", "-", "--json"]]
)
def test_a_file_that_cannot_be_written_is_one_sentence(
    alpha: FakeSlurm, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["probe", *words]) == 2
    assert words[1] in capsys.readouterr().err


def test_a_file_whose_jobs_slurm_refuses_is_written_and_said(
    alpha: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    alpha.fail("sbatch --test-only", "Batch job submission failed: Invalid account or account/partition combination")
    assert main(["probe"]) == 78
    assert "SLURM would not accept a job of it" in capsys.readouterr().out
    assert Path("conf/cluster/alpha.yaml").exists()


def test_check_says_what_cannot_run_and_what_probe_would_write_differently(
    alpha: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe"]) == 0
    path, answers = Path("conf/cluster/alpha.yaml"), answers_of("alpha_22_05")
    text = path.read_text()
    path.write_text(text.replace("gpu_memory_gb: 79", "gpu_memory_gb: 40"))
    capsys.readouterr()
    assert main(["probe", "--check", "conf/cluster/alpha.yaml"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "--- conf/cluster/alpha.yaml",
        "+++ what probe would write today",
        "-gpu_memory_gb: 40.0",
        "+gpu_memory_gb: 79",
    ]
    path.write_text(text)
    partitions = next(command for command in answers if command.endswith("show partition"))
    play(alpha, answers | {partitions: answers[partitions].replace("MaxTime=2-00:00:00", "MaxTime=01:00:00")})
    assert main(["probe", "--check", "alpha"]) == 78
    said = capsys.readouterr().out
    assert said.startswith("cannot run: ") and "-time_limit_min: 1440\n+time_limit_min: 60\n" in said
    assert main(["probe", "--check", "alpha", "--json"]) == 78
    found = json.loads(capsys.readouterr().out)
    assert found["cannot_run"].startswith("cluster.time_limit_min=1440 is more than partition gpu (MaxTime) allows, 60")
    assert found["changed"]["time_limit_min"] == {"file": 1440, "probe": 60}
    play(alpha, answers | {partitions: answers[partitions].replace("PartitionName=gpu", "PartitionName=h100")})
    assert main(["probe", "--check", "alpha"]) == 78
    assert "cannot run: cluster.partition=gpu: this cluster has no such partition" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("a: [\n", 78, "mine.yaml cannot be read"),
        ("nodez: 3\n", 2, "nodez"),
        ("backend: local\n", 2, "is not a SLURM cluster"),
        ("nodes: many\n", 78, "many"),
    ],
)
def test_a_file_that_is_no_clusters_is_one_sentence(
    alpha: FakeSlurm, capsys: pytest.CaptureFixture[str], text: str, code: int, words: str
) -> None:
    Path("conf/cluster").mkdir(parents=True)
    Path("conf/cluster/mine.yaml").write_text(text)
    assert main(["probe", "--check", "conf/cluster/mine.yaml"]) == code
    assert words in capsys.readouterr().err
    assert main(["probe", "--check", "nowhere"]) == 2
    assert "no such cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("scontrol: error: Unable to contact slurm controller (connect failure)", "`scontrol ping` says more"),
        ("scontrol: fatal: Could not establish a configuration source", "is this a login node?"),
    ],
)
def test_without_an_answer_of_slurm_nothing_is_written(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], words: str, hint: str
) -> None:
    slurm.command("scontrol", f"echo 'scontrol: error: DNS SRV lookup failed' >&2; echo '{words}' >&2; exit 1")
    assert main(["probe"]) == 1
    said = capsys.readouterr().err
    assert f"`scontrol show config` failed: {words}" in said and hint in said and not Path("conf").exists()


@pytest.mark.parametrize(
    "words",
    [["cluster.time_limit_min=3000", "submit"], ["train.seed=1,2", "cluster.time_limit_min=30,3000", "-m", "submit"]],
)
def test_a_job_that_does_not_suit_the_cluster_is_refused_before_anything_is_created(
    alpha: FakeSlurm, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["cluster.backend=slurm", "cluster.partition=gpu", "+experiment=smoke", *words]) == 78
    assert "cluster.time_limit_min=3000" in capsys.readouterr().err
    assert alpha.submitted == []
    assert not Path("runs").exists()


def test_a_drill_whose_tiny_jobs_a_partition_does_not_take_says_so_before_it_submits_any(
    alpha: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "--partition", "cpu", "--account", "physics"]) == 0
    assert main(["+cluster=alpha-cpu", "drill"]) == 78
    said = capsys.readouterr().err
    assert "a job of 1 node is less than partition cpu requires, 2 (MinNodes)" in said and "cluster.nodes=2" in said
    assert alpha.submitted == [] and not list(Path("runs").glob("*"))
