"""The command line, called in this process, with commands of SLURM that answer what a test wants."""

from __future__ import annotations

import contextlib
import io
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.cli import main

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def refusal(*words: str, code: int = 2) -> str:
    """What a command line that ends with this code says on stderr, called in this process."""
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        assert main([*words]) == code, said.getvalue()
    return said.getvalue()


@dataclass(frozen=True)
class FakeSlurm:
    """A folder, first on PATH, with an sbatch that keeps what it gets, and other commands that a test may script.

    Attributes:
        directory: the folder; what the commands note down lies beside them.
    """

    directory: Path

    @property
    def submitted(self) -> list[str]:
        """The scripts that sbatch got, in order."""
        return [path.read_text() for path in sorted(self.directory.glob("script-*"))]

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which sbatch ran last."""
        pairs = (self.directory / "environment").read_text().split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def command(self, name: str, body: str) -> None:
        """Put a command there; `body` is bash, `$here` this folder."""
        path = self.directory / name
        path.write_text(f"#!/bin/bash\nhere={self.directory}\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def refuse(self, words: str) -> None:
        self.command("sbatch", f"echo '{words}' >&2; exit 1")
