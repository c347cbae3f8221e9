"""How the facts of all ranks come to rank 0, and its verdict to all: through the store in which they have met.

Each rank writes one value and reads one, so that rank 0 alone sees all of them, in one answer of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from slurmtrain.errors import LostPeersError, RendezvousError


class Exchange:
    """Sends and receives the messages of the checks.

    Args:
        timeout_s: seconds to wait for any other rank.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float):
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout = timedelta(seconds=timeout_s)

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
        """
        key = f"preflight/{what}/{rank}"
        try:
            self._store.wait([key], self._timeout)
            return self._store.get(key).decode()
        except (dist.DistError, RuntimeError) as error:
            raise _rank_0_is_gone(error) from None

    def collect(self, what: str, ranks: Sequence[int] | None = None) -> list[str]:
        """Wait for the parts of all ranks, or of `ranks`, and return them in that order.

        Raises:
            RendezvousError: some do not come; it names them.
        """
        wanted = list(range(self._world_size) if ranks is None else ranks)
        keys = [f"preflight/{what}/{rank}" for rank in wanted]
        try:
            self._store.wait(keys, self._timeout)
            return [each.decode() for each in self._store.multi_get(keys)]
        except (dist.DistError, RuntimeError):
            missing = [rank for rank, key in zip(wanted, keys, strict=True) if not self._store.check([key])]
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise RendezvousError(
                f"{len(missing)} of {len(wanted)} ranks did not tell their facts within "
                f"{self._timeout.total_seconds():.0f} s: rank {shown}",
                hint="their logs say why; preflight=off begins without",
            ) from None


def _rank_0_is_gone(error: Exception) -> LostPeersError:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LostPeersError(f"rank 0 does not answer any more: {words}", hint="see rank 0's log")
