"""Read the facts of this rank and of its node. Each reader has a bounded time; what it cannot read is None.

A file system whose server is gone holds whoever asks it, for ever and without a way back. So each reader has a thread of its
own, which is left alone when its time is over.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from slurmtrain import __version__
from slurmtrain.choices import Device
from slurmtrain.config.folders import PACKAGE
from slurmtrain.config.schema import Config
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import addresses
from slurmtrain.runtime.preflight import shared_folder
from slurmtrain.runtime.preflight.facts import DiskFacts, GpuFacts, NodeFacts, PathFacts, RankFacts
from slurmtrain.runtime.preflight.gpus import NoAnswerError, read_gpus
from slurmtrain.runtime.preflight.waiting import begin
from slurmtrain.slurm.environment import Environment, has_gpu_files, own_node_name
from slurmtrain.system.paths import URL
from slurmtrain.system.process_facts import ProcessFacts, gather_facts

log = logging.getLogger(__name__)

LIMIT_S = 5.0  # for each reader
ENDS_BYTES = 1 << 16  # that are read of each end of a data file
MOST_ENTRIES = 512  # of a folder of data that are looked at
MOST_PATHS = 64
MANIFESTS = ("manifest.json", "dataset_info.json", "config.json")  # files of a folder that say what is in it
# Variables whose values all ranks should share: they change what is sent, how, and what is computed.
SHARED_VARIABLES = re.compile(
    r"(NCCL_|TORCH_|PYTORCH_)\w+|CUDA_LAUNCH_BLOCKING|CUBLAS_WORKSPACE_CONFIG|(OMP|MKL)_NUM_THREADS"
)
OF_EACH_RANK = re.compile(r"\w*(SOCKET_IFNAME|IB_HCA|NET_DEVICES|RANK|CACHE_DIR|_FILE|HOME|HOSTID|_ID)$")
SLOW_SETTINGS = {  # variable -> values that slow training down
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_IB_DISABLE": ("1",),
    "NCCL_SHM_DISABLE": ("1",),
}
GPU_SETTINGS = frozenset(SLOW_SETTINGS) - {"TORCH_DISTRIBUTED_DEBUG"}

T = TypeVar("T")


@dataclass(frozen=True)
class Readers:
    """Where facts come from, so that tests can say what a node would.

    Attributes:
        process: facts of this process: packages, driver, variables.
        gpus: facts of the GPUs.
        clock: unix seconds.
        looks_at: reads a file or folder that the config names.
        disk: reads a folder in which the job writes.
        limit_s: the time that each of them has.
        folder_limit_s: how long the nodes look for each other's files in the shared folder.
    """

    process: Callable[[], ProcessFacts] = gather_facts
    gpus: Callable[[], tuple[GpuFacts, ...] | None] = read_gpus
    clock: Callable[[], float] = time.time
    looks_at: Callable[[Path], PathFacts] | None = None
    disk: Callable[[Path], DiskFacts] | None = None
    variables: Mapping[str, str] | None = None
    limit_s: float = LIMIT_S
    folder_limit_s: float = shared_folder.LIMIT_S


def end(future: Future[T], what: str, until: float) -> T | None:
    """Return what a reader has found, None if it has failed or is not done at `until`, in seconds of the monotonic clock."""
    try:
        return future.result(max(0.0, until - time.monotonic()))
    except FutureTimeoutError:
        log.debug("preflight: %s could not be read in time", what)
    except Exception as error:
        log.debug("preflight: %s could not be read: %s: %s", what, type(error).__name__, error)
    return None


class NodeReaders:
    """The readers of a node's facts, at work from the beginning until `facts` is called.

    Args:
        interface: the network interface towards the other nodes; None: there are none, or it is not known.
    """

    def __init__(
        self,
        config: Config,
        environment: Environment,
        run_dir: RunDir,
        readers: Readers,
        *,
        interface: str | None,
    ):
        self._config, self._environment, self._readers = config, environment, readers
        self._until = time.monotonic() + readers.limit_s
        look = readers.looks_at or look_at
        disk = readers.disk or look_at_disk
        disks = disks_of(config, run_dir)
        self._process = begin(readers.process)
        self._code = begin(lambda: code_digests(run_dir))
        self._frozen = begin(lambda: hashlib.sha256(run_dir.config_file.read_bytes()).hexdigest())
        self._paths = {str(path): begin(lambda path=path: look(path)) for path in paths_of(config)}  # type: ignore[misc]
        self._disks = {str(path): begin(lambda path=path: disk(path)) for path in disks}  # type: ignore[misc]
        self._memory = begin(available_memory_gb)
        wants_gpus = gpus_of(config) > 0 and (readers.gpus is not read_gpus or has_gpu_files())
        self._gpus = begin(readers.gpus) if wants_gpus else None
        self._interface = interface
        self._mbit = begin(lambda: speed_mbit(interface)) if interface else None
        self._network = begin(lambda: addresses.network_of(interface)) if interface else None

    def facts(self) -> NodeFacts:
        """Wait for the readers, and return what they have found."""
        variables = self._readers.variables if self._readers.variables is not None else os.environ
        process = end(self._process, "the packages", self._until)
        gpus, driver_error = self._gpu_facts()
        return NodeFacts(
            node=self._environment.node,
            rank=self._environment.rank,
            versions=versions_of(process) if process is not None else None,
            packages=process.packages if process is not None else None,
            code=end(self._code, "the code", self._until),
            config_hash=end(self._frozen, "config.yaml", self._until),
            paths=_known((path, end(each, path, self._until)) for path, each in self._paths.items()),
            disks=_known((path, end(each, path, self._until)) for path, each in self._disks.items()),
            gpus=gpus,
            driver_error=driver_error,
            memory_gb=end(self._memory, "the memory", self._until),
            interface=self._interface,
            interface_mbit=end(self._mbit, "the interface", self._until) if self._mbit is not None else None,
            network=end(self._network, "the network", self._until) if self._network is not None else None,
            variables=left_over(variables, gpus=gpus_of(self._config) > 0),
        )

    def _gpu_facts(self) -> tuple[tuple[GpuFacts, ...] | None, str | None]:
        if self._gpus is None:
            return None, None
        try:
            return self._gpus.result(max(0.0, self._until - time.monotonic())), None
        except NoAnswerError as error:
            return None, str(error)
        except FutureTimeoutError:
            return None, f"nothing within {self._readers.limit_s:.0f} s"
        except Exception as error:
            log.debug("preflight: the GPUs could not be read: %s: %s", type(error).__name__, error)
            return None, None


def gpus_of(config: Config) -> int:
    """Return how many GPUs of each node the ranks use."""
    return 0 if config.train.device == Device.CPU else config.cluster.gpus_per_node


def _known(found: Iterable[tuple[str, T | None]]) -> dict[str, T]:
    return {name: value for name, value in found if value is not None}


def rank_facts(environment: Environment, device: str, gpus_seen: int | None, readers: Readers) -> RankFacts:
    """Return the facts of this rank; it takes a millisecond or two."""
    variables = readers.variables if readers.variables is not None else os.environ
    cpus = _affinity()
    return RankFacts(
        rank=environment.rank,
        node=environment.node,
        node_rank=environment.node_rank,
        local_rank=environment.local_rank,
        pid=os.getpid(),
        world_size=environment.world_size,
        device=device,
        gpus_seen=gpus_seen,
        cpus=as_list(cpus) if cpus else None,
        cpus_of_machine=os.cpu_count(),
        numa_nodes=numa_nodes_of(cpus) if cpus else None,
        packages=packages_digest(),
        variables=shared_variables(variables),
    )


def _affinity() -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset()


def as_list(cpus: Collection[int]) -> str:
    """Return CPUs as the kernel lists them: "0-3,8"."""
    parts: list[list[int]] = []
    for each in sorted(cpus):
        if parts and parts[-1][1] == each - 1:
            parts[-1][1] = each
        else:
            parts.append([each, each])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def numa_nodes_of(cpus: Collection[int], root: Path = Path("/sys/devices/system")) -> tuple[int, ...] | None:
    """Return the NUMA nodes of the sockets of these CPUs; None where the kernel does not tell.

    A socket may be divided into several (NPS4, sub-NUMA clustering), and within it the way to a GPU is short.
    """
    nodes: dict[int, set[int]] = {}
    socket_of: dict[int, str] = {}
    try:
        for folder in (root / "node").glob("node[0-9]*"):
            node, its = int(folder.name.removeprefix("node")), members((folder / "cpulist").read_text())
            if its:  # others have memory only
                nodes[node] = its
                socket_of[node] = (root / f"cpu/cpu{min(its)}/topology/physical_package_id").read_text().strip()
    except (OSError, ValueError):
        return None
    sockets = {socket_of[node] for node, its in nodes.items() if its & set(cpus)}
    return tuple(sorted(node for node in nodes if socket_of[node] in sockets)) or None


def members(cpus: str) -> set[int]:
    """Return the CPUs of a list such as "0-3,8".

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in filter(None, cpus.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def packages_digest(path: Iterable[str] | None = None) -> str:
    """Return a digest of the names and versions of all packages on the path of imports, by a list of each folder alone.

    Where it differs between two ranks, they may import other packages, or the same from other folders.
    """
    digest = hashlib.sha256()
    for folder in sys.path if path is None else path:
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info")))
            digest.update("\0".join(["", *names]).encode(errors="surrogatepass") if names else b"")
    return digest.hexdigest()[:16]


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


def left_over(variables: Mapping[str, str], *, gpus: bool) -> dict[str, str]:
    """Return the variables that slow training down, or name an interface that this node does not have."""
    found = {
        name: variables[name]
        for name, values in SLOW_SETTINGS.items()
        if variables.get(name) in values and (gpus or name not in GPU_SETTINGS)
    }
    there = {name for _, name in socket.if_nameindex()}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = variables.get(name, "")
        exact = value.removeprefix("=")
        # Without "=" NCCL takes all that begin so, with "^" all others; gloo takes a list of whole names.
        wanted = [each for each in exact.split(",") if each]
        if wanted and not value.startswith("^") and not any(_fits(each, there, name, value) for each in wanted):
            found[name] = value
    return found


def _fits(wanted: str, there: Collection[str], variable: str, value: str) -> bool:
    if variable.startswith("GLOO") or value.startswith("="):
        return wanted.partition(":")[0] in there
    return any(each.startswith(wanted.partition(":")[0]) for each in there)


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
                with open(name, "rb") as file:
                    found[f"{what}{name.removeprefix(root)}"] = hashlib.sha256(file.read()).hexdigest()[:12]
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
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _texts(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value)


def look_at(path: Path) -> PathFacts:
    """Return what a node sees of a file or folder that the config names.

    Raises:
        OSError: it is there, and cannot be read.
    """
    try:
        if path.is_dir():
            return _look_at_folder(path)
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return PathFacts("missing")
    except OSError as error:
        if error.errno == errno.ESTALE:  # a mount whose server has forgotten it
            return PathFacts("missing")
        raise
    if not path.is_file():
        return PathFacts("file")
    return PathFacts("file", size, _ends_of(path, size))


def _ends_of(path: Path, size: int) -> str:
    with path.open("rb", buffering=0) as file:
        head = os.pread(file.fileno(), ENDS_BYTES, 0)
        tail = os.pread(file.fileno(), ENDS_BYTES, max(0, size - ENDS_BYTES)) if size > ENDS_BYTES else b""
    return hashlib.sha256(head + tail).hexdigest()[:16]


def _look_at_folder(path: Path) -> PathFacts:
    listing, total = hashlib.sha256(), 0
    with os.scandir(path) as entries:
        found = sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)
    for entry in found[:MOST_ENTRIES]:
        size = entry.stat().st_size if entry.is_file() else 0
        total += size
        listing.update(f"{entry.name}\0{size}\n".encode(errors="surrogatepass"))
    manifest = next((path / name for name in MANIFESTS if (path / name).is_file()), None)
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()[:16] if manifest is not None else None
    return PathFacts("folder", total, digest, listing.hexdigest()[:16])


def disks_of(config: Config, run_dir: RunDir) -> list[Path]:
    """Return the folders in which the job writes: the run's, each node's own for temporary files, and that of local copies."""
    found = [run_dir.path, Path(tempfile.gettempdir())]
    if config.checkpoint.local:
        found.append(Path(config.checkpoint.local))
    return list(dict.fromkeys(found))


def look_at_disk(path: Path) -> DiskFacts:
    """Return how much room a folder has.

    Raises:
        OSError: it cannot be asked.
    """
    found = os.statvfs(path)
    error = "it is mounted read-only" if found.f_flag & os.ST_RDONLY else None
    if error is None and not os.access(path, os.W_OK):
        error = os.strerror(errno.EACCES)
    files = found.f_favail if found.f_files else None  # btrfs and others count none
    # File systems of user space that do not count say 0 of 0.
    free_gb = round(found.f_bavail * found.f_frsize / 1e9, 3) if found.f_blocks else None
    return DiskFacts(free_gb, files, error)


def available_memory_gb(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """Return the memory that is available on this machine."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    return round(int(found[1]) * 1024 / 1e9, 2) if found else None


def speed_mbit(interface: str) -> int | None:
    """Return the speed of a network interface as the kernel states it; None where it has none, as the loopback.

    Raises:
        OSError, ValueError: the kernel does not say.
    """
    speed = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    return speed if speed > 0 else None


def interface_of(environment: Environment, store_address: tuple[str, int] | None) -> str | None:
    """Return the interface by which this node reaches rank 0, or they reach it; None on a single node."""
    if environment.single_node or store_address is None:
        return None
    return addresses.interface_towards(addresses.address_of(store_address[0]))


def with_clock(facts: NodeFacts, clock: tuple[float, float] | None) -> NodeFacts:
    """Add what this node's clock showed just before and after the common moment."""
    return replace(facts, clock=clock)
