"""A process that does not outlive the one that has started it, by the kernel's own means (prctl(2), PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal

_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may be, since a thread may have held the lock
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int) -> None:
    """Have the kernel send this signal to the calling process when its parent is killed. For a new process, before exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def be_killed_with(parent: int) -> None:
    """Have the kernel kill the calling process when the process `parent`, which has started it, ends for whatever reason."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os._exit(1)
