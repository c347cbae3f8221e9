"""--host: what is typed on a laptop happens on the login node, over the person's own ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.folders import PACKAGE
from slurmtrain.config.frozen import load_frozen
from slurmtrain.runs.run_dir import RunDir
from tests.support.commands import refusal
from tests.support.fake_slurm import FakeSlurm

LOGIN = ["--host", "me@login", "--host-python", sys.executable]


@pytest.fixture
def login(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory on a login node, which is this machine: `ssh` begins a shell there, as sshd does."""
    home = tmp_path / "login home"
    home.mkdir()
    (home / ".bash_profile").write_text(f"export PATH='{slurm.directory}':\"$PATH\" PYTHONPATH='{PACKAGE.parent}'\n")
    slurm.command(
        "ssh",
        'while [ "$1" != -- ]; do shift; done\n'
        'echo "$2" >>"$here/hosts"; shift 2\n'
        f"cd '{home}' && exec env -i HOME='{home}' PATH=/usr/bin:/bin USER=me bash -c \"$*\"",
    )
    laptop = tmp_path / "laptop"
    laptop.mkdir()
    subprocess.run(["git", "init", "-q", str(laptop)], check=True)
    for name, text in {"a.py": "a", "below/train me.py": "b", "big.ckpt": "c", ".gitignore": "*.ckpt\n"}.items():
        (laptop / name).parent.mkdir(exist_ok=True)
        (laptop / name).write_text(text)
    monkeypatch.chdir(laptop / "below")
    return home


def runs_of(home: Path) -> list[RunDir]:
    return [RunDir(path) for path in sorted((home / "slurmtrain-work/laptop/runs").glob("*/2*"))]


def test_submit_sends_the_work_tree_and_the_run_is_made_there(login: Path, slurm: FakeSlurm) -> None:
    program = ["python", "train me.py", "--name", "it's $HOME", '"q"', "--host", "x"]
    assert main(["cluster=a100x4", "submit", *LOGIN, "--", *program]) == 0  # the machine may stand anywhere before --
    (run,) = runs_of(login)
    sent = sorted(str(path.relative_to(run.code)) for path in run.code.rglob("*") if path.is_file())
    assert [name for name in sent if not name.startswith("slurmtrain/")] == [".gitignore", "a.py", "below/train me.py"]
    assert run.info()["workdir"] == "code/below" and slurm.submitted == [run.script.read_text()]
    command = load_frozen(run.config_file, with_secrets=False).job.command
    assert command == "python 'train me.py' --name 'it'\"'\"'s $HOME' '\"q\"' --host x"
    assert not Path("runs").exists() and (slurm.directory / "hosts").read_text() == "me@login\n"
    Path("../a.py").write_text("edited after submit")
    assert (run.code / "a.py").read_text() == "a"


def test_verbs_work_from_the_laptop_and_their_exit_codes_are_those_of_there(
    login: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there = ["--host", f"me@login:{login}/my work", *LOGIN[2:]]  # a folder of one's own choice
    assert main([*there, "status"]) == 2
    assert "there are no runs under" in capfd.readouterr().err
    assert main([*there, "cluster=a100x4", "submit"]) == 0
    assert main([*there, "status", "last"]) == 0
    (path,) = (login / "my work" / "runs").glob("*/2*")
    assert f"run {path.name} (train)" in capfd.readouterr().out and not (login / "slurmtrain-work").exists()
    assert main([*there, "status", "no-such-run"]) == 2


def test_where_the_connection_breaks_while_the_code_is_sent_nothing_is_submitted(
    login: Path, slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("noise").write_bytes(os.urandom(1 << 20))  # so that what arrives is no whole archive
    whole = (slurm.directory / "ssh").read_text()
    slurm.command("ssh", whole.partition("\n")[2].replace("exec env", "head -c 100000 | env"))
    assert main([*LOGIN, "cluster=a100x4", "submit"]) != 0
    assert "the code could not be unpacked" in capfd.readouterr().err
    assert runs_of(login) == [] and slurm.submitted == []


def test_where_ssh_fails_a_sentence_says_what_to_try(
    login: Path, slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    slurm.command("ssh", 'echo "ssh: Could not resolve hostname login" >&2; exit 255')
    assert main([*LOGIN, "cluster=a100x4", "submit"]) == 1
    said = capfd.readouterr().err
    assert "it is not known whether the command was executed" in said and "`ssh me@login true` must work" in said


def test_a_login_node_without_this_package_is_told(login: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for verb in (["status"], ["cluster=a100x4", "submit"]):
        assert main(["--host", "me@login", "--host-python", "envs/none/bin/python", *verb]) == 78
        told = capfd.readouterr().err
        assert told.count("error:") == 1 and f"{login}/envs/none/bin/python on" in told
        assert "cannot import slurmtrain" in told and "--host-python venv/bin/python" in told
    assert not (login / "slurmtrain-work").exists()


@pytest.mark.parametrize("python", ["~/venv/bin/python", "python-of-mine"])
def test_the_python_there_may_be_named_as_a_person_names_it(
    login: Path, slurm: FakeSlurm, python: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Below the home directory, whatever the folder of the runs is, or by a name that a login shell finds."""
    (login / "venv" / "bin").mkdir(parents=True)
    for path in (login / "venv" / "bin" / "python", slurm.directory / "python-of-mine"):
        path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
    slurm.command("sbatch", 'command -v python >"$here/python"; echo "Submitted batch job 1"')
    there = ["--host=me@login:~/my work", f"--host-python={python}"]
    assert main([*there, "cluster=a100x4", "submit"]) == 0
    assert len(list((login / "my work" / "runs").glob("*/2*"))) == 1
    of_the_job = (slurm.directory / "python").read_text().strip()
    assert of_the_job == f"{login}/venv/bin/python" or python == "python-of-mine"
    assert main([*there, "status", "last"]) == 0 and "(train)" in capfd.readouterr().out


def test_an_account_without_a_home_directory_can_name_a_folder(
    login: Path, slurm: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = (slurm.directory / "ssh").read_text().partition("\n")[2]
    slurm.command("ssh", whole.replace(f"HOME='{login}'", f"HOME=/dev/null/me PYTHONPATH='{PACKAGE.parent}'"))
    assert main([*LOGIN, "status"]) == 2
    assert "the folder /dev/null/me/slurmtrain-work/laptop on" in capfd.readouterr().err
    assert main(["--host", f"me@login:{tmp_path}/there", *LOGIN[2:], "cluster=a100x4", "submit", "--dry-run"]) == 0


def test_probe_does_not_write_a_file_where_submit_would_not_find_it(
    login: Path, slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*LOGIN, "probe"]) == 2
    assert "probe --out - > conf/cluster/NAME.yaml" in capfd.readouterr().err
    assert main([*LOGIN, "probe", "--out", "-"]) != 2  # there is no slurmctld behind these commands
    assert (login / "slurmtrain-work" / "laptop").is_dir()


@pytest.mark.parametrize(
    "words",
    [
        ["--host", "-oProxyCommand=touch x", "status"],
        ["--host", "a b", "status"],
        ["--host=", "status"],
        ["status", "--host"],
        ["--host-python", "p", "status"],
    ],
)
def test_what_is_no_machine_is_refused(words: list[str], login: Path, slurm: FakeSlurm) -> None:
    refusal(*words)
    assert not (slurm.directory / "hosts").exists()


@pytest.mark.parametrize("words", [["train"], ["sandbox", "up"], []])
def test_what_is_for_this_machine_is_not_sent(words: list[str], login: Path, slurm: FakeSlurm) -> None:
    refusal(*LOGIN, *words)
    assert not (slurm.directory / "hosts").exists()
