"""How the facts of all ranks come to rank 0, and its verdict to all: through the store in which they have met.

Rank 0 says when it begins, each rank sends its facts, and rank 0 its verdict. So rank 0 alone sees all facts, in one answer of
the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from slurmtrain.checkpoint.errors import LostPeersError
from slurmtrain.runtime.addresses import RendezvousError
from slurmtrain.system.signals import StopDuringStartError

LISTEN_EVERY_S = 1.0  # while this rank waits in the store, no handler of a signal of Python's runs


class Exchange:
    """Sends and receives the messages of the checks.

    Args:
        store: of this attempt alone.
        timeout_s: seconds to wait for any other rank.
        stop_requested: returns whether this rank was told to stop, so that it waits for nobody any more.
    """

    def __init__(self, store: dist.Store, world_size: int, timeout_s: float, stop_requested: Callable[[], bool]):
        self._store, self._world_size = store, world_size
        self._timeout_s, self._stop_requested = timeout_s, stop_requested

    def send(self, key: str, text: str) -> None:
        """Send a text under a key that no other rank uses.

        Raises:
            LostPeersError: the store has ended with rank 0.
        """
        try:
            self._store.set(key, text)
        except (dist.DistError, RuntimeError) as error:
            raise _rank_0_is_gone(error) from None

    def receive(self, key: str) -> str:
        """Wait for what rank 0 sends under a key.

        Raises:
            LostPeersError: it does not come.
            StopDuringStartError: this rank was told to stop before it came.
        """
        try:
            self._wait([key])
            return self._store.get(key).decode()
        except (dist.DistError, RuntimeError) as error:
            raise _rank_0_is_gone(error) from None

    def collect(self, what: str) -> list[str]:
        """Wait on rank 0 for what each rank sends under `what`/RANK.

        Raises:
            RendezvousError: some do not come; it names them.
            StopDuringStartError: this rank was told to stop before they came.
        """
        keys = [f"{what}/{rank}" for rank in range(self._world_size)]
        try:
            self._wait(keys)
            return [each.decode() for each in self._store.multi_get(keys)]
        except (dist.DistError, RuntimeError):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise RendezvousError(
                f"{len(missing)} of {len(keys)} ranks did not report their facts within {self._timeout_s:.0f} s: "
                f"rank {shown}",
                hint="their logs say why; preflight=off skips the checks",
            ) from None

    def _wait(self, keys: list[str]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait(keys, timedelta(seconds=max(0.001, min(LISTEN_EVERY_S, left))))
                return
            except dist.DistNetworkError:
                raise
            except (dist.DistError, RuntimeError):
                if self._stop_requested():
                    raise StopDuringStartError from None
                if time.monotonic() >= deadline:
                    raise


def _rank_0_is_gone(error: Exception) -> LostPeersError:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LostPeersError(f"rank 0 does not answer any more: {words}", hint="see rank 0's log")
