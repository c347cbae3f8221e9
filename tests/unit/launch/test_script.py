"""The script that sbatch gets: its goldens, its options, and that every way to it gives the same.

What it does when it runs is in test_job.py.

python -m pytest tests/unit/launch/test_script.py --update-goldens    writes jobs/golden anew; read the diff
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.folders import shipped
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import printed, refused

GOLDENS = shipped("jobs") / "golden"
EVERYTHING = r"""
    +cluster=a100x8  cluster.nodes=4  cluster.partition=gpu  cluster.account='my project'  cluster.qos=high
    cluster.constraint='[rack1|rack2]'  cluster.reservation=friday  cluster.exclude='node[03-04]'
    cluster.mem_per_node_gb=null  cluster.mem_per_gpu_gb=100  cluster.exclusive=false
    +cluster.sbatch.comment='it is "mine"'  +cluster.sbatch.mail-type=[END,FAIL]  +cluster.sbatch.no-kill=true
    +cluster.sbatch.nice=3  cluster.modules=[cuda/12.8,nccl]
    cluster.setup=['ulimit -l unlimited','export SCRATCH=\${TMPDIR:-/tmp}']
    cluster.conda_env=/home/me/envs/torch  +cluster.env.NCCL_DEBUG=INFO  +cluster.env.GREETING='two words'
    cluster.container.kind=pyxis  cluster.container.image='nvcr.io#nvidia/pytorch:26.01'
    cluster.container.mounts=[/data:/data:ro]  cluster.container.args=[--no-container-mount-home]
    cluster.srun_args=['--mpi=pmix']  train.global_batch_size=32  requeue.restart_delay_s=20
    hooks.on_failure='mail -s "$SLURMTRAIN_SENTENCE" me'
"""
ALL = [word for line in EVERYTHING.split("\n") for word in line.strip().split("  ") if word.strip()]
GOLDEN_WORDS = {
    "sandbox": ["+cluster=sandbox"],
    "everything": ALL,
    "pack": ["-m", "+cluster=a100x4", "train.seed=1,2,3,4,5", "sweep.pack=3"],
}
ODD = """it's "odd" $(touch x) `touch x` $HOME a;b&c|d>e \\ * !x #c é"""
Out = pytest.CaptureFixture[str]


def quoted(value: str) -> str:
    """A value as an override has it."""
    return '"' + value.replace('"', '\\"') + '"'


def rendered(capsys: Out, *words: str) -> str:
    assert main([*words, "render"]) == 0
    return capsys.readouterr().out


def srun_words(capsys: Out, *words: str) -> list[str]:
    """The words by which the ranks are started, as `render --explain` shows them."""
    assert main([*words, "render", "--explain", "--json"]) == 0
    lines = [line["line"] for line in json.loads(capsys.readouterr().out)]
    return shlex.split(" ".join(lines[lines.index("srun") :]))


@pytest.mark.parametrize("name", GOLDEN_WORDS)
def test_the_script_is_the_golden_one_and_bash_can_read_it(
    name: str, project: Path, slurm: FakeSlurm, capsys: Out, request: pytest.FixtureRequest
) -> None:
    words = [*GOLDEN_WORDS[name], "job.snapshot=cwd"]
    if name == "pack":
        assert main([*words, "submit", "--array-parallelism", "3"]) == 0
        script = slurm.submitted[0]
    else:
        script = rendered(capsys, *words)
    script = script.replace(str(project), "/home/me/project").replace(sys.executable, "/home/me/venv/bin/python")
    script = re.sub(r"\d{8}-\d{6}-[0-9a-f]{5}", "RUN_ID", script)
    script = re.sub(r"\bsweep-[0-9a-f]{8}\b", "sweep-POINTS", script)  # a hash of all fields of the config
    golden = GOLDENS / f"{name}.sbatch"
    if request.config.getoption("--update-goldens"):
        golden.write_text(script)
    assert script == golden.read_text()
    assert {path.stem for path in GOLDENS.glob("*.sbatch")} == {*GOLDEN_WORDS}
    checked = subprocess.run(["bash", "-n", golden], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    # sbatch stops reading #SBATCH lines at the first line that is neither empty nor a comment.
    lines = script.splitlines()
    last = max(index for index, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])


OPTIONS: dict[str, tuple[list[str], dict[str, str | None]]] = {
    # sbatch counts the tasks of the least nodes, so a node has one task with all of the CPUs.
    "elastic": (
        ["+cluster=a100x4", "cluster.nodes=2-4", "train.global_batch_size=64", "cluster.cpus_per_task=6"],
        {"nodes": "2-4", "ntasks-per-node": None, "cpus-per-task": "24", "no-kill": ""},
    ),
    "alone": (
        [
            *("+cluster=a100x4", "requeue=off", "cluster.gpus_per_node=0", "cluster.gpu_type=null"),
            *("cluster.gpu_memory_gb=null", "cluster.signal_lead_s=0", "job.singleton=true"),
            "cluster.partition='gpu,gpu-long'",
            "+cluster.sbatch.dependency='afterok:7'",
        ],
        dict.fromkeys(("requeue", "gpus-per-node", "signal", "no-kill"))
        | {"no-requeue": "", "partition": "gpu,gpu-long", "dependency": "afterok:7,singleton"},
    ),
    "odd values": (
        [
            *("+cluster=a100x4", "+cluster.sbatch.wckey=a"),
            *(f"cluster.{field}={quoted(ODD)}" for field in ("partition", "account", "qos")),
        ],
        {"partition": ODD, "account": ODD, "qos": ODD, "wckey": "a"},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_sbatch_gets_what_the_config_says(name: str, project: Path, slurm: FakeSlurm) -> None:
    words, wanted = OPTIONS[name]
    assert main([*words, "cluster.node_paths=[/home/me]", "submit"]) == 0
    options = slurm.jobs[0]["options"]
    assert {option: options.get(option) for option in wanted} == wanted
    (run,) = project.glob("runs/train/*")
    assert (options["chdir"], options["output"]) == (str(project), f"{run}/slurm-%j.log")
    assert options["comment"] == f"slurmtrain:{run.name}:s0"


@pytest.mark.parametrize(
    ("words", "there", "absent"),
    [
        (
            ["cluster.cpus_per_task=7", "cluster.srun_wait_s=33"],
            # srun does not inherit the CPUs; ranks fill the sockets of a node in the order of its GPUs
            ["--cpus-per-task=7", "--kill-on-bad-exit=1", "--wait=33", "--distribution=block:block", sys.executable],
            [],
        ),
        ([], ["--mem=0"], []),
        (["cluster.gpus_per_node=0", "cluster.gpu_type=null", "cluster.gpu_memory_gb=null"], [], ["--distribution"]),
        (["cluster.srun_args=['--distribution=cyclic']"], ["--distribution=cyclic"], []),
        (["cluster.venv=/v"], ["python"], [sys.executable]),
        (["cluster.venv=/v", "cluster.python='/opt/my python'"], ["/opt/my python"], [sys.executable]),
        (
            [
                *("cluster.container.kind=pyxis", f"cluster.container.image={quoted(ODD)}"),
                f"cluster.container.args=[{quoted('--a=' + ODD)}]",
                f"cluster.srun_args=[{quoted('--b=' + ODD)}]",
                "cluster.container.mounts=[/data:/data:ro]",
            ],
            [f"--container-image={ODD}", f"--a={ODD}", f"--b={ODD}", "python"],
            [sys.executable],
        ),
        (
            ["cluster.container={kind: apptainer, image: /images/torch.sif, args: [--nv], mounts: ['/data:/data:ro']}"],
            ["apptainer", "exec", "--nv", "/data:/data:ro", "/images/torch.sif", "python"],
            [],
        ),
    ],
)
def test_srun_gets_what_the_config_says(
    words: list[str], there: list[str], absent: list[str], project: Path, capsys: Out
) -> None:
    found = srun_words(capsys, "+cluster=a100x4", *words)
    assert {*there} <= {*found}
    assert not [word for word in found for prefix in absent if word.startswith(prefix)]
    if "--distribution=cyclic" in there:  # the last one counts
        assert found.index("--distribution=block:block") < found.index("--distribution=cyclic")
    if "--nv" not in there and any("container" in word for word in words):
        (mounts,) = [word for word in found if word.startswith("--container-mounts=")]
        run_dir = mounts.partition("=")[2].partition(":")[0]
        assert run_dir.startswith(f"{project}/runs/")
        assert mounts.startswith(f"--container-mounts={run_dir}:{run_dir},/data:/data:ro")


def test_what_a_container_image_sets_does_not_overrule_what_the_job_sets(
    project: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "a-secret-token")
    words = ["cluster.container.kind=pyxis", "cluster.container.image=a", "+cluster.env.NCCL_DEBUG=INFO"]
    words += ["+secrets.TOKEN=env", "cluster.container.args=['--container-env=MINE,PYTHONPATH','--other']"]
    found = srun_words(capsys, "+cluster=a100x4", *words)
    (names,) = [word.split("=")[1].split(",") for word in found if word.startswith("--container-env=")]
    assert {"PYTHONPATH", "OMP_NUM_THREADS", "SLURMTRAIN_RUN_DIR", "SLURMTRAIN_ATTEMPT"} < {*names}
    assert {"NCCL_DEBUG", "TOKEN", "MINE"} < {*names} and len(names) == len({*names})


# Why each line is there.


def test_every_line_that_does_something_knows_why_it_is_there(project: Path, slurm: FakeSlurm, capsys: Out) -> None:
    words = [*ALL, f"+secrets.TOKEN='file:{project}/token'"]
    (project / "token").touch(0o600)
    (project / "token").write_text("a-secret-token")
    script = rendered(capsys, *words)
    assert main([*words, "render", "--explain", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    of_script = script.splitlines()
    assert [line["line"] for line in lines][: len(of_script)] == of_script
    prose = ("# ", "#!")
    does = [line for line in lines if line["line"].strip() and not line["line"].lstrip().startswith(prose)]
    assert [line["line"] for line in does if not line["why"].strip()] == []
    assert [line["line"] for line in lines if line["line"].lstrip().startswith("# ") and line["why"]] == []

    def why(begin: str) -> str:
        return next(str(line["why"]) for line in lines if line["line"].strip().lstrip("'").startswith(begin))

    for begin, field in {
        "#SBATCH --partition": "cluster.partition",
        "#SBATCH --comment": "cluster.sbatch.comment",
        "module load": "cluster.modules",
        "export NCCL_DEBUG": "cluster.env.NCCL_DEBUG",
        "--mpi=pmix": "cluster.srun_args",
    }.items():
        assert field in why(begin), begin


# One source: render, --dry-run and submit.


@pytest.mark.parametrize("where", ["outside of git", "in a folder of a git work tree"])
def test_dry_run_render_and_submit_give_the_same_text(
    where: str, project: Path, slurm: FakeSlurm, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project
    if where.startswith("in a folder"):
        subprocess.run(["git", "init", "-q"], check=True)
        folder = project / "sub"
        folder.mkdir()
        monkeypatch.chdir(folder)
    words = ["+cluster=a100x4", "+cluster.env.A='it is'", "cluster.nodes=2"]
    shown = printed(*words, "submit", "--dry-run")
    assert not (folder / "runs").exists() and slurm.jobs == []
    assert rendered(capsys, *words) == shown
    assert main([*words, "submit"]) == 0
    submitted = next(folder.glob("runs/train/*"))
    assert main([*words, "render", "-o", "job.sbatch"]) == 0
    of_script = next(path for path in folder.glob("runs/train/*") if path != submitted)

    def with_placeholder(text: str, run_dir: Path) -> str:
        return text.replace(str(run_dir), str(run_dir.with_name("RUN_ID")))

    assert with_placeholder(slurm.submitted[0], submitted) == shown
    assert with_placeholder((folder / "job.sbatch").read_text(), of_script) == shown
    assert (submitted / "job.sbatch").read_text() == slurm.submitted[0]


# What is said by the shell that submits.


def test_submitting_inside_a_job_hides_that_job_but_keeps_slurm_conf(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_MEM_PER_NODE": "1",
        "PMI_RANK": "3",
    }
    inherited |= {"SUBMITIT_EXECUTOR": "slurm", "SLURMTRAIN_RUN_DIR": "/other/run", "SLURMTRAIN_ATTEMPT": "4"}
    # On clusters without configuration files on their nodes, slurmd sets SLURM_CONF to a copy that exists there alone.
    copy = project.parent / "spool" / "conf-cache" / "slurm.conf"
    copy.parent.mkdir(parents=True)
    copy.touch()
    kept = {"SLURM_CONF": str(copy), "SLURMTRAIN_RUNS": "runs", "MY_OWN": "a b"}
    for name, value in (inherited | kept).items():
        monkeypatch.setenv(name, value)
    assert main(["+cluster=a100x4", "submit"]) == 0
    assert inherited.keys().isdisjoint(slurm.environment)
    assert kept.items() <= slurm.environment.items()
    (run,) = project.glob("runs/train/*")
    assert json.loads((run / "run.json").read_text())["slurm_conf"] is None
    monkeypatch.delenv("SLURM_CONF")  # on the login node
    assert "waiting" in printed("status", run.name)


SET_BY_THE_SHELL = {"SBATCH_TIMELIMIT": "1", "SBATCH_NO_REQUEUE": "1", "SBATCH_ARRAY_INX": "0-9", "SBATCH_WAIT": "1"}
SET_BY_THE_SHELL |= {"SBATCH_OUTPUT": "/x", "SBATCH_GPUS_PER_TASK": "1", "SBATCH_GRES": "gpu:1"}
SET_BY_THE_SHELL |= {"SBATCH_MEM_PER_CPU": "1G"}
LEFT_TO_THE_SHELL = {"SBATCH_ACCOUNT": "mine", "SBATCH_QOS": "high", "SBATCH_EXPORT": "ALL", "SBATCH_CLUSTERS": "b"}


def test_variables_of_sbatch_do_not_beat_the_config_and_give_what_it_leaves_open(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    for name, value in (SET_BY_THE_SHELL | LEFT_TO_THE_SHELL).items():
        monkeypatch.setenv(name, value)
    words = ["+cluster=a100x4", "cluster.account=null", "cluster.qos=null", "cluster.mem_per_node_gb=10"]
    assert main([*words, "cluster.partition=long", "submit"]) == 0
    assert SET_BY_THE_SHELL.keys().isdisjoint(slurm.environment)
    assert LEFT_TO_THE_SHELL.items() <= slurm.environment.items()
    said = capsys.readouterr().err
    assert all(name in said for name in SET_BY_THE_SHELL) and not any(name in said for name in LEFT_TO_THE_SHELL)
    monkeypatch.setenv("SBATCH_PARTITION", "long")  # says the same
    said = refused(*words, "cluster.partition=long", "cluster.account=theirs", "submit", code=0)
    assert "SBATCH_PARTITION" not in said and "SBATCH_ACCOUNT=mine" in said
