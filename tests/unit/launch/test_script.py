"""The sbatch text: its goldens, that every way to it gives the same, and what bash makes of it.

python -m pytest tests/unit/launch/test_script.py --update-goldens    writes jobs/golden anew; read the diff
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.checkpoint.node_copies.folder import run_folder
from slurmtrain.choices import ContainerKind
from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.folders import config_groups
from slurmtrain.config.schema import ClusterConfig, Config, ContainerConfig, HooksConfig, StageConfig
from slurmtrain.config.validate import validate
from slurmtrain.errors import ConfigError
from slurmtrain.launch.directives import explained_directives
from slurmtrain.launch.script import explain_script, render_script, setup_lines
from slurmtrain.launch.script_parts import JobPaths, Line
from slurmtrain.launch.srun import explained_srun
from slurmtrain.launch.submit import preparing, submit, submit_existing_script
from slurmtrain.report.status.look import state
from slurmtrain.resources import shipped
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.versions import Version
from tests.support.children import children
from tests.support.commands import Cli, FakeSlurm

GOLDENS = shipped("jobs") / "golden"
RUN = Path("/home/me/project/runs/train/RUN_ID")
PYTHON = "/home/me/venv/bin/python"
SUBMIT_DIR = Path("/home/me/project")
PATHS = JobPaths([RUN], "code", PYTHON, submit_dir=SUBMIT_DIR)
SLURM_CLUSTERS = [name for name in config_groups()["cluster"] if name != "local"]

EVERYTHING = r"""
    cluster=a100x8  cluster.nodes=4  cluster.partition=gpu  cluster.account='my project'  cluster.qos=high
    cluster.constraint='[rack1|rack2]'  cluster.reservation=friday  cluster.exclude='node[03-04]'
    cluster.mem_per_node_gb=null  cluster.mem_per_gpu_gb=100  cluster.exclusive=false
    +cluster.sbatch.comment='it is "mine"'  +cluster.sbatch.mail-type=END  +cluster.sbatch.no-kill=true
    cluster.modules=[cuda/12.8,nccl]  cluster.setup=['ulimit -l unlimited','export SCRATCH=\${TMPDIR:-/tmp}']
    cluster.conda_env=/home/me/envs/torch  +cluster.env.NCCL_DEBUG=INFO  +cluster.env.GREETING='two words'
    cluster.container.kind=pyxis  cluster.container.image='nvcr.io#nvidia/pytorch:26.01'
    cluster.container.mounts=[/data:/data:ro]  cluster.container.args=[--no-container-mount-home]
    cluster.srun_args=['--mpi=pmix']  train.global_batch_size=32  requeue.restart_delay_s=20
    hooks.on_failure='mail -s "$SLURMTRAIN_SENTENCE" me'
"""
APPTAINER = """
    cluster=a100x4  cluster.container.kind=apptainer  cluster.container.image=/images/torch.sif
    cluster.container.args=[--nv]  cluster.container.mounts=[/data:/data:ro]  requeue=off
"""
STAGE = """
    cluster=a100x4  cluster.nodes=2-4  train.global_batch_size=64  cluster.venv=/home/me/envs/train
    cluster.stage.code=true  cluster.stage.environment=true  cluster.stage.data=['/data/my tokens',/data/valid]
    cluster.stage.dir=$SLURM_TMPDIR/me  cluster.switches=1  cluster.switches_wait_min=30
"""


def config_of(text: str) -> Config:
    config = compose([word for line in text.split("\n") for word in line.strip().split("  ") if word.strip()])
    validate(config)
    return config


def golden_of(name: str) -> tuple[Config, JobPaths]:
    """The config and the paths that a golden script is rendered from."""
    if name == "everything":
        return config_of(EVERYTHING), PATHS
    if name == "apptainer":
        return config_of(APPTAINER), JobPaths([RUN], "/home/me/project", PYTHON, submit_dir=SUBMIT_DIR)
    if name == "array":
        runs = [RUN.with_name(f"RUN_{letter}") for letter in "ABC"]
        return config_of("cluster=a100x4"), JobPaths(runs, "code/experiments", PYTHON, submit_dir=SUBMIT_DIR)
    if name == "pack":
        runs = [RUN.with_name(f"RUN_{letter}") for letter in "ABCDE"]
        paths = JobPaths(runs, "code", PYTHON, parallelism=1, pack=3, submit_dir=SUBMIT_DIR)
        return config_of("cluster=a100x4"), paths
    if name == "elastic":
        return config_of("cluster=a100x4  cluster.nodes=2-4  train.global_batch_size=64"), PATHS
    if name == "standby":
        return config_of("cluster=a100x4  requeue.standby_ranks=true"), PATHS
    if name == "stage":
        return config_of(STAGE), PATHS
    if name in ("resubmit", "chain"):
        return config_of(f"cluster=a100x4  requeue={name}  job.singleton=true"), PATHS
    return config_of(f"cluster={name}"), PATHS


def golden_text(name: str) -> str:
    return render_script(*golden_of(name))


ALL_GOLDENS = [
    *SLURM_CLUSTERS,
    "everything",
    "apptainer",
    "array",
    "pack",
    "resubmit",
    "chain",
    "elastic",
    "standby",
    "stage",
]


# Goldens.


@pytest.mark.parametrize("name", ALL_GOLDENS)
def test_the_script_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    golden = GOLDENS / f"{name}.sbatch"
    if request.config.getoption("--update-goldens"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(golden_text(name))
    assert golden_text(name) == golden.read_text()


@pytest.mark.parametrize("name", ALL_GOLDENS)
def test_bash_can_read_every_golden(name: str) -> None:
    checked = subprocess.run(["bash", "-n", GOLDENS / f"{name}.sbatch"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_every_golden_belongs_to_something_shipped() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == set(ALL_GOLDENS)


@pytest.mark.parametrize("name", ALL_GOLDENS)
def test_directives_come_before_the_first_command(name: str) -> None:
    # sbatch stops reading #SBATCH lines at the first line that is neither empty nor a comment.
    lines = golden_text(name).splitlines()
    last_directive = max(index for index, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last_directive + 1])


# Why each line is there.

EXPLAINED = {
    **dict.fromkeys(ALL_GOLDENS, ""),
    "spare nodes with copies": "cluster=a100x4  cluster.nodes=2-4  train.global_batch_size=64  cluster.spare_nodes=1  "
    "checkpoint.local=/dev/shm  hooks.on_finish=true",
    "secrets": "cluster=a100x4  cluster.setup=['umask 077']  requeue=off",
}


@pytest.mark.parametrize("name", EXPLAINED)
@pytest.mark.parametrize("version", [None, (22, 5), (25, 11)])
def test_every_line_that_does_something_knows_why_it_is_there(name: str, version: Version | None) -> None:
    config, paths = (config_of(EXPLAINED[name]), PATHS) if EXPLAINED[name] else golden_of(name)
    if name == "secrets":
        config = replace(config, secrets={"TOKEN": "/home/me/token"})
    lines = explain_script(config, paths, version)
    assert "".join(f"{line.text}\n" for line in lines) == render_script(config, paths)
    prose = ("# ", "#!")
    unexplained = [
        line.text
        for line in lines
        if line.text.strip() and not line.why.strip() and not line.text.lstrip().startswith(prose)
    ]
    assert unexplained == []
    assert [line.why for line in lines if line.text.lstrip().startswith("# ") and line.why] == []


def why(lines: Sequence[Line], begin: str) -> str:
    return next(line.why for line in lines if line.text.strip().startswith(begin))


def test_the_reasons_name_the_fields_that_decide_and_what_the_clusters_release_needs() -> None:
    config, paths = golden_of("everything")
    lines = explain_script(config, paths, (22, 5))
    for begin, words in {
        "#SBATCH --partition": "cluster.partition",
        "#SBATCH --signal": "cluster.signal_lead_s",
        "#SBATCH --comment": "cluster.sbatch.comment",
        "module load": "cluster.modules",
        "export NCCL_DEBUG": "cluster.env.NCCL_DEBUG",
        "--cpus-per-task=": "before 23.11, srun ignores --cpus-per-task of sbatch",
        "--container-image=": "pyxis",
        "--mpi=pmix": "cluster.srun_args",
    }.items():
        assert words in why(lines, begin), begin
    newest, former = explain_script(config, paths, (25, 11)), explain_script(config, paths, (25, 5))
    assert "not --requeue=expedite (25.11)" in why(newest, "#SBATCH --requeue")
    assert "expedite" not in why(former, "#SBATCH --requeue")
    assert "SLURM_TRES_PER_TASK" in why(newest, "--cpus-per-task=")
    guard = '[ "${SLURM_RESTART_COUNT'
    assert "24.05 and later" in why(newest, guard)
    assert "24.05" not in why(lines, guard)


def test_nodes_are_asked_for_behind_switches_and_in_segments_and_the_order_of_ranks_is_explained() -> None:
    config = config_of("cluster=a100x4  cluster.nodes=4  cluster.switches=2  cluster.segment=2")
    lines = explain_script(config, PATHS, (24, 5), "ranks are numbered switch by switch")
    assert {"#SBATCH --switches=2", "#SBATCH --segment=2"} <= {line.text for line in lines}
    assert why(lines, "#SBATCH --nodes") == "cluster.nodes; ranks are numbered switch by switch"
    for words, said in {
        "cluster.nodes=3  cluster.segment=2": "cluster.segment=2 does not divide the 3 nodes",
        "cluster.nodes=2  cluster.spare_nodes=1  cluster.segment=2": "does not divide the 3 nodes",
        "cluster.switches_wait_min=5": "has nothing to wait for",
        "cluster.switches=1  +cluster.sbatch.switches=1": "set the same option of sbatch",
        "cluster.switches=0": "cluster.switches=0",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            config_of(f"cluster=a100x4  {words}")


def test_render_explains_beside_each_line_and_for_programs(
    project: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["+cluster=a100x4", "cluster.nodes=2", "render"]
    assert main(words) == 0
    script = capsys.readouterr().out.splitlines()
    known = {"SLURM_VERSION": "25.11.1", "TopologyPlugin": "topology/tree", "TopologyParam": "SwitchAsNodeRank"}
    fake_slurm.command("scontrol", "\n".join(f"echo '{name} = {value}'" for name, value in known.items()))
    assert main([*words, "--explain", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [line["line"] for line in lines] == script
    assert "--requeue=expedite" in next(each["why"] for each in lines if each["line"] == "#SBATCH --requeue")
    assert main([*words, "--explain"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^#SBATCH --nodes=2 +\| cluster.nodes; ranks are numbered switch by", shown, re.MULTILINE)
    assert all(line.strip() in shown for line in script)
    assert main([*words, "--explain", "-o", "job.sbatch"]) == 2
    assert main([*words, "--json"]) == 2
    assert not (project / "runs").exists()


# One source: render, --dry-run and submit.


@pytest.mark.parametrize("where", ["outside of git", "in git", "in a folder of a git work tree"])
def test_dry_run_render_and_submit_give_the_same_text(
    where: str,
    project: Path,
    fake_slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = project
    if where != "outside of git":
        subprocess.run(["git", "init", "-q"], check=True)
    if where.startswith("in a folder"):
        folder = project / "sub"
        folder.mkdir()
        monkeypatch.chdir(folder)
    words = ["+cluster=a100x4", "+cluster.env.A='it is'", "cluster.nodes=2"]
    assert main([*words, "submit", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert main([*words, "render"]) == 0
    assert capsys.readouterr().out == shown
    assert main([*words, "submit"]) == 0
    submitted = next(folder.glob("runs/train/*"))
    assert main([*words, "render", "-o", "job.sbatch"]) == 0
    rendered = next(path for path in folder.glob("runs/train/*") if path != submitted)

    def with_placeholder(text: str, run_dir: Path) -> str:
        return text.replace(str(run_dir), str(run_dir.with_name("RUN_ID")))

    assert with_placeholder(fake_slurm.submitted[0], submitted) == shown
    assert with_placeholder((folder / "job.sbatch").read_text(), rendered) == shown
    assert (submitted / "job.sbatch").read_text() == fake_slurm.submitted[0]


def test_a_dry_run_leaves_nothing_and_asks_nobody(
    project: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["+cluster=sandbox", "submit", "--dry-run"]) == 0  # of a sandbox that need not run
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH")
    assert list(project.iterdir()) == [] and fake_slurm.submitted == []


def test_submitting_inside_a_job_hides_that_job_but_keeps_slurm_conf(
    project: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inherited = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_MEM_PER_NODE": "1",
        "SUBMITIT_EXECUTOR": "slurm",
        "SLURMTRAIN_RUN_DIR": "/other/run",
        "SLURMTRAIN_ATTEMPT": "4",
        "PMI_RANK": "3",
    }
    kept = {"SLURM_CONF": "/etc/slurm/other.conf", "SLURMTRAIN_RUNS": "runs", "MY_OWN": "a b"}
    for name, value in (inherited | kept).items():
        monkeypatch.setenv(name, value)
    assert main(["+cluster=a100x4", "submit"]) == 0
    assert inherited.keys().isdisjoint(fake_slurm.environment)
    assert kept.items() <= fake_slurm.environment.items()


SET_BY_THE_SHELL = {
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_ARRAY_INX": "0-9",
    "SBATCH_WAIT": "1",
    "SBATCH_OUTPUT": "/x",
    "SBATCH_GPUS_PER_TASK": "1",
    "SBATCH_GRES": "gpu:1",
    "SBATCH_MEM_PER_CPU": "1G",
}
LEFT_TO_THE_SHELL = {
    "SBATCH_ACCOUNT": "mine",
    "SBATCH_QOS": "high",
    "SBATCH_EXPORT": "ALL",
    "SBATCH_GRES_FLAGS": "x",
    "SBATCH_CLUSTERS": "b",
}


def test_variables_of_sbatch_do_not_beat_the_config_and_give_what_it_leaves_open(
    project: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (SET_BY_THE_SHELL | LEFT_TO_THE_SHELL).items():
        monkeypatch.setenv(name, value)
    words = ["+cluster=a100x4", "cluster.account=null", "cluster.qos=null", "cluster.mem_per_node_gb=10"]
    assert main([*words, "cluster.partition=long", "submit"]) == 0
    assert SET_BY_THE_SHELL.keys().isdisjoint(fake_slurm.environment)
    assert LEFT_TO_THE_SHELL.items() <= fake_slurm.environment.items()
    said = capsys.readouterr().err
    assert all(name in said for name in SET_BY_THE_SHELL) and not any(name in said for name in LEFT_TO_THE_SHELL)
    monkeypatch.setenv("SBATCH_PARTITION", "long")  # says the same
    assert main([*words, "cluster.partition=long", "submit"]) == 0
    assert "SBATCH_PARTITION" not in capsys.readouterr().err
    assert main([*words, "cluster.account=theirs", "submit"]) == 0
    assert "SBATCH_ACCOUNT=mine (cluster.account)" in capsys.readouterr().err


def test_a_cluster_with_its_own_slurm_conf_is_the_one_that_sbatch_talks_to(
    project: Path, fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("")
    assert main(["+cluster=a100x4", f"cluster.slurm_conf={conf}", "submit"]) == 0
    assert fake_slurm.environment["SLURM_CONF"] == str(conf)
    info = json.loads(next(project.glob("runs/train/*/run.json")).read_text())
    assert info["slurm_conf"] == str(conf)


def test_a_run_submitted_inside_a_job_does_not_remember_the_nodes_own_copy_of_slurm_conf(
    project: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On clusters without configuration files on their nodes, slurmd sets SLURM_CONF to a copy that exists there alone."""
    copy = tmp_path / "spool" / "conf-cache" / "slurm.conf"
    copy.parent.mkdir(parents=True)
    copy.touch()
    monkeypatch.setenv("SLURM_CONF", str(copy))
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert main(["+cluster=a100x4", "submit"]) == 0
    (run,) = project.glob("runs/train/*")
    assert json.loads((run / "run.json").read_text())["slurm_conf"] is None
    monkeypatch.delenv("SLURM_CONF")  # on the login node
    fake_slurm.command("squeue", 'echo "4711|4711_N/A|PENDING|N/A|Priority"')
    assert state(RunDir(run)).status == "waiting"


def test_several_runs_are_one_array_and_each_can_be_resumed_alone(project: Path, fake_slurm: FakeSlurm) -> None:
    config = config_of("cluster=a100x4")
    runs = []
    for _ in range(3):
        with preparing(config, [], project) as run_dir:
            runs.append(run_dir)
    assert submit(runs, config) == "4711"
    assert [run.info()["job_ids"] for run in runs] == [["4711_0"], ["4711_1"], ["4711_2"]]
    assert "#SBATCH --array=0-2\n" in fake_slurm.submitted[0]
    assert all(run.script.read_text() == fake_slurm.submitted[0] for run in runs)
    submit_existing_script(runs[1])
    alone = fake_slurm.submitted[1]
    assert "--array" not in alone
    assert f"run_dir={runs[1].path}\n" in alone
    assert runs[1].info()["job_ids"] == ["4711_1", "4711"]


# Values are quoted where they may hold anything, and put in the right place.

NASTY = [
    "two words",
    "it's",
    'say "hi"',
    "$(touch x)",
    "`touch x`",
    "$HOME",
    "a;b&c|d>e",
    "\\",
    "*",
    "!x",
    "#c",
    "é",
    "",
]


def test_the_ranks_get_environment_values_to_the_letter(tmp_path: Path) -> None:
    env = {f"V{index}": value for index, value in enumerate(NASTY)}
    script = render_script(Config(cluster=ClusterConfig(env=env)), PATHS)
    exports = [line for line in script.splitlines() if line.startswith("export V")]
    assert len(exports) == len(NASTY)
    printed = "; ".join(f'printf "%s\\0" "${name}"' for name in env)
    done = subprocess.run(
        ["bash", "-c", "\n".join([*exports, printed])], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\0")[:-1] == NASTY
    assert list(tmp_path.iterdir()) == []


PRINTABLE = st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs"]), min_size=1)


@given(value=PRINTABLE)
def test_directives_survive_any_value(value: str) -> None:
    cluster = ClusterConfig(partition=value, account=value, constraint=value, sbatch={"comment": value})
    words = [shlex.split(line.text) for line in explained_directives(Config(cluster=cluster), PATHS)]
    for name in ("partition", "account", "constraint", "comment"):
        assert [f"--{name}={value}"] in words


def srun_words(cluster: ClusterConfig) -> list[str]:
    return [line.text for line in explained_srun(cluster, PATHS)]


@given(value=PRINTABLE)
def test_srun_words_survive_any_value(value: str) -> None:
    container = ContainerConfig(kind=ContainerKind.PYXIS, image=value, mounts=[f"{value}:/x"], args=[f"--a={value}"])
    words = shlex.split(" ".join(srun_words(ClusterConfig(container=container, srun_args=[f"--b={value}"]))))
    assert f"--container-image={value}" in words
    assert f"--container-mounts=$run_dir:$run_dir,{value}:/x" in words
    assert f"--a={value}" in words and f"--b={value}" in words


@pytest.mark.parametrize("folder", ["it's $(touch x)", "two words", "normal"])
def test_run_directories_with_odd_names_work(folder: str, tmp_path: Path) -> None:
    run_dir = tmp_path / folder / "runs" / "train" / "RUN"
    (run_dir / "attempts").mkdir(parents=True)
    (run_dir / "code").mkdir()
    done = run_script(
        render_script(Config(), JobPaths([run_dir], "code", "true")), tmp_path, srun="pwd >cwd-of-$0; exit 0"
    )
    assert done.returncode == 0, done.stderr
    assert (run_dir / "code" / "cwd-of-srun").read_text() == f"{run_dir}/code\n"


def test_modules_come_first_then_own_lines_then_the_environment() -> None:
    lines = setup_lines(ClusterConfig(modules=["cuda/12", "a b"], setup=["export A=$B"], venv="/my env"))
    assert lines == ["module load cuda/12", "module load 'a b'", "export A=$B", "source '/my env/bin/activate'"]
    assert setup_lines(ClusterConfig(conda_env="x"))[-1] == "conda activate x"


@pytest.mark.parametrize(
    ("cluster", "python"),
    [
        (ClusterConfig(), PYTHON),
        (ClusterConfig(venv="/v"), "python"),
        (ClusterConfig(conda_env="c"), "python"),
        (ClusterConfig(container=ContainerConfig(kind=ContainerKind.PYXIS, image="i")), "python"),
        (ClusterConfig(venv="/v", python="/opt/my python"), "'/opt/my python'"),
    ],
)
def test_the_ranks_use_the_python_of_the_environment_that_was_activated(cluster: ClusterConfig, python: str) -> None:
    assert f' {python} -u -m slurmtrain train "$run_dir"' in srun_words(cluster)[-1]


def test_srun_is_told_again_what_it_does_not_inherit() -> None:
    words = srun_words(ClusterConfig(cpus_per_task=7, srun_wait_s=33))
    assert {"--cpus-per-task=7", "--kill-on-bad-exit=1", "--wait=33"} <= set(words)


def test_ranks_fill_the_sockets_of_a_node_in_the_order_of_its_gpus_unless_the_person_decides() -> None:
    """SLURM's default would bind rank 1 to the second socket, though GPU 1 is at the first."""
    gpus = ClusterConfig(tasks_per_node=8, gpus_per_node=8)
    assert "--distribution=block:block" in srun_words(gpus)
    for other in (
        replace(gpus, gpus_per_node=0),
        replace(gpus, tasks_per_node=1),
        replace(gpus, sbatch={"distribution": "block:fcyclic"}),
    ):
        assert not [word for word in srun_words(other) if "distribution" in word]
    words = srun_words(replace(gpus, srun_args=["--distribution=cyclic"]))
    assert words.index("--distribution=block:block") < words.index("--distribution=cyclic")  # the last one counts


def test_a_secret_is_inherited_and_never_written(
    project: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "it's s3cret")
    words = [
        "+cluster.env.WANDB_API_KEY='${oc.env:WANDB_API_KEY}'",
        "+cluster.env.AUTH='Bearer ${oc.env:WANDB_API_KEY}!'",
    ]
    assert main(["+cluster=a100x4", *words, "submit"]) == 0
    assert not [path for path in project.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert fake_slurm.environment["WANDB_API_KEY"] == "it's s3cret"  # --export=ALL hands it to the job
    exports = [
        line for line in fake_slurm.submitted[0].splitlines() if line.startswith(("export WANDB", "export AUTH"))
    ]
    done = subprocess.run(["bash", "-c", "\n".join([*exports, "env"])], capture_output=True, text=True, check=True)
    assert "\nWANDB_API_KEY=it's s3cret\n" in done.stdout and "\nAUTH=Bearer it's s3cret!\n" in done.stdout


def test_a_secret_is_there_for_local_ranks_too(cli: Cli, project: Path) -> None:
    (project / "check.sh").write_text('[ "$(echo "$AUTH" | rev)" = "terc3s reraeB" ]')
    secret = "+cluster.env.AUTH='Bearer ${oc.env:MY_TOKEN}'"
    words = ["+cluster=local", "job=command", "job.command='bash check.sh'", "requeue=off"]
    done = cli(*words, secret, "submit", MY_TOKEN="s3cret")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [path for path in project.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert cli(*words, "+cluster.env.AUTH=other", "submit").returncode == 1


# What the script does, with stand-ins for srun, scontrol and `finish-attempt`.


# As srun 22.05 does it in a job with GPUs. Of tasks on a node it would start all of the job's, with a warning.
REFUSED_BY_SRUN = """case " $* " in
  *" --gres=none "*) if [ -n "$SLURM_GPUS_PER_NODE" ]; then
    echo "srun: error: Unable to create step for job 77: Invalid Trackable RESource (TRES) specification" >&2; exit 1; fi ;;
esac
case " $* " in
  *" --ntasks="*) ;;
  *" --ntasks-per-node=1 "*) if [ -n "$SLURM_NTASKS$SLURM_NPROCS" ]; then
    echo "srun: Warning: can't honor --ntasks-per-node set to 1" >&2; exit 1; fi ;;
esac
"""


def run_script(
    script: str, tmp_path: Path, *, srun: str, verbs: str = "", squeue: str = "", again: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    process = start_script(script, tmp_path, srun=srun, verbs=verbs, squeue=squeue, again=again, **env)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_script(
    script: str, tmp_path: Path, *, srun: str, verbs: str = "", squeue: str = "", again: str = "", **env: str
) -> subprocess.Popen[str]:
    """The script as a batch shell would run it. All but scontrol and `resubmit`, which note their arguments down, are bash."""
    fake = FakeSlurm(tmp_path / "bin")
    fake.directory.mkdir(exist_ok=True)
    fake.command("srun", REFUSED_BY_SRUN + srun.replace("$0", "srun"))
    fake.command("scontrol", 'echo "$*" >>"$here/../scontrol-calls"')
    job = '"${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"'
    noted = f'echo "${{@:4}}" >>"$here/../again-calls"; echo {job} >"$here/../again-element"'
    fake.command("slurmtrain-python", f'if [ "$3" = resubmit ]; then {noted}; {again or ":"}; fi\n{verbs or "exit 0"}')
    fake.command("squeue", squeue or "exit 1")
    of_job = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_GPUS_PER_NODE": "a100:4"}
    variables = {"PATH": f"{fake.directory}:{os.environ['PATH']}", "HOME": str(tmp_path), **of_job, **env}
    return subprocess.Popen(
        ["bash", "-c", script], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    (path / "attempts").mkdir(parents=True)
    (path / "code").mkdir()
    return path


def script_for(*run_dirs: Path, config: Config | None = None) -> str:
    python = str(run_dirs[0].parent / "bin" / "slurmtrain-python")
    return render_script(config or Config(), JobPaths(list(run_dirs), "code", python))


def scontrol_calls(tmp_path: Path) -> list[str]:
    calls = tmp_path / "scontrol-calls"
    return calls.read_text().splitlines() if calls.exists() else []


def again_calls(tmp_path: Path) -> list[str]:
    calls = tmp_path / "again-calls"
    return calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("code", [0, 1, 75, 78, 137])
def test_without_a_requeue_the_script_ends_with_the_ranks_code(code: int, run_dir: Path, tmp_path: Path) -> None:
    done = run_script(
        script_for(run_dir), tmp_path, srun=f"exit {code}", verbs='echo "$@" >"$here/../finished"; echo end'
    )
    assert done.returncode == (code or 1)  # 0 of srun, which may have lost its ranks, is no success by itself
    assert (
        tmp_path / "finished"
    ).read_text() == f"-m slurmtrain finish-attempt {run_dir} --attempt 1 --in-place --exit-code {code}\n"
    assert scontrol_calls(tmp_path) == []


@pytest.mark.parametrize("mode", ["requeue", "resubmit", "chain", "off"])
@pytest.mark.parametrize(("word", "code"), [("done", 0), ("end", 1), ("next", 1), ("", 0)])
def test_a_job_is_a_success_to_those_who_wait_for_it_only_if_its_run_has_finished(
    run_dir: Path, tmp_path: Path, mode: str, word: str, code: int
) -> None:
    script = script_for(run_dir, config=compose(["cluster=a100x4", f"requeue.mode={mode}"]))
    assert (
        run_script(script, tmp_path, srun="exit 0", verbs=f'[ "$3" != finish-attempt ] || echo {word}').returncode
        == code
    )


def test_the_verdict_requeue_lets_the_run_go_on(run_dir: Path, tmp_path: Path) -> None:
    done = run_script(script_for(run_dir), tmp_path, srun="exit 75", verbs="echo requeue")
    assert done.returncode == 75
    assert again_calls(tmp_path) == [f"{run_dir} --attempt 1"] and scontrol_calls(tmp_path) == []


def test_where_our_own_python_fails_the_job_is_requeued_all_the_same(run_dir: Path, tmp_path: Path) -> None:
    done = run_script(script_for(run_dir), tmp_path, srun="exit 75", verbs="echo requeue", again="exit 1")
    assert (done.returncode, scontrol_calls(tmp_path)) == (75, ["requeue incomplete 77"]), done.stderr


@pytest.mark.parametrize(("word", "code"), [("done", 0), ("end", 1)])
def test_a_job_that_slurm_starts_again_after_the_run_has_ended_claims_no_attempt(
    run_dir: Path, tmp_path: Path, word: str, code: int
) -> None:
    said = f'[ "$3" = begin-attempt ] && echo {word}'
    done = run_script(
        script_for(run_dir), tmp_path, srun='touch "$here/../started"', verbs=said, SLURM_RESTART_COUNT="2"
    )
    assert done.returncode == code, done.stderr
    assert not (tmp_path / "started").exists() and list((run_dir / "attempts").iterdir()) == []
    assert scontrol_calls(tmp_path) == []


@pytest.mark.parametrize("mode", ["requeue", "resubmit"])
@pytest.mark.parametrize(("word", "code"), [("done", 0), ("end", 1)])
def test_a_job_that_goes_on_after_another_claims_no_attempt_when_the_run_has_ended_meanwhile(
    run_dir: Path, tmp_path: Path, mode: str, word: str, code: int
) -> None:
    (run_dir / "attempts" / "0001").mkdir()
    script = script_for(run_dir, config=compose(["cluster=a100x4", f"requeue.mode={mode}"]))
    done = run_script(
        script, tmp_path, srun='touch "$here/../started"', verbs=f'[ "$3" = begin-attempt ] && echo {word}'
    )
    assert done.returncode == code, done.stderr
    assert not (tmp_path / "started").exists() and len(list((run_dir / "attempts").iterdir())) == 1
    assert again_calls(tmp_path) == [] and scontrol_calls(tmp_path) == []


@pytest.mark.parametrize("mode", ["requeue", "resubmit"])
def test_a_job_that_slurm_starts_again_with_a_script_of_before_a_change_leaves_to_a_new_one(
    run_dir: Path, tmp_path: Path, mode: str
) -> None:
    script = script_for(run_dir, config=compose(["cluster=a100x4", f"requeue.mode={mode}"]))
    said = '[ "$3" = begin-attempt ] && echo change'
    done = run_script(script, tmp_path, srun='touch "$here/../started"', verbs=said, SLURM_RESTART_COUNT="1")
    assert done.returncode == 75, done.stderr
    assert not (tmp_path / "started").exists() and list((run_dir / "attempts").iterdir()) == []
    assert again_calls(tmp_path) == [str(run_dir)]


@pytest.mark.parametrize("mode", ["requeue", "resubmit"])
def test_the_first_start_of_a_run_asks_nothing(run_dir: Path, tmp_path: Path, mode: str) -> None:
    script = script_for(run_dir, config=compose(["cluster=a100x4", f"requeue.mode={mode}"]))
    verbs = '[ "$3" != begin-attempt ] || touch "$here/../asked"; echo done'
    run_script(script, tmp_path, srun='touch "$here/../started"', verbs=verbs)
    assert (tmp_path / "started").exists() and not (tmp_path / "asked").exists()


@pytest.mark.parametrize("verbs", ["exit 0", "exit 1"])
def test_a_restart_of_a_run_that_has_not_ended_or_that_cannot_be_asked_goes_on(
    run_dir: Path, tmp_path: Path, verbs: str
) -> None:
    run_script(script_for(run_dir), tmp_path, srun='touch "$here/../started"', verbs=verbs, SLURM_RESTART_COUNT="1")
    assert (tmp_path / "started").exists() and (run_dir / "attempts" / "0001").is_dir()


def test_an_array_task_requeues_itself_alone(run_dir: Path, tmp_path: Path) -> None:
    script = script_for(tmp_path / "a", run_dir, tmp_path / "b")
    array = {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"}
    done = run_script(script, tmp_path, srun="exit 75", verbs="echo requeue", **array)
    assert done.returncode == 75, done.stderr
    assert (tmp_path / "again-element").read_text() == "70_1\n"
    assert (run_dir / "attempts" / "0001").is_dir()


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [(75, "RUNNING", True), (75, "COMPLETING", False), (1, "RUNNING", False), (0, "RUNNING", False)],
)
def test_a_finish_attempt_that_fails_does_not_lose_a_stopped_run(
    run_dir: Path, tmp_path: Path, code: int, state: str, requeued: bool
) -> None:
    """And does not revive a job that SLURM has ended: a requeue while it is COMPLETING would."""
    done = run_script(script_for(run_dir), tmp_path, srun=f"exit {code}", verbs="exit 1", squeue=f"echo {state}")
    assert done.returncode == (75 if requeued else code), done.stderr
    assert bool(again_calls(tmp_path)) == requeued


def test_the_script_asks_slurm_without_the_persons_defaults_for_its_commands(run_dir: Path, tmp_path: Path) -> None:
    """SQUEUE_STATES=PENDING would hide this job. The ranks have what the person has."""
    squeue = '[ -z "$SQUEUE_STATES$SLURM_CLUSTERS" ] && echo RUNNING'
    env = {"SQUEUE_STATES": "PENDING", "SLURM_CLUSTERS": "a,b", "SLURM_JWT": "expired"}
    srun = 'echo "$SQUEUE_STATES|$SLURM_JWT" >"$here/../seen"; exit 75'
    done = run_script(script_for(run_dir), tmp_path, srun=srun, verbs="exit 1", squeue=squeue, **env)
    assert done.returncode == 75 and again_calls(tmp_path)
    assert (tmp_path / "seen").read_text() == "PENDING|\n"


def test_each_start_claims_the_next_attempt(run_dir: Path, tmp_path: Path) -> None:
    for number in ("0001", "0002"):
        (run_dir / "attempts" / number).mkdir()
    srun = 'echo "$SLURMTRAIN_ATTEMPT $SLURMTRAIN_RUN_DIR" >"$here/../seen"'
    assert run_script(script_for(run_dir), tmp_path, srun=srun).returncode == 0
    assert (tmp_path / "seen").read_text() == f"3 {run_dir}\n"
    assert (run_dir / "attempts" / "0003").is_dir()


def test_a_run_directory_that_is_not_mounted_ends_the_job_with_78(tmp_path: Path) -> None:
    done = run_script(script_for(tmp_path / "gone"), tmp_path, srun="exit 0")
    assert done.returncode == 78
    assert "cannot create" in done.stderr and "is its file system mounted" in done.stderr


OTHER_NODES = ("n[1-7]", "n[1-8]")


@pytest.mark.parametrize(
    ("case", "code", "changes"),
    [
        ({}, 75, ["requeue incomplete 77", "update jobid=77 excnodelist=n9 starttime=now+{delay}"]),
        ({"restarts": 0}, 78, []),  # the config names a folder that no node has, for all that is known
        # the first attempt of the job had it; so says the batch script, whose node has lost it before the next one
        (
            {"restarts": 0, "lost_after_an_attempt": True},
            75,
            ["requeue incomplete 77", "update jobid=77 excnodelist=n9 starttime=now+{delay}"],
        ),
        ({"state": "COMPLETING"}, 78, []),  # cancelled, say, which a requeue would revive
        ({"test_only": 1}, 78, []),  # no node would be left
        (
            {"excluded": OTHER_NODES[0]},
            75,
            ["requeue incomplete 77", "update jobid=77 excnodelist=n[1-7],n9 starttime=now+{delay}"],
        ),
        ({"excluded": OTHER_NODES[1]}, 78, []),  # so many are not the nodes' fault
        ({"update": "exit 1"}, 75, ["requeue incomplete 77", "hold 77"]),  # or it would come back to this node for ever
    ],
)
def test_a_restarted_job_on_a_node_without_the_run_directory_starts_elsewhere_and_not_for_ever(
    case: dict[str, Any], code: int, changes: list[str], tmp_path: Path
) -> None:
    fake = FakeSlurm(tmp_path / "slurm")
    fake.directory.mkdir()
    fake.command("sleep", "exit 0")
    fake.command("sbatch", f"exit {case.get('test_only', 0)}")
    excluded = case.get("excluded", "(null)")
    fake.command(
        "scontrol",
        f"""case "$*" in
  "show job"*) echo "JobId=77 ExcNodeList={excluded} Restarts=1" ;;
  "show hostnames"*) seq 1 {8 if excluded == OTHER_NODES[1] else 7} ;;
  update*) {case.get("update", 'echo "$*" >>"$here/changes"')} ;;
  *) echo "$*" >>"$here/changes" ;;
esac""",
    )
    config = Config()
    gone = tmp_path / "gone"
    if "lost_after_an_attempt" in case:
        for folder in ("attempts", "code"):
            (gone / folder).mkdir(parents=True)
    script = script_for(gone, config=config)
    done = run_script(
        f"PATH={fake.directory}:$PATH\n{script}",
        tmp_path,
        srun=f"rm -r {gone}/attempts; exit 1",
        verbs="echo in-place",
        squeue=f"echo {case.get('state', 'RUNNING')}",
        SLURM_RESTART_COUNT=str(case.get("restarts", 1)),
        SLURMD_NODENAME="n9",
    )
    made = fake.directory / "changes"
    found = made.read_text().splitlines() if made.exists() else []
    assert found == [each.format(delay=config.requeue.restart_delay_s) for each in changes], done.stderr
    assert done.returncode == code and "is its file system mounted" in done.stderr


def test_a_set_up_line_that_fails_ends_the_job_with_78_and_says_which(run_dir: Path, tmp_path: Path) -> None:
    config = Config(cluster=ClusterConfig(setup=["export FINE=1", "ls /no/such/folder", "export LATER=1"]))
    done = run_script(script_for(run_dir, config=config), tmp_path, srun='touch "$here/../started"')
    assert done.returncode == 78
    said = (run_dir / "attempts" / "0001" / "setup-failed").read_text()
    assert said.startswith("set-up failed with code 2") and "ls /no/such/folder" in said
    assert not (tmp_path / "started").exists()


def test_set_up_lines_reach_the_ranks(run_dir: Path, tmp_path: Path) -> None:
    config = Config(cluster=ClusterConfig(setup=['export A="x y"'], env={"B": "$A"}, cpus_per_task=3))
    srun = 'echo "$A|$B|$OMP_NUM_THREADS|$PYTHONPATH" >"$here/../seen"'
    run_script(script_for(run_dir, config=config), tmp_path, srun=srun)
    assert (tmp_path / "seen").read_text() == f"x y|$A|3|{run_dir}/code\n"


def test_the_batch_shell_outlives_the_signals_and_finishes_the_attempt_after_the_last_rank(
    run_dir: Path, tmp_path: Path
) -> None:
    srun = 'trap "" TERM USR2; touch "$here/../started"; while [ ! -e "$here/../go" ]; do sleep 0.02; done; exit 75'
    process = start_script(script_for(run_dir), tmp_path, srun=srun, verbs="echo requeue")
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.05)
    assert process.poll() is None and again_calls(tmp_path) == []
    (tmp_path / "go").touch()
    assert process.wait(timeout=60) == 75
    assert again_calls(tmp_path) == [f"{run_dir} --attempt 1"]
    process.communicate()


# Copies on the nodes.

# srun notes down its steps, and of the ranks what they are given.
STEPS = """case "$*" in
  *--copy*) echo "$*" | grep -o 'nodes=[0-9]*\\|copy .*' | tr '\\n' ' ' >>"$here/../steps"; eval "$copies" ;;
  *" rm -rf "*) eval "$removed"; echo "removed ${@: -1}" >>"$here/../steps" ;;
  *) echo "ranks [$SLURMTRAIN_STAGE]" >>"$here/../steps"; [ "$SLURMTRAIN_ATTEMPT" = 2 ] || exit 137 ;;
esac"""
ENDS = """case "$*" in *" stage "*--pack*) eval "$packs"; exit ;; esac
[ "$3" = finish-attempt ] || exit 0
echo "${*:4}" >>"$here/../finished"; read -r word <"$here/../words"; sed -i 1d "$here/../words"; echo "$word"
"""


def copying(
    run_dir: Path, tmp_path: Path, *more: str, words: str = "in-place done", **what: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What the script says, and the steps that it started."""
    (tmp_path / "words").write_text(words.replace(" ", "\n") + "\n")
    given = {**dict.fromkeys(("packs", "copies", "removed"), ""), "TMPDIR": "/local", "SLURM_JOB_NUM_NODES": "2"}
    config = compose(["cluster=a100x4", "cluster.nodes=2", "cluster.stage.code=true", *more])
    again = 'echo "goes on" >>"$here/../steps"; touch "$here/../gone-on"'
    done = run_script(
        script_for(run_dir, config=config),
        tmp_path,
        srun=STEPS,
        verbs=ENDS,
        squeue="echo 77",
        again=again,
        **(given | what),
    )
    steps = (tmp_path / "steps").read_text().replace(f"slurmtrain-stage-{os.getuid()}", "UID")
    return done, steps.splitlines()


def test_the_nodes_copy_once_for_all_starts_of_the_ranks_and_the_copies_end_with_the_job(
    run_dir: Path, tmp_path: Path
) -> None:
    done, steps = copying(run_dir, tmp_path, "cluster.stage.environment=true", packs="echo /archives/one.tar")
    folder = "/local/UID/cluster-77-0"
    python = tmp_path / "bin" / "slurmtrain-python"
    copied = f"nodes=2 copy {folder} --archive /archives/one.tar --python {python} --live 77 "
    assert steps == [f"{copied}ranks [{folder}]", f"ranks [{folder}]", f"removed {folder}"]
    assert done.returncode == 0


def test_copies_lie_in_another_folder_than_checkpoints_on_nodes_whose_dead_runs_are_removed() -> None:
    checkpoints = run_folder(Path("/local"), Path("/checkpoints"), "run").parent.name
    assert f"/{checkpoints}/".replace(str(os.geteuid()), "$(id -u)") not in golden_text("stage")


@pytest.mark.parametrize(("code", "said"), [(1, ""), (143, ""), (124, "the copying was ended after 30 min")])
def test_whatever_becomes_of_the_copying_the_ranks_start(run_dir: Path, tmp_path: Path, code: int, said: str) -> None:
    """A rank that a signal has not reached asks SLURM about it when it starts."""
    done, steps = copying(run_dir, tmp_path, copies=f"exit {code}")
    assert done.returncode == 0 and sum("ranks" in step for step in steps) == 2
    assert ("the copying was ended" in done.stderr) == bool(said) and said in done.stderr


def test_without_the_tar_of_an_environment_nothing_is_copied(run_dir: Path, tmp_path: Path) -> None:
    _, steps = copying(run_dir, tmp_path, "cluster.stage.environment=true", packs="exit 1")
    assert steps == ["ranks []", "ranks []"]


def test_a_run_that_goes_on_does_not_wait_until_its_copies_are_removed(run_dir: Path, tmp_path: Path) -> None:
    slow = 'until [ -e "$here/../gone-on" ]; do sleep 0.02; done'
    done, steps = copying(run_dir, tmp_path, words="requeue", removed=slow)
    assert done.returncode == 75 and steps[-2:] == ["goes on", "removed /local/UID/cluster-77-0"]


def test_a_rank_uses_the_copies_of_its_node_only_where_there_are_some(tmp_path: Path) -> None:
    (tmp_path / "n0").mkdir()
    (tmp_path / "n0" / "use").write_text("export PYTHONPATH=/local SLURMTRAIN_PYTHON=/bin/echo\n")
    cluster = ClusterConfig(python="/bin/true", stage=StageConfig(code=True))
    words = srun_words(cluster)[-1]

    def rank(**variables: str) -> str:
        return subprocess.run(["bash", "-c", words], env=variables, capture_output=True, text=True, check=True).stdout

    assert "-m slurmtrain train" in rank(SLURMTRAIN_STAGE=str(tmp_path), SLURMD_NODENAME="n0")
    assert rank(SLURMTRAIN_STAGE=str(tmp_path), SLURMD_NODENAME="n1") == ""
    assert rank(SLURMD_NODENAME="n0") == ""


# Restart in place.

AGAIN = """[ "$3" = finish-attempt ] || exit 0
echo "${*:4}" >>"$here/../finished"
read -r word <"$here/../words"; sed -i 1d "$here/../words"; echo "$word"
"""


@pytest.mark.parametrize("mode", ["requeue", "resubmit", "chain"])
def test_the_verdict_in_place_starts_the_ranks_again_in_the_same_job_as_the_next_attempt(
    run_dir: Path, tmp_path: Path, mode: str
) -> None:
    (tmp_path / "words").write_text("in-place --nodes=4\nin-place --nodes=4\ndone\n")
    srun = 'echo "$SLURMTRAIN_ATTEMPT $PWD" >>"$here/../seen"; [ "$SLURMTRAIN_ATTEMPT" = 3 ] || exit 137'
    script = script_for(run_dir, config=compose(["cluster=a100x4", f"requeue.mode={mode}"]))
    done = run_script(script, tmp_path, srun=srun, verbs=AGAIN)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text() == "".join(f"{number} {run_dir}/code\n" for number in (1, 2, 3))
    assert (tmp_path / "finished").read_text().splitlines() == [
        f"{run_dir} --attempt {number} --in-place --exit-code {code}" for number, code in ((1, 137), (2, 137), (3, 0))
    ]
    claims = [(run_dir / "attempts" / f"000{number}" / "job").read_text().split()[:2] for number in (1, 2, 3)]
    assert claims == [["77", "0"]] * 3 and again_calls(tmp_path) == []


def run_with_standby_ranks(run_dir: Path, tmp_path: Path, standby: str, words: str, *more: str) -> list[str]:
    """What a job of four ranks starts, and for which attempt; the first fails when its standby ranks have done `standby`."""
    (tmp_path / "words").write_text(words)
    (tmp_path / "bin").mkdir()
    FakeSlurm(tmp_path / "bin").command("sleep", "exec /bin/sleep 0.05")
    srun = f"""case "$*" in *--standby)
  [[ "$*" = *"--overlap --mem=0"* ]] || exit 9
  if [ "$SLURMTRAIN_ATTEMPT" -gt 1 ]; then exec /bin/sleep 60; fi
  {standby}; read -r number
  [ -f "$SLURMTRAIN_RUN_DIR/attempts/000$number/srun.log" ] && echo "standby $number" >>"$here/../seen"
  exit ;;
esac
echo "start $SLURMTRAIN_ATTEMPT" >>"$here/../seen"
echo ' "stepping": 1795407813.27,' >"$SLURMTRAIN_RUN_DIR/attempts/000$SLURMTRAIN_ATTEMPT/attempt.json"
until [ -e "$here/../waits" ]; do /bin/sleep 0.02; done
exit $((SLURMTRAIN_ATTEMPT == 1))"""
    config = compose(["cluster=a100x4", "requeue.standby_ranks=true", *more])
    done = run_script(script_for(run_dir, config=config), tmp_path, srun=srun, verbs=AGAIN)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "seen").read_text().splitlines()


def test_the_next_start_in_a_job_is_that_of_the_standby_ranks_when_all_are_ready(run_dir: Path, tmp_path: Path) -> None:
    all_ready = 'for rank in 0 1 2 3; do echo ready; done; touch "$here/../waits"'
    seen = run_with_standby_ranks(run_dir, tmp_path, all_ready, "in-place --nodes=1\ndone\n")
    assert seen == ["start 1", "standby 2"]


def test_standby_ranks_are_seen_whatever_the_cluster_lets_srun_do_with_output(run_dir: Path, tmp_path: Path) -> None:
    labelled = 'for rank in 0 1 2 3; do echo "$rank: ready"; done; touch "$here/../waits"'
    no_output = f'case "$*" in *here.log*) exit 9 ;; esac; {labelled}'
    more = "cluster.srun_args=['--label','--output=here.log','-e','here.log','--mpi=none']"
    seen = run_with_standby_ranks(run_dir, tmp_path, no_output, "in-place --nodes=1\ndone\n", more)
    assert seen == ["start 1", "standby 2"]


def test_a_process_that_has_got_the_number_of_srun_does_not_keep_the_script_busy(tmp_path: Path) -> None:
    """What it looked for with kill -0 was there, and `wait` returned at once, over and over."""
    (works,) = re.findall(r"^slurmtrain_works\(\) .*$", script_for(tmp_path), re.M)
    text = f"""{works}
bash -c 'exit 3' & one=$!; wait "$one"
slurmtrain_works "$one" && echo "an ended one works"
slurmtrain_works "$PPID" && echo "one of another shell works"
sleep 60 & two=$!
slurmtrain_works "$two" || echo "it does not"
slurmtrain_works "${{two:1}}" && echo "a part of a number works"
kill "$two"; wait "$two"; slurmtrain_works "$two" && echo "still"
wait "$one"; echo $?"""
    assert subprocess.run(["bash", "-c", text], capture_output=True, text=True).stdout == "3\n"


@pytest.mark.parametrize(
    "standby",
    [
        'echo ready; touch "$here/../waits"',
        'for rank in 0 1 2 3; do echo ready; done; (/bin/sleep 0.2; touch "$here/../waits") & exit 1',
    ],
    ids=["not all are ready", "they have left"],
)
def test_ranks_start_as_ever_without_their_standby_ranks(run_dir: Path, tmp_path: Path, standby: str) -> None:
    seen = run_with_standby_ranks(run_dir, tmp_path, standby, "in-place --nodes=1\ndone\n")
    assert seen == ["start 1", "start 2"]


@pytest.mark.parametrize(("code", "removed"), [(0, False), (75, False), (137, True)])
def test_copies_of_checkpoints_stay_for_a_restart_in_place_and_leave_the_nodes_after_a_crash_without(
    run_dir: Path, tmp_path: Path, code: int, removed: bool
) -> None:
    (tmp_path / "words").write_text("in-place --nodes=4\nend\n")
    folder = tmp_path / "my node" / f"slurmtrain-{os.getuid()}" / "run-0123"
    folder.mkdir(parents=True)
    srun = (
        f'case "$*" in --overlap*bash*) exec "${{@:8}}" ;; esac; [ -d "{folder}" ] || exit 3; '
        f'[ "$SLURMTRAIN_ATTEMPT" = 2 ] || exit 137; exit {code}'
    )
    script = script_for(run_dir, config=compose(["cluster=a100x4", f"checkpoint.local={tmp_path}/my node"]))
    done = run_script(script, tmp_path, srun=srun, verbs=AGAIN, SLURM_JOB_NUM_NODES="4")
    assert (done.returncode, folder.exists()) == (code or 1, not removed), done.stderr


@pytest.mark.parametrize(("words", "removed"), [("in-place --nodes=4\ndone\n", True), ("done\n", False)])
def test_copies_leave_nodes_that_were_left_out_of_a_restart_in_place_and_dead_nodes_do_not_prevent_it(
    run_dir: Path, tmp_path: Path, words: str, removed: bool
) -> None:
    (tmp_path / "words").write_text(words)
    folder = tmp_path / "shm" / f"slurmtrain-{os.getuid()}" / "run-0123"
    folder.mkdir(parents=True)
    srun = (
        'case "$*" in *"watch "*) exit ;; --overlap*bash*) echo "$5" >>"$here/../seen"; exec "${@:8}" ;; esac; '
        f"exit $(({words.count('in-place')} + 1 - SLURMTRAIN_ATTEMPT))"
    )
    given = ["cluster=a100x4", "cluster.nodes=4", "cluster.spare_nodes=1", f"checkpoint.local={tmp_path}/shm"]
    script = script_for(run_dir, config=compose(given))
    done = run_script(script, tmp_path, srun=srun, verbs=AGAIN, squeue="echo 4", SLURM_JOB_NUM_NODES="5")
    assert (done.returncode, folder.exists()) == (0, not removed), done.stderr
    assert not removed or (tmp_path / "seen").read_text() == "--nodes=4\n", "as many as the job still has"


def test_an_attempt_after_a_restart_in_place_can_be_requeued(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("in-place\nrequeue\n")
    done = run_script(script_for(run_dir), tmp_path, srun="exit 1", verbs=AGAIN)
    assert (done.returncode, again_calls(tmp_path)) == (75, [f"{run_dir} --attempt 2"])


def test_ranks_run_on_as_many_nodes_as_the_config_says_and_then_on_those_that_are_named(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "words").write_text("in-place --nodes=2 --ntasks=4 --nodelist=n0,n2\ndone\n")
    config = config_of("cluster=a100x4  cluster.tasks_per_node=2  cluster.nodes=2  cluster.spare_nodes=1")
    script = script_for(run_dir, config=config)
    assert "#SBATCH --nodes=3\n" in script and "#SBATCH --no-kill\n" in script
    srun = """case "$*" in --overlap*) exit ;; esac
echo "$*" | grep -o -e "--n[^ ]*" | paste -sd" " >>"$here/../seen"
exit $((2 - SLURMTRAIN_ATTEMPT))"""
    done = run_script(script, tmp_path, srun=srun, verbs=AGAIN)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text().splitlines() == [
        "--nodes=2 --ntasks=4",
        "--nodes=2 --ntasks=4 --nodelist=n0,n2",
    ]


def test_without_spare_nodes_the_ranks_have_all_nodes_of_the_job_and_a_dead_one_ends_it() -> None:
    script = render_script(config_of("cluster=a100x4  cluster.nodes=2"), PATHS)
    assert "--no-kill" not in script and "nodes_of_ranks" not in script and "#SBATCH --nodes=2\n" in script


@pytest.mark.parametrize("words", ["requeue.in_place=false", "requeue=off"])
def test_a_script_that_may_not_start_ranks_again_has_no_loop(words: str) -> None:
    script = render_script(config_of(f"cluster=a100x4  {words}"), PATHS)
    assert "in-place" not in script and "while :;" not in script


def test_every_attempt_of_a_job_has_its_hook_and_the_last_one_waits_for_the_others(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "words").write_text("in-place\ndone\n")
    hook = """if [ "$3" = hook ]; then
  while [ "$6" = 1 ] && [ ! -e "$here/../go" ]; do sleep 0.02; done
  echo "${*:4}" >>"$here/../hooks"; exit
fi
"""
    config = Config(hooks=HooksConfig(on_failure="true"))
    srun = '[ "$SLURMTRAIN_ATTEMPT" = 2 ] || exit 1; touch "$here/../go"'  # the ranks need not wait for the hook
    done = run_script(script_for(run_dir, config=config), tmp_path, srun=srun, verbs=hook + AGAIN)
    assert done.returncode == 0, done.stderr
    hooks = [f"{run_dir} --attempt {number}" for number in (1, 2)]
    assert (tmp_path / "hooks").read_text().splitlines() == hooks


def test_a_background_process_of_a_set_up_line_does_not_hold_up_the_end(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("in-place\ndone\n")
    config = Config(
        hooks=HooksConfig(on_failure="true"), cluster=ClusterConfig(setup=['sleep 600 & echo "$!" >"$HOME/pid"'])
    )
    script = script_for(run_dir, config=config).replace("sleep 600 &", "sleep 600 >/dev/null 2>&1 &")
    done = run_script(script, tmp_path, srun="exit 0", verbs=AGAIN)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert done.returncode == 0, done.stderr


# Several runs in one job.


@pytest.fixture
def packed(tmp_path: Path) -> list[Path]:
    runs = [tmp_path / name for name in "abcde"]
    for run in runs:
        for folder in ("attempts", "code"):
            (run / folder).mkdir(parents=True)
    return runs


SECOND_OF_TWO = {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"}
NAME = 'name=$(basename "$SLURMTRAIN_RUN_DIR")'
AS_NAMED = f'{NAME}; code=$(cat "$here/../code-$name" 2>/dev/null); exit "${{code:-0}}"'
REQUEUE_75 = '[ "$3" = begin-attempt ] || [ "${!#}" != 75 ] || echo requeue'


def pack_script(packed: list[Path], config: Config | None = None, pack: int = 3) -> str:
    python = str(packed[0].parent / "bin" / "slurmtrain-python")
    return render_script(config or Config(), JobPaths(packed, "code", python, pack=pack))


def test_the_runs_of_a_pack_run_at_the_same_time_each_in_its_own_attempt(packed: list[Path], tmp_path: Path) -> None:
    srun = f'{NAME}; touch "$here/../here-$name"; until [ -e "$here/../here-d" -a -e "$here/../here-e" ]; do sleep 0.02; done'
    srun += '; echo "$SLURMTRAIN_ATTEMPT $PWD $OMP_NUM_THREADS" >"$here/../seen-$name"'
    config = Config(cluster=ClusterConfig(cpus_per_task=7))
    done = run_script(pack_script(packed, config), tmp_path, srun=srun, **SECOND_OF_TWO)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("seen-*")} == {"seen-d", "seen-e"}  # a, b and c are the first task's
    assert (tmp_path / "seen-e").read_text() == f"1 {packed[4]}/code 2\n"


@pytest.mark.parametrize(
    ("codes", "code", "requeued"),
    [
        ({}, 0, False),
        ({"a": 1}, 1, False),
        ({"a": 75, "b": 1}, 75, True),
        ({"a": 75, "b": 75, "c": 75}, 75, True),
        ({"a": 78, "c": 3}, 78, False),
    ],
)
def test_a_pack_is_requeued_once_when_one_is_to_go_on_and_fails_when_one_fails(
    packed: list[Path], tmp_path: Path, codes: dict[str, int], code: int, requeued: bool
) -> None:
    for name, its in codes.items():
        (tmp_path / f"code-{name}").write_text(str(its))
    done = run_script(pack_script(packed[:3]), tmp_path, srun=AS_NAMED, verbs=REQUEUE_75)
    assert done.returncode == code, done.stderr
    going_on = " ".join(str(packed["abc".index(name)]) for name, its in codes.items() if its == 75)
    assert again_calls(tmp_path) == ([going_on] if requeued else [])


def test_every_run_of_a_pack_has_its_hook(packed: list[Path], tmp_path: Path) -> None:
    (tmp_path / "code-b").write_text("75")
    config = Config(hooks=HooksConfig(on_finish="true"))
    verbs = f'[ "$3" = hook ] && echo "$*" >>"$here/../hooks"; {REQUEUE_75}'
    done = run_script(pack_script(packed[:3], config), tmp_path, srun=AS_NAMED, verbs=verbs)
    assert done.returncode == 75 and again_calls(tmp_path), done.stderr
    told = [f"-m slurmtrain hook {run} --attempt 1" for run in packed[:3]]
    assert sorted((tmp_path / "hooks").read_text().splitlines()) == told


def test_a_run_of_a_pack_starts_again_in_place_without_the_others(packed: list[Path], tmp_path: Path) -> None:
    """b crashes once; the others train on meanwhile."""
    srun = f"""{NAME}; echo "$name $SLURMTRAIN_ATTEMPT" >>"$here/../seen"
if [ "$name $SLURMTRAIN_ATTEMPT" = "b 1" ]; then exit 1; fi
if [ "$name" = b ]; then touch "$here/../go"; fi
until [ -e "$here/../go" ]; do sleep 0.02; done"""
    verbs = '[ "$3" != finish-attempt ] || { [ "${!#}" = 1 ] && echo in-place || echo done; }'
    done = run_script(pack_script(packed[:3]), tmp_path, srun=srun, verbs=verbs)
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "seen").read_text().splitlines()) == ["a 1", "b 1", "b 2", "c 1"]


def test_a_run_of_a_pack_that_stopped_for_good_is_not_taken_for_one_that_goes_on(
    packed: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "code-b").write_text("75")
    done = run_script(pack_script(packed[:3]), tmp_path, srun=AS_NAMED, verbs="exit 0")
    assert (done.returncode, again_calls(tmp_path)) == (1, []), done.stderr


@pytest.mark.parametrize(("word", "code"), [("done", 0), ("end", 1)])
def test_runs_of_a_pack_with_nothing_left_to_do_claim_no_attempt(
    packed: list[Path], tmp_path: Path, word: str, code: int
) -> None:
    begin = f'[ "$3" = begin-attempt ] && [ "$(basename "$4")" != b ] && echo {word}; exit 0'
    done = run_script(pack_script(packed[:3]), tmp_path, srun="exit 0", verbs=begin)
    assert done.returncode == code, done.stderr
    assert [len(list((run / "attempts").iterdir())) for run in packed[:3]] == [0, 1, 0]


def test_the_shells_of_a_pack_outlive_the_signals(packed: list[Path], tmp_path: Path) -> None:
    srun = 'trap "" TERM USR2; echo >>"$here/../started"; while [ ! -e "$here/../go" ]; do sleep 0.02; done; exit 75'
    process = start_script(
        pack_script(packed[:3]), tmp_path, srun=srun, verbs='[ "$3" = begin-attempt ] || echo requeue'
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() or len((tmp_path / "started").read_text()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shells = children(process.pid)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
        for pid in (process.pid, *shells):
            os.kill(pid, number)
        time.sleep(0.05)
    assert process.poll() is None and len(shells) == 3
    (tmp_path / "go").touch()
    assert process.wait(timeout=60) == 75
    assert again_calls(tmp_path)
    process.communicate()


def test_the_ranks_ignore_the_signals_until_python_listens(run_dir: Path, tmp_path: Path) -> None:
    # What stands behind srun's own words, run as it is, with a python that says what it inherited.
    show = "import signal, sys; print([signal.getsignal(n) == signal.SIG_IGN for n in (15, 12)], sys.argv[1:])"
    fake_python = tmp_path / "python"
    fake_python.write_text(f'#!/bin/bash\nexec {sys.executable} -c "{show}" "$@"\n')
    fake_python.chmod(0o755)
    words = srun_words(ClusterConfig(python=str(fake_python)))[-1]
    done = subprocess.run(["bash", "-c", f"run_dir=/r; {words}"], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True] ['-u', '-m', 'slurmtrain', 'train', '/r']\n"


def test_a_percent_sign_in_a_path_is_no_pattern_of_slurm() -> None:
    text = render_script(Config(), JobPaths([Path("/a/50%/%j/run")], "code", PYTHON))
    assert "#SBATCH --output=/a/50%%/%%j/run/slurm-%j.log\n" in text
    assert '--output="${attempt_dir//%/$slurmtrain_percent}/rank-%t.log"' in text and "run_dir=/a/50%/%j/run\n" in text


@pytest.mark.parametrize(
    ("version", "written"),
    [
        ("slurm-wlm 22.05.8", "/a/50%%/%%j"),
        ("slurm 25.05.9", "/a/50%%/%%j"),
        ("slurm 25.11.8-0pre1", "/a/50%%%%/%%%%j"),
    ],
)
def test_srun_gets_a_percent_sign_as_often_as_its_version_reads_it(tmp_path: Path, version: str, written: str) -> None:
    """Of 25.11 and newer, srun and the node replace %% one after the other."""
    text = render_script(Config(), JobPaths([Path("/a/50%/%j")], "code", PYTHON))
    lines = text[text.index("slurmtrain_percent=%%") : text.index("\nfi\n", text.index("slurmtrain_percent=%%")) + 4]
    show = f"ask_slurm() {{ echo '{version}'; }}\nattempt_dir=/a/50%/%j\n{lines}"
    shown = subprocess.run(
        ["bash", "-euc", show + 'echo "${attempt_dir//%/$slurmtrain_percent}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == written + "\n"


def test_what_a_container_image_sets_does_not_overrule_what_the_job_sets() -> None:
    cluster = ClusterConfig(
        container=ContainerConfig(
            kind=ContainerKind.PYXIS, image="a", args=["--container-env=MINE,PYTHONPATH", "--other"]
        ),
        env={"NCCL_DEBUG": "INFO"},
    )
    words = next(line for line in srun_of(Config(cluster=cluster, secrets={"TOKEN": "env"})) if "container-env" in line)
    names = words.split("=")[1].split(",")
    assert set(names) > {"PYTHONPATH", "OMP_NUM_THREADS", "SLURMTRAIN_RUN_DIR", "SLURMTRAIN_ATTEMPT"}
    assert set(names) > {"NCCL_DEBUG", "TOKEN", "MINE"} and len(names) == len(set(names))


def srun_of(config: Config) -> list[str]:
    script = render_script(config, PATHS)
    return [line.strip(" \\") for line in script[script.index("\n  srun ") :].splitlines()]
