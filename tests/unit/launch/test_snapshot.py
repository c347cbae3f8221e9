"""The snapshot: which files the job will run from."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import CodeRecord, read_code_record
from tests.support.fake_slurm import FakeSlurm

Submit = Callable[..., RunDir]
COMMITTED = {"train.py", "sub/deep.py", ".gitignore"}
ODD = ["two words.py", "it's.py", "new\nline.py", "ünïcode.py", os.fsdecode(b"latin-\xe9.py")]


def git(*arguments: str, cwd: Path) -> str:
    settings = ["-c", "user.name=me", "-c", "user.email=me@here", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *settings, *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def tree(project: Path) -> Path:
    """A git work tree with one commit: the current folder."""
    (project / "sub").mkdir()
    (project / "train.py").write_text("print('committed')")
    (project / "sub" / "deep.py").write_text("")
    (project / ".gitignore").write_text("*.bin\n")
    git("init", "-q", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "-qm", "first", cwd=project)
    return project


@pytest.fixture
def submit(slurm: FakeSlurm) -> Submit:
    """Submit a program from the current folder; returns its run."""

    def run(*words: str) -> RunDir:
        assert main(["+cluster=a100x4", "job=command", "job.command=true", *words, "submit"]) == 0
        found = re.search(r"^run_dir=(.*)$", slurm.submitted[-1], re.MULTILINE)
        assert found
        return RunDir(Path(*shlex.split(found[1])))

    return run


def copied(run: RunDir) -> set[str]:
    """Without this package's own code, which an editable install adds."""
    files = {str(path.relative_to(run.code)) for path in run.code.rglob("*") if path.is_file() or path.is_symlink()}
    return {name for name in files if not name.startswith("slurmtrain/")}


def record_of(run: RunDir) -> CodeRecord:
    record = read_code_record(run.path / "code.json")
    assert record is not None
    return record


def test_a_job_has_what_git_knows_and_what_is_new_and_the_record_says_what_each_was(tree: Path, submit: Submit) -> None:
    git("remote", "add", "origin", "https://me:secret@host/project.git", cwd=tree)
    (tree / "gone.py").touch()
    git("add", "gone.py", cwd=tree)
    git("commit", "-qm", "second", cwd=tree)
    (tree / "gone.py").unlink()
    (tree / "train.py").write_text("print('edited')\n")
    for name in ("fresh.py", "data.bin", ".env.example", *ODD):  # git ignores the second
        (tree / name).write_text("fresh")
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    links = {"link.py": "train.py", "folder": "sub", "broken": "/no/such/file"}
    for name, target in links.items():
        (tree / name).symlink_to(target)
    run = submit()
    new = {"fresh.py", ".env.example", "run.sh", *ODD}
    assert copied(run) == COMMITTED | new | {*links}
    assert (run.code / "train.py").read_text() == "print('edited')\n"
    assert all((run.code / name).read_text() == "fresh" for name in ODD)
    assert {name: os.readlink(run.code / name) for name in links} == links
    assert os.access(run.code / "run.sh", os.X_OK) and not os.access(run.code / "train.py", os.X_OK)
    record = record_of(run)
    assert (record.revision, record.dirty, record.branch) == (git("rev-parse", "HEAD", cwd=tree).strip(), True, "main")
    assert record.remote == "https://host/project.git" and record.links == links
    assert {*record.untracked} == new | {*links}
    assert record.files["fresh.py"] == hashlib.sha256(b"fresh").hexdigest()
    assert {name for name in record.files if not name.startswith("slurmtrain/")} == COMMITTED | new
    git("stash", "-q", cwd=tree)
    assert record.diff is not None
    (tree.parent / "patch").write_text(record.diff)
    git("apply", str(tree.parent / "patch"), cwd=tree)
    assert (tree / "train.py").read_text() == "print('edited')\n" and not (tree / "gone.py").exists()


@pytest.mark.parametrize(
    ("folder", "words", "workdir", "files"),
    [
        pytest.param(".", [], "code", COMMITTED, id="git"),
        pytest.param("sub", [], "code/sub", COMMITTED, id="a folder below: the whole tree"),
        pytest.param("scratch", [], "code/scratch", COMMITTED, id="one that git knows nothing of"),
        pytest.param("sub", ["job.snapshot=cwd"], "code", {"deep.py", "data.bin"}, id="this folder alone"),
        pytest.param("../plain", [], "", set(), id="outside of git, so in place"),
    ],
)
def test_which_files_a_job_has_and_in_which_folder_it_runs(
    folder: str, words: list[str], workdir: str, files: set[str], tree: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (here := (tree / folder).resolve()).mkdir(exist_ok=True)
    (tree / "sub" / "data.bin").write_text("git ignores it, cwd does not")
    (tree / "sub" / ".hidden").mkdir()
    (tree / "sub" / ".hidden" / "data.bin").write_text("")
    monkeypatch.chdir(here)
    run = submit(*words)
    assert run.info()["workdir"] == (workdir or str(here)) and copied(run) == files
    assert not workdir.startswith("code/") or (run.path / workdir).is_dir()
    assert (run.code / "slurmtrain" / "__main__.py").is_file()  # the job's own copy of this package
    assert not list(run.code.rglob("__pycache__"))
    if folder != "../plain":
        record = record_of(run)
        assert (record.revision, record.dirty) == (git("rev-parse", "HEAD", cwd=tree).strip(), False)


@pytest.mark.parametrize(("runs", "kind"), [("runs", "auto"), ("out/runs", "cwd"), (".", "auto")])
def test_runs_and_sweeps_inside_the_tree_are_not_copied_into_each_other(
    runs: str, kind: str, tree: Path, submit: Submit
) -> None:
    own = ["notes.py", "a/b/mine.py"]
    for name in (
        "train/20260101-000000-aaaa/code/old.py",
        "train/20260101-000000-aaaa/run.json",
        "train/20260101-000001-aaaa/code/half.py",  # never finished
        "train/20260101-000001-aaaa/attempts/x.py",
        "train/20260101-000001-aaaa/checkpoints/x.py",
        "train.sweep-1/code/sub/copy.py",
        "train.sweep-1/sweep.json",
        ".preparing/train.sweep-2-7/code/copy.py",
        ".environments-7/key-digest.tar",
        ".environments-7/.key.tar",
        *own,
    ):
        (tree / runs / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / runs / name).write_text("{}")
    mine = {os.path.normpath(f"{runs}/{name}") for name in own}
    run = submit(f"job.snapshot={kind}", f"job.runs_dir={tree / runs}")
    assert copied(run) - {".gitignore"} == COMMITTED - {".gitignore"} | mine


def test_submodules_and_clones_inside_are_copied(tree: Path, tmp_path: Path, submit: Submit) -> None:
    inner, library = tmp_path / "inner", tmp_path / "library"
    for root in (inner, library):
        root.mkdir()
        git("init", "-q", cwd=root)
        (root / f"{root.name}.py").write_text("")
        (root / ".gitignore").write_text("*.log\n")
        git("add", ".", cwd=root)
        git("commit", "-qm", "first", cwd=root)
    allowed = ("-c", "protocol.file.allow=always")
    git(*allowed, "submodule", "add", "-q", str(inner), "deps/inner", cwd=library)
    git("commit", "-qm", "with a submodule", cwd=library)
    git(*allowed, "submodule", "add", "-q", str(library), "lib", cwd=tree)
    git(*allowed, "submodule", "update", "-q", "--init", "--recursive", cwd=tree)
    git("clone", "-q", str(inner), "clone", cwd=tree)
    (tree / "lib" / "fresh.py").write_text("")
    (tree / "lib" / "x.log").write_text("")
    found = {name for name in copied(submit()) if name.endswith((".py", ".log"))}
    assert found == {
        *("train.py", "sub/deep.py", "clone/inner.py", "lib/library.py", "lib/fresh.py", "lib/deps/inner/inner.py")
    }
