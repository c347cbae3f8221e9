"""The snapshot: which files the job will run from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from slurmtrain.config.schema import JobConfig
from slurmtrain.errors import ConfigError
from slurmtrain.launch import snapshot as snapshots
from slurmtrain.launch.snapshot import Snapshot, find_source, take_snapshot
from slurmtrain.runs.code_record import read_code_record, words_for_changes


def git(*arguments: str, cwd: Path) -> str:
    settings = ["-c", "user.name=me", "-c", "user.email=me@here", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *settings, *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A git work tree with one commit."""
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "train.py").write_text("print('committed')")
    (root / "sub" / "deep.py").write_text("")
    (root / ".gitignore").write_text("*.bin\n")
    git("init", "-q", cwd=root)
    git("add", ".", cwd=root)
    git("commit", "-qm", "first", cwd=root)
    return root


def snapshot(cwd: Path, target: Path, **job: object) -> Snapshot:
    config = JobConfig(**{"runs_dir": str(cwd / "runs"), **job})  # type: ignore[arg-type]
    return take_snapshot(config, find_source(config, cwd), target)


def copied(target: Path) -> set[str]:
    """Without this package's own code, which an editable install adds."""
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file() or path.is_symlink()}
    return {name for name in files if not name.startswith("slurmtrain/")}


def test_tracked_and_untracked_files_are_copied_and_ignored_ones_are_not(tree: Path, tmp_path: Path) -> None:
    (tree / "fresh.py").write_text("fresh")
    (tree / "train.py").write_text("edited")
    (tree / "data.bin").write_text("ignored")
    (tree / ".env.example").write_text("hidden, but not ignored")
    taken = snapshot(tree, tmp_path / "code")
    assert copied(tmp_path / "code") == {"train.py", "fresh.py", "sub/deep.py", ".gitignore", ".env.example"}
    assert (tmp_path / "code" / "train.py").read_text() == "edited"
    assert taken == Snapshot("code", git("rev-parse", "HEAD", cwd=tree).strip(), dirty=True)


def test_a_clean_tree_is_not_dirty(tree: Path, tmp_path: Path) -> None:
    assert not snapshot(tree, tmp_path / "code").dirty


def test_a_tree_without_a_commit_has_no_revision(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    git("init", "-q", cwd=root)
    (root / "a.py").write_text("")
    assert snapshot(root, tmp_path / "code") == Snapshot("code", None, dirty=True)
    assert copied(tmp_path / "code") == {"a.py"}


def test_a_file_that_is_deleted_but_still_tracked_is_left_out(tree: Path, tmp_path: Path) -> None:
    (tree / "train.py").unlink()
    snapshot(tree, tmp_path / "code")
    assert copied(tmp_path / "code") == {"sub/deep.py", ".gitignore"}


def test_links_stay_links_and_programs_stay_executable(tree: Path, tmp_path: Path) -> None:
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link.py").symlink_to("train.py")
    (tree / "folder").symlink_to("sub")
    (tree / "broken").symlink_to("/no/such/file")
    snapshot(tree, tmp_path / "code")
    code = tmp_path / "code"
    assert os.access(code / "run.sh", os.X_OK) and not os.access(code / "train.py", os.X_OK)
    links = {name: os.readlink(code / name) for name in ("link.py", "folder", "broken")}
    assert links == {"link.py": "train.py", "folder": "sub", "broken": "/no/such/file"}


@pytest.mark.parametrize(
    "name", ["two words.py", "it's.py", "new\nline.py", "ünïcode.py", os.fsdecode(b"latin-\xe9.py")]
)
def test_odd_file_names_are_copied(name: str, tree: Path, tmp_path: Path) -> None:
    (tree / name).write_text("here")
    snapshot(tree, tmp_path / "code")
    assert (tmp_path / "code" / name).read_text() == "here"


def test_submitting_from_a_subfolder_runs_in_that_subfolder_of_the_whole_tree(tree: Path, tmp_path: Path) -> None:
    assert snapshot(tree / "sub", tmp_path / "code").workdir == "code/sub"
    assert copied(tmp_path / "code") == {"train.py", "sub/deep.py", ".gitignore"}


def test_a_subfolder_that_git_knows_nothing_of_is_there_all_the_same(tree: Path, tmp_path: Path) -> None:
    (tree / "scratch").mkdir()
    assert snapshot(tree / "scratch", tmp_path / "code").workdir == "code/scratch"
    assert (tmp_path / "code" / "scratch").is_dir()


@pytest.mark.parametrize("below", ["runs", "out/runs"])
@pytest.mark.parametrize("kind", ["auto", "cwd"])
def test_runs_inside_the_tree_are_not_copied_into_each_other(below: str, kind: str, tree: Path, tmp_path: Path) -> None:
    old = tree / below / "train" / "20260101-000000-aaaa" / "code"
    old.mkdir(parents=True)
    (old / "train.py").write_text("")
    (old.parent / "run.json").write_text("{}")
    code = tree / below / "train" / "next" / "code"
    code.parent.mkdir()
    snapshot(tree, code, snapshot=kind, runs_dir=str(tree / below))
    assert {name for name in copied(code) if name.endswith(".py")} == {"train.py", "sub/deep.py"}


def test_sweeps_inside_the_tree_are_not_copied_into_each_other(tree: Path, tmp_path: Path) -> None:
    for name in ("runs/train.sweep-1/code/sub", "runs/.preparing/train.sweep-2-7/code"):
        (tree / name).mkdir(parents=True)
        (tree / name / "copy.py").write_text("a copy")
    (tree / "runs/train.sweep-1/sweep.json").write_text("{}")
    (tree / "runs/notes.txt").write_text("mine")
    snapshot(tree, tmp_path / "code")
    assert copied(tmp_path / "code") == {".gitignore", "train.py", "sub/deep.py", "runs/notes.txt"}


def test_archives_of_environments_beside_the_runs_are_not_copied(tree: Path, tmp_path: Path) -> None:
    for name in ("runs/.environments-7/key-digest.tar", "runs/.environments-7/.key.tar"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("an archive")
    snapshot(tree, tmp_path / "code")
    assert copied(tmp_path / "code") == {".gitignore", "train.py", "sub/deep.py"}


def test_outside_of_git_the_job_runs_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "a.py").write_text("")
    taken = snapshot(folder, tmp_path / "code")
    assert taken == Snapshot(str(folder)) and taken.in_place
    assert copied(tmp_path / "code") == set()


def test_none_runs_in_place_in_git_too(tree: Path, tmp_path: Path) -> None:
    assert snapshot(tree, tmp_path / "code", snapshot="none").workdir == str(tree)
    assert copied(tmp_path / "code") == set()


def test_cwd_copies_this_folder_alone(tree: Path, tmp_path: Path) -> None:
    (tree / "sub" / "data.bin").write_text("git ignores it, cwd does not")
    (tree / "sub" / ".hidden").mkdir()
    (tree / "sub" / ".hidden" / "x").write_text("")
    assert snapshot(tree / "sub", tmp_path / "code", snapshot="cwd").workdir == "code"
    assert copied(tmp_path / "code") == {"deep.py", "data.bin"}


def test_editing_the_tree_afterwards_changes_nothing(tree: Path, tmp_path: Path) -> None:
    snapshot(tree, tmp_path / "code")
    (tree / "train.py").write_text("edited later")
    assert (tmp_path / "code" / "train.py").read_text() == "print('committed')"


@pytest.mark.parametrize(("kind", "hint"), [("auto", ".gitignore"), ("cwd", "job.snapshot_max_mb")])
def test_a_tree_that_is_too_large_names_its_largest_files(kind: str, hint: str, tree: Path, tmp_path: Path) -> None:
    for name, size in [("a.dat", 900_000), ("b.dat", 2_100_000), ("c.dat", 100), ("d.dat", 500_000)]:
        (tree / name).write_bytes(bytes(size))
    with pytest.raises(ConfigError, match=r"4 MB .* b\.dat \(2 MB\), a\.dat \(1 MB\), d\.dat") as caught:
        snapshot(tree, tmp_path / "code", snapshot=kind, snapshot_max_mb=3)
    assert caught.value.hint is not None and hint in caught.value.hint
    snapshot(tree, tmp_path / "code2", snapshot=kind, snapshot_max_mb=4)


def test_the_jobs_own_copy_of_this_package_is_there_when_it_is_installed_editable(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    snapshot(folder, tmp_path / "code")
    assert (tmp_path / "code" / "slurmtrain" / "__main__.py").is_file()
    assert not list((tmp_path / "code").rglob("__pycache__"))


@pytest.mark.parametrize("kind", ["auto", "cwd"])
def test_the_work_tree_itself_may_be_the_folder_of_the_runs(kind: str, tree: Path) -> None:
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/b/mine.py").write_text("")
    run, unfinished = tree / "train" / "20260101-000000-aaaa", tree / "train" / "20260101-000001-aaaa"
    for folder in (run / "code", unfinished / "code", unfinished / "attempts", unfinished / "checkpoints"):
        folder.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "code" / "old.py").write_text("")
    (unfinished / "code" / "half.py").write_text("")
    code = tree / "train" / "next" / "code"
    code.parent.mkdir()
    snapshot(tree, code, snapshot=kind, runs_dir=str(tree))
    assert {name for name in copied(code) if name.endswith(".py")} == {"train.py", "sub/deep.py", "a/b/mine.py"}


def test_submodules_and_clones_inside_are_copied(tree: Path, tmp_path: Path) -> None:
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
    snapshot(tree, tmp_path / "code")
    found = {name for name in copied(tmp_path / "code") if name.endswith((".py", ".log"))}
    assert found == {
        "train.py",
        "sub/deep.py",
        "clone/inner.py",
        "lib/library.py",
        "lib/fresh.py",
        "lib/deps/inner/inner.py",
    }


def test_variables_of_another_repository_change_nothing(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are set within a hook of git, or by whoever keeps his dotfiles in git."""
    other = tmp_path / "other"
    other.mkdir()
    git("init", "-q", cwd=other)
    for name, value in {
        "GIT_DIR": other / ".git",
        "GIT_WORK_TREE": other,
        "GIT_INDEX_FILE": tmp_path / "index",
    }.items():
        monkeypatch.setenv(name, str(value))
    taken = snapshot(tree / "sub", tmp_path / "code")
    assert taken.workdir == "code/sub" and taken.revision is not None
    assert copied(tmp_path / "code") == {"train.py", "sub/deep.py", ".gitignore"}


def test_the_record_beside_a_snapshot_says_what_git_knew_and_has_a_digest_of_each_file(
    tree: Path, tmp_path: Path
) -> None:
    git("remote", "add", "origin", "https://me:secret@host/project.git", cwd=tree)
    (tree / "train.py").write_text("print('edited')\n")
    (tree / "fresh.py").write_text("fresh")
    (tree / "data").symlink_to("/scratch/data")
    taken = snapshot(tree, tmp_path / "code")
    record = read_code_record(tmp_path / "code.json")
    assert record is not None
    assert (record.revision, record.dirty, record.branch) == (taken.revision, True, "main")
    assert record.remote == taken.remote == "https://host/project.git"
    assert record.untracked == ("data", "fresh.py") and record.links == {"data": "/scratch/data"}
    assert record.files["fresh.py"] == hashlib.sha256(b"fresh").hexdigest()
    assert {name for name in record.files if not name.startswith("slurmtrain/")} == {
        *("train.py", "fresh.py", "sub/deep.py", ".gitignore")
    }
    git("stash", "-q", cwd=tree)
    assert record.diff is not None
    (tmp_path / "patch").write_text(record.diff)
    git("apply", str(tmp_path / "patch"), cwd=tree)
    assert (tree / "train.py").read_text() == "print('edited')\n"


def test_code_that_runs_in_place_is_named_by_its_revision_too(tree: Path, tmp_path: Path) -> None:
    (tree / "train.py").write_text("edited")
    taken = snapshot(tree, tmp_path / "code", snapshot="none")
    assert taken.in_place and taken.dirty
    assert taken.revision == git("rev-parse", "HEAD", cwd=tree).strip()


def test_a_long_diff_is_left_out_of_the_record(tree: Path, tmp_path: Path) -> None:
    (tree / "train.py").write_text("x = 1\n" * 300_000)
    snapshot(tree, tmp_path / "code")
    record = read_code_record(tmp_path / "code.json")
    assert record is not None and record.dirty and record.diff is None


def test_a_work_tree_in_place_that_git_takes_long_for_keeps_nobody_waiting(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "train.py").write_text("edited")
    programs = tmp_path / "bin"
    programs.mkdir()
    real = shutil.which("git")
    (programs / "git").write_text(f'#!/bin/sh\ncase " $* " in *" diff "*) exec sleep 30 ;; esac\nexec {real} "$@"\n')
    (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(snapshots, "IN_PLACE_S", 0.5)
    assert snapshot(tree, tmp_path / "code", snapshot="none").dirty
    record = read_code_record(tmp_path / "code.json")
    assert record is not None and record.diff is None
    slow = (programs / "git").read_text().replace('" diff "', '" status "')
    (programs / "git").write_text(slow)
    assert snapshot(tree, tmp_path / "again", snapshot="none").dirty is None  # it is not said that there are no changes
    record = read_code_record(tmp_path / "again.json")
    assert record is not None and (record.dirty, record.diff) == (None, None)
    assert json.loads((tmp_path / "again.json").read_text())["dirty"] is None
    assert words_for_changes(None) == " (whether with changes is not known)"
