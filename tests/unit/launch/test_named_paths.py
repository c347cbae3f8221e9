"""Paths mean the folder of the command, in every job of the run, by the names that the person's shell knows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from slurmtrain.config.compose import compose
from slurmtrain.errors import EXIT_CONFIG, ConfigError
from slurmtrain.launch.named_paths import check_named_paths, with_absolute_paths
from slurmtrain.launch.script import directive
from slurmtrain.launch.submit import submit_existing_script
from slurmtrain.runs import lookup
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import files
from slurmtrain.system.paths import absolute, current_folder
from tests.support.commands import Cli, FakeSlurm

CLUSTER = "+cluster=a100x4"


def test_every_relative_path_of_a_config_means_the_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    config = compose(
        [
            *("cluster=a100x4", "data=files", "data.paths=[texts/*.txt,/data/all.txt]", "model=huggingface"),
            *("model.path=../models/own", "checkpoint.restore_from=runs/a/b/checkpoints/checkpoint_0000010"),
            *("cluster.container.kind=apptainer", "cluster.container.image=image", "cluster.slurm_conf=slurm.conf"),
            *("cluster.container.mounts=[./data:/data:ro,/a:/b]", "cluster.conda_env=torch", "cluster.venv=envs/torch"),
            *("job.runs_dir=out", "checkpoint.mirror=s3://bucket/folder"),
            "+eval.cluster={container: {image: eval.sif}, python: bin/python, nodes: 1}",
        ]
    )
    found = with_absolute_paths(config, tmp_path)
    assert found.data["paths"] == [f"{tmp_path}/texts/*.txt", "/data/all.txt"]
    assert found.model["path"] == f"{tmp_path.parent}/models/own"
    assert found.checkpoint.restore_from == f"{tmp_path}/runs/a/b/checkpoints/checkpoint_0000010"
    assert found.checkpoint.mirror == "s3://bucket/folder"
    cluster = found.cluster
    assert cluster.container.image == f"{tmp_path}/image" and cluster.slurm_conf == f"{tmp_path}/slurm.conf"
    assert cluster.container.mounts == [f"{tmp_path}/data:/data:ro", "/a:/b"]
    assert (cluster.conda_env, cluster.venv) == ("torch", f"{tmp_path}/envs/torch")
    assert found.job.runs_dir == f"{tmp_path}/out"
    assert found.eval.cluster == {
        "container": {"image": f"{tmp_path}/eval.sif"},
        "python": f"{tmp_path}/bin/python",
        "nodes": 1,
    }
    assert with_absolute_paths(found, Path("/elsewhere")) == found


@pytest.mark.parametrize("image", ["nvcr.io#nvidia/pytorch:26.01", "docker://ubuntu", "ubuntu:24.04"])
def test_an_image_in_a_registry_stays_what_it_is(image: str, tmp_path: Path) -> None:
    config = compose(["cluster=a100x4", "cluster.container.kind=pyxis", f"cluster.container.image='{image}'"])
    assert with_absolute_paths(config, tmp_path).cluster.container.image == image


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data=files", "data.paths=[text.txt]"], "data.paths: there is no file text.txt in "),
        (["data=files", "data.paths=[*.txt]"], "data.paths: no file matches .*/[*].txt"),
        (["model=huggingface", "model.path=qwen"], "model.path: there is no folder qwen in "),
        (["checkpoint.restore_from=nothing"], "checkpoint.restore_from: there is no checkpoint nothing in "),
        (
            ["checkpoint.restore_from=runs/checkpoint_0000500", "train.steps=500"],
            "is at step 500 already, and train.steps=500",
        ),
        (["cluster.setup=['source ./env.sh']"], r"cluster.setup has 'source ./env.sh': there is no file env.sh in "),
        (["cluster.venv=env"], "cluster.venv: there is no virtual environment env in "),
        (
            ["cluster.container.kind=apptainer", "cluster.container.image=a.sif"],
            "cluster.container.image: there is no image a.sif in ",
        ),
    ],
)
def test_what_is_missing_on_the_login_node_is_said_before_the_queue(
    overrides: list[str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        check_named_paths(compose(["cluster=a100x4", *overrides]), tmp_path)


def test_a_folder_of_checkpoints_is_refused_before_the_queue_and_its_newest_one_named(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"run/checkpoints/checkpoint_{step:07d}").mkdir(parents=True)
        (tmp_path / f"run/checkpoints/checkpoint_{step:07d}/COMPLETE").touch()
    for named in ("run", "run/checkpoints"):
        with pytest.raises(ConfigError, match="is no checkpoint: it has no manifest") as caught:
            check_named_paths(compose(["cluster=a100x4", f"checkpoint.restore_from={named}"]), tmp_path)
        assert caught.value.hint == f"its newest one is {tmp_path}/run/checkpoints/checkpoint_0000020"


def test_what_only_the_nodes_see_or_another_job_makes_is_not_missed(tmp_path: Path) -> None:
    unseen = ["data=files", "data.paths=[/only/on/nodes/a.txt,/tmp/staged.txt]", "cluster.venv=/only/on/nodes/venv"]
    setup = ["cluster.setup=['source $HOME/env.sh','source /only/on/nodes/env.sh','. spack']"]
    check_named_paths(compose(["cluster=a100x4", *unseen, *setup]), tmp_path)
    check_named_paths(compose(["cluster=a100x4", "checkpoint.restore_from=later"]), tmp_path, later=True)
    inside = ["cluster.container.kind=pyxis", "cluster.container.image=ubuntu", "checkpoint.restore_from=inside"]
    check_named_paths(compose(["cluster=a100x4", *inside]), tmp_path)


def test_submit_refuses_a_missing_file_with_78_and_makes_nothing(
    cli: Cli, project: Path, fake_slurm: FakeSlurm
) -> None:
    answer = cli(CLUSTER, "data=files", "data.paths=[text.txt]", "submit")
    assert answer.returncode == EXIT_CONFIG and f"there is no file text.txt in {project}" in answer.stderr
    assert not fake_slurm.submitted and not (project / "runs").exists()


def test_each_job_of_a_run_begins_in_the_folder_of_the_command(
    cli: Cli, project: Path, fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is submitted again is submitted from the snapshot, and by hand from anywhere."""
    (project / "env.sh").write_text("export FROM_ENV=1\n")
    answer = cli(CLUSTER, "cluster.setup=['source ./env.sh']", "job.snapshot=cwd", "requeue=resubmit", "submit")
    assert answer.returncode == 0, answer.stderr
    [run_dir] = (project / "runs" / "train").iterdir()
    monkeypatch.chdir(tmp_path)
    submit_existing_script(RunDir(run_dir))
    assert [directive(script, "chdir") for script in fake_slurm.submitted] == [str(project), str(project)]


def test_a_job_is_told_the_path_that_the_shell_uses_and_not_what_links_here_resolve_to(
    cli: Cli, project: Path, fake_slurm: FakeSlurm
) -> None:
    """Compute nodes may mount the same folder elsewhere than the login node, behind the same link."""
    link = project.parent / "home"
    link.symlink_to(project)
    words = (CLUSTER, "cluster.nodes=1", "submit")
    assert cli(*words, PWD=str(link)).returncode == 0
    [script] = fake_slurm.submitted
    assert f"run_dir={link}/runs/train/" in script and str(project) not in script
    [run_dir] = (project / "runs" / "train").iterdir()
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["job"]["runs_dir"] == f"{link}/runs"
    assert cli(*words, "job.snapshot=none", "--dry-run", PWD=str(link)).stdout.count(str(project)) == 0
    # The verbs find it by either name.
    for name in (link, project):
        assert run_dir.name in cli("status", run_dir.name, PWD=str(name)).stdout
    sweep = cli("-m", CLUSTER, "optim.lr=1e-4,1e-3", "submit", PWD=str(link))
    assert sweep.returncode == 0, sweep.stderr
    assert str(project) not in fake_slurm.submitted[1]


def test_a_pwd_that_is_another_folder_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for wrong in (str(tmp_path), "here", "", str(tmp_path / "gone")):
        monkeypatch.setenv("PWD", wrong)
        assert current_folder() == here
    (tmp_path / "link").symlink_to(here)
    monkeypatch.setenv("PWD", str(tmp_path / "link"))
    assert current_folder() == tmp_path / "link"


def test_the_parent_of_a_linked_folder_is_that_of_the_folder_itself(tmp_path: Path) -> None:
    (tmp_path / "deep" / "folder").mkdir(parents=True)
    (tmp_path / "deep" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "folder")
    assert os.path.samefile(absolute("../file", tmp_path / "link"), tmp_path / "deep" / "file")
    assert absolute("./a/../b", tmp_path / "link") == tmp_path / "link" / "b"


def test_a_run_that_is_a_link_is_what_it_points_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = create_run_dir(tmp_path / "elsewhere", "train")
    files.write_json(real.info_file, {"id": real.id})
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "train").symlink_to(real.path.parent)
    monkeypatch.chdir(tmp_path)
    assert [run.path for run in lookup.all_runs(Path("runs"))] == [real.path]


def test_a_folder_of_runs_with_a_backslash_in_its_name_is_refused(tmp_path: Path) -> None:
    for cluster, refused in (("a100x4", True), ("local", False)):
        config = compose([f"cluster={cluster}", f"job.runs_dir='{tmp_path}/a\\b'"])
        if refused:
            with pytest.raises(ConfigError, match="with a backslash in its name SLURM writes a job's log elsewhere"):
                check_named_paths(config, tmp_path)
        else:
            check_named_paths(config, tmp_path)
