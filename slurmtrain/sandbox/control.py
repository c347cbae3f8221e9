"""Start a sandbox, stop it, and control it in between."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurmtrain.errors import ClusterError
from slurmtrain.sandbox.directory import (
    MARKER,
    PLAN,
    PROCESSES,
    Plan,
    claim_directory,
    claim_ports,
    default_directory,
    recorded,
)
from slurmtrain.sandbox.files import find_programs, prefix_of, write_files
from slurmtrain.sandbox.spec import SandboxSpec
from slurmtrain.slurm.command_environment import clean_environment, path_with, programs_beside
from slurmtrain.system.process import kill_trees, send, wait_until

_UP_TIMEOUT_S = 90.0  # usually 2 to 3 s


@dataclass(frozen=True)
class Sandbox:
    """A sandbox that was started, by this process or by an earlier one."""

    directory: Path
    nodes: tuple[str, ...]

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm.conf"

    def env(self) -> dict[str, str]:
        """Return the environment variables by which a SLURM command talks to this sandbox."""
        programs = programs_beside(str(self.slurm_conf))
        path = {"PATH": path_with(programs, os.environ.get("PATH"))} if programs is not None else {}
        return {"SLURM_CONF": str(self.slurm_conf), **path}

    def run(self, command: Sequence[str], *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a SLURM command in this sandbox; the caller checks the exit code."""
        return subprocess.run(
            list(command),
            env=clean_environment(os.environ, str(self.slurm_conf)),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def node_states(self) -> dict[str, str]:
        """Return each node's state as sinfo names it (`idle`, `mixed`, `down*`, ...); empty while slurmctld does not answer."""
        try:
            done = self.run(["sinfo", "-h", "-N", "-p", "low", "-o", "%N %T"], timeout_s=5.0)
        except subprocess.TimeoutExpired:
            return {}
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def down(self) -> None:
        """End every process of the sandbox and remove its directory, whatever state they are in."""
        found = recorded(self.directory)
        if found is not None:
            send(signal.SIGTERM, [found.supervisor.pid] if found.supervisor.lives() else [])
            wait_until(lambda: not found.supervisor.lives(), timeout_s=20.0)
        _kill_remains(self.directory)  # no process is left, unless the supervisor was killed or hangs
        if (self.directory / MARKER).exists():
            shutil.rmtree(self.directory, ignore_errors=True)


def up(spec: SandboxSpec, directory: Path, *, ends_with: int | None = None) -> Sandbox:
    """Start a sandbox and return once a job has run on all its nodes, and they are idle.

    Args:
        ends_with: pid of a process with which the sandbox ends, however that is killed; None: it lives until `down`.

    Raises:
        ClusterError: SLURM is not installed or cannot simulate several nodes, the place is taken, or a daemon failed
            (its log's last lines are shown).
    """
    programs, directory = find_programs(), directory.absolute()
    lock = claim_directory(directory)
    sandbox = Sandbox(directory, spec.node_names)
    ports = None
    try:
        _clear_remains(directory)
        ports = claim_ports(spec.nodes + 1, seed=str(directory))
        write_files(spec, directory, ports.first, programs, prefix_of(programs))
        _launch_supervisor(directory, ends_with, inherit=(lock, ports.claim))
        _wait_until_idle(sandbox)
        _run_on_all_nodes(sandbox)
    except BaseException:
        sandbox.down()
        raise
    finally:
        os.close(lock)
        if ports:
            os.close(ports.claim)
    return sandbox


def find(name_or_directory: str | Path) -> Sandbox | None:
    """Return the sandbox of that name, or in that directory, if any process of it is alive."""
    is_name = isinstance(name_or_directory, str) and "/" not in name_or_directory
    directory = default_directory(str(name_or_directory)) if is_name else Path(name_or_directory).absolute()
    try:
        if directory.stat().st_uid not in (os.getuid(), 0):
            return None
        plan = msgspec.json.decode((directory / PLAN).read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError):
        return None
    found = recorded(directory)
    lives = found is not None and any(process.lives() for process in found.roots)
    return Sandbox(directory, plan.nodes) if lives else None


def _kill_remains(directory: Path) -> None:
    found = recorded(directory)
    kill_trees(found.roots if found is not None else ())


def _launch_supervisor(directory: Path, ends_with: int | None, *, inherit: tuple[int, ...]) -> None:
    root = Path(__file__).parents[3]  # so that it runs from a source tree that is not installed, from any directory
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "slurmtrain.sandbox.supervisor", str(directory)]
    command += [] if ends_with is None else [str(ends_with)]
    with open(directory / "log" / "supervisor.out", "ab") as out:
        subprocess.run(
            command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=inherit, check=False
        )
    if not wait_until(lambda: (directory / PROCESSES).exists(), timeout_s=30.0):
        raise _failure(directory, "supervisor", "the supervisor of the sandbox did not start")


def _wait_until_idle(sandbox: Sandbox) -> None:
    deadline = time.monotonic() + _UP_TIMEOUT_S
    states: dict[str, str] = {}
    while not (len(states) == len(sandbox.nodes) and set(states.values()) == {"idle"}):
        _refuse_one_node_a_machine(sandbox)
        found = recorded(sandbox.directory)
        cells = found.cells if found is not None else []
        if failed := [c for c in cells if c.exit_status is not None]:
            cell = failed[0]
            what = f"{cell.name} of the sandbox ended at once, with exit code {cell.exit_status}"
            raise _failure(sandbox.directory, cell.name, what)
        if time.monotonic() > deadline:
            silent = [node for node in sandbox.nodes if states.get(node) != "idle"] if states else ["slurmctld"]
            what = f"the sandbox's nodes are not idle after {_UP_TIMEOUT_S:.0f} s ({states or 'slurmctld does not answer'})"
            raise _failure(sandbox.directory, silent[0], what)
        time.sleep(0.05)
        if {c.name for c in cells} >= set(sandbox.nodes):  # before slurmctld serves, sinfo would keep us for seconds
            states = sandbox.node_states()


def _refuse_one_node_a_machine(sandbox: Sandbox) -> None:
    """Raise ClusterError if this SLURM was built for one slurmd per machine, and leaves out every node but the first."""
    told = (_text(sandbox.directory / "log" / f"{name}.out") for name in ("slurmctld", sandbox.nodes[0]))
    if len(sandbox.nodes) > 1 and any("Duplicated NodeHostName" in text for text in told):
        raise ClusterError(
            "this SLURM was built without --enable-multiple-slurmd, so it cannot play several nodes on one machine.",
            hint="sandbox up --nodes 1, or put another SLURM first on PATH: Debian's slurm-wlm",
        )


def _run_on_all_nodes(sandbox: Sandbox) -> None:
    """Run one step over all nodes: a node that SLURM considers idle may still be unable to run anything.

    Raises:
        ClusterError: it did not run.
    """
    nodes = f"--nodes={len(sandbox.nodes)}"
    try:
        tried = sandbox.run(["srun", "--partition=low", nodes, "--ntasks-per-node=1", "true"], timeout_s=_UP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _failure(
            sandbox.directory, "slurmctld", f"a job over all nodes of the sandbox did not end in {_UP_TIMEOUT_S:.0f} s"
        ) from None
    if tried.returncode != 0:
        said = " ".join(tried.stderr.split())
        raise _failure(sandbox.directory, sandbox.nodes[0], f"a job over all nodes of the sandbox failed: {said}")
    _wait_until_idle(sandbox)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _failure(directory: Path, daemon: str, what: str) -> ClusterError:
    """Return an error with the end of a daemon's log in it, since the file itself is removed with the sandbox."""
    lines = _text(directory / "log" / f"{daemon}.out").splitlines()[-8:]
    return ClusterError("\n  | ".join([f"{what}. The end of its log:", *(lines or ["(empty)"])]))


def _clear_remains(directory: Path) -> None:
    """Remove what a sandbox that was not stopped has left here: after a reboot, say."""
    _kill_remains(directory)
    for entry in directory.iterdir():
        if entry.name != MARKER:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
