"""--host over a real sshd on this machine: submit, status, logs and cancel on a login node, which is a sandbox's."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmtrain.resources import PACKAGE
from slurmtrain.runs.run_dir import RunDir
from tests.slurm.project import SMALL, Project, Run, make_project
from tests.support.slurm_cluster import Cluster

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Path]:
    """A folder with an `ssh` that logs in to an sshd of this test, with keys of its own."""
    assert SSHD is not None, "there is no sshd: apt-get install openssh-server"
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "me"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    shutil.copy(keys / "me.pub", keys / "authorized")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (keys / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/authorized\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nStrictModes no\nPidFile none\nPermitRootLogin yes\n"
    )
    (keys / "ssh_config").write_text(
        f"Host login\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {keys}/me\n  IdentitiesOnly yes\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile {keys}/known\n  LogLevel ERROR\n  BatchMode yes\n"
    )
    (keys / "bin").mkdir()
    (keys / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys}/ssh_config "$@"\n')
    (keys / "bin" / "ssh").chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (keys / "sshd.log").open("w") as log:
        daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(keys / "sshd_config")], stderr=log)
        try:
            deadline = time.monotonic() + 30
            while "listening" not in (keys / "sshd.log").read_text():
                assert time.monotonic() < deadline and daemon.poll() is None, (keys / "sshd.log").read_text()
                time.sleep(0.05)
            yield keys / "bin"
        finally:
            daemon.terminate()
            daemon.wait()


@pytest.mark.slow
def test_a_run_is_submitted_watched_and_cancelled_from_a_laptop(tmp_path: Path, sandbox: Cluster, ssh: Path) -> None:
    laptop: Project = make_project(tmp_path / "laptop", sandbox)
    work = tmp_path / "on the login node"
    python = tmp_path / "python"  # an installation there: its Python knows this package
    python.write_text(f"#!/bin/sh\nexport PYTHONPATH='{PACKAGE.parent}'\nexec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    words = [sys.executable, "-m", "slurmtrain", f"--host=login:{work}", f"--host-python={python}"]
    # Of this machine's SLURM the laptop knows nothing.
    there = {**os.environ, "PATH": f"{ssh}:{os.environ['PATH']}", "PYTHONPATH": str(PACKAGE.parent)}

    def type_in(*verb: str, cwd: Path = laptop.path) -> str:
        done = subprocess.run(
            [*words, *verb], cwd=cwd, env=there, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    cluster = ["+cluster=sandbox", "cluster.sandbox=null", f"cluster.slurm_conf={sandbox.sandbox.slurm_conf}"]
    said = type_in(*cluster, *SMALL, "cluster.nodes=1", "train.steps=100000", "submit")
    path = next(line.strip() for line in said.splitlines() if line.startswith("  /"))
    run = Run(RunDir(Path(path)), sandbox, laptop.path)
    assert work in run.run_dir.path.parents and (run.run_dir.code / "paced.py").exists()
    run.wait_for_step(3)
    assert "running" in type_in("status", "last") and "step" in type_in("logs", "last")
    assert "is told to end" in type_in("cancel", "last")
    assert run.wait_for_end().reason == "cancelled"
    assert "stopped" in type_in("status", "last")
