"""Copies on the nodes (cluster.stage): a node has whole copies that its ranks use, or none and a sentence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.validate import validate
from slurmtrain.errors import ConfigError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.staging import archive_of
from slurmtrain.system.node_copies import shared_interpreter, with_copies, without_copies
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import submitted_run


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment, with an interpreter that answers only which one it is of."""
    prefix = tmp_path / "environment"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib" / "__pycache__").mkdir(parents=True)
    (prefix / "pyvenv.cfg").touch()
    (prefix / "lib" / "package.py").write_text("x = 1")
    (prefix / "bin" / "python").write_text(f"#!/bin/sh\necho {prefix}; echo {prefix}/bin/python\n")
    (prefix / "bin" / "python").chmod(0o755)
    (prefix / "bin" / "python3").symlink_to(prefix / "bin" / "python")
    (prefix / "bin" / "tool").write_text(f"#!{prefix}/bin/python\nprint()\n")
    (prefix / "lib" / "outside").symlink_to("../../shared")
    return prefix


@pytest.fixture
def run(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    (project / "train.py").write_text("print()")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "tokens").write_text("some words")
    words = ["cluster=a100x4", "job=command", "job.command='python train.py'", "job.snapshot=cwd"]
    return submitted_run(project, *words, "cluster.stage.code=true", f"cluster.stage.data=['{tmp_path}/shared/tokens']")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of a job on its nodes."""
    (tmp_path / "local").mkdir()
    return tmp_path / "local" / "slurmtrain-stage-1" / "c-7-1"


def packed(run: RunDir, prefix: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    return archive_of(str(prefix / "bin" / "python"), run.environments)


def copy(run: RunDir, job: Path, *more: str) -> int:
    return main(["supervise", str(run.path), "--stage-to", str(job), *more])


def test_ranks_use_the_copies_of_their_node(
    run: RunDir, prefix: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, python = packed(run, prefix, capsys), str(prefix / "bin" / "python")
    assert copy(run, job, "--archive", str(archive), "--python", python) == 0
    names = "PYTHONPATH SLURMTRAIN_CODE SLURMTRAIN_DATA SLURMTRAIN_PYTHON VIRTUAL_ENV PATH SLURMTRAIN_SHARED_PATH"
    asks = "; ".join(f'echo "${name}"' for name in names.split())
    words = ["bash", "-c", f'. "{job}/n0/use"; {asks}']
    variables = {"PYTHONPATH": "/shared", "PATH": "/usr/bin:/bin"}
    lines = subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout.splitlines()
    own = job / "n0"
    assert lines == [
        f"{own}/code:/shared",
        f"{own}/code",
        f"{own}/data",
        f"{own}/environment/bin/python",
        f"{own}/environment",
        f"{own}/environment/bin:/usr/bin:/bin",
        "/usr/bin:/bin",
    ]
    assert (own / "code" / "train.py").read_text() == "print()" and (
        own / "data" / "tokens"
    ).read_text() == "some words"
    environment = own / "environment"
    assert (environment / "bin" / "tool").read_text() == f"#!{environment}/bin/python\nprint()\n"
    assert (environment / "bin" / "python3").readlink() == Path("python")
    assert (environment / "lib" / "outside").readlink() == prefix.parent / "shared"


PROGRAM = """
echo "$SLURMTRAIN_ATTEMPT $SLURMD_NODENAME ${SLURMTRAIN_CODE#FOLDER/} $(cat "$SLURMTRAIN_DATA/tokens")" >>FOLDER/seen
[ "$SLURMTRAIN_ATTEMPT" = 2 ]
"""


def test_a_job_copies_once_for_all_starts_of_its_ranks_and_a_node_that_cannot_uses_the_shared_folders(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm.install(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{slurm.directory}:{os.environ['PATH']}")
    (project / "p.sh").write_text(PROGRAM.replace("FOLDER", str(tmp_path)))
    (tmp_path / "tokens").write_text("some words")
    job = tmp_path / "local" / f"slurmtrain-stage-{os.getuid()}" / "fake-101-0"
    job.mkdir(mode=0o755, parents=True)
    (job / "n2").touch()  # no folder can be made there
    words = [
        *("+cluster=a100x4", "cluster.nodes=2", "cluster.tasks_per_node=1", "cluster.gpus_per_node=0"),
        *("cluster.gpu_type=null", "cluster.gpu_memory_gb=null", "cluster.network_interface=lo"),
        *("job=command", "job.command='bash p.sh'", "job.snapshot=cwd", "cluster.stage.code=true"),
        *(f"cluster.stage.dir={tmp_path}/local", f"cluster.stage.data=['{tmp_path}/tokens']"),
    ]
    assert main([*words, "submit"]) == 0
    done = slurm.run("101", timeout_s=240)
    assert done.returncode == 0, done.stdout
    (run,) = (path.parent for path in project.glob("runs/*/*/run.json"))
    codes = {"n1": (job / "n1" / "code").relative_to(tmp_path), "n2": (run / "code").relative_to(tmp_path)}
    seen = (tmp_path / "seen").read_text().splitlines()
    assert sorted(seen) == [f"{attempt} {node} {codes[node]} some words" for attempt in (1, 2) for node in codes]
    assert sum(" --copy " in call for call in slurm.calls("srun")) == 1
    assert "n2 uses the shared folders instead of copies (cluster.stage): " in done.stdout
    assert "n1 uses the shared folders" not in done.stdout
    assert not job.exists()  # the copies end with the job


def damage(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes().replace(b"x = 1", b"x = 2"))


def open_to_all(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)


FAILS: dict[str, tuple[Callable[[RunDir, Path, Path], object], str]] = {
    "the code differs": (lambda run, job, archive: (run.code / "train.py").write_text("other"), "train.py of the code"),
    "the tar is damaged": (lambda run, job, archive: damage(archive), "is damaged"),
    "data are gone": (
        lambda run, job, archive: (job.parents[2] / "shared" / "tokens").unlink(),
        "tokens: No such file or directory",
    ),
    "others can write there": (
        lambda run, job, archive: open_to_all(job.parent),
        "is not a folder that only its owner",
    ),
    "others can replace it": (
        lambda run, job, archive: open_to_all(job.parents[1]),
        "which has no sticky bit",
    ),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_node_on_which_anything_fails_says_so_and_has_no_copies(
    case: str, run: RunDir, prefix: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = packed(run, prefix, capsys)
    happens, why = FAILS[case]
    happens(run, job, archive)
    assert copy(run, job, "--archive", str(archive), "--python", str(prefix / "bin" / "python")) == 1
    said = capsys.readouterr().err
    assert said.count("n0 uses the shared folders instead of copies (cluster.stage): ") == 1 and why in said
    assert not (job / "n0").exists()  # what nobody uses takes no room


def test_an_environment_is_packed_once_and_again_when_it_has_changed(
    run: RunDir, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = packed(run, prefix, capsys)
    (prefix / "lib" / "__pycache__" / "package.pyc").write_text("compiled")  # which each import may add to
    assert packed(run, prefix, capsys) == first
    (prefix / "lib" / "package.py").write_text("x = 22")
    second = packed(run, prefix, capsys)
    os.utime(first, (0, 0))  # no job has used it for a long time
    (prefix / "lib" / "package.py").write_text("x = 333")
    third = packed(run, prefix, capsys)
    assert sorted(os.listdir(first.parent)) == sorted([second.name, third.name])


@pytest.mark.parametrize(
    ("python", "why"), [("/no/such/python", "cannot be asked"), ("elsewhere", "no virtual or conda environment")]
)
def test_what_cannot_be_packed_is_said(
    python: str, why: str, run: RunDir, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (prefix / "pyvenv.cfg").unlink()
    python = python.replace("elsewhere", str(prefix / "bin" / "python"))
    assert main(["stage", str(run.path), "--pack", "--python", python]) == 1
    said = capsys.readouterr().err
    assert "all nodes use the shared folders instead of copies" in said and why in said


def test_what_ended_jobs_and_earlier_starts_left_is_removed_and_nothing_else(run: RunDir, job: Path) -> None:
    kept = ("c-8-0", "other-9-0", "notes", "c-10-0")
    for name in (*kept, "c-7-0", "c-9-0"):
        (job.parent / name).mkdir(parents=True)
        os.utime(job.parent / name, (0, 0))
    os.utime(job.parent / "c-10-0")  # it has started since SLURM was asked
    assert copy(run, job) == 0  # SLURM has not answered
    assert {path.name for path in job.parent.iterdir()} == {*kept, "c-9-0", "c-7-1"}
    assert copy(run, job.with_name("c-7-2"), "--live", "7\n8") == 0
    assert {path.name for path in job.parent.iterdir()} == {*kept, "c-7-2"}


def test_a_data_source_reads_the_copies_and_the_checkpoint_is_bound_to_the_names_in_the_config() -> None:
    copies = {"SLURMTRAIN_COPIES": '{"/shared/tokens": "/local/data/tokens"}'}
    values = {"_target_": "a.B", "path": "/shared/tokens", "paths": ["/shared/tokens/x.bin", "/shared/tokens2"], "n": 1}
    found = {"path": "/local/data/tokens", "paths": ["/local/data/tokens/x.bin", "/shared/tokens2"]}
    assert with_copies(values, copies) == {**values, **found}
    assert with_copies(values, {}) is values


def test_what_a_rank_submits_names_no_folder_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/local/environment/bin/python")
    staged = {
        "PATH": "/local/environment/bin:/bin",
        "PYTHONSAFEPATH": "1",
        "SLURMTRAIN_SHARED_PATH": "/bin",
        "SLURMTRAIN_SHARED_PYTHONSAFEPATH": "",
        "SLURMTRAIN_PYTHON": "/local/environment/bin/python",
        "SLURMTRAIN_SHARED_PYTHON": "/shared/bin/python",
        "SLURMTRAIN_STAGE": "/local",
        "HOME": "/home/me",
    }
    assert shared_interpreter(staged) == "/shared/bin/python"
    assert shared_interpreter({}) == "/local/environment/bin/python"
    assert without_copies(staged) == {"PATH": "/bin", "HOME": "/home/me"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.stage.dir=scratch"], "is not a folder on a node"),
        (["cluster.stage.dir='/tmp/$(id)'"], "is not a folder on a node"),
        (["cluster.stage.data=[/a/x,/b/x]"], "x is a second of that name"),
        (["cluster=local", "cluster.stage.code=true"], "has only this machine"),
        (
            ["cluster.container.kind=apptainer", "cluster.container.image=/a.sif", "cluster.stage.code=true"],
            "would not see the copies",
        ),
        (["sweep.pack=2", "cluster.stage.environment=true"], "make its own copies"),
        (["job.snapshot=none", "cluster.stage.code=true"], "there is no snapshot to copy"),
        (["cluster.stage.limit_min=0"], r"cluster.stage.limit_min=0 must be at least 1"),
    ],
)
def test_what_cannot_be_copied_is_refused_before_the_queue(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(compose(["cluster=a100x4", *words] if "cluster=local" not in words else words))


def test_relative_data_is_that_of_the_folder_of_the_command() -> None:
    config = with_absolute_paths(compose(["cluster=a100x4", "cluster.stage.data=[tokens/]"]), Path("/home/me"))
    assert config.cluster.stage.data == ["/home/me/tokens"]


def test_the_ranks_of_a_job_run_in_the_copy_of_their_node_which_goes_with_the_job(
    project: Path, slurm: FakeSlurm, tmp_path: Path
) -> None:
    (project / "p.sh").write_text('[ "$SLURMTRAIN_ATTEMPT" = 2 ] || exit 1\necho $PYTHONPATH >here')
    words = [
        "cluster.tasks_per_node=1",
        "cluster.gpus_per_node=0",
        "cluster.gpu_type=null",
        "cluster.gpu_memory_gb=null",
    ]
    words += ["cluster.network_interface=lo", "job=command", "job.command='bash p.sh'", "job.snapshot=cwd"]
    words += ["cluster.stage.code=true", "requeue.in_place=true"]
    assert main(["+cluster=a100x4", *words, "submit"]) == 0
    local = tmp_path / "node's own"
    local.mkdir()
    done = slurm.run("101", TMPDIR=str(local))
    assert (done.returncode, slurm.job("101")["state"]) == (0, "COMPLETED"), done.stdout
    (found,) = project.glob("runs/*/*/code/here")
    assert found.read_text().startswith(f"{local}/slurmtrain-stage-{os.getuid()}/fake-101-0/")
    assert [path for path in local.rglob("*") if path.is_file()] == []
