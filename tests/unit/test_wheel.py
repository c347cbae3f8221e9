"""The wheel, in a fresh virtual environment outside of the clone: what a person gets who never clones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmtrain.config.folders import PACKAGE
from slurmtrain.slurm.command_environment import belongs_to_a_job

Slurmtrain = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", str(out), str(PACKAGE.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh virtual environment with the wheel, and our own environment's dependencies."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    interpreter = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(interpreter)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)], check=True)
    # Folders named in a .pth file come last, and .pth files inside of them are not read: the clone stays invisible.
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


@pytest.fixture
def slurmtrain(python: Path, tmp_path: Path) -> Slurmtrain:
    """Run `python -m slurmtrain` of the wheel in an empty folder; its output."""

    def run(*words: str, **variables: str) -> str:
        return output(python, tmp_path, "-m", "slurmtrain", *words, **variables)

    return run


def output(python: Path, cwd: Path, *words: str, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not belongs_to_a_job(name)}
    env |= variables
    done = subprocess.run([python, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_holds_the_configs_the_template_and_the_manual_and_nothing_of_the_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    clone = PACKAGE.parent
    for shipped in [*clone.glob("conf/**/*.yaml"), clone / "jobs" / "job.sbatch.j2"]:
        assert f"slurmtrain/{shipped.relative_to(clone)}" in names
    pages = [str(page.relative_to(clone)) for page in (clone / "slurmtrain" / "docs").glob("*.md")]
    assert pages and set(pages) <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"slurmtrain", "hydra_plugins"}
    assert "slurmtrain/py.typed" in names  # type checkers read its types
    assert [name for name in names if name.startswith("hydra_plugins")] == ["hydra_plugins/slurmtrain.py"]
    assert not [name for name in names if "test" in name or "__pycache__" in name]


def test_the_package_that_runs_is_the_wheels(python: Path, tmp_path: Path) -> None:
    where = output(python, tmp_path, "-c", "import slurmtrain; print(slurmtrain.__file__)")
    assert where.startswith(str(python.parent.parent))


def test_help_names_the_shipped_configs(slurmtrain: Slurmtrain, python: Path, tmp_path: Path) -> None:
    text = slurmtrain("--help")
    assert "a100x4 a100x8 h100x8 kubernetes local sandbox" in text
    assert output(python, tmp_path, "-c", "import sys, slurmtrain.cli as c; sys.exit(c.main(['--help']))") == text
    script = subprocess.run([python.parent / "slurmtrain", "--help"], capture_output=True, text=True, check=True)
    assert script.stdout == text


def test_the_first_command_runs(slurmtrain: Slurmtrain, tmp_path: Path) -> None:
    said = slurmtrain("+cluster=local", "+experiment=smoke", "submit")
    assert "\nslurmtrain: finished\n" in said
    run_dir = next(tmp_path.glob("runs/train/*"))
    assert (run_dir / "checkpoints").is_dir() and list(run_dir.glob("checkpoints/*/COMPLETE"))
    assert not (run_dir / "code" / "slurmtrain").exists()  # an installed package needs no copy
    assert "finished" in slurmtrain("status", "last")
