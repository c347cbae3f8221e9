"""Paths mean the folder of the command, in every job of the run, by the names that the person's shell knows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.errors import EXIT_CONFIG, ConfigError
from slurmtrain.launch.job import submit_existing_script
from slurmtrain.launch.named_paths import check_named_paths, with_absolute_paths
from slurmtrain.runs.run_dir import RunDir
from tests.support.commands import refusal
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import printed

CLUSTER = "+cluster=a100x4"
LAST = "begun/checkpoints/checkpoint_0000020"
NEWEST = f"its newest one is .*/{LAST}"


def test_every_relative_path_of_a_config_means_the_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    config = compose(
        [
            *("cluster=a100x4", "data=prepared", "data.path=tokens", "model=huggingface"),
            *("model.path=../models/own", "checkpoint.restore_from=runs/a/b/checkpoints/checkpoint_0000010"),
            *("cluster.container.kind=apptainer", "cluster.container.image=image", "cluster.slurm_conf=slurm.conf"),
            *("cluster.container.mounts=[./data:/data:ro,/a:/b]", "cluster.conda_env=torch", "cluster.venv=envs/torch"),
            *("job.runs_dir=out", "checkpoint.mirror=s3://bucket/folder"),
            *("prepare.tokenizer=tokenizer.json", "prepare.chat_template=chat.jinja"),
            "+eval.cluster={container: {image: eval.sif}, python: bin/python, nodes: 1}",
        ]
    )
    found = with_absolute_paths(config, tmp_path)
    assert found.data["path"] == f"{tmp_path}/tokens"
    assert found.model["path"] == f"{tmp_path.parent}/models/own"
    assert found.checkpoint.restore_from == f"{tmp_path}/runs/a/b/checkpoints/checkpoint_0000010"
    assert found.checkpoint.mirror == "s3://bucket/folder"
    cluster = found.cluster
    assert cluster.container.image == f"{tmp_path}/image" and cluster.slurm_conf == f"{tmp_path}/slurm.conf"
    assert cluster.container.mounts == [f"{tmp_path}/data:/data:ro", "/a:/b"]
    assert (cluster.conda_env, cluster.venv) == ("torch", f"{tmp_path}/envs/torch")
    assert found.job.runs_dir == f"{tmp_path}/out"
    assert found.prepare.tokenizer == f"{tmp_path}/tokenizer.json"
    assert found.prepare.chat_template == f"{tmp_path}/chat.jinja"
    container = {"image": f"{tmp_path}/eval.sif"}
    assert found.eval.cluster == {"container": container, "python": f"{tmp_path}/bin/python", "nodes": 1}
    assert with_absolute_paths(found, Path("/elsewhere")) == found


def test_each_job_of_a_run_begins_in_the_folder_of_the_command(
    project: Path, slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is submitted again is submitted from the snapshot, and by hand from anywhere."""
    (project / "env.sh").write_text("export FROM_ENV=1\n")
    words = ["cluster.setup=['source ./env.sh']", "job.snapshot=cwd", "requeue=resubmit"]
    assert main([CLUSTER, *words, "submit"]) == 0
    [run_dir] = (project / "runs" / "train").iterdir()
    monkeypatch.chdir(tmp_path)
    submit_existing_script(RunDir(run_dir))
    assert [job["options"]["chdir"] for job in slurm.jobs] == [str(project), str(project)]


def test_a_job_is_told_the_path_that_the_shell_uses_and_not_what_links_here_resolve_to(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute nodes may mount the same folder elsewhere than the login node, behind the same link."""
    link = project.parent / "home"
    link.symlink_to(project)
    monkeypatch.setenv("PWD", str(link))
    assert main([CLUSTER, "submit"]) == main(["-m", CLUSTER, "optim.lr=1e-4,1e-3", "submit"]) == 0
    assert f"run_dir={link}/runs/train/" in slurm.submitted[0] and str(project) not in "".join(slurm.submitted)
    [run_dir] = (project / "runs" / "train").iterdir()
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["job"]["runs_dir"] == f"{link}/runs"
    assert str(project) not in printed(CLUSTER, "job.snapshot=none", "submit", "--dry-run")
    # The verbs find it by either name.
    for name in (link, project):
        monkeypatch.setenv("PWD", str(name))
        assert run_dir.name in printed("status", run_dir.name)


@pytest.mark.parametrize(
    ("words", "told", "hint"),
    [
        (["data=prepared", "data.path=none"], "data.path: there is no folder of prepared data .*: .* has no none", "relative"),
        (["data=prepared", "data.path=tests"], "no folder of prepared data .*: .* has no tests", "did you mean .*/texts"),
        (["data=prepared", "data.path=texts"], ".*/texts has no manifest.json", "incomplete, or no folder of prepared data"),
        (["data=prepared", "data.path=[texts,more]"], r"\['texts', 'more'\] is not the path of a folder", "mixture"),
        (["model=huggingface", "model.path=old"], "/old: .*/old has no [*].safetensors", "incomplete, or no folder of"),
        (["model=huggingface", "model.path=torn"], "/torn: .*/torn has no model-2.safetensors", "it is incomplete"),
        (["checkpoint.restore_from=begun"], "there is no checkpoint .*/begun: .*/begun has no manifest", NEWEST),
        (["cluster.venv=texts"], "no virtual environment .*/texts: .*/texts has no bin", "or no virtual environment"),
        (["cluster.container={kind: apptainer, image: a.sif}"], "cluster.container.image: there is no image .*/a.sif", ""),
        (["job=prepare", "prepare.inputs=raw.json", "prepare.output=out"], "prepare.inputs: .* has no raw.json", "raw.jsonl"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_before_the_queue_and_what_was_probably_meant(
    words: list[str], told: str, hint: str, project: Path, slurm: FakeSlurm
) -> None:
    for folder in ("texts", "old", "torn", "begun/checkpoints"):
        (project / folder).mkdir(parents=True)
    for name in ("raw.jsonl", "old/pytorch_model.bin", "torn/model-1.safetensors"):
        (project / name).touch()
    for step in (10, 20):
        folder = f"begun/checkpoints/checkpoint_{step:07d}"
        (project / folder).mkdir()
        (project / folder / "COMPLETE").touch()
    files = {f"layer.{number}": f"model-{number}.safetensors" for number in (1, 2, 3)}
    (project / "torn" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    before = sorted(project.rglob("*"))
    said = refusal(CLUSTER, *words, "submit", code=EXIT_CONFIG)
    assert re.search(told, said) and re.search(hint, said), said
    assert slurm.jobs == [] and sorted(project.rglob("*")) == before


def test_a_run_that_has_checkpoints_needs_what_it_began_with_no_more(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    began = ["cluster=a100x4", "checkpoint.restore_from=gone/checkpoint_0000005"]
    assert check_named_paths(compose(began), tmp_path, begun=True) == []
    weights = ["cluster=a100x4", "model=huggingface", "model.path=folder"]
    assert check_named_paths(compose(weights), tmp_path, begun=True) == []
    with pytest.raises(ConfigError, match=r"has no [*]\.safetensors"):  # adapters: every start reads the weights
        check_named_paths(compose([*weights, "lora.r=4"]), tmp_path, begun=True)
    with pytest.raises(ConfigError, match=r"there is no folder .*/gone"):
        check_named_paths(compose([*weights, "model.path=gone"]), tmp_path, begun=True)


def test_what_only_the_nodes_can_know_is_said_in_one_sentence_unless_it_is_meant(tmp_path: Path) -> None:
    named = ["data=prepared", "data.path=/only/on/nodes", "cluster.venv=/opt/cuda-99"]
    (warning,) = check_named_paths(compose(["cluster=a100x4", *named]), tmp_path)
    assert "data.path (/only/on/nodes)" in warning and "cluster.venv (/opt/cuda-99)" in warning
    assert "cluster.node_paths=[/opt/cuda-99,/only]" in warning
    meant = ["cluster=a100x4", *named, "cluster.node_paths=[/opt/cuda-99,/only]"]
    assert check_named_paths(compose(meant), tmp_path) == []
    with pytest.raises(ConfigError, match="there is no folder of prepared data"):  # this machine is the node
        check_named_paths(compose(["cluster=local", *named[:2]]), tmp_path)


def test_a_sweep_says_once_what_only_the_nodes_can_know(project: Path, slurm: FakeSlurm) -> None:
    words = ("-m", CLUSTER, "data=prepared", "data.path=/only/on/nodes", "optim.lr=1e-3,1e-4", "submit")
    assert "only the nodes can know" not in refusal(*words, "--dry-run", code=0), "a dry run looks at no files"
    assert refusal(*words, code=0).count("only the nodes can know") == 1
    missing = ("-m", CLUSTER, "checkpoint.restore_from=none/at/all", "optim.lr=1e-3,1e-4", "submit")
    assert "point 0 (optim.lr=0.001): checkpoint.restore_from" in refusal(*missing, code=EXIT_CONFIG)
    assert len(slurm.submitted) == 1
