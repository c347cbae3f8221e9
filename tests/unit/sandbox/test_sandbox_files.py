"""What a sandbox writes for SLURM, by version, and which SLURM its commands are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slurmtrain.errors import UsageError
from slurmtrain.sandbox import SandboxSpec
from slurmtrain.sandbox.directory import PLAN, PROCESSES
from slurmtrain.sandbox.files import find_programs, write_files
from slurmtrain.sandbox.spec import Site, slurm_conf
from slurmtrain.slurm.command_environment import PREFIX_FILE, clean_environment, programs_beside, submission_environment
from slurmtrain.system.process import ProcessMark, wait_until
from tests.support.runs import refused

PROGRAMS = ("sinfo", "squeue", "scontrol", "scancel", "sbatch", "srun", "slurmctld", "slurmd")


def a_slurm(prefix: Path, monkeypatch: pytest.MonkeyPatch, version: str = "25.05.9") -> Path:
    """A folder that looks like an installed SLURM of this version, and is first on PATH."""
    for name in PROGRAMS:
        program = prefix / ("sbin" if name.endswith("d") else "bin") / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\necho slurm {version}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{prefix}/bin:{prefix}/sbin:{os.environ['PATH']}")
    return prefix


def test_a_sandbox_ends_with_the_process_that_it_was_begun_for_however_that_is_killed() -> None:
    """Here one without daemons. The path of its socket has to be short."""
    owner = subprocess.Popen(["sleep", "600"])
    directory = Path(tempfile.mkdtemp(prefix="sandbox-"))
    try:
        (directory / PLAN).write_text("{}")
        command = [sys.executable, "-m", "slurmtrain.sandbox.supervisor", str(directory), str(owner.pid)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        assert wait_until((directory / PROCESSES).exists, timeout_s=60)
        supervisor = ProcessMark(**json.loads((directory / PROCESSES).read_text())["supervisor"])
        assert supervisor.lives() and directory.exists()
        owner.kill()
        owner.wait()
        assert wait_until(lambda: not supervisor.lives(), timeout_s=60) and not directory.exists()
    finally:
        owner.kill()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(("version", "cgroups"), [("22.05.8", None), ("23.11.11", None), ("24.05.0", "disabled")])
def test_slurmd_needs_no_cgroups_where_it_can_be_told_so(
    tmp_path: Path, version: str, cgroups: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = tmp_path / "sandbox"
    sandbox.mkdir()
    prefix = a_slurm(tmp_path / "slurm", monkeypatch, version)
    write_files(SandboxSpec(nodes=1), sandbox, 17000, find_programs(), prefix)
    conf = sandbox / "cgroup.conf"
    assert (conf.read_text() if conf.exists() else None) == (cgroups and f"CgroupPlugin={cgroups}\n")


@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        ("requeue", ("PreemptMode=REQUEUE", "PreemptMode=REQUEUE GraceTime=10")),
        ("cancel", ("PreemptMode=CANCEL", "PreemptMode=CANCEL GraceTime=10")),
        ("suspend", ("PreemptMode=SUSPEND,GANG", "PreemptMode=SUSPEND GraceTime=10")),
    ],
)
def test_a_sandbox_preempts_as_it_was_asked_to(mode: str, lines: tuple[str, str], tmp_path: Path) -> None:
    text = slurm_conf(SandboxSpec(preempt_mode=mode), Site(tmp_path, "me", "here", 17000))
    assert f"\n{lines[0]}\n" in text and f" {lines[1]} " in text
    with pytest.raises(UsageError, match="preempt_mode='kill'"):
        SandboxSpec(preempt_mode="kill")


def test_a_slurm_that_lacks_a_program_is_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = a_slurm(tmp_path / "slurm", monkeypatch)
    assert find_programs()["slurmctld"] == str(prefix / "sbin" / "slurmctld")
    (prefix / "bin" / "sinfo").unlink()
    monkeypatch.setenv("PATH", f"{prefix}/bin")
    assert "SLURM is not installed here: no sinfo" in refused("sandbox", "up", "--name", "none", code=1)


def test_the_commands_of_a_sandbox_are_those_of_its_own_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "sandbox" / "slurm.conf"
    conf.parent.mkdir()
    conf.touch()
    assert programs_beside(str(conf)) is None and programs_beside(None) is None
    noted = conf.with_name(PREFIX_FILE)
    noted.touch(0o600)
    noted.write_text("/opt/slurm\n")
    path = f"/opt/slurm/bin{os.pathsep}/usr/bin"
    assert clean_environment({"PATH": "/usr/bin"}, str(conf))["PATH"] == path
    assert submission_environment({"PATH": path, "SLURM_CONF": str(conf)})["PATH"] == path  # in the job
    noted.chmod(0o666)  # anybody could have written it
    assert programs_beside(str(conf)) is None
    noted.unlink()
    noted.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("/opt/slurm\n")
    assert programs_beside(str(conf)) is None
