"""The command line, called in this process or as a command."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable

from slurmtrain.cli import main

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def refusal(*words: str, code: int = 2) -> str:
    """What a command line that ends with this code says on stderr, called in this process."""
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        assert main([*words]) == code, said.getvalue()
    return said.getvalue()
