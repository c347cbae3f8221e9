"""Keep the log of a rank that draws on a terminal plain text: a bar that is redrawn ten times a second is one line in it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

FRAME_EVERY_S = 10.0  # seconds between versions of a redrawn line that the log keeps, besides the last

# ECMA-48: control sequences (ESC [ ...), strings (ESC ] ... BEL or ESC \), and other escapes of two characters.
_CONTROL = re.compile(
    rb"\x1b\[[0-?]*[ -/]*(?P<final>[@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[^\[\]]|(?P<end>\r*\n)|(?P<back>\r)"
)
_UNFINISHED = re.compile(rb"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?)?|\r+)\Z")


class PlainLog:
    """A filter that turns what a program writes to a terminal into the lines that a person would have seen.

    Colours and cursor movements are left out. Of a line that is overwritten in place, the last version is kept, and
    before that one frame every `FRAME_EVERY_S` seconds.

    Args:
        clock: returns seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._kept = clock, clock()
        self._line = b""  # the present line of the terminal
        self._rest = b""  # the beginning of a sequence whose end has not come yet
        self._overwrite = False  # the cursor is back at the beginning of the line

    def feed(self, data: bytes) -> bytes:
        """Take what was written, and return the part that belongs in the log."""
        data = self._rest + data
        kept: list[bytes] = []
        unfinished = _UNFINISHED.search(data)
        self._rest = unfinished.group() if unfinished else b""
        data = data[: len(data) - len(self._rest)]
        position = 0
        for found in _CONTROL.finditer(data):
            self._write(data[position : found.start()], kept)
            position = found.end()
            if found.group("end") is not None:
                kept.append(self._line + b"\n")
                self._line, self._overwrite = b"", False
            elif found.group("back") is not None or found.group("final") in (b"K", b"A", b"J"):
                self._overwrite = True
        self._write(data[position:], kept)
        return b"".join(kept)

    def close(self) -> bytes:
        """Return what is left of the last line."""
        return self.feed(b"\n") if self._line or self._rest.strip(b"\r") else b""

    def _write(self, text: bytes, kept: list[bytes]) -> None:
        if not text:
            return
        if self._overwrite:
            if self._line.strip() and self._clock() - self._kept >= FRAME_EVERY_S:
                kept.append(self._line + b"\n")
                self._kept = self._clock()
            self._line, self._overwrite = b"", False
        self._line += text
