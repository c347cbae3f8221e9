"""The files that a sandbox needs before its first process: SLURM's programs, the configuration, munge's key, the plan."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import msgspec

from slurmtrain.errors import ClusterError
from slurmtrain.sandbox.directory import PLAN, Daemon, Plan
from slurmtrain.sandbox.spec import EPILOG, GPU_DEVICES, SandboxSpec, Site, epilog, gres_conf, slurm_conf
from slurmtrain.slurm.command_environment import PREFIX_FILE, path_with
from slurmtrain.slurm.parse_values import CGROUP_PLUGIN_DISABLED, Version, does, parse_version
from slurmtrain.system.files import name_of

_CLIENTS = ("sinfo", "squeue", "scontrol", "scancel", "sbatch", "srun")


def find_programs() -> dict[str, str]:
    """Return the full paths of SLURM's programs. An ordinary user's PATH often lacks the directories of the daemons.

    Raises:
        ClusterError: some are missing.
    """
    found = {name: shutil.which(name) for name in _CLIENTS}
    beside = f"{Path(found['srun'] or '/').parent.parent}/sbin"
    with_daemons = f"{os.environ.get('PATH', '')}:{beside}:/usr/sbin:/sbin:/usr/local/sbin"
    found |= {name: shutil.which(name, path=with_daemons) for name in ("slurmctld", "slurmd", "munged")}
    if missing := [name for name, where in found.items() if where is None]:
        raise ClusterError(
            f"SLURM is not installed here: no {', '.join(missing)} on PATH.", hint="apt-get install slurm-wlm munge"
        )
    return {name: where for name, where in found.items() if where}


def prefix_of(programs: dict[str, str]) -> Path | None:
    """Return the prefix of a SLURM that only this shell's PATH leads to; None for one in a standard directory."""
    folder = Path(programs["srun"]).parent
    usual = str(folder) in ("/usr/bin", "/bin", "/usr/local/bin")
    return None if usual or not (folder.parent / "sbin" / "slurmctld").exists() else folder.parent


def write_files(
    spec: SandboxSpec, directory: Path, first_port: int, programs: dict[str, str], prefix: Path | None = None
) -> None:
    """Write all files that the daemons will read: configuration, munge's key, and the plan for the supervisor.

    Args:
        prefix: recorded beside slurm.conf, so that every verb asks this sandbox with the commands of that SLURM.
    """
    user = name_of(os.getuid())
    if user is None:
        raise ClusterError(f"uid {os.getuid()} has no name on this machine, and SLURM refuses such users.")
    devices = [d for d in GPU_DEVICES if os.path.exists(d) and stat.S_ISCHR(os.stat(d).st_mode)]
    if len(devices) < spec.gpus:
        raise ClusterError(f"this machine has devices to stand in for {len(devices)} GPUs per node, not {spec.gpus}.")
    version = _slurm_version(programs["slurmctld"])
    task_prolog = directory / "task-prolog" if prefix is not None else None
    site = Site(directory, user, socket.gethostname().split(".")[0], first_port, task_prolog)
    for name in ("log", "state", "spool", *(f"spool/{node}" for node in spec.node_names)):
        (directory / name).mkdir(mode=0o700)
    texts = {"slurm.conf": slurm_conf(spec, site), "gres.conf": gres_conf(spec, devices)}
    if does(version, CGROUP_PLUGIN_DISABLED):
        texts["cgroup.conf"] = "CgroupPlugin=disabled\n"
    if prefix is not None:
        texts[PREFIX_FILE] = f"{prefix}\n"
        # A job that was told to export nothing gets the PATH of a login, which has another SLURM or none.
        # One that leads there keeps its order: a front of the person's for one of the commands stays before it.
        texts["task-prolog"] = task_prolog_text(f"{prefix}/bin")
    for name, text in texts.items():
        (directory / name).touch(0o600)
        (directory / name).write_text(text)
    if task_prolog is not None:
        task_prolog.chmod(0o700)
    (directory / EPILOG).touch(0o700)
    (directory / EPILOG).write_text(epilog(site))
    key = directory / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    path = path_with(os.path.dirname(programs["srun"]), os.environ["PATH"])
    (directory / PLAN).write_bytes(msgspec.json.encode(_plan(spec, site, programs, path)))


def task_prolog_text(programs: str) -> str:
    """Return the script that adds the folder of SLURM's commands to a task's PATH, where it is not on it.

    SLURM takes what is printed after "export NAME=" as it stands, without a shell's quotes.
    """
    folder = shlex.quote(programs)
    return f"""#!/bin/sh
case ":$PATH:" in *:{folder}:*) ;; *) printf 'export PATH=%s:%s\\n' {folder} "$PATH" ;; esac
"""


def _plan(spec: SandboxSpec, site: Site, programs: dict[str, str], path: str) -> Plan:
    d = site.directory
    # --force: a home directory that only its owner may enter is enough for a sandbox that only its owner uses.
    munged = [programs["munged"], "--foreground", "--force", f"--socket={d}/munge.sock", f"--key-file={d}/munge.key"]
    munged += [f"--pid-file={d}/state/munged.pid", f"--seed-file={d}/state/munged.seed"]
    daemons = [Daemon("munged", munged, f"{d}/munge.sock")]
    daemons.append(Daemon("slurmctld", [programs["slurmctld"], "-D"], site.first_port))
    daemons += [Daemon(node, [programs["slurmd"], "-D", "-N", node]) for node in spec.node_names]
    env = {"PATH": path, "LANG": "C.UTF-8", "SLURM_CONF": f"{d}/slurm.conf"}
    return Plan(spec.node_names, env, daemons, [[programs["scancel"], "-p", name] for name in ("low", "high")])


def _slurm_version(slurmctld: str) -> Version:
    text = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=10, check=False).stdout
    version = parse_version(text)
    if version is None:
        raise ClusterError(f"`{slurmctld} -V` names no version (it says {text.strip()!r}).")
    return version
