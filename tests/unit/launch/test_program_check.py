"""What a job is to start or load: what is missing is said before the queue (78), or by the job, and not tried again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.launched_program import repeated_launcher, script_and_module
from slurmtrain.errors import EXIT_CONFIG, exit_code_of
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import refused
from tests.unit.launch.test_snapshot import git


@pytest.mark.parametrize(
    ("command", "script", "module"),
    [
        ("python train.py --lr 1", "train.py", None),
        ("/env/bin/python3.11 -u -X faulthandler -W ignore a/train.py", "a/train.py", None),
        ("torchrun --nproc-per-node 2 --rdzv-id=a.py train.py -m x", "train.py", None),
        ("python -m my.train --data -m", None, "my.train"),
        ("torchrun --nproc-per-node 2 -m my.train --config a.py", None, "my.train"),
        ("python -c 'print(1)' -m x", None, None),
        ("python $SCRIPT", None, None),
    ],
)
def test_the_script_or_the_module_that_a_command_runs(command: str, script: str | None, module: str | None) -> None:
    assert script_and_module(command) == (script, module)


@pytest.fixture
def ignoring(project: Path) -> Path:
    """A git work tree in which git ignores one of each: a script, a module, a folder, and another file."""
    git("init", "-q", cwd=project)
    (project / ".gitignore").write_text("mine.py\ndata.bin\nout/\npackage/hidden.py\n")
    for name in "mine.py data.bin out/x seen.py seen.bin seen.sh package/__init__.py package/hidden.py".split():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).touch()
    return project


@pytest.mark.parametrize("sweep", [(), ("-m", "train.seed=1,2")], ids=["run", "sweep"])
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("python mine.py", "mine.py is not in the snapshot that the job would run, because git ignores it"),
        ("python -m package.hidden", "the module package.hidden is not in the snapshot that the job would run"),
        ("python -m package.gone", "there is no module package.gone in "),
        ("python gone.py", "there is no gone.py in "),
        ("./seen.sh", "submit -- bash ./seen.sh"),  # it is not executable
        ("seen.py", "hint: submit -- python seen.py"),
    ],
)
def test_a_program_that_would_not_be_there_is_said_before_the_queue(
    command: str, told: str, sweep: tuple[str, ...], ignoring: Path, slurm: FakeSlurm
) -> None:
    assert told in refused(*sweep, "+cluster=a100x4", "submit", "--", *command.split(), code=EXIT_CONFIG)
    assert not slurm.submitted and not list(ignoring.glob("runs/*/*"))


def test_a_program_that_is_not_on_the_path_is_warned_of_unless_something_may_bring_it(
    ignoring: Path, slurm: FakeSlurm
) -> None:
    for words, times in ([], 1), (["cluster.setup=[true]"], 0):
        said = refused("+cluster=a100x4", *words, "submit", "--", "pyhton", "seen.py", code=0)
        assert said.count("warning: job.command: there is no program pyhton on this machine's PATH") == times
    assert "no program" not in refused("+cluster=a100x4", "submit", "--", "python", "-m", "installed.there", code=0)


def test_files_that_the_snapshot_does_not_have_are_named_before_the_queue(
    ignoring: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--data ./data.bin --also=data.bin --out out --in seen.bin {ignoring}/data.bin 3".split()
    for sweep in ([], ["-m", "train.seed=1,2"]):
        assert main([*sweep, "+cluster=a100x4", "submit", "--", "python", "seen.py", *words]) == 0
        warnings = [line for line in capsys.readouterr().err.splitlines() if "snapshot" in line]
        assert len(warnings) == 3
        assert warnings[0] == (
            "slurmtrain: warning: ./data.bin is not in the snapshot that the job runs, because git ignores it, so "
            f"`./data.bin` does not name it there; name it by its absolute path: {ignoring}/data.bin"
        )
        assert "so `--also=data.bin` does not name it there" in warnings[1] and "warning: out is not in" in warnings[2]


def test_a_package_that_is_missing_in_the_job_is_no_reason_to_try_again(cli: Cli, project: Path) -> None:
    (project / "loop.py").write_text(
        "import slurmtrain\nslurmtrain.init()\nif True:\n    import not_installed_at_all\n"
    )
    job = ("+cluster=local", "job=command", f"job.command={sys.executable} loop.py", "job.snapshot=none")
    answer = cli(*job, "submit")
    assert answer.returncode == EXIT_CONFIG, answer.stdout
    assert "No module named 'not_installed_at_all'" in answer.stdout
    assert "KEY=VALUE after it changes its config" in answer.stdout
    assert exit_code_of(ModuleNotFoundError("x")) == EXIT_CONFIG and exit_code_of(ImportError("x")) == 1


# A program of one's own before the queue: a launcher that every rank would start, and settings of programs alone.


@pytest.mark.parametrize(
    ("words", "command", "several"),
    [
        (["cluster.tasks_per_node=4"], "torchrun --nproc-per-node 4 train.py", "each of the 4 ranks starts torchrun"),
        (["cluster.nodes=2"], "python -m torch.distributed.run --nproc-per-node 4 train.py", "each of the 2 ranks"),
        ([], "torchrun --nproc-per-node 4 train.py", None),
        (["cluster.nodes=2"], "torchrun --nnodes=2 --rdzv-endpoint=$MASTER_ADDR:29500 train.py", None),
        (["cluster.tasks_per_node=4"], "accelerate env", None),
    ],
)
def test_a_launcher_that_every_rank_would_start_is_named(words: list[str], command: str, several: str | None) -> None:
    one = ["cluster.nodes=1", "cluster.tasks_per_node=1", *words]
    sentence = repeated_launcher(compose(["cluster=a100x4", "job=command", f"job.command='{command}'", *one]))
    assert sentence is None if several is None else several in (sentence or "")
