"""All ranks stop after the same step, whichever of them was told to.

A signal reaches ranks at different moments of different steps, or one rank only. A maximum over the ranks' flags, once
a step, makes it one decision. It runs on a CPU group of its own while the step goes on, so it costs no GPU time and
cannot meet the gradients' collectives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slurmtrain.runtime.signals import StopSignals


class StopAgreement:
    """Implements training's `StopCheck` over all ranks of `group` (gloo), or for a single process."""

    def __init__(self, signals: StopSignals, group: dist.ProcessGroup | None):
        self._signals, self._group = signals, group
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Hand in this rank's flag; returns at once."""
        self._flag.fill_(int(self._signals.requested))
        if self._group is not None:
            self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> bool:
        """Wait for the others' flags. True on all ranks when one of them was told to stop."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        stopping = bool(self._flag.item())
        if stopping:
            self._signals.request("another rank")
        return stopping
