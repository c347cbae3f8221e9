"""What this machine shows of a cluster besides SLURM: containers, modules, shared file systems. Compute nodes may differ."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.system.file_systems import write_speed_mb_per_s

MODULES_SHOWN = 12
# Modules that a training job may want, the most wanted first.
_WANTED = (
    "cuda",
    "nccl",
    "pytorch",
    "python",
    "conda",
    "miniforge",
    "apptainer",
    "singularity",
    "gcc",
    "openmpi",
    "rocm",
)


@dataclass(frozen=True)
class LoginNode:
    """Software and file systems of the machine on which the person types.

    Attributes:
        containers: of apptainer, singularity and enroot those that are there.
        modules: whether there is a `module` command.
        module_names: some that a training job may want; (): none were found.
        write_mb_per_s: roughly what one process writes to the folder of the runs; None: not measured.
    """

    containers: tuple[str, ...] = ()
    modules: bool = False
    module_names: tuple[str, ...] = ()
    write_mb_per_s: float | None = None


def look_at_login_node(runs_dir: Path, variables: Mapping[str, str] = os.environ, *, measure: bool = True) -> LoginNode:
    """Return what is found on this machine.

    Args:
        runs_dir: where runs are kept, or would be.
        measure: write some megabytes there for a moment, to see how fast that is.
    """
    listing = _module_listing(variables)
    there = next((each for each in (runs_dir, *runs_dir.parents) if each.is_dir()), Path("/"))
    return LoginNode(
        containers=tuple(name for name in ("apptainer", "singularity", "enroot") if shutil.which(name)),
        modules=bool(_module_command(variables)) or "MODULEPATH" in variables,
        module_names=wanted_modules(listing),
        write_mb_per_s=write_speed_mb_per_s(there) if measure else None,
    )


def wanted_modules(listing: str) -> tuple[str, ...]:
    """Return the modules in `module --terse avail` that a training job may want, the most wanted first."""
    names = [line.strip().removesuffix("(default)").rstrip("/") for line in listing.splitlines()]
    names = [name for name in names if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+/-]*", name)]
    found: list[str] = []
    for wanted in _WANTED:
        matching = [name for name in names if wanted in re.split(r"[/_-]", name.lower())]
        found += [name for name in matching[-3:] if name not in found]  # versions are listed in their order
    return tuple(found[:MODULES_SHOWN])


def _module_command(variables: Mapping[str, str]) -> list[str]:
    """Return the program behind the shell function `module`: Lmod's or that of Environment Modules."""
    for name in ("LMOD_CMD", "MODULES_CMD"):
        path = variables.get(name, "")
        if path.startswith("/") and os.access(path, os.X_OK):
            return [path]
    path = shutil.which("modulecmd") or ""
    return [path] if path else []


def _module_listing(variables: Mapping[str, str]) -> str:
    command = _module_command(variables)
    if not command:
        return ""
    try:
        done = subprocess.run(
            [*command, "bash", "--terse", "avail"],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2.0,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stderr or done.stdout  # `module` prints lists on standard error, and shell code on standard output
