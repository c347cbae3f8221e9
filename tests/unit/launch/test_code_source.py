"""Projects that are installed editable: the job imports them from its snapshot, not from the live work tree."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.slurm.command_environment import belongs_to_a_job

HATCHLING = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1"
"""
SETUPTOOLS = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "1"
[tool.setuptools]
packages = ["{name}"]
"""
# Where each keeps its package, and how it is built: by a .pth file, and by an import hook, whose folder is the project's own.
PROJECTS = {"alpha": ("libs/alpha/src", HATCHLING), "gamma": ("libs/gamma", SETUPTOOLS)}
SHOW = "import alpha, gamma\nprint('imported', alpha.VALUE, gamma.VALUE)\n"
PREPARE = """
import sys
from pathlib import Path
from slurmtrain.config.compose import compose
from slurmtrain.launch.submit import preparing
config = compose(sys.argv[1:])
with preparing(config, sys.argv[1:], Path.cwd()) as run_dir:
    print(run_dir.path)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that sees this package and our own environment's packages."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    ours = [path for path in sys.path if "site-packages" in path] + [str(Path(__file__).parents[3])]
    (site / "zz_dependencies.pth").write_text("".join(f"{path}\n" for path in ours))
    return venv / "bin" / "python"


def call(python: Path, cwd: Path, *words: str, code: int = 0) -> str:
    """Run the interpreter; returns what it said."""
    hidden = ("PYTHONPATH", "GIT_DIR", "SLURMTRAIN_RUNS")
    env = {name: value for name, value in os.environ.items() if name not in hidden and not belongs_to_a_job(name)}
    done = subprocess.run([python, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def make_project(folder: Path, package: Path, text: str) -> None:
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 'snapshot'\n")
    (folder / "pyproject.toml").write_text(text.format(name=folder.name))


def install(python: Path, *folders: Path) -> None:
    editable = [word for folder in folders for word in ("--editable", str(folder))]
    options = ["--no-deps", "--quiet", "--disable-pip-version-check"]
    if importlib.util.find_spec("hatchling"):
        options += ["--no-build-isolation", "--no-index"]
    call(Path(sys.executable), folders[0], "-m", "pip", "--python", str(python), "install", *options, *editable)


@pytest.fixture
def tree(python: Path, tmp_path: Path) -> Path:
    """A git work tree with two projects, both of them installed editable."""
    root = tmp_path / "tree"
    for name, (folder, text) in PROJECTS.items():
        make_project(root / "libs" / name, root / folder / name, text)
    (root / "show.py").write_text(SHOW)
    (root / ".gitignore").write_text("*.egg-info\n/runs/\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    install(python, *(root / "libs" / name for name in PROJECTS))
    return root


def test_an_editable_install_runs_from_the_snapshot_and_not_from_the_edited_work_tree(python: Path, tree: Path) -> None:
    assert "imported snapshot snapshot" in call(python, tree, "show.py")
    job = ("cluster=local", "job=command", f"job.command={python} show.py")
    run_dir = Path(call(python, tree, "-c", PREPARE, *job).strip())
    for name, (folder, _) in PROJECTS.items():
        (tree / folder / name / "__init__.py").write_text("VALUE = 'edited'\n")
    assert "imported edited edited" in call(python, tree, "show.py")
    assert "imported snapshot snapshot" in call(python, tree, "-m", "slurmtrain", "resume", str(run_dir))
    roots = json.loads((run_dir / "run.json").read_text())["import_roots"]
    assert sorted(roots) == ["libs/alpha/src", "libs/gamma"]
    on_path = ":".join(f'"$run_dir"/{each}' for each in ("code", *(f"code/{root}" for root in roots)))
    assert f"PYTHONPATH={on_path}" in (run_dir / "job.sbatch").read_text()
