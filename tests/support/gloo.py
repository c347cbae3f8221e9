"""Ranks as processes of this machine that talk over gloo."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.rank.distributed_context import init_distributed
from slurmtrain.slurm.environment import LAUNCHER_VARIABLE, Environment
from slurmtrain.system import signals
from slurmtrain.system.process import be_killed_with, state

Result = TypeVar("Result")

# Importing torch takes seconds. The fork server does it once, stays single-threaded, and each rank is a fork of it. That costs
# 70 ms of CPU a rank, and no rank has anything of another test: no lock that some thread of the test process held, no groups
# and caches of their meshes, no variables, signal handlers, threads or default types.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "tests.support.rank_server"])


@dataclass(frozen=True)
class Ending:
    """How a rank process ended: with a value, with a traceback, or without a word."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = 0


class Ranks:
    """Processes that were started together."""

    def __init__(self, directory: Path, size: int, function: Callable[..., Any], args: Sequence[Any], only: list[int]):
        self.directory = directory
        self._readers: dict[int, multiprocessing.connection.Connection] = {}
        self._processes: dict[int, Any] = {}
        for rank in only:
            reader, writer = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_be_rank, args=(writer, rank, size, self.directory, function, args))
            process.start()
            writer.close()
            self._readers[rank], self._processes[rank] = reader, process

    def pid(self, rank: int) -> int:
        return int(self._processes[rank].pid)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has said how it ended."""
        return self._readers[rank].poll()

    def endings(self, timeout_s: float = 180) -> list[Ending]:
        """Wait for all; in the order of ranks. The first traceback ends the wait for the others."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, Ending] = {}
        by_reader = {reader: rank for rank, reader in self._readers.items()}
        while len(found) < len(self._readers):
            waiting = [reader for reader, rank in by_reader.items() if rank not in found]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            late = sorted(self._readers.keys() - found.keys())
            states = {rank: state(self.pid(rank)) for rank in late} if not ready else {}
            assert ready, f"ranks {late} are not done after {timeout_s} s: {states}"
            for reader in ready:
                rank = by_reader[reader]  # type: ignore[index]
                try:
                    found[rank] = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
                except EOFError:  # it was killed
                    self._processes[rank].join(60)
                    found[rank] = Ending(exit_code=self._processes[rank].exitcode)
        return [found[rank] for rank in sorted(found)]

    def results(self, timeout_s: float = 180) -> list[Any]:
        """What the function returned on each rank; the first failure fails the test with that rank's traceback."""
        endings = self.endings(timeout_s)
        for rank, ending in enumerate(endings):
            if ending.error is not None:
                pytest.fail(f"rank {rank}:\n{ending.error}", pytrace=False)
            assert ending.exit_code == 0, f"rank {rank} ended with {ending.exit_code}"
        return [ending.value for ending in endings]

    def reap(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()


def _be_rank(
    writer: multiprocessing.connection.Connection,
    rank: int,
    size: int,
    directory: Path,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    from tests.support.rank_server import SERVER

    be_killed_with(SERVER)
    os.environ.update(rank_variables(rank, size))
    try:
        ending = Ending(function(directory, *args))
    except BaseException:
        ending = Ending(error=traceback.format_exc())
    # Plain bytes: torch would send tensors as handles to shared memory that is gone when this process is.
    writer.send_bytes(pickle.dumps(ending))
    writer.close()
    os._exit(0)


def rank_variables(rank: int, size: int) -> dict[str, str]:
    """What cluster=local tells its ranks."""
    return {
        LAUNCHER_VARIABLE: "local",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }


def cluster_config(timeout_s: int = 120) -> ClusterConfig:
    return ClusterConfig(network_interface="lo", rendezvous_timeout_s=timeout_s, collective_timeout_s=120)


def joined(directory: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Meet the other ranks, call function(world, *args) and leave together."""
    world = init_distributed(
        cluster_config(), "cpu", Environment.detect(), directory, signals.install_signal_handlers()
    )
    value = function(world, *args)
    world.leave_together()
    return value


@dataclass
class GlooRanks:
    """`gloo_ranks(n, function, *args)`: n processes meet, each calls function(world, *args); what they returned.

    `with GlooRanks(folder) as gloo_ranks:` leaves none of them behind.
    """

    tmp_path: Path
    started: list[Ranks] = field(default_factory=list)

    def __enter__(self) -> GlooRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for started in self.started:
            started.reap()

    def __call__(self, n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 180) -> list[Any]:
        return self.start(n, joined, function, *args).results(timeout_s)

    def start_joined(self, n: int, function: Callable[..., Any], *args: Any) -> Ranks:
        """As a call, without waiting for the end."""
        return self.start(n, joined, function, *args)

    def start(
        self,
        n: int,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        directory: Path | None = None,
    ) -> Ranks:
        """Start `ranks` (default: all) of a world of n, without making them meet: function(directory, *args)."""
        directory = directory or self.tmp_path / f"world-{len(self.started)}"
        directory.mkdir(exist_ok=True)
        self.started.append(Ranks(directory, n, function, args, list(range(n) if ranks is None else ranks)))
        return self.started[-1]


def wait_until(condition: Callable[[], Result | None], what: str, timeout_s: float = 120) -> Result:
    """Poll a file or a process: there is no event to await. Returns the condition's first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not {what} after {timeout_s} s"
        time.sleep(0.05)
    return value
