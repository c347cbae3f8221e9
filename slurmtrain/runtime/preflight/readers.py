"""Read the facts of this rank and of its node. Each reader has a bounded time; what it cannot read is None.

A file system whose server is gone holds whoever asks it, for ever and without a way back. So each reader has a thread of its
own, which is left alone when its time is over.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from slurmtrain import __version__
from slurmtrain.choices import Device
from slurmtrain.config.folders import PACKAGE
from slurmtrain.config.schema import Config
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.preflight import shared_folder
from slurmtrain.runtime.preflight.facts import MISSING, NodeFacts, RankFacts
from slurmtrain.slurm.environment import Environment, has_gpu_files, own_node_name
from slurmtrain.system.gpu import GpuFacts, NoAnswerError, read_gpus
from slurmtrain.system.paths import URL
from slurmtrain.system.patience import begin
from slurmtrain.system.process_facts import ProcessFacts, gather_facts

log = logging.getLogger(__name__)

LIMIT_S = 5.0  # for each reader
MOST_PATHS = 64
MANIFESTS = ("manifest.json", "dataset_info.json", "config.json")  # files of a folder that say what is in it
LEAST_TMP_GB = 0.05  # of a node's own folder for temporary files: torch.compile, sockets and data workers need it
LEAST_FILES = 1000
# Variables whose values all ranks should share: they change what is sent, how, and what is computed.
SHARED_VARIABLES = re.compile(
    r"(NCCL_|TORCH_|PYTORCH_)\w+|CUDA_LAUNCH_BLOCKING|CUBLAS_WORKSPACE_CONFIG|(OMP|MKL)_NUM_THREADS"
)
OF_EACH_RANK = re.compile(r"\w*(SOCKET_IFNAME|IB_HCA|NET_DEVICES|RANK|CACHE_DIR|_FILE|HOME|HOSTID|_ID)$")

T = TypeVar("T")


def look_at(path: Path) -> str:
    """Say what a node sees of a file or folder that the config names: its size, or the digest of its manifest.

    Raises:
        OSError: it is there, and cannot be read.
    """
    try:
        if not path.is_dir():
            return f"a file of {path.stat().st_size} bytes" if path.is_file() else MISSING
    except OSError as error:
        if error.errno == errno.ESTALE:  # a mount whose server has forgotten it
            return MISSING
        raise
    manifest = next((path / name for name in MANIFESTS if (path / name).is_file()), None)
    if manifest is None:
        return "a folder without a manifest"
    return f"a folder whose {manifest.name} has the digest {hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]}"


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


@dataclass(frozen=True)
class Readers:
    """Where facts come from, so that tests can say what a node would.

    Attributes:
        process: facts of this process: packages and driver.
        gpus: facts of the GPUs.
        clock: unix seconds.
        path: reads a file or folder that the config names.
        disk: reads a folder in which the job writes.
        folder: which the nodes share; None: that of the attempt.
        limit_s: the time that each of them has.
        folder_limit_s: how long the nodes look for each other's files in the shared folder.
    """

    process: Callable[[], ProcessFacts] = gather_facts
    gpus: Callable[[], tuple[GpuFacts, ...] | None] = read_gpus
    clock: Callable[[], float] = time.time
    path: Callable[[Path], str] = look_at
    disk: Callable[[Path, float], str] = disk_problem
    folder: Path | None = None
    limit_s: float = LIMIT_S
    folder_limit_s: float = shared_folder.LIMIT_S


class NodeReaders:
    """The readers of a node's facts, at work from the beginning until `facts` is called."""

    def __init__(self, config: Config, environment: Environment, run_dir: RunDir, readers: Readers):
        self._environment, self._limit_s = environment, readers.limit_s
        self._until = time.monotonic() + readers.limit_s
        self._process = begin(readers.process)
        self._code = begin(lambda: code_digests(run_dir))
        self._config = begin(lambda: hashlib.sha256(run_dir.config_file.read_bytes()).hexdigest())
        self._paths = {str(path): begin(partial(readers.path, path)) for path in paths_of(config)}
        least = {**dict.fromkeys(own_folders(config), LEAST_TMP_GB), run_dir.path: config.preflight.min_free_gb}
        self._disks = {str(path): begin(partial(readers.disk, path, least_gb)) for path, least_gb in least.items()}
        wants_gpus = gpus_of(config) > 0 and (readers.gpus is not read_gpus or has_gpu_files())
        self._gpus = begin(readers.gpus if wants_gpus else lambda: None)

    def facts(self) -> NodeFacts:
        """Wait for the readers, and return what they have found."""
        process = self._end(self._process, "the packages")
        gpus, driver_error = None, None
        try:
            gpus = self._gpus.result(max(0.0, self._until - time.monotonic()))
        except NoAnswerError as error:
            driver_error = str(error)
        except FutureTimeoutError:
            driver_error = f"nothing within {self._limit_s:.0f} s"
        except Exception as error:
            log.debug("preflight: the GPUs could not be read: %s: %s", type(error).__name__, error)
        return NodeFacts(
            node=self._environment.node,
            rank=self._environment.rank,
            versions=versions_of(process) if process is not None else None,
            packages=process.packages if process is not None else None,
            code=self._end(self._code, "the code"),
            config_hash=self._end(self._config, "config.yaml"),
            paths={name: said for name, each in self._paths.items() if (said := self._end(each, name)) is not None},
            disks={name: said for name, each in self._disks.items() if (said := self._end(each, name)) is not None},
            gpus=gpus,
            driver_error=driver_error,
        )

    def _end(self, future: Future[T], what: str) -> T | None:
        """Return what a reader has found; None if it has failed, or is not done in time."""
        try:
            return future.result(max(0.0, self._until - time.monotonic()))
        except FutureTimeoutError:
            log.debug("preflight: %s could not be read in time", what)
        except Exception as error:
            log.debug("preflight: %s could not be read: %s: %s", what, type(error).__name__, error)
        return None


def rank_facts(config: Config, environment: Environment) -> RankFacts:
    """Return the facts of this rank; it takes a millisecond or two."""
    # Whether torch sees GPUs is looked at only where some are asked for: it takes a moment.
    looks = gpus_of(config) > 0 and (torch.version.cuda or torch.version.hip)
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return RankFacts(
        rank=environment.rank,
        node=environment.node,
        node_rank=environment.node_rank,
        local_rank=environment.local_rank,
        pid=os.getpid(),
        world_size=environment.world_size,
        gpus_seen=torch.cuda.device_count() if looks else None,
        cpus=cpus if len(cpus) < (os.cpu_count() or 0) else None,
        variables=shared_variables(os.environ),
    )


def gpus_of(config: Config) -> int:
    """Return how many GPUs of each node the ranks use."""
    return 0 if config.train.device == Device.CPU else config.cluster.gpus_per_node


def versions_of(process: ProcessFacts) -> dict[str, str]:
    """Return the versions in which all nodes should agree."""
    found = {
        "python": process.system.get("python"),
        "torch": process.packages.get("torch"),
        "cuda": process.gpu.get("cuda"),
        "nccl": process.gpu.get("nccl"),
        "driver": process.gpu.get("driver"),
        "slurmtrain": __version__,
    }
    return {name: version for name, version in found.items() if version}


def shared_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values all ranks should share."""
    return {
        name: value[:200]
        for name, value in variables.items()
        if SHARED_VARIABLES.fullmatch(name) and not OF_EACH_RANK.fullmatch(name)
    }


def code_digests(run_dir: RunDir) -> dict[str, str]:
    """Return a digest of each source file that this process has loaded of this package and of the run's code, by its name.

    Ranks may have loaded other modules, so only files that two nodes both have can be compared.

    Raises:
        OSError: one of them cannot be read.
    """
    roots = [(f"{PACKAGE}{os.sep}", "slurmtrain/"), (f"{run_dir.code.resolve()}{os.sep}", "code/")]
    stage, node = os.environ.get("SLURMTRAIN_STAGE"), own_node_name()
    if stage and node:  # this node's copy of the code
        roots.append((f"{os.path.join(stage, node, 'code')}{os.sep}", "code/"))
    found = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py"):
            continue
        for root, what in roots:
            if name.startswith(root):
                digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()[:12]
                found[f"{what}{name.removeprefix(root)}"] = digest
    return found


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


def own_folders(config: Config) -> list[Path]:
    """Return the folders in which each node writes for itself: that for temporary files, and that of local copies."""
    return [Path(tempfile.gettempdir()), *([Path(config.checkpoint.local)] if config.checkpoint.local else [])]
