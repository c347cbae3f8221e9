"""What the parts of the script share: the paths that it needs, and a line of it with its reason."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurmtrain.runs.sweep_dir import tasks_of


class Line(NamedTuple):
    """A line of the script, or a part of one, and why it is there; a comment explains itself, so its reason is empty."""

    text: str
    why: str


class Words(NamedTuple):
    """Words of a command line, and why they are there."""

    words: Sequence[str]
    why: str

    @property
    def line(self) -> Line:
        return Line(shlex.join(self.words), self.why)


@dataclass(frozen=True)
class JobPaths:
    """The paths that the script needs.

    Attributes:
        run_dirs: one run directory, or those of all array tasks.
        workdir: the working directory of the ranks, relative to each run directory ("code", "code/sub"), or absolute.
        roots: folders of the snapshot that modules are imported from, besides the working directory, relative to the
            snapshot.
        python: the interpreter that submits; the supervisor of the job runs with it.
        parallelism: number of tasks of an array that may run at the same time; None: no limit.
        pack: number of runs that share a task.
        submit_dir: the folder of the command, to which paths in set-up lines are relative in every job of the run.
    """

    run_dirs: Sequence[Path]
    workdir: str
    python: str
    parallelism: int | None = None
    pack: int = 1
    roots: Sequence[str] = ()
    submit_dir: Path | None = None

    @property
    def tasks(self) -> int:
        return tasks_of(len(self.run_dirs), self.pack)
