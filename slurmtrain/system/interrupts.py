"""Ctrl-C where no code of a verb could handle it: while Python loads the verb, and after its end."""

from __future__ import annotations

import os
import signal

CODE = 130  # what shells show for it


def leave_silently() -> None:
    """Let Ctrl-C end this process at once, unless it is ignored or has another handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, for the verb to handle."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(CODE)
