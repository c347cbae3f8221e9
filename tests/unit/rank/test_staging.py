"""Copies on the nodes (cluster.stage): a node has whole copies that its ranks use, or none and a sentence."""

from __future__ import annotations

import os
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import slurmtrain
from slurmtrain.cli import main
from slurmtrain.system.node_copies import with_copies
from tests.support.fake_slurm import ON_CPUS, FakeSlurm

# What each rank does: it writes down what it sees. The first attempt fails.
PROGRAM = """
seen="$SLURMTRAIN_RUN_DIR/seen $SLURMTRAIN_ATTEMPT $SLURMD_NODENAME"
{ tool; echo "$SLURMTRAIN_CODE"; cat "$SLURMTRAIN_DATA/tokens"; pwd; } >"$seen.tmp"
mv "$seen.tmp" "$seen"
until [ -e "${seen% *} n1" ] && [ -e "${seen% *} n2" ]; do sleep 0.02; done # the first rank that fails ends the others
[ "$SLURMTRAIN_ATTEMPT" = 2 ]
"""
# As pip writes it where the path of the interpreter has a space.
TOOL = """#!/bin/sh
'''exec' "PREFIX/bin/python" "$0" "$@"
' '''
import sys, helper; print(helper.__file__, sys.prefix, sep="\\n")
"""
WORDS = (
    *ON_CPUS,
    *("job=command", "job.command='bash p.sh'", "job.snapshot=cwd", "cluster.stage.code=true"),
)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A small environment that leads to the packages of this one."""
    prefix = tmp_path / "its environment"
    venv.create(prefix, symlinks=True)
    packages = next(prefix.glob("lib/python*/site-packages"))
    there = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "all.pth").write_text("\n".join([*there, str(Path(slurmtrain.__file__).parents[1])]))
    (prefix / "bin" / "tool").write_text(TOOL.replace("PREFIX", str(prefix)))
    (prefix / "bin" / "tool").chmod(0o755)
    return prefix


@pytest.fixture
def local(tmp_path: Path, project: Path) -> Path:
    """The folder of copies on the nodes, which share this machine. There are code and data to copy."""
    (project / "p.sh").write_text(PROGRAM)
    (project / "helper.py").touch()
    (tmp_path / "tokens").write_text("some words\n")
    (tmp_path / "node's own").mkdir()
    return tmp_path / "node's own" / f"slurmtrain-stage-{os.getuid()}"


def test_each_node_has_one_copy_of_code_environment_and_data_for_all_starts_of_its_ranks(
    project: Path, slurm: FakeSlurm, tmp_path: Path, prefix: Path, local: Path
) -> None:
    slurm.add("55", state="RUNNING")
    left = {"fake-9": 0.0, "fake-55": 0.0, "other-9": 0.0, "notes": 0.0, "fake-10": None}  # None: it is young
    for name, time in left.items():
        (local / name).mkdir(parents=True)
        local.chmod(0o700)
        if time is not None:
            os.utime(local / name, (time, time))
    find = slurm.directory / "find"  # as where another job removes such a folder meanwhile
    find.write_text('#!/bin/sh\n/usr/bin/find "$@"; case "$*" in *-mmin*) exit 1 ;; esac\n')
    find.chmod(0o755)
    words = ["cluster.nodes=2", f"cluster.venv='{prefix}'", "cluster.stage.environment=true"]
    assert main([*WORDS, *words, f"cluster.stage.data=['{tmp_path}/tokens']", "submit"]) == 0
    done = slurm.run("101", timeout_s=240, TMPDIR=str(local.parent))
    assert done.returncode == 0, done.stdout
    (run,) = (path.parent for path in project.glob("runs/*/*/run.json"))
    seen = {path.name: path.read_text().splitlines() for path in run.glob("seen *")}
    nodes = {node: local / "fake-101" / node for node in ("n1", "n2")}
    assert seen == {
        f"seen {attempt} {node}": [
            *(f"{own}/code/helper.py", f"{own}/environment", f"{own}/code", "some words"),
            str(run / "code"),  # the working directory, where its output is kept
        ]
        for attempt in (1, 2)
        for node, own in nodes.items()
    }, done.stdout
    assert sum(" bash -c " in call and "environment" in call for call in slurm.calls("srun")) == 1
    # The copies end with the job, and with them what a job has left that has ended.
    assert {path.name for path in local.iterdir()} == left.keys() - {"fake-9"}
    assert len(list(project.glob("runs/.environments-*/*.tar"))) == 1


# An interpreter of no environment.
PYTHON = f"""#!/bin/sh
case "$2" in *sys.prefix*) echo /usr; echo /usr/bin/python; exit ;; esac
exec {sys.executable} "$@"
"""


def open_to_all(local: Path) -> None:
    local.mkdir()
    local.chmod(0o777)


FAILS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "data are gone": (lambda folder, local: (folder / "tokens").unlink(), "tokens': No such file"),
    "others can write there": (lambda folder, local: open_to_all(local), "is not a folder that only its owner"),
    "no environment": (
        lambda folder, local: None,
        "all nodes use the shared folders instead of copies (cluster.stage): cluster.stage.environment: /usr/bin/python is",
    ),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_node_on_which_anything_fails_says_so_and_uses_the_shared_folders(
    case: str, project: Path, slurm: FakeSlurm, tmp_path: Path, local: Path
) -> None:
    happens, why = FAILS[case]
    (project / "p.sh").write_text("echo $PYTHONPATH")
    words = ["cluster.nodes=1", f"cluster.stage.data=['{tmp_path}/tokens']"]
    if case == "no environment":
        (tmp_path / "python").write_text(PYTHON)
        (tmp_path / "python").chmod(0o755)
        words += ["cluster.stage.environment=true", f"cluster.python={tmp_path}/python"]
    assert main([*WORDS, *words, "submit"]) == 0
    happens(tmp_path, local)
    done = slurm.run("101", timeout_s=240, TMPDIR=str(local.parent))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("the shared folders instead of copies (cluster.stage)") == 1 and why in done.stdout
    (log,) = project.glob("runs/*/*/attempts/0001/rank-0.log")
    assert log.read_text().startswith(f"{log.parents[2]}/code") and str(local) not in log.read_text()
    assert [path for path in local.parent.rglob("*") if path.is_file()] == []  # what nobody uses takes no room


def test_a_data_source_reads_the_copies_and_the_checkpoint_is_bound_to_the_names_in_the_config() -> None:
    copies = {"SLURMTRAIN_COPIES": '["/shared/tokens"]', "SLURMTRAIN_DATA": "/local/data"}
    values = {"_target_": "a.B", "path": "/shared/tokens", "paths": ["/shared/tokens/x.bin", "/shared/tokens2"], "n": 1}
    found = {"path": "/local/data/tokens", "paths": ["/local/data/tokens/x.bin", "/shared/tokens2"]}
    assert with_copies(values, copies) == {**values, **found}
    assert with_copies(values, {}) is values
