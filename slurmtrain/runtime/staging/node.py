"""The copies of one node: made by one process, which any signal ends at once, since nothing uses a copy before all are made.

The ranks of a node begin with the file `use` in its folder: lines of shell that put the copies before the shared folders. It
is written last, so that a node whose copying was interrupted has none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.checkpoint.host_memory import available_memory
from slurmtrain.errors import ConfigError
from slurmtrain.runs.stage_record import Item, NodeReport, Plan
from slurmtrain.runtime.staging.copying import copy_tree, unpack
from slurmtrain.runtime.staging.environment import point_to
from slurmtrain.runtime.staging.plan import DATA, ENVIRONMENT
from slurmtrain.system.file_systems import IN_MEMORY, Mount, mount_here
from slurmtrain.system.modes import make_own_folder, open_parent
from slurmtrain.system.node_copies import CHANGED, COPIES, SHARED, SHARED_PYTHON, STAGED_PYTHON

USE = "use"
ROOM = 0.02  # share of a disk that stays free: others need it, too
# The name of a job's folder, which the batch script gives it.
OF_A_JOB = re.compile(r"(?P<cluster>.+)-(?P<job>\d+)-\d+")
CLOCKS_S = 60.0  # so much may the clocks of two nodes differ


@dataclass(frozen=True)
class LiveJobs:
    """This user's jobs that SLURM had not ended.

    Attributes:
        asked: when SLURM was asked, in unix seconds, by the clock of another node.
    """

    asked: float
    ids: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([f"{self.asked:.0f}", *self.ids])

    @classmethod
    def parse(cls, words: str) -> LiveJobs:
        """Return what `str` has made."""
        asked, *ids = words.split()
        return cls(float(asked), tuple(ids))


def stage_node(
    plan: Plan,
    folder: Path,
    node: str,
    *,
    live_jobs: LiveJobs | None = None,
    mount: Callable[[Path], Mount | None] = mount_here,
    memory: Callable[[], int | None] = available_memory,
) -> NodeReport:
    """Make the copies of a node, and return what has become of them.

    Args:
        folder: the job's folder on this node, `TOP/slurmtrain-stage-UID/CLUSTER-JOB-RESTARTS`.
        node: name of this node.
        live_jobs: jobs that SLURM has not ended: what others have left here is removed. None: nothing is.
        mount: returns what a folder lies on.
        memory: returns the bytes of memory that the job has left on this node; None: not known.
    """
    began = time.monotonic()
    own = folder / node
    digests: dict[str, str] = {}
    try:
        _own_folder(folder.parent)
        if live_jobs is not None:
            remove_left_over(folder, live_jobs)
        lies_on = mount(folder.parent)
        if lies_on is not None and lies_on.shared:
            raise ConfigError(
                f"{folder.parent.parent} is no folder of the node: it is {lies_on.kind}, which nodes share"
            )
        _check_room(plan, folder.parent)
        in_memory = lies_on is not None and lies_on.kind in IN_MEMORY
        if in_memory:
            _check_memory(plan, folder.parent, memory())
        own.mkdir(parents=True)
        try:
            for item in plan.items:
                digests[item.name] = _copy(item, own, plan)
            temporary = own / f"{USE}.tmp"
            temporary.write_text(use_lines(plan, own))
            temporary.replace(own / USE)
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)  # nobody uses it, and a full disk is not left full
            raise
    except ConfigError as error:
        return NodeReport(node, _since(began), digests, error.message)
    except (OSError, tarfile.TarError) as error:
        return NodeReport(node, _since(began), digests, _words(error))
    return NodeReport(node, _since(began), digests, in_memory=in_memory)


def use_lines(plan: Plan, own: Path) -> str:
    """Return the lines of shell by which a rank uses the copies in a node's folder."""
    lines = [f'export {SHARED}{name}="${name}"' for name in CHANGED]
    if plan.imports:
        folders = ":".join(str(own / each) for each in plan.imports)
        lines.append(f'export PYTHONPATH={shlex.quote(folders)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    if plan.workdir is not None:
        lines.append(f"export SLURMTRAIN_CODE={shlex.quote(str(own / plan.workdir))}")
    if plan.only_copies:  # `python -m` would import from the working directory first, which nodes share
        lines.append("export PYTHONSAFEPATH=1")
    if plan.python is not None and plan.prefix is not None:
        environment = own / ENVIRONMENT
        programs = shlex.quote(str((environment / plan.python).parent))
        lines += [
            f'export PATH={programs}:"$PATH" VIRTUAL_ENV={shlex.quote(str(environment))}',
            f"export {STAGED_PYTHON}={shlex.quote(str(environment / plan.python))}",
            f"export {SHARED_PYTHON}={shlex.quote(str(Path(plan.prefix) / plan.python))}",
        ]
    copies = {item.source: str(own / item.name) for item in plan.items if item.name.startswith(f"{DATA}/")}
    if copies:
        lines.append(f"export SLURMTRAIN_DATA={shlex.quote(str(own / DATA))}")
        lines.append(f"export {COPIES}={shlex.quote(json.dumps(copies))}")
    return "".join(f"{line}\n" for line in lines)


def remove_left_over(folder: Path, live_jobs: LiveJobs) -> None:
    """Remove the folders of this cluster's jobs that have ended without removing them, beside the folder of this job.

    One that was made after SLURM was asked belongs to a job that has started since.
    """
    own = OF_A_JOB.fullmatch(folder.name)
    if own is None:
        return
    for path in folder.parent.iterdir():
        other = OF_A_JOB.fullmatch(path.name)
        if other is None or other["cluster"] != own["cluster"] or path.name == folder.name:
            continue
        if other["job"] == own["job"] or _is_left_over(path, other["job"], live_jobs):
            shutil.rmtree(path, ignore_errors=True)


def _is_left_over(path: Path, job: str, live_jobs: LiveJobs) -> bool:
    try:
        return job not in live_jobs.ids and path.stat().st_mtime < live_jobs.asked - CLOCKS_S
    except FileNotFoundError:  # another job removes it
        return False


def _copy(item: Item, own: Path, plan: Plan) -> str:
    """Make one copy, and return its digest.

    Raises:
        ConfigError: it is not what it should be.
    """
    target = own / item.name
    if item.name == ENVIRONMENT:
        found = unpack(Path(item.source), target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        found = copy_tree(Path(item.source), target)
    if item.digest is not None and found != item.digest:
        raise ConfigError(f"{item.source} was read here with the digest {found[:12]}, and it is {item.digest[:12]}")
    if item.name == ENVIRONMENT and plan.prefix is not None:
        point_to(Path(plan.prefix), target)
    return found


def _own_folder(folder: Path) -> None:
    """Make the folder of this user's jobs."""
    if not make_own_folder(folder, closed=0o022):
        raise ConfigError(f"{folder} is not a folder that only its owner, user {os.getuid()}, can write to")
    if (parent := open_parent(folder)) is not None:
        raise ConfigError(
            f"{folder} could be replaced by others: they can write to {parent}, which has no sticky bit (chmod +t)"
        )


def _check_room(plan: Plan, folder: Path) -> None:
    disk = shutil.disk_usage(folder)
    left = disk.free - ROOM * disk.total
    if plan.size_bytes > left:
        raise ConfigError(
            f"{plan.size_bytes / 1e9:.2f} GB are to be copied to {folder.parent}, which has {max(left, 0) / 1e9:.2f} GB to give"
        )


def _check_memory(plan: Plan, folder: Path, left: int | None) -> None:
    """Raise where copies in memory would take more than the job has left."""
    if left is not None and plan.size_bytes > left:
        raise ConfigError(
            f"{plan.size_bytes / 1e9:.2f} GB are to be copied to {folder.parent}, which is memory of the job, and it has "
            f"{left / 1e9:.2f} GB left"
        )


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)
