"""A pickle that does something when it is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)
