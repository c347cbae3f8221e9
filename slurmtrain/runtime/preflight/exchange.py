"""How the facts of all ranks come to rank 0, and its verdict to all: through the store in which they have met.

Each rank writes one value and reads one, so that rank 0 alone sees all of them, in one answer of the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from slurmtrain.errors import LostPeersError, RendezvousError
from slurmtrain.system.signals import StopDuringStartError

LISTEN_EVERY_S = 1.0  # while this rank waits in the store, no handler of a signal of Python's runs


class Exchange:
    """Sends and receives the messages of the checks.

    Args:
        timeout_s: seconds to wait for any other rank.
        stop_requested: returns whether this rank was told to stop, so that it waits for nobody any more.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        stop_requested: Callable[[], bool] = lambda: False,
    ):
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s, self._stop_requested = timeout_s, stop_requested

    def send(self, what: str, text: str, *, of: int | None = None) -> None:
        """Send this rank's part of `what`.

        Args:
            of: the rank as whose part the others read it; None: this one. Which rank is the first of another's node is not
                known to that one: SLURM may hand ranks out in turn (`srun -m cyclic`).
        """
        try:
            self._store.set(f"preflight/{what}/{self._rank if of is None else of}", text)
        except (dist.DistError, RuntimeError) as error:
            raise _rank_0_is_gone(error) from None

    def receive(self, what: str, rank: int) -> str:
        """Wait for a rank's part of `what`, and return it.

        Raises:
            LostPeersError: it does not come.
            StopDuringStartError: this rank was told to stop before it came.
        """
        key = f"preflight/{what}/{rank}"
        try:
            self._wait([key])
            return self._store.get(key).decode()
        except (dist.DistError, RuntimeError) as error:
            raise _rank_0_is_gone(error) from None

    def collect(self, what: str, ranks: Sequence[int] | None = None) -> list[str]:
        """Wait for the parts of all ranks, or of `ranks`, and return them in that order.

        Raises:
            RendezvousError: some do not come; it names them.
            StopDuringStartError: this rank was told to stop before they came.
        """
        wanted = list(range(self._world_size) if ranks is None else ranks)
        keys = [f"preflight/{what}/{rank}" for rank in wanted]
        try:
            self._wait(keys)
            return [each.decode() for each in self._store.multi_get(keys)]
        except (dist.DistError, RuntimeError):
            missing = [rank for rank, key in zip(wanted, keys, strict=True) if not self._store.check([key])]
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise RendezvousError(
                f"{len(missing)} of {len(wanted)} ranks did not report their facts within "
                f"{self._timeout_s:.0f} s: rank {shown}",
                hint="their logs say why; preflight=off skips the checks",
            ) from None

    def meet(self, what: str) -> None:
        """Wait until all ranks are here.

        Raises:
            LostPeersError, RendezvousError: some do not come.
            StopDuringStartError: this rank was told to stop before they came.
        """
        if self._rank != 0:
            self.send(what, "")
            self.receive(what, 0)
            return
        self.collect(what, range(1, self._world_size))
        self.send(what, "")

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
