"""`submit --from RUN`: another run with its config and code, here or elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.frozen import load_frozen
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import read_code_record
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import printed, refused, submitted_run
from tests.unit.launch.test_snapshot import git


@pytest.fixture
def run(project: Path) -> RunDir:
    """A run of a program in a git work tree with changes."""
    (project / "lib").mkdir()
    (project / "train.py").write_text("import lib.model\n")
    (project / "lib" / "model.py").write_text("WIDTH = 8\n")
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    (project / ".gitignore").write_text("runs\n")
    (project / "latest").symlink_to("train.py")
    git("init", "-q", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "-qm", "first", cwd=project)
    (project / "lib" / "model.py").write_text("WIDTH = 16\n")
    words = ["cluster=a100x4", "cluster.partition=gpu", "job=command", "job.command='python train.py'", "optim.lr=0.5"]
    run = submitted_run(project, *words)
    (run.code / "weights.bin").write_text("which the program has written beside its code")
    return run


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which somebody types commands."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    return folder


@pytest.fixture
def unpacked(run: RunDir, elsewhere: Path) -> Path:
    """What `tar` brings to another machine of a run, as the manual shows it."""
    pack = ["tar", "-czhf", str(elsewhere / "run.tgz"), "--exclude=checkpoints", "-C", str(run.path.parent), run.id]
    subprocess.run(pack, check=True)
    folder = elsewhere.parent / "unpacked"
    folder.mkdir()
    subprocess.run(["tar", "-xzf", str(elsewhere / "run.tgz"), "-C", str(folder)], check=True)
    (elsewhere / "run.tgz").unlink()
    return folder / run.id


def test_a_run_is_submitted_from_an_empty_folder_with_its_config_its_code_and_what_is_changed(
    run: RunDir, unpacked: Path, elsewhere: Path, slurm: FakeSlurm
) -> None:
    assert main(["optim.lr=0.25", "submit", "--from", str(unpacked)]) == 0
    (made,) = all_runs(elsewhere / "runs")
    before, after = load_frozen(run.config_file), load_frozen(made.config_file)
    assert after.optim.lr == 0.25 and after.job.runs_dir == str(elsewhere / "runs")
    assert (after.cluster, after.model, after.job.command) == (before.cluster, before.model, before.job.command)
    info = made.info()
    assert info["job_ids"] == ["101"] and info["submit_dir"] == str(elsewhere)
    assert info["code"]["from"] == str(unpacked / "code")
    assert info["code"]["revision"] == run.info()["code"]["revision"] and info["code"]["dirty"]
    assert os.access(made.code / "run.sh", os.X_OK) and not (made.code / "weights.bin").exists()
    first, second = (read_code_record(each.code_record_file) for each in (run, made))
    assert first is not None and second is not None
    assert {**second.files, "latest": ""} == {**first.files, "latest": ""}


def test_another_cluster_replaces_all_that_was_of_the_first_one(
    run: RunDir, elsewhere: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    words = ["+cluster=h100x8", "cluster.nodes=2", "submit", "--from", str(run.path)]
    script = printed(*words, "--dry-run")
    assert "#SBATCH --nodes=2" in script and "--partition=gpu" not in script and not list(elsewhere.iterdir())
    assert main(words) == 0
    (made,) = all_runs(elsewhere / "runs")
    assert load_frozen(made.config_file).cluster.tasks_per_node == 8


@pytest.mark.parametrize(
    ("before", "behind", "said"),
    [
        (["model=llama3_8b"], [], "single fields can be set"),
        (["optim.lrr=1"], [], "optim has no field 'lrr'"),
        ([], ["--dry-run", "--", "python", "x.py"], "--from takes the program of the run"),
    ],
)
def test_what_a_run_decides_is_not_typed_beside_it(
    before: list[str], behind: list[str], said: str, run: RunDir, elsewhere: Path
) -> None:
    assert said in refused(*before, "submit", "--from", str(run.path), *behind)


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("../../escape.py", 78, "names ../../escape.py, which is not in it"),
        ("", 2, "calls a function of slurmtrain.map"),
    ],
)
def test_what_would_leave_the_new_run_and_calls_of_a_map_are_refused(
    name: str, code: int, said: str, run: RunDir, elsewhere: Path, slurm: FakeSlurm
) -> None:
    record = json.loads(run.code_record_file.read_text())
    run.code_record_file.write_text(json.dumps({**record, "files": {name or "train.py": "0" * 64}}))
    if not name:
        text = run.config_file.read_text()
        run.config_file.write_text(text.replace("python train.py", "python -m slurmtrain.rank.jobs.map_task"))
    assert said in refused("submit", "--from", str(run.path), code=code)
    assert not list(elsewhere.rglob("escape.py")) and all_runs(elsewhere / "runs") == []
