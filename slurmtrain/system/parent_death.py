"""A process that does not outlive the one that has started it, by the kernel's own means (prctl(2), PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may be, since a thread may have held the lock
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int) -> None:
    """Have the kernel send this signal to the calling process when its parent is killed. For a new process, before exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
