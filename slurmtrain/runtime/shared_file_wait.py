"""Wait for files that rank 0 writes into a shared folder: less and less often, and first of all on one rank of each node.

A shared file system has no event to await, and its metadata server serves everybody: if each of 1,024 ranks looked
fifty times a second until rank 0 is there, that would be 50,000 directory reads a second. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slurmtrain.runtime.addresses import RendezvousError, interface_towards
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import read_json
from slurmtrain.system.patience import may_pass
from slurmtrain.system.signals import StopDuringStartError

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
NETWORK_HINT = (
    "see rank 0's log; cluster.network_interface=NAME names the network that connects the nodes, "
    "cluster.port_range=LOW-HIGH the ports that a firewall between them lets through"
)


class Pauses:
    """Sleeps that grow from `first_s` to `longest_s`, each randomly a little longer or shorter.

    None is much longer than half of the time that was waited before, so no rank is much too late.
    """

    def __init__(self, longest_s: float = LONGEST_PAUSE_S, *, first_s: float = FIRST_PAUSE_S):
        self._next_s, self._longest_s = first_s, longest_s

    def pause(self) -> None:
        """Sleep once more."""
        time.sleep(self._next_s * random.uniform(0.75, 1.25))  # so that many ranks do not look at the same moment
        self._next_s = min(1.5 * self._next_s, self._longest_s)


T = TypeVar("T")


def await_rank_0(
    path: Path,
    environment: Environment,
    timeout_s: float,
    stop_requested: Callable[[], bool],
    use: Callable[[dict[str, Any]], T],
) -> T:
    """Wait until rank 0 has published its address under `path`, and return what `use` makes of it, which may raise OSError.

    All ranks but the first of each node look ten times less often.

    Raises:
        RendezvousError: the time is over.
        StopDuringStartError: a stop was requested before.
    """
    times = 1 if environment.local_rank == 0 else 10
    pauses, deadline = Pauses(times * LONGEST_PAUSE_S, first_s=times * FIRST_PAUSE_S), time.monotonic() + timeout_s
    own, rank_0 = (
        f"rank {environment.rank} on {environment.node}",
        f"rank 0, expected on node {environment.expected_node(0)},",
    )
    failed = ""
    while True:
        address = look(path)
        if address is not None:
            try:
                return use(address)
            except OSError as error:
                by = interface_towards(address["host"])
                failed = f"{address['host']}:{address['port']}{f' by {by}' if by else ''}: {str(error).splitlines()[0]}"
        if stop_requested():
            raise StopDuringStartError
        if time.monotonic() > deadline and failed:
            raise RendezvousError(f"{own}: {rank_0} cannot be reached at {failed}", hint=NETWORK_HINT)
        if time.monotonic() > deadline:
            said = f"{own}: {rank_0} did not publish its address within {timeout_s:.0f} s"
            raise RendezvousError(said, hint="see rank 0's log", because_of_peer=True)
        pauses.pause()


def look(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that rank 0 has published under `path`; None while it is not there, or the storage fails.

    Raises:
        OSError: the file cannot be read, and that will not pass.
        UnreadableRecordError: it is not a regular file.
    """
    # Listing the directory makes NFS ask its server; opening a name that it remembers as missing does not.
    try:
        return read_json(path) if path.name in os.listdir(path.parent) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        if not may_pass(error):
            raise
        log.warning("%s cannot be read, and is looked for again: %s", path, error.strerror or error)
        return None
