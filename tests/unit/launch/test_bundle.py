"""`runs bundle` and `submit --from`: the same run elsewhere, from one tar file."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.frozen import load_frozen
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import read_code_record, write_environment
from slurmtrain.system.process_facts import ProcessFacts
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import submitted_run

FACTS = ProcessFacts(packages={"torch": "2.11.0+cu128", "numpy": "2.0"})


def git(*arguments: str, cwd: Path) -> None:
    settings = ["-c", "user.name=me", "-c", "user.email=me@here", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *settings, *arguments], cwd=cwd, capture_output=True, check=True)


@pytest.fixture
def run(project: Path) -> RunDir:
    """A run of a program in a git work tree with changes, whose one attempt has recorded what it ran with."""
    (project / "lib").mkdir()
    (project / "train.py").write_text("import lib.model\n")
    (project / "lib" / "model.py").write_text("WIDTH = 8\n")
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    (project / ".gitignore").write_text("runs\n")
    (project / "latest").symlink_to("train.py")
    (project / "data").symlink_to("/scratch/data")
    git("init", "-q", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "-qm", "first", cwd=project)
    (project / "lib" / "model.py").write_text("WIDTH = 16\n")
    words = ["cluster=a100x4", "cluster.partition=gpu", "job=command", "job.command='python train.py'", "optim.lr=0.5"]
    run = submitted_run(project, *words)
    write_environment(run.attempt(run.new_attempt()), FACTS)
    (run.code / "weights.bin").write_text("which the program has written beside its code")
    return run


@pytest.fixture
def bundle(run: RunDir, tmp_path: Path) -> Path:
    path = tmp_path / "bundle.tar"
    assert main(["runs", "bundle", run.id, str(path)]) == 0
    return path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which somebody types commands."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    return folder


def test_a_bundle_holds_config_code_packages_and_revision(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    words = ["runs", "bundle", run.id, str(tmp_path / "b.tar.gz")]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    path = Path(json.loads(captured.out)["file"])
    assert json.loads(captured.out)["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "code/data leads out of the code, so it is not in the bundle" in captured.err
    with tarfile.open(path) as tar:
        entries = {entry.name.removeprefix(f"{run.id}/"): entry for entry in tar}
        texts = {name: file.read() for name, each in entries.items() if (file := tar.extractfile(each))}
    assert {(each.uid, each.uname) for each in entries.values()} == {(0, "")}
    code = {"code/train.py", "code/lib/model.py", "code/run.sh", "code/.gitignore", "code/latest"}
    own = {name for name in entries if not name.startswith("code/slurmtrain/")}  # which an editable install adds
    assert own == {"run.json", "code.json", "config.yaml", "requirements.txt", *code}
    assert texts["code/lib/model.py"] == b"WIDTH = 16\n" and texts["config.yaml"] == run.config_file.read_bytes()
    assert json.loads(texts["run.json"])["code"]["revision"] == run.info()["code"]["revision"]
    assert texts["requirements.txt"] == b"numpy==2.0\ntorch==2.11.0+cu128\n"
    assert main(words) == 78
    assert "b.tar.gz already exists" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../private/id", "link/id", "file"])
def test_the_records_of_a_run_of_somebody_else_lead_to_no_file_of_the_reader(
    run: RunDir, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "id").write_text("mine alone")
    (run.code / "link").symlink_to(private)
    (run.code / "file").symlink_to(private / "id")
    record = json.loads(run.code_record_file.read_text())
    run.code_record_file.write_text(json.dumps({**record, "files": {name: "0" * 64}}))
    assert main(["runs", "bundle", run.id, str(tmp_path / "b.tar")]) == 0
    assert f"code/{name} leads out of the code" in capsys.readouterr().err
    assert b"mine alone" not in (tmp_path / "b.tar").read_bytes()


@pytest.mark.parametrize("target", ["x.zip", "-"])
def test_a_file_that_would_be_no_bundle_is_refused_before_the_run_is_read(
    target: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "bundle", "last", target]) == 2
    assert target in capsys.readouterr().err


def test_a_call_of_a_pickled_function_is_not_packed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = submitted_run(
        project, "cluster=a100x4", "job=command", "job.command='python -m slurmtrain.runtime.jobs.map_task'"
    )
    assert main(["runs", "bundle", run.id]) == 2
    assert "calls a pickled function" in capsys.readouterr().err


def test_a_bundle_is_submitted_from_an_empty_folder_with_its_config_its_code_and_what_is_changed(
    run: RunDir, bundle: Path, elsewhere: Path, slurm: FakeSlurm
) -> None:
    assert main(["optim.lr=0.25", "submit", "--from", str(bundle)]) == 0
    (made,) = all_runs(elsewhere / "runs")
    before, after = load_frozen(run.config_file), load_frozen(made.config_file)
    assert after.optim.lr == 0.25 and after.job.runs_dir == str(elsewhere / "runs")
    assert (after.cluster, after.model, after.job.command) == (before.cluster, before.model, before.job.command)
    info = made.info()
    assert info["job_ids"] == ["101"] and info["submit_dir"] == str(elsewhere)
    assert info["bundle"]["run"] == run.id
    assert info["bundle"]["sha256"] == hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert info["code"]["revision"] == run.info()["code"]["revision"] and info["code"]["dirty"]
    assert (made.code / "latest").readlink() == Path("train.py") and os.access(made.code / "run.sh", os.X_OK)
    first, second = (read_code_record(each.code_record_file) for each in (run, made))
    assert first is not None and second is not None
    assert second.files == first.files


def test_another_cluster_replaces_all_that_was_of_the_first_one(
    bundle: Path, elsewhere: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["+cluster=h100x8", "cluster.nodes=2", "submit", "--from", str(bundle)]
    assert main([*words, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in script and "--partition=gpu" not in script and not list(elsewhere.iterdir())
    assert main(words) == 0
    (made,) = all_runs(elsewhere / "runs")
    assert load_frozen(made.config_file).cluster.tasks_per_node == 8


@pytest.mark.parametrize(
    ("before", "behind", "said"),
    [
        (["model=llama3_8b"], [], "single fields can be set"),
        (["optim.lrr=1"], [], "optim has no field 'lrr'"),
        (["-m", "optim.lr=1,2"], [], "--from submits one run"),
        ([], ["--config-name", "x"], "--from contains a whole config"),
        ([], ["--dry-run", "--", "python", "x.py"], "a bundle has its own program, so --from takes none after --"),
    ],
)
def test_what_a_bundle_decides_is_not_typed_beside_it(
    before: list[str], behind: list[str], said: str, bundle: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*before, "submit", "--from", str(bundle), *behind]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_ran_in_place_is_packed_without_code_and_takes_that_of_the_folder(
    project: Path, tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted_run(project, "cluster=a100x4", "experiment=smoke")
    assert main(["runs", "bundle", run.id, str(tmp_path / "b.tar.gz")]) == 0
    assert "its code is not in the bundle" in capsys.readouterr().err
    assert main(["job.runs_dir=other", "submit", "--from", str(tmp_path / "b.tar.gz")]) == 0
    (made,) = all_runs(project / "other")
    assert made.info()["workdir"] == str(project)


def test_a_torn_bundle_is_one_sentence_wherever_that_is(
    bundle: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, torn = gzip.compress(bundle.read_bytes()), elsewhere / "torn.tar.gz"
    for length in [0, 10, len(whole) // 3]:
        torn.write_bytes(whole[:length])
        assert main(["submit", "--from", str(torn)]) == 78, length
        assert "torn.tar.gz is incomplete, or not a bundle" in capsys.readouterr().err
    assert main(["submit", "--from", "gone.tar"]) == 2
    assert "gone.tar cannot be read: there is no such file" in capsys.readouterr().err
    assert os.listdir(elsewhere) == ["torn.tar.gz"]


@pytest.mark.parametrize(
    "facts", [{"name": "../../escape.py"}, {"name": "RUN/code/link", "type": tarfile.SYMTYPE, "linkname": "/etc"}]
)
def test_a_file_that_would_leave_the_bundles_folder_is_refused(
    facts: dict[str, str], run: RunDir, bundle: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = tarfile.TarInfo()
    for key, value in facts.items():
        setattr(entry, key, value.replace("RUN", run.id) if isinstance(value, str) else value)
    with tarfile.open(bundle, "a") as tar:
        tar.addfile(entry, io.BytesIO())
    assert main(["submit", "--from", str(bundle)]) == 78
    assert "bundle.tar is incomplete, or not a bundle" in capsys.readouterr().err
    assert os.listdir(elsewhere) == [] and not list(elsewhere.parent.rglob("escape.py"))
