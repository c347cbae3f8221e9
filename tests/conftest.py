"""What all tests share: a project folder to type commands in, and stand-ins for SLURM's commands."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before it is imported: its asserts show what they compare, as those of a test do.
pytest.register_assert_rewrite("tests.support")

from slurmtrain.slurm.command_environment import belongs_to_a_job
from slurmtrain.system import logs, redaction
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm
from tests.support.stranger import Stranger, a_stranger

# A loaded machine is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell that runs the tests in the background lets them ignore Ctrl-C, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks that tests start compute on cores that others use, too. By default OpenMP's threads spin while they wait for each
# other, which takes half of the processor time of a short training there. This is how `submit` has them wait on a machine.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="1000")

# Their tests take longest, and so are begun first.
LONG = ("slurm", "distributed", "faults")


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist hand out files in their order here: its own begins those with few tests last, among them the longest."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All tests of a real SLURM run in one process of xdist and share its sandbox; elsewhere, those of a file do.

    Marks of groups (--dist loadgroup) would say so, but xdist 3.8 does not find them with pytest 9.2.
    """
    from xdist.scheduler import LoadFileScheduling

    scheduling = LoadFileScheduling(config, log)
    by_file = scheduling._split_scope
    scheduling._split_scope = lambda nodeid: "slurm" if nodeid.startswith("tests/slurm/") else by_file(nodeid)
    return scheduling


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no process is left alone with one of them at the end."""
    sizes = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG), -sizes[item.path]

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What is imported lives to the end: the garbage collector, an eighth of the time of a composition, leaves it alone."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="write jobs/golden/*.sbatch anew instead of comparing"
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Let torch compute with one thread here: test processes share the cores, and threads that wait for each other spin."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test has for a secret is none to the next."""
    monkeypatch.setattr(redaction, "_hidden", {})


@pytest.fixture(scope="session")
def new_state_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new folder for each test, made by whoever writes into it first."""
    root = tmp_path_factory.mktemp("states")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(scope="module", autouse=True)
def ledger_of_nodes_of_a_module(new_state_folders: Iterator[Path]) -> Iterator[None]:
    """Jobs that the fixtures of a module submit have a ledger of their own: what an earlier run of the tests has left says
    nothing of the nodes of this one, whose names are the same."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_STATE_HOME", str(next(new_state_folders)))
        yield


@pytest.fixture(autouse=True)
def ledger_of_nodes_of_a_test(new_state_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test, and each job that it submits, has a ledger of its own, and never touches the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(next(new_state_folders)))


@pytest.fixture(autouse=True)
def log_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are shown as by the command line, and `caplog` has them, too, until the test types a command line."""
    package = logging.getLogger(logs.PACKAGE)
    for name, value in (("handlers", [logs.LogHandler()]), ("propagate", True), ("level", logging.INFO)):
        monkeypatch.setattr(package, name, value)


@pytest.fixture(scope="session")
def stranger() -> Iterator[Stranger]:
    """Another user of this machine."""
    with a_stranger() as user:
        yield user


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: empty, outside of git, and outside of any job."""
    for name in list(os.environ):
        if belongs_to_a_job(name) or name in ("SLURM_CONF", "SLURMTRAIN_RUNS"):
            monkeypatch.delenv(name)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """SLURM's commands, with jobs that are kept from 101 on."""
    fake = FakeSlurm.install(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{fake.directory}:{os.environ['PATH']}")
    return fake


@pytest.fixture
def cli(project: Path) -> Cli:
    """Run `python -m slurmtrain` with these words in the project folder."""

    def run(
        *words: str, program: tuple[str, ...] = ("-m", "slurmtrain"), **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *program, *words],
            cwd=project,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    return run
