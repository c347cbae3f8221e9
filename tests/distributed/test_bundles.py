"""A run that was packed runs again from an empty folder, and computes the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.local_runs import LocalRun, Project, assert_same_bits


@pytest.mark.slow
def test_a_bundle_runs_again_from_an_empty_folder_with_the_same_bits(tmp_path: Path) -> None:
    first, second = Project(tmp_path / "first"), Project(tmp_path / "second")
    (second.path / "paced.py").unlink()  # the model is in the bundle
    (first.path / ".gitignore").write_text("runs\n__pycache__\n")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=me", "-c", "user.email=m@h", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *words], cwd=first.path, check=True)
    try:
        run = first.submit("train.steps=6", "cluster.tasks_per_node=2", "train.eval_every=0").finish()
        (first.path / "paced.py").write_text("what is here now does not matter\n")
        bundle = tmp_path / "bundle.tar.gz"
        packed = first.cli("runs", "bundle", "last", str(bundle))
        assert packed.returncode == 0, packed.stdout
        process = second.popen("slurmtrain", "submit", "--from", str(bundle))
        again = LocalRun(second.path, process)
        second.runs.append(again)
        again.finish()
        assert_same_bits(run, again)
        assert "other versions" not in again.output and "not installed" not in again.output
        assert again.run_dir.info()["bundle"]["run"] == run.run_dir.id
        compared = second.cli("runs", "compare", str(run.run_dir.path), str(again.run_dir.path))
        assert "no file of the snapshots differs" in compared.stdout
        assert "they ran with the same packages, driver, image and variables" in compared.stdout, compared.stdout
    finally:
        first.reap()
        second.reap()
