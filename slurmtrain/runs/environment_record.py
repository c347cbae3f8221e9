"""What each attempt of a run ran with: attempts/NNNN/environment.json, written by rank 0 for its own process and node."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.run_dir import RUN_DIR_VARIABLE, RunDir
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.process_facts import ProcessFacts, gather_facts

log = logging.getLogger(__name__)


def write_environment(attempt_dir: AttemptDir, facts: ProcessFacts) -> None:
    """Write what an attempt runs with.

    Raises:
        OSError: it cannot be written.
    """
    write_json(attempt_dir.environment_file, facts.to_json(), durable=False)


def record_environment(attempt_dir: AttemptDir) -> threading.Thread:
    """Gather and write the facts of this process beside its other work, which nothing of it can stop."""

    def record() -> None:
        try:
            write_environment(attempt_dir, without_own_path(gather_facts(), attempt_dir.path.parents[1]))
        except Exception as error:  # it serves later readers only
            log.debug("what this attempt runs with is not recorded: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=record, name="slurmtrain-facts", daemon=True)
    thread.start()
    return thread


def without_own_path(facts: ProcessFacts, run_path: Path) -> ProcessFacts:
    """Return the facts with the path of the run's own directory, as in PYTHONPATH, replaced by the variable that has it."""
    variables = {name: value.replace(str(run_path), f"${RUN_DIR_VARIABLE}") for name, value in facts.variables.items()}
    return dataclasses.replace(facts, variables=variables)


def read_environment(attempt_dir: AttemptDir) -> ProcessFacts | None:
    """Return what an attempt ran with; None if it has no record of it.

    Raises:
        UnreadableRecordError: the record cannot be read.
    """
    values = read_json(attempt_dir.environment_file)
    return None if values is None else ProcessFacts.from_json(values)


def newest_environment(run_dir: RunDir) -> tuple[int, ProcessFacts] | None:
    """Return the number of the newest attempt that has a record, and what it ran with; None if there is none.

    Raises:
        UnreadableRecordError: a record cannot be read.
    """
    for number in reversed(run_dir.attempt_numbers()):
        found = read_environment(run_dir.attempt(number))
        if found is not None:
            return number, found
    return None
