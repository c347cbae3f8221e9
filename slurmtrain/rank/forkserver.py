"""A module that only multiprocessing's fork server loads, so that a preemption's TERM does not end the server.

Data workers that are started by "forkserver" live as long as the server; the TERM goes to every process of the job.
"""

from __future__ import annotations

import os
import signal


def _shield() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # whoever starts data workers has blocked it meanwhile
    # Its children decide for themselves: `terminate()` works on a child as always.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


_shield()
