"""The facts that ranks gather about themselves and their nodes before training. A fact that could not be read is left out.

Every rank reports the few facts in which the ranks of a node may differ, and the first rank of each node also those of the
node, so that the facts of 4,096 ranks are a megabyte or two.

A file system whose server is gone blocks whoever asks it, for ever and without a way back. So each reader has a thread of its
own, which is abandoned when its time is over.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurmtrain import __version__
from slurmtrain.choices import Device, FindingKind
from slurmtrain.config.schema import Config
from slurmtrain.rank.addresses import Pauses, look
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import Environment, has_gpu_files
from slurmtrain.system.gpu import GpuFacts, ask_gpus
from slurmtrain.system.paths import URL
from slurmtrain.system.patience import begin
from slurmtrain.system.process_facts import ProcessFacts, gather_facts

log = logging.getLogger(__name__)

LIMIT_S = 5.0  # for each reader
FOLDER_LIMIT_S = 30.0  # until a node sees rank 0's file in the attempt's folder
MOST_PATHS = 64
MISSING = "is missing"  # what a node says of a path of the config that is not there
MANIFESTS = ("manifest.json", "dataset_info.json", "config.json")  # files of a folder that say what is in it
LEAST_TMP_GB = 0.05  # of a node's own folder for temporary files: torch.compile, sockets and data workers need it
LEAST_FILES = 1000


@dataclass(frozen=True)
class NodeFacts:
    """The facts of a node, reported by its first rank.

    Attributes:
        same: what all nodes should share, by kind of finding and name: the versions of packages, Python, CUDA and the driver,
            and the models of GPUs; config.yaml; what is at the paths of the config, in words.
        disks: by folder in which the job writes, why it cannot; empty if it can.
        gpus: those of this job; None where NVML cannot be asked, or none was requested.
        driver_error: why the driver does not answer.
        clock_ahead_s: seconds by which its clock is ahead of rank 0's.
        folder_after_s: seconds until it saw what rank 0 wrote into the attempt's folder; None: it did not in `FOLDER_LIMIT_S`.
    """

    same: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    disks: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[GpuFacts, ...] | None = None
    driver_error: str | None = None
    clock_ahead_s: float = 0.0
    folder_after_s: float | None = 0.0


@dataclass(frozen=True)
class RankFacts:
    """The facts of a rank.

    Attributes:
        node, node_rank: name and number of its node.
        pid: its process.
        gpus_seen: GPUs that are visible to it; None where none was requested, or torch is built for CPUs.
        cpus: CPUs on which it may run; None: any of the machine's.
        of_node: the facts of its node, if it is the first rank there.
    """

    rank: int
    node: str
    node_rank: int = 0
    pid: int = 0
    gpus_seen: int | None = None
    cpus: tuple[int, ...] | None = None
    of_node: NodeFacts | None = None


def look_at(path: Path) -> str:
    """Say what a node sees of a file or folder that the config names: its size, or the digest of its manifest.

    Raises:
        OSError: it is there, and cannot be read.
    """
    try:
        if not path.is_dir():
            return f"is a file of {path.stat().st_size} bytes" if path.is_file() else MISSING
    except OSError as error:
        if error.errno == errno.ESTALE:  # a mount whose server has forgotten it
            return MISSING
        raise
    manifest = next((path / name for name in MANIFESTS if (path / name).is_file()), None)
    if manifest is None:
        return "is a folder without a manifest"
    return f"is a folder whose {manifest.name} has the digest {_digest(manifest)}"


def disk_problem(path: Path, least_gb: float) -> str:
    """Say why nothing can be written in a folder, or that it is nearly full; "" if it is well.

    Raises:
        OSError: it cannot be asked.
    """
    found = os.statvfs(path)
    if found.f_flag & os.ST_RDONLY:
        return "cannot be written: it is mounted read-only"
    if not os.access(path, os.W_OK):
        return f"cannot be written: {os.strerror(errno.EACCES)}"
    free_gb = found.f_bavail * found.f_frsize / 1e9
    if found.f_blocks and free_gb < least_gb:  # file systems of user space that do not count say 0 of 0
        return f"has {free_gb:.2g} GB left"
    if found.f_files and found.f_favail < LEAST_FILES:  # btrfs and others count none
        return f"has room for {found.f_favail} more files"
    return ""


def seconds_until_seen(path: Path, token: str) -> float | None:
    """Look for rank 0's file until it is there; None: it is not within `FOLDER_LIMIT_S`."""
    began, pauses = time.monotonic(), Pauses()
    while (waited := time.monotonic() - began) < FOLDER_LIMIT_S:
        with contextlib.suppress(OSError):
            if (look(path) or {}).get("token") == token:
                return round(waited, 3)
        pauses.pause()
    return None


def node_facts(config: Config, run_dir: RunDir) -> NodeFacts:
    """Read the facts of this node, each for `LIMIT_S` seconds at most."""
    until = time.monotonic() + LIMIT_S
    least = {
        run_dir.path: config.preflight.min_free_gb,
        Path(tempfile.gettempdir()): LEAST_TMP_GB,
        **({Path(config.checkpoint.local): LEAST_TMP_GB} if config.checkpoint.local else {}),
    }
    process, config_file = begin(gather_facts), begin(lambda: _digest(run_dir.config_file))
    paths = {str(path): begin(partial(look_at, path)) for path in paths_of(config)}
    disks = {str(path): begin(partial(disk_problem, path, least_gb)) for path, least_gb in least.items()}
    gpus, driver_error = ask_gpus(LIMIT_S) if gpus_of(config) and has_gpu_files() else (None, None)

    def read(future: Any, what: str) -> Any:
        """Return what a reader has found; None if it has failed, or is not done in time."""
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except Exception as error:
            log.debug("preflight: %s could not be read: %s: %s", what, type(error).__name__, error)
        return None

    known, digest = read(process, "the packages"), read(config_file, "config.yaml")
    models = ", ".join(sorted({gpu.name for gpu in gpus or () if gpu.name}))
    found: dict[str, dict[str, str]] = {
        FindingKind.VERSIONS: (versions_of(known) if known is not None else {}) | ({"GPU": models} if models else {}),
        FindingKind.CODE: {"config.yaml": f"has the digest {digest}"} if digest is not None else {},
        FindingKind.DATA: {name: said for name, each in paths.items() if (said := read(each, name)) is not None},
    }
    return NodeFacts(
        same={kind: values for kind, values in found.items() if values},
        disks={name: said for name, each in disks.items() if (said := read(each, name)) is not None},
        gpus=gpus,
        driver_error=driver_error,
    )


def rank_facts(config: Config, environment: Environment) -> RankFacts:
    """Return the facts of this rank; it takes a millisecond or two."""
    # Whether torch sees GPUs is looked at only where some are requested: it takes a moment.
    looks = gpus_of(config) > 0 and (torch.version.cuda or torch.version.hip)
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return RankFacts(
        rank=environment.rank,
        node=environment.node,
        node_rank=environment.node_rank,
        pid=os.getpid(),
        gpus_seen=torch.cuda.device_count() if looks else None,
        cpus=cpus if len(cpus) < (os.cpu_count() or 0) else None,
    )


def gpus_of(config: Config) -> int:
    """Return how many GPUs of each node the ranks use."""
    return 0 if config.train.device == Device.CPU else config.cluster.gpus_per_node


def versions_of(process: ProcessFacts) -> dict[str, str]:
    """Return the versions in which all nodes should agree."""
    found = {
        "python": process.system.get("python"),
        "cuda": process.gpu.get("cuda"),
        "nccl": process.gpu.get("nccl"),
        "driver": process.gpu.get("driver"),
        "slurmtrain": __version__,
    }
    return {**process.packages, **{name: version for name, version in found.items() if version}}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def paths_of(config: Config) -> list[Path]:
    """Return the absolute paths that the config names for data, weights and restoring."""
    groups: list[Any] = [config.data, config.eval.sets, config.model.get("path"), config.checkpoint.restore_from]
    found = [Path(text) for group in groups for text in _texts(group) if text.startswith("/") and "\0" not in text]
    known = [path for path in found if len(path.parts) > 1 and not re.search(r"[*?\[]", str(path))]
    return list(dict.fromkeys(known))[:MOST_PATHS]


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        if not URL.match(values):
            yield values
    elif isinstance(values, Mapping | list | tuple):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _texts(value)
