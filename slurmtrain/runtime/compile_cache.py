"""Compiled code that jobs share (cluster.compile_cache): loaded before the model compiles, and published once at the end.

Ranks compile into torch's own cache, a folder of their node: torch names its half-written files by process and thread, which
can be the same on two nodes, so no folder that nodes share would be safe. What is shared are archives that torch makes of its
cache. An archive is one file, replaced by a rename, with a digest of its content and the key of what it was made for before
it; so nobody reads half of one, or one of other versions, hardware or shapes. Torch's own keys are compared once more for each
compiled function.

Loading an archive runs code of it. So only files count that belong to this user, and that nobody else can write to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import replace_file

log = logging.getLogger(__name__)

MAGIC = b"slurmtrain compile cache 1\n"


@dataclass(frozen=True)
class Part:
    """The ranks that compile the same code: those with the same number of their device, and the same pipeline stage.

    Attributes:
        publishes: whether this rank is the first of them, which publishes for all.
    """

    device_index: int
    stage: int
    publishes: bool


class CompileCache:
    """The archive of one rank's compiled code.

    Args:
        folder: the folder of archives.
        key: what the archive is for; see `key_of`.
        part: which ranks' code it holds.
    """

    def __init__(self, folder: Path, key: dict[str, Any], part: Part) -> None:
        self.path = folder / f"{_name(key)}-{part.device_index}-{part.stage}.compiled"
        self._key, self._part = key, part
        self._loaded: frozenset[tuple[str, str]] = frozenset()

    def load(self) -> int:
        """Put the archive's content into this node's cache, and return the number of its pieces; 0: there is none."""
        content = read_archive(self.path, self._key)
        if content is None:
            return 0
        try:
            self._loaded = _pieces(torch.compiler.load_cache_artifacts(content))
        except Exception as error:  # torch unpickles it: anything can be raised, and a cache must not end a training
            log.warning("torch cannot load %s: %r; the model is compiled again", self.path, error)
            return 0
        if self._part.publishes:
            log.info("compiled code of earlier jobs: %d pieces from %s", len(self._loaded), self.path)
        return len(self._loaded)

    def publish(self) -> bool:
        """Replace the archive, if this rank speaks for its part and has compiled something that is not in it yet."""
        if not self._part.publishes:
            return False
        try:
            saved = torch.compiler.save_cache_artifacts()
            if saved is None or _pieces(saved[1]) <= self._loaded:
                return False
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.path, archive_bytes(saved[0], self._key), mode=0o600)
        except OSError as error:
            log.warning("the compiled code cannot be kept in %s: %s", self.path.parent, error.strerror or error)
            return False
        except Exception as error:  # whatever torch raises: the training has succeeded all the same
            log.warning("the compiled code cannot be kept in %s: %r", self.path.parent, error)
            return False
        log.info("compiled code for later jobs: %s", self.path)
        return True


def compile_cache_of(
    config: Config, dims: ParallelDims, environment: Environment, device: torch.device
) -> CompileCache | None:
    """Return this rank's archive; None where nothing is compiled, or nothing is to be kept."""
    if config.cluster.compile_cache is None or not config.parallel.compile:
        return None
    return CompileCache(Path(config.cluster.compile_cache), key_of(config, dims, device), part_of(environment, dims))


def key_of(config: Config, dims: ParallelDims, device: torch.device) -> dict[str, Any]:
    """Return what compiled code depends on: versions, hardware, and what of the config gives the model its shapes."""
    hardware = [platform.machine(), _cpu_model(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        hardware += [torch.cuda.get_device_name(device), *map(str, torch.cuda.get_device_capability(device))]
    shapes = {
        "model": config.model,
        "parallel": dataclasses.asdict(config.parallel),
        "lora": dataclasses.asdict(config.lora),
        "dims": dataclasses.asdict(dims),
        "micro_batch_size": dims.micro_batch_size(config.train),
    }
    return {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "hardware": hardware,
        "shapes": hashlib.sha256(json.dumps(shapes, sort_keys=True, default=str).encode()).hexdigest(),
    }


def part_of(environment: Environment, dims: ParallelDims) -> Part:
    """Return the ranks that compile the same code as this one."""

    def of(rank: int, local_rank: int) -> tuple[int, int]:
        return local_rank, dims.coordinates(rank)["pp"]

    own = of(environment.rank, environment.local_rank)
    first, rank = environment.rank, 0
    for tasks in environment.tasks_per_node:
        for local_rank in range(tasks):
            if rank < first and of(rank, local_rank) == own:
                first = rank
            rank += 1
    return Part(*own, publishes=first == environment.rank)


def archive_bytes(content: bytes, key: dict[str, Any]) -> bytes:
    """Return the bytes of an archive: a line with the key and the digest of the content, then the content."""
    head = {"key": key, "sha256": hashlib.sha256(content).hexdigest()}
    return MAGIC + json.dumps(head, sort_keys=True).encode() + b"\n" + content


def read_archive(path: Path, key: dict[str, Any]) -> bytes | None:
    """Return the content of an archive; None if there is none, or none that may be used."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                log.warning("%s is not used: its code would be executed, and others could have written it", path)
                return None
            whole = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read: %s; the model is compiled again", path, error.strerror)
        return None
    head, _, content = whole.removeprefix(MAGIC).partition(b"\n")
    try:
        said = json.loads(head) if whole.startswith(MAGIC) else None
    except ValueError:
        said = None
    if said != {"key": key, "sha256": hashlib.sha256(content).hexdigest()}:
        log.warning("%s is damaged or for other versions; the model is compiled again", path)
        return None
    return content


def _pieces(info: Any) -> frozenset[tuple[str, str]]:
    artifacts: dict[str, Iterable[str]] = info.artifacts if info is not None else {}
    return frozenset((kind, name) for kind, names in artifacts.items() for name in names)


def _name(key: dict[str, Any]) -> str:
    return f"torch-{key['torch']}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    if not sys.platform.startswith("linux"):
        return platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
