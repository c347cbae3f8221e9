"""What starts the ranks of an attempt, and carries out what is decided at its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from slurmtrain.config.schema import Config
from slurmtrain.launch.code_source import pythonpath_folders
from slurmtrain.runs.decide import AttemptOutcome
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from slurmtrain.slurm.client import SlurmClient


class Platform(Protocol):
    """Whatever can run the ranks of a run.

    Attributes:
        config: the run's.
        can_start_again: ranks that have crashed may start again in the same job.
    """

    config: Config
    can_start_again: bool

    @property
    def client(self) -> SlurmClient | None:
        """SLURM, which tells why a job has ended; None outside of it."""

    def begin(self) -> int | None:
        """Return the exit code where nothing is left to do for the run, else None."""

    def claim(self) -> int:
        """Claim the next attempt and return its number."""

    def run(self, number: int, nodes: Sequence[str]) -> int:
        """Start the ranks of an attempt, pass on signals to stop, and wait until every rank has left.

        Args:
            nodes: those that are fit for it; (): as the config says.

        Returns:
            The highest exit code of all ranks, 128 + n for a signal.
        """

    def carry_out(self, number: int, outcome: AttemptOutcome, code: int) -> int | None:
        """Do what was decided, and return the exit code; None if another attempt starts here."""


def rank_environment(run_dir: RunDir, number: int, variables: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the variables of the ranks of an attempt: those given, and what tells them which attempt it is.

    Modules are imported from the snapshot of the code first.
    """
    info = run_dir.info()
    folders = pythonpath_folders(info["workdir"], info.get("import_roots", ()))
    roots = [*(str(run_dir.path / each) for each in folders), *variables.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, roots))),
        "OMP_NUM_THREADS": variables.get("OMP_NUM_THREADS", str(max(1, threads))),
        RUN_DIR_VARIABLE: str(run_dir.path),
        ATTEMPT_VARIABLE: str(number),
    }
