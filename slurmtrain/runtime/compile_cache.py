"""Compiled code that jobs share (cluster.compile_cache): loaded before the model compiles, and published once at the end.

Ranks compile into torch's own cache, a folder of their node: torch names its half-written files by process and thread, which
can be the same on two nodes, so no folder that nodes share would be safe. What is shared are archives that torch makes of its
cache: one file for each kind of software, hardware and config, made by a rename. Torch's own keys are compared once more for
each compiled function, so an archive of other shapes does no harm.

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
from pathlib import Path
from typing import Any

import torch

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import replace_file

log = logging.getLogger(__name__)


class CompileCache:
    """The archive of the code that one rank compiles, and all others with the same number of their device and the same stage.

    Args:
        path: the archive.
        publishes: whether this rank is the first of them, which publishes for all.
    """

    def __init__(self, path: Path, *, publishes: bool) -> None:
        self.path, self.publishes = path, publishes
        self._loaded: set[str] = set()

    def load(self) -> bool:
        """Put the archive's content into this node's cache, and return whether there is one that may be used."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                    log.warning(
                        "%s is not used: its code would be executed, and others could have written it", self.path
                    )
                    return False
                content = file.read()
            self._loaded = _pieces(torch.compiler.load_cache_artifacts(content))
        except FileNotFoundError:
            return False
        except Exception as error:  # torch unpickles it: anything can be raised, and a cache must not end a training
            log.warning("torch cannot load %s: %r; the model is compiled again", self.path, error)
            return False
        if self.publishes:
            log.info("compiled code of an earlier job: %s", self.path)
        return True

    def publish(self) -> bool:
        """Replace the archive, if this rank speaks for all and has compiled what is not in it, and return whether it has."""
        if not self.publishes:
            return False
        try:
            saved = torch.compiler.save_cache_artifacts()
            if saved is None or _pieces(saved[1]) <= self._loaded:
                return False
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.path, saved[0], mode=0o600)
        except Exception as error:  # a full disk, or whatever torch raises: the training has succeeded all the same
            log.warning("the compiled code cannot be kept in %s: %r", self.path, error)
            return False
        log.info("compiled code for later jobs: %s", self.path)
        return True


def _pieces(info: Any) -> set[str]:
    """Return the names of what is in an archive, which torch makes of what it was compiled from."""
    return {f"{kind} {name}" for kind, names in (info.artifacts if info is not None else {}).items() for name in names}


def compile_cache_of(
    config: Config, dims: ParallelDims, environment: Environment, device: torch.device
) -> CompileCache | None:
    """Return this rank's archive; None where nothing is compiled, or nothing is to be kept."""
    if config.cluster.compile_cache is None or not config.parallel.compile:
        return None
    key: list[Any] = [platform.python_version(), platform.machine(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        key += [torch.version.cuda, torch.cuda.get_device_name(device)]
    key += [
        config.model,
        dataclasses.asdict(config.parallel),
        dataclasses.asdict(config.lora),
        dataclasses.asdict(dims),
    ]
    key += [dims.micro_batch_size(config.train), config.data.get("seq_len")]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    own = (environment.local_rank, dims.coordinates(environment.rank)["pp"])
    places = [local_rank for tasks in environment.tasks_per_node for local_rank in range(tasks)]
    alike = (rank for rank, place in enumerate(places) if (place, dims.coordinates(rank)["pp"]) == own)
    path = Path(config.cluster.compile_cache) / f"torch-{torch.__version__}-{digest}-{own[0]}-{own[1]}.compiled"
    return CompileCache(path, publishes=next(alike, environment.rank) == environment.rank)
