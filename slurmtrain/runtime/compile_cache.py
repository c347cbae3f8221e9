"""Compiled code that jobs share (cluster.compile_cache): loaded before the model compiles, and published once at the end.

Ranks compile into torch's own cache, a folder of their node: torch names its half-written files by process and thread, which
can be the same on two nodes, so no folder that nodes share would be safe. What is shared are archives that torch makes of its
cache. An archive is one file, made by a rename, with a digest of its content, the names of the pieces in it and the key of
what it was made for before it; so nobody reads half of one, or one of other versions, hardware or shapes. Torch's own keys are
compared once more for each compiled function.

There may be several archives of one key: a rank loads all of them. Torch names its pieces by what they were compiled from, and
an archive is named by its pieces. So jobs that publish at the same time add to each other's work, and need no lock: one that
has compiled more adds an archive, and removes those of which it holds every piece.

Loading an archive runs code of it. So only files count that belong to this user, and that nobody else can write to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import logging
import os
import platform
import stat
import sys
from collections.abc import Iterable, Mapping
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

MAGIC = b"slurmtrain compile cache 2\n"
MOST_ARCHIVES = 16  # of one key and part; the oldest ones beyond are removed
SHAPES_OF_DATA = ("seq_len", "packing", "document_mask")  # what a data config says of the shapes that a model sees
Pieces = frozenset[tuple[str, str]]  # (kind, name) of each piece, as torch says them


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
    """The archives of one rank's compiled code.

    Args:
        folder: the folder of archives.
        key: what the archives are for; see `key_of`.
        part: which ranks' code they hold.

    Attributes:
        name: beginning of the names of all archives of this key and part.
    """

    def __init__(self, folder: Path, key: dict[str, Any], part: Part) -> None:
        self.folder, self.name = folder, f"{_name(key)}-{part.device_index}-{part.stage}"
        self._key, self._part = key, part
        self._loaded: Pieces = frozenset()

    def load(self) -> int:
        """Put the archives' content into this node's cache, and return the number of its pieces; 0: there is none."""
        seen: set[Path] = set()
        # Listed once more: what is gone when it is to be read is in an archive that was made since.
        while new := [path for path in self._archives() if path not in seen]:
            seen.update(new)
            for content in filter(None, (read_archive(path, self._key) for path in new)):
                try:
                    self._loaded |= _pieces(torch.compiler.load_cache_artifacts(content))
                # Torch unpickles it: anything can be raised, and a cache must not end a training.
                except Exception as error:
                    log.warning("torch cannot load an archive of %s: %r; it is compiled again", self.name, error)
        if self._part.publishes and self._loaded:
            log.info("compiled code of earlier jobs: %d pieces from %s/%s", len(self._loaded), self.folder, self.name)
        return len(self._loaded)

    def publish(self) -> bool:
        """Add an archive, if this rank speaks for its part and has compiled something that was in none."""
        if not self._part.publishes:
            return False
        try:
            saved = torch.compiler.save_cache_artifacts()
            pieces = _pieces(saved[1]) if saved is not None else frozenset()
            if saved is None or pieces <= self._loaded:
                return False
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / f"{self.name}-{_digest(sorted(pieces))[:16]}.compiled"
            replace_file(path, archive_bytes(saved[0], self._key, pieces), mode=0o600)
            self._remove_superseded(path, pieces)
        except OSError as error:
            log.warning("the compiled code cannot be kept in %s: %s", self.folder, error.strerror or error)
            return False
        except Exception as error:  # whatever torch raises: the training has succeeded all the same
            log.warning("the compiled code cannot be kept in %s: %r", self.folder, error)
            return False
        log.info("compiled code for later jobs: %s", path)
        return True

    def _archives(self) -> list[Path]:
        return sorted(self.folder.glob(f"{glob.escape(self.name)}-*.compiled"))

    def _remove_superseded(self, own: Path, pieces: Pieces) -> None:
        """Remove archives of which this one has every piece, and the oldest of too many."""
        kept: list[tuple[float, Path]] = []
        for path in self._archives():
            if path == own:
                continue
            with contextlib.suppress(OSError):  # removed by another job
                held = _pieces_in(path)
                if held is not None and held <= pieces:
                    path.unlink()
                else:
                    kept.append((path.stat().st_mtime, path))
        for _, path in sorted(kept, reverse=True)[MOST_ARCHIVES - 1 :]:
            with contextlib.suppress(OSError):
                path.unlink()


def compile_cache_of(
    config: Config, dims: ParallelDims, environment: Environment, device: torch.device
) -> CompileCache | None:
    """Return this rank's archives; None where nothing is compiled, or nothing is to be kept."""
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
        "data": _shapes_of_data(config.data),
        "eval": sorted(_digest(_shapes_of_data(each)) for each in config.eval.sets.values()),
    }
    return {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "hardware": hardware,
        "shapes": _digest(shapes),
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


def archive_bytes(content: bytes, key: dict[str, Any], pieces: Pieces = frozenset()) -> bytes:
    """Return the bytes of an archive: a line with the key, the pieces and the digest of the content, then the content."""
    head = {"key": key, "pieces": sorted(pieces), "sha256": hashlib.sha256(content).hexdigest()}
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
        said = json.loads(head) if whole.startswith(MAGIC) else {}
    except ValueError:
        said = {}
    if (said.get("key"), said.get("sha256")) != (key, hashlib.sha256(content).hexdigest()):
        log.warning("%s is damaged or for other versions; the model is compiled again", path)
        return None
    return content


def _pieces_in(path: Path) -> Pieces | None:
    """Return the pieces that an archive says it has; None if it is none. The content is not read: it may be large."""
    with path.open("rb") as file:
        is_one, head = file.readline() == MAGIC, file.readline()
    try:
        return frozenset((str(kind), str(name)) for kind, name in json.loads(head)["pieces"]) if is_one else None
    except (ValueError, TypeError, LookupError):
        return None


def _shapes_of_data(data: Any) -> Any:
    """Return what a data config, or each source of a mixture, says of the shapes that a model sees; not where the data lie."""
    if not isinstance(data, Mapping):
        return None
    sources = data.get("sources")
    mixed = sorted(map(_digest, map(_shapes_of_data, sources.values()))) if isinstance(sources, Mapping) else []
    return {**{name: data.get(name) for name in SHAPES_OF_DATA}, "sources": mixed}


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _pieces(info: Any) -> Pieces:
    artifacts: dict[str, Iterable[str]] = info.artifacts if info is not None else {}
    return frozenset((kind, name) for kind, names in artifacts.items() for name in names)


def _name(key: dict[str, Any]) -> str:
    return f"torch-{key['torch']}-{_digest(key)[:16]}"


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
