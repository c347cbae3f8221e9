"""What a sandbox needs on disk before its first process: SLURM's programs, the configuration, munge's key, the plan."""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import shutil
import socket
import stat
import subprocess
from pathlib import Path

from slurmtrain.errors import ClusterError
from slurmtrain.launch.sandbox.directory import PLAN
from slurmtrain.launch.sandbox.spec import EPILOG, GPU_DEVICES, SandboxSpec, Site, epilog, gres_conf, slurm_conf

_DAEMONS = ("munged", "slurmctld", "slurmd")
_CLIENTS = ("sinfo", "squeue", "scontrol", "scancel", "sbatch", "srun")


def find_programs() -> dict[str, str]:
    """Full paths of SLURM's programs. An ordinary user's PATH often lacks the directories where daemons are."""
    path = os.environ.get("PATH", "")
    found = {name: shutil.which(name, path=path) for name in _CLIENTS}
    found |= {name: shutil.which(name, path=f"{path}:/usr/sbin:/sbin:/usr/local/sbin") for name in _DAEMONS}
    if missing := [name for name, where in found.items() if where is None]:
        raise ClusterError(
            f"SLURM is not installed here: no {', '.join(missing)} on PATH.", hint="apt-get install slurm-wlm munge"
        )
    return {name: where for name, where in found.items() if where}


def write_files(spec: SandboxSpec, directory: Path, first_port: int, programs: dict[str, str]) -> None:
    """All that the daemons will read: configuration, munge's key, and the plan for the supervisor."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise ClusterError(f"uid {os.getuid()} has no name on this machine, and SLURM refuses such users.") from None
    devices = [d for d in GPU_DEVICES if os.path.exists(d) and stat.S_ISCHR(os.stat(d).st_mode)]
    if len(devices) < spec.gpus:
        raise ClusterError(f"this machine has devices to stand in for {len(devices)} GPUs per node, not {spec.gpus}.")
    version = _slurm_version(programs["slurmctld"])
    site = Site(directory, user, socket.gethostname().split(".")[0], first_port, version)
    for name in ("log", "state", "spool", *(f"spool/{node}" for node in spec.node_names)):
        (directory / name).mkdir(mode=0o700)
    for name, text in (("slurm.conf", slurm_conf(spec, site)), ("gres.conf", gres_conf(spec, devices))):
        (directory / name).touch(0o600)
        (directory / name).write_text(text)
    (directory / EPILOG).touch(0o700)
    (directory / EPILOG).write_text(epilog(site))
    key = directory / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    (directory / PLAN).write_text(json.dumps(_plan(spec, directory, first_port, programs)))


def _plan(spec: SandboxSpec, directory: Path, first_port: int, programs: dict[str, str]) -> dict[str, object]:
    munge_socket = f"{directory}/munge.sock"
    # --force: a home directory that only its owner may enter is enough for a sandbox that only its owner uses.
    munged = [
        programs["munged"],
        "--foreground",
        "--force",
        f"--socket={munge_socket}",
        f"--key-file={directory}/munge.key",
    ]
    munged += [f"--pid-file={directory}/state/munged.pid", f"--seed-file={directory}/state/munged.seed"]
    return {
        "nodes": spec.node_names,
        "env": {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "SLURM_CONF": f"{directory}/slurm.conf"},
        "daemons": [
            {"name": "munged", "argv": munged, "ready_file": munge_socket},
            {"name": "slurmctld", "argv": [programs["slurmctld"], "-D"], "ready_port": first_port},
            *({"name": node, "argv": [programs["slurmd"], "-D", "-N", node]} for node in spec.node_names),
        ],
        "stop_commands": [[programs["scancel"], "-p", partition] for partition in ("low", "high")],
    }


def _slurm_version(slurmctld: str) -> tuple[int, int]:
    text = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=10, check=False).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    if not match:
        raise ClusterError(f"`{slurmctld} -V` names no version (it says {text.strip()!r}).")
    return int(match[1]), int(match[2])
